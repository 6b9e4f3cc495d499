"""The oracle of these tests is a module beside them, which the benchmark also imports."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
