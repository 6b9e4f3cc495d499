"""What a step costs on this machine: its time, its memory, the largest batch that fits."""

from .fitting import Fit, bytes_needed, compile_step, fit_batch
from .placement import Placement, hidden, needed_flops, placement
from .timing import Measured, compare, count_gemms, measure, measure_largest

__all__ = [
    "Fit",
    "Measured",
    "Placement",
    "bytes_needed",
    "compare",
    "compile_step",
    "count_gemms",
    "fit_batch",
    "hidden",
    "measure",
    "measure_largest",
    "needed_flops",
    "placement",
]
