"""The oracles are modules next to their test; tests of formats, ops and kernels import them from here."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
