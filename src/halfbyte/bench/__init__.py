"""What a step costs on this machine: its time, its memory, the largest batch that fits."""

from .fitting import bytes_needed, compile_step
from .flag_sets import SetResult, measure_sets, ratios
from .operand_traffic import operand_traffic
from .placement import hidden, hidden_time, needed_flops, placement
from .timing import Measured, compare, gemm_work, measure, measure_largest, without_communication
