"""What a step costs on this machine: its time, its memory, the largest batch that fits."""

from .fitting import Fit, bytes_needed, compile_step, fit_batch
from .placement import needed_flops
from .timing import Measured, compare, gemm_work, measure, measure_largest, without_communication
