"""Expected operands (`kernel_expected`) and compiled programs are modules next to the tests."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
