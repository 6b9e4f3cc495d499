"""Operations: the quantized linear and MLP with their backends, and the plain pieces of a transformer."""

from halfbyte.ops.backends import BACKENDS, choose
from halfbyte.ops.mlp import mlp
from halfbyte.ops.problem import Problem, compile_for, target
from halfbyte.ops.qdot import qdot
from halfbyte.ops.weight import QWeight, quantize_weight

__all__ = ["BACKENDS", "Problem", "QWeight", "choose", "compile_for", "mlp", "qdot", "quantize_weight", "target"]
