"""Numbers of a run: counted, read one step late, written to files, shown to a person."""

from .display import Compiling, Display, make_display
from .late import Finished, OneStepLate
from .rows import append_row, finite, missing_steps, number, read_rows, rows_until
from .sinks import Aside, Guarded, Jsonl, Sink, TensorBoard, WandB
from .throughput import Throughput, mixed_peak
