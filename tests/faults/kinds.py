"""Every kind of fault: what is done to the trainer, and what must come of it."""

import disagreeing  # noqa: F401  each adds its kinds to the list
import killing  # noqa: F401
import storage  # noqa: F401
import values  # noqa: F401
from reference import KINDS, Bench

__all__ = ["KINDS", "Bench"]
