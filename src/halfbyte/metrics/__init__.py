"""Numbers of a run: counted, read one step late, written to files, shown to a person."""

from .display import Compiling, Display, make_display
from .late import Finished, OneStepLate
from .rows import append_row, finite, missing_steps, number, read_rows, rows_until
from .sinks import Aside, Guarded, Jsonl, Sink, TensorBoard, WandB
from .throughput import Throughput, mixed_peak

__all__ = [
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
    "append_row",
    "finite",
    "make_display",
    "missing_steps",
    "mixed_peak",
    "number",
    "read_rows",
    "rows_until",
]
