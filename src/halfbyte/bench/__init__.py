"""What a step costs on this machine: its time, its memory, the largest batch that fits."""

from .fitting import Fit, bytes_needed, compile_step, fit_batch
from .flag_sets import SetResult, measure_sets, ratios
from .operand_traffic import OperandTraffic, native_calls, operand_traffic
from .placement import Placement, hidden, hidden_time, needed_flops, placement
from .timing import Measured, compare, gemm_work, measure, measure_largest, without_communication

__all__ = [
    "Fit",
    "Measured",
    "OperandTraffic",
    "Placement",
    "SetResult",
    "bytes_needed",
    "compare",
    "compile_step",
    "fit_batch",
    "gemm_work",
    "hidden",
    "hidden_time",
    "measure",
    "measure_largest",
    "measure_sets",
    "native_calls",
    "needed_flops",
    "operand_traffic",
    "placement",
    "ratios",
    "without_communication",
]
