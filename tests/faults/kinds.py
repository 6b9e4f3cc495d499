"""Every kind of fault: what is done to the trainer, and what must come of it."""

import buckets  # noqa: F401  each adds its kinds to the list
import disagreeing  # noqa: F401
import disks  # noqa: F401
import files  # noqa: F401
import hostile  # noqa: F401
import judging  # noqa: F401
import killing  # noqa: F401
import replacing  # noqa: F401
import sharing  # noqa: F401
import values  # noqa: F401
from reference import KINDS, Bench, Benches

__all__ = ["KINDS", "Bench", "Benches"]
