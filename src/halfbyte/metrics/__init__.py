"""Numbers of a run: counted, read one step late, written to files, shown to a person."""

from .display import Compiling, Display, make_display
from .late import Finished, OneStepLate
from .rows import read_rows
from .sinks import Aside, Guarded, Jsonl, Sink, TensorBoard, WandB
from .throughput import FLOPS_FORMULA, Throughput, mixed_peak

__all__ = [
    "FLOPS_FORMULA",
    "Aside",
    "Compiling",
    "Display",
    "Finished",
    "Guarded",
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
