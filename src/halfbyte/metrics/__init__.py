"""Numbers of a run: counted, read one step late, written to files, shown to a person."""

from .display import Display, make_display
from .late import Finished, OneStepLate
from .sinks import Jsonl, Sink, TensorBoard, WandB, read_rows
from .throughput import FLOPS_FORMULA, Throughput, mixed_peak

__all__ = [
    "FLOPS_FORMULA",
    "Display",
    "Finished",
    "Jsonl",
    "OneStepLate",
    "Sink",
    "TensorBoard",
    "Throughput",
    "WandB",
    "make_display",
    "mixed_peak",
    "read_rows",
]
