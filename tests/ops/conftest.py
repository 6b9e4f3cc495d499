"""The oracle, the shapes and the instruments of these tests are modules beside them, which benchmarks also import."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
