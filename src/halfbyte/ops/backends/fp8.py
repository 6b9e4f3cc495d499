"""`fp8`: 8-bit GEMMs for fprop, dgrad and wgrad, without a transpose between them.

A GPU's 8-bit GEMM reads K-major operands on both sides: x and W^T for fprop, dy and W for dgrad, x^T and dy^T for
wgrad. With one scale per tensor the codes of a tensor and of its transpose are equal, so each pass reads a tensor once
for its amax and once to write its codes in the requested layouts, with SwiGLU fused (`kernels.fp8_cast`).

XLA has an 8-bit GEMM that takes both decode scales as float32 device scalars, applies them to its float32 sums and
rounds once. It only writes it for products of dequantized bfloat16 operands, and only if its Triton GEMMs are off:
otherwise the same lines would round the scales. `fuse_scales_into_gemm` is for programs that are compiled with
`COMPILER_OPTIONS` and checked with `unexpected_fp8_gemms`, as the trainer's. Otherwise the sums are float32 and a
second pass applies the scales.
"""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from halfbyte import kernels
from halfbyte.devices.compile_target import TraceFlag
from halfbyte.formats import FP8, FP8_E5M2, BlockFormat
from halfbyte.kernels import fp8_cast
from halfbyte.kernels.mosaic_launch import StackSlice
from halfbyte.ops.activation import SILU, Activation
from halfbyte.ops.backends.backend import Backend, find_unexpected_gemms
from halfbyte.ops.backends.emulated import fp8_accumulation_precision, fp8_k_major
from halfbyte.ops.gemm_problem import (
    DGRAD,
    FPROP,
    WGRAD,
    ContractingAxes,
    GemmKind,
    LinearProblem,
    apply_epilogue,
    dot_f32,
    gemm_alpha,
)
from halfbyte.ops.linear_sharding import global_amaxes
from halfbyte.ops.operand import SCALES_NAME, Fp8Operand, Operand, QuantizedOperand, tag_residual
from halfbyte.ops.quantize_passes import (
    COLUMN_AXIS,
    ROW_AXIS,
    Amaxes,
    GatedQuantizePasses,
    OperandOrResidual,
    OperandSpec,
)
from halfbyte.recipes import ROLES, OperandPolicy, Recipe

FP8_ELEMENT_NAMES = {FP8: "e4m3", FP8_E5M2: "e5m2"}
COMPILER_OPTIONS = {"xla_gpu_enable_triton_gemm": False, "xla_allow_excess_precision": True}
FP8_SCOPE = "f8_call"  # the named scope, in a compiled program, of GEMMs that take their scales
K_MAJOR_DIMS: ContractingAxes = ((1,), (1,))
TRANSPOSED_OPERANDS = {
    FPROP: (False, True),
    DGRAD: (False, False),
    WGRAD: (True, True),
}  # whether the left and the right operand are read transposed
_fuse_scales_flag = TraceFlag(False)


def fp8_format_mismatch(recipe: Recipe) -> str | None:
    """Returns why the recipe is unsupported; None for per-tensor FP8 with RNE, one format for x and one for dy."""
    supported = all(_is_per_tensor_fp8(getattr(recipe, role)) for role in ROLES)
    if supported and recipe.fprop_x == recipe.wgrad_x and recipe.dgrad_dy == recipe.wgrad_dy:
        return None
    return f"recipe {recipe.name} is not FP8 with one scale a tensor on both sides of every GEMM"


def _is_per_tensor_fp8(policy: OperandPolicy) -> bool:
    return policy.format in FP8_ELEMENT_NAMES and policy == OperandPolicy(policy.format)


def fp8_unsupported(problem: LinearProblem, gemm: GemmKind) -> str | None:
    """Returns None: it runs every GEMM over operands of its passes."""
    return None


def fuse_scales_into_gemm() -> contextlib.AbstractContextManager[None]:
    """Lets GEMMs traced inside take their scales; for programs that are compiled with `COMPILER_OPTIONS`.

    A function that was traced outside is traced again inside and vice versa, so neither reuses the other's GEMMs.
    """
    return _fuse_scales_flag(True)


def unexpected_fp8_gemms(program: str) -> list[str]:
    """Returns lines of a compiled program in which a GEMM that takes its scales is not an 8-bit call.

    Lines that round such a scale are returned as well.
    """
    unexpected = re.compile(
        r'custom_call_target="__cublas\$(?!lt\$matmul\$f8)|"kind":"__(?:triton\w*gemm|cudnn|custom)|(?<!%)\bdot\('
    )
    rounded_scale = re.compile(r"= bf16\[1?\]\S* convert\(")
    lines = [line for line in program.splitlines() if FP8_SCOPE in line]
    return [line.strip() for line in lines if unexpected.search(line) or rounded_scale.search(line)]


def fp8_gemm(gemm: GemmKind, left: Operand, right: Operand, dtype: jnp.dtype) -> jax.Array:
    """Returns exact products summed, times alpha, rounded once to `dtype`."""
    precision = fp8_accumulation_precision(gemm)
    (a, a_free), (b, b_free) = (
        _matrix(o, transposed) for o, transposed in zip((left, right), TRANSPOSED_OPERANDS[gemm], strict=True)
    )
    if _fuse_scales_flag.value and left.decode_scale is not None and right.decode_scale is not None:
        y = _scaled_dot(a, b, left.decode_scale, right.decode_scale, precision, dtype)
    else:
        y = apply_epilogue(dot_f32(a, b, K_MAJOR_DIMS, precision=precision), gemm_alpha(left, right), dtype)
    return y.reshape(*a_free, *b_free)  # [rows, rows] -> [free dims of left, free dims of right]


@jax.named_scope(FP8_SCOPE)
def _scaled_dot(
    a: jax.Array, b: jax.Array, s: jax.Array, t: jax.Array, precision: lax.Precision | None, dtype: jnp.dtype
) -> jax.Array:
    """Returns (a * s) . (b * t) in the form that XLA's rewriter turns into one FP8 call with float32 scales s and t."""
    s, t = lax.optimization_barrier((s, t))  # hides the scalars' producers, so that the casts to bfloat16 cancel
    left, right = (codes.astype(jnp.bfloat16) * scale.astype(jnp.bfloat16) for codes, scale in ((a, s), (b, t)))
    y = lax.dot_general(left, right, (K_MAJOR_DIMS, ((), ())), precision=precision, preferred_element_type=dtype)
    return lax.optimization_barrier(y)  # else XLA would skip the rounding for a float32 consumer


def _matrix(operand: Operand, transposed: bool) -> tuple[jax.Array, tuple[int, ...]]:
    """Returns (the codes as float8 [rows, k], the shape of the rows)."""
    if isinstance(operand, QuantizedOperand):  # prequantized by the reference
        tensor = operand.codes
        summed = tuple(range(len(tensor.shape) - 1)) if transposed else (len(tensor.shape) - 1,)
        return fp8_k_major(tensor, summed), tuple(n for i, n in enumerate(tensor.shape) if i not in summed)
    assert isinstance(operand, Fp8Operand), "an 8-bit GEMM reads 8-bit codes"
    if transposed and operand.transposed is not None:
        return operand.transposed, operand.transposed.shape[:1]
    codes = operand.values()
    flat = codes.reshape(-1, codes.shape[-1])  # [tokens..., features] -> [tokens, features]
    if transposed:  # only one order was saved
        return flat.T, codes.shape[-1:]
    return flat, codes.shape[:-1]


@dataclasses.dataclass(frozen=True)
class Fp8QuantizePasses(GatedQuantizePasses):
    """The quantize passes of FP8 as kernels."""

    name = "fp8"
    supports_stacked_residuals = True
    reads_stacks = True
    batches_weights = True

    def unsupported(self, problem: LinearProblem) -> str | None:
        """Returns why these passes cannot quantize x and dy (device, dtype, amax history, sizes), or None."""
        reason = problem.no_pallas_reason()
        if reason is None and problem.recipe.amax_history_len:
            reason = "its kernels scale by a tensor's own maximum, not by a history of them"
        if reason is not None:
            return reason
        pairs = ((problem.tokens, problem.inputs), (problem.tokens, problem.outputs), (problem.inputs, problem.outputs))
        for rows, columns in pairs:
            for kernel in (kernels.unsupported_tiled, fp8_cast.unsupported_fp8):
                reason = kernel(rows, columns, capability=problem.device.capability)
                if reason is not None:
                    return reason
        return None

    def weight_unsupported(self, problem: LinearProblem, policy: OperandPolicy) -> str | None:
        supported, dtype = kernels.WEIGHT_DTYPES, problem.weight_dtype
        return None if dtype in supported else f"its kernels read {' or '.join(supported)}, got {dtype}"

    def unsupported_activation_fusion(self, activation: Activation, recipes: Sequence[Recipe]) -> str | None:
        if activation != SILU:
            return f"its kernels compute {SILU.name}, not {activation.name}"
        gate, up, _ = recipes
        return None if gate.dgrad_dy == up.dgrad_dy else "its kernels cast the gradients of gate and up alike"

    def precompute_amax(self, x: jax.Array, specs: Sequence[OperandSpec]) -> Amaxes:
        flat = x.reshape(-1, x.shape[-1])  # [tokens..., features] -> [tokens, features]
        return global_amaxes(kernels.partial_amax(flat, hadamard=False), specs[0].dim_axes)

    def quantize_with_amax(self, x: jax.Array, specs: Sequence[OperandSpec], maxima: Amaxes) -> list[OperandOrResidual]:
        assert maxima is not None, "one of x itself"
        flat, (amax,) = x.reshape(-1, x.shape[-1]), maxima  # [tokens..., features] -> [tokens, features]
        operands: dict[OperandPolicy, Fp8Operand] = {}
        for policy in dict.fromkeys(spec.policy for spec in specs):
            scale, decode_scale = self._scale(amax, policy.format)
            layouts = _requested_layouts([spec for spec in specs if spec.policy == policy])
            codes = fp8_cast.fp8_cast_transpose(flat, scale, element=FP8_ELEMENT_NAMES[policy.format], **layouts)
            operands[policy] = _fp8_operand(codes, layouts, decode_scale, policy, x.shape)
        return [_only_layout(operands[spec.policy], spec) for spec in specs]

    def activate_to_stacks(self, g, u, specs, into):
        g2, u2, *slices = (t.reshape(-1, t.shape[-1]) for t in (g, u, *into))  # [tokens..., features] -> a matrix
        partial, *stacks = kernels.swiglu_forward_amax(g2, u2, hadamard=False, stack_slices=slices)
        (amax,) = global_amaxes([partial], specs[0].dim_axes)
        policy, layouts = specs[0].policy, _requested_layouts(specs)
        scale, decode_scale = self._scale(amax, policy.format)
        codes = fp8_cast.fp8_swiglu_cast_forward(g2, u2, scale, element=FP8_ELEMENT_NAMES[policy.format], **layouts)
        operand = _fp8_operand(codes, layouts, decode_scale, policy, g.shape)
        new_stacks = tuple(stack.reshape(layer.stack.shape) for stack, layer in zip(stacks, into, strict=True))
        return [_only_layout(operand, spec) for spec in specs], new_stacks

    def activate_backward(self, g, u, dh, dg, du, h):
        g2, u2, dh2 = (t.reshape(-1, t.shape[-1]) for t in (g, u, dh))  # [tokens..., features] -> [tokens, features]
        partial = kernels.swiglu_backward_amax(g2, u2, dh2, hadamard=False, tensors=3)
        amaxes = global_amaxes(partial, dg[0].dim_axes)
        policies = [specs[0].policy for specs in (dg, du, h)]
        scales, decode_scales = zip(*self._scales(amaxes, [p.format for p in policies]), strict=True)
        elements = [FP8_ELEMENT_NAMES[p.format] for p in policies]
        codes = fp8_cast.fp8_swiglu_cast_backward(  # dg, dg^T, du, du^T, h^T
            g2, u2, dh2, scales, gradient=elements[0], element=elements[2]
        )
        operands = [
            Fp8Operand(codes[2 * i].reshape(g.shape), codes[2 * i + 1], decode_scales[i], policies[i]) for i in (0, 1)
        ]
        operands.append(Fp8Operand(None, codes[4], decode_scales[2], policies[2]))
        return tuple(
            [_only_layout(operand, spec) for spec in specs]
            for operand, specs in zip(operands, (dg, du, h), strict=True)
        )

    def quantize_weight(self, w: jax.Array | StackSlice, spec: OperandSpec, *, packed: bool = True) -> Fp8Operand:
        """Returns codes in both orders: fprop reads W^T, dgrad W."""
        (amax,), policy = global_amaxes([kernels.weight_partial_amax(w)], spec.dim_axes), spec.policy
        scale, decode_scale = self._scale(amax, policy.format)
        plain, transposed = fp8_cast.fp8_cast_transpose(w, scale, element=FP8_ELEMENT_NAMES[policy.format])
        return Fp8Operand(plain, transposed, decode_scale, policy)

    def _scale(self, maxima: jax.Array, fmt: BlockFormat) -> tuple[jax.Array, jax.Array]:
        return self._scales([maxima], [fmt])[0]

    def _scales(self, maxima: Sequence[jax.Array], formats: Sequence[BlockFormat]) -> list[tuple[jax.Array, jax.Array]]:
        tops = tuple(fp8_cast.FP8_MAX[FP8_ELEMENT_NAMES[fmt]] for fmt in formats)
        return tag_residual(kernels.compute_scales_and_alphas(*maxima, tops=tops), SCALES_NAME)


def _requested_layouts(specs: Sequence[OperandSpec]) -> dict[str, Any]:
    axes = {spec.axis for spec in specs}
    return {"plain": ROW_AXIS in axes, "turned": COLUMN_AXIS in axes}


def _fp8_operand(
    codes: Sequence[jax.Array], orders: dict[str, Any], factor: jax.Array, policy: OperandPolicy, shape: tuple
) -> Fp8Operand:
    """Returns the outputs of a cast kernel, plain codes first, as an operand of a tensor of `shape`."""
    rows = codes[0].reshape(shape) if orders["plain"] else None
    return Fp8Operand(rows, codes[-1] if orders["turned"] else None, factor, policy)


def _only_layout(made: Fp8Operand, spec: OperandSpec) -> Fp8Operand:
    """Returns the operand with only the order that `spec` needs."""
    if spec.axis == COLUMN_AXIS:
        return dataclasses.replace(made, as_stored=None)
    return dataclasses.replace(made, transposed=None)


BACKEND = Backend(
    "fp8",
    fp8_unsupported,
    fp8_gemm,
    (Fp8QuantizePasses(),),
    format_mismatch=fp8_format_mismatch,
    compiler_options=COMPILER_OPTIONS,
    trace_context=fuse_scales_into_gemm,
    unexpected_gemms=functools.partial(find_unexpected_gemms, FP8_SCOPE, unexpected_fp8_gemms),
)
