"""Makes the helper of this folder importable (hlo: what programs written by hand have in common)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
