"""Operations: the quantized linear and MLP with their backends, and their adapters to other people's models."""

from halfbyte.ops.activation import ACTIVATIONS, Activation
from halfbyte.ops.ahead import Site, quantize_stacks
from halfbyte.ops.backends import BACKENDS, Backend, Choice, check_backend, choose, passed_over, serving
from halfbyte.ops.compiled import GPU_OPTIONS, jit, refuse_strays, tracing
from halfbyte.ops.dot_general import dot_general
from halfbyte.ops.execution import Execution
from halfbyte.ops.gemms import GEMMS, Gemm
from halfbyte.ops.grouped import grouped_qdot
from halfbyte.ops.linear import quantize_weight
from halfbyte.ops.mlp import Middle, mlp, mlp_in_stacks
from halfbyte.ops.problem import Problem, compile_for, target
from halfbyte.ops.qdot import qdot, qdots
from halfbyte.ops.rewrite import apply_recipe
from halfbyte.ops.shards import Placement
from halfbyte.ops.weight import QWeight, Remembered
