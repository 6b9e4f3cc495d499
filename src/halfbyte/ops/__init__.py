"""Quantized linear, MLP and MoE operations with their backends, attention, norms, RoPE and cross-entropy.

`adapters` applies recipes to the functions and layers of other libraries. The self-tests compare the operands and GEMMs
of this device with the reference before a run.
"""

from typing import TYPE_CHECKING

from halfbyte.ops.activation import ACTIVATIONS, Activation
from halfbyte.ops.adapters.dot_general import dot_general
from halfbyte.ops.adapters.jaxpr_rewriter import apply_recipe
from halfbyte.ops.backends import (
    BACKENDS,
    BackendChoice,
    backends_for,
    check_backend,
    choose_backend,
    rejected_backends,
)
from halfbyte.ops.backends.backend import Backend
from halfbyte.ops.gemm_problem import GEMMS, GemmKind, LinearProblem, compile_for, target_device
from halfbyte.ops.grouped_dot import grouped_qdot
from halfbyte.ops.linear import quantize_weight
from halfbyte.ops.linear_plan import (
    GPU_OPTIONS,
    ExecutionConfig,
    LinearPlan,
    check_no_unexpected_gemms,
    jit,
    plan_placed_linear,
    trace_with_backend_options,
)
from halfbyte.ops.linear_sharding import Placement
from halfbyte.ops.mlp import GatedActivationConfig, mlp, mlp_with_stacked_residuals
from halfbyte.ops.prequantize import LoopLinear, prequantize_stacked_weights
from halfbyte.ops.qdot import qdot, qdots
from halfbyte.ops.quantized_weight import DelayedScalingWeight, QWeight
from halfbyte.renamed import old_names

if TYPE_CHECKING:
    from halfbyte.ops.selftest_gemms import (
        SelfTestFailed,
        compare_native_gemms,
        compare_native_grouped_gemms,
        compare_native_linears,
        run_gemm_selftest_once,
    )
    from halfbyte.ops.selftest_operands import (
        backends_match_reference,
        count_mismatches,
        mesh_operand_mismatches,
        selftest_reference_operands,
        stacked_residuals_match_reference,
    )

# Imported on first use.
_LATER = {
    "selftest_gemms": (
        "SelfTestFailed",
        "run_gemm_selftest_once",
        "compare_native_grouped_gemms",
        "compare_native_gemms",
        "compare_native_linears",
    ),
    "selftest_operands": (
        "stacked_residuals_match_reference",
        "selftest_reference_operands",
        "count_mismatches",
        "backends_match_reference",
        "mesh_operand_mismatches",
    ),
}

if not TYPE_CHECKING:
    __getattr__ = old_names(__name__, _LATER)
