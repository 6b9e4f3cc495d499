"""Steps captured by a profiler, and where their time went."""

from .breakdown import CATEGORIES, breakdown
from .capture import Capture, ProfileConfig
