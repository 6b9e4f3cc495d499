"""Makes the planted defects and the model that the bands were fixed with importable."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


@pytest.fixture(autouse=True, scope="module")
def _quick(quick_compiles):
    """Compiling is most of what these tests cost."""
