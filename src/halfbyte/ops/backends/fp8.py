"""`fp8`: real 8-bit GEMMs in all three directions, and no transpose between them.

A GPU's 8-bit GEMM wants the contraction last on both sides: x and W^T for fprop, dy and W for dgrad, x^T and dy^T for
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
FP8_SCOPE = "f8_call"  # the name that GEMMs with scales carry in a compiled program
K_MAJOR_DIMS: ContractingAxes = ((1,), (1,))
TRANSPOSED_OPERANDS = {
    FPROP: (False, True),
    DGRAD: (False, False),
    WGRAD: (True, True),
}  # the order that each side is read in
_fuse_scales_flag = TraceFlag(False)


def fp8_format_mismatch(recipe: Recipe) -> str | None:
    """Needs FP8 on all six sides, with one scale, no transform, nearest; one format for x and one for dy."""
    plain = all(_plain(getattr(recipe, role)) for role in ROLES)
    if plain and recipe.fprop_x == recipe.wgrad_x and recipe.dgrad_dy == recipe.wgrad_dy:
        return None
    return f"recipe {recipe.name} is not FP8 with one scale a tensor on both sides of every GEMM"


def _plain(policy: OperandPolicy) -> bool:
    return policy.format in FP8_ELEMENT_NAMES and policy == OperandPolicy(policy.format)


def fp8_unsupported(problem: LinearProblem, gemm: GemmKind) -> str | None:
    """What its passes can make it can multiply."""
    return None


def fuse_scales_into_gemm() -> contextlib.AbstractContextManager[None]:
    """What is traced inside will be compiled with `COMPILER_OPTIONS`, so its GEMMs may take the scales themselves.

    A function that was traced outside is traced again inside, and the other way round: neither gets the other's GEMMs.
    """
    return _fuse_scales_flag(True)


def unexpected_fp8_gemms(program: str) -> list[str]:
    """Lines of a compiled program where a GEMM that was given its scales is something else than an 8-bit call, or where
    such a scale is rounded.
    """
    other = re.compile(
        r'custom_call_target="__cublas\$(?!lt\$matmul\$f8)|"kind":"__(?:triton\w*gemm|cudnn|custom)|(?<!%)\bdot\('
    )
    rounded = re.compile(r"= bf16\[1?\]\S* convert\(")
    lines = [line for line in program.splitlines() if FP8_SCOPE in line]
    return [line.strip() for line in lines if other.search(line) or rounded.search(line)]


def fp8_gemm(gemm: GemmKind, left: Operand, right: Operand, dtype: jnp.dtype) -> jax.Array:
    """Exact products, the factors on their sums, one rounding to `dtype`."""
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
    """(a * s) . (b * t) in the words of XLA's rewriter, which makes one call of it and hands it s and t as float32."""
    s, t = lax.optimization_barrier((s, t))  # bare scalars: then the casts to bfloat16 cancel
    left, right = (codes.astype(jnp.bfloat16) * scale.astype(jnp.bfloat16) for codes, scale in ((a, s), (b, t)))
    y = lax.dot_general(left, right, (K_MAJOR_DIMS, ((), ())), precision=precision, preferred_element_type=dtype)
    return lax.optimization_barrier(y)  # a reader in float32 would otherwise get sums that were never rounded


def _matrix(operand: Operand, transposed: bool) -> tuple[jax.Array, tuple[int, ...]]:
    """(the codes as float8 [rows, contraction], the shape of the rows)."""
    if isinstance(operand, QuantizedOperand):  # quantized ahead, by the definition
        tensor = operand.codes
        summed = tuple(range(len(tensor.shape) - 1)) if transposed else (len(tensor.shape) - 1,)
        return fp8_k_major(tensor, summed), tuple(n for i, n in enumerate(tensor.shape) if i not in summed)
    assert isinstance(operand, Fp8Operand), "an 8-bit GEMM reads 8-bit codes"
    if transposed and operand.transposed is not None:
        return operand.transposed, operand.transposed.shape[:1]
    codes = operand.values()
    flat = codes.reshape(-1, codes.shape[-1])  # [tokens..., features] -> [tokens, features]
    if transposed:  # only one order was kept
        return flat.T, codes.shape[-1:]
    return flat, codes.shape[:-1]


@dataclasses.dataclass(frozen=True)
class Fp8QuantizePasses(GatedQuantizePasses):
    """The passes as kernels."""

    name = "fp8"
    supports_stacked_residuals = True
    reads_stacks = True
    batches_weights = True

    def unsupported(self, problem: LinearProblem) -> str | None:
        """Needs one NVIDIA GPU with 8-bit units, bfloat16 activations, and sizes that the kernels' tiles divide."""
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
        known, given = kernels.WEIGHT_DTYPES, problem.weight_dtype
        return None if given in known else f"its kernels read {' or '.join(known)}, got {given}"

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
        flat, (top,) = x.reshape(-1, x.shape[-1]), maxima  # [tokens..., features] -> [tokens, features]
        made: dict[OperandPolicy, Fp8Operand] = {}
        for policy in dict.fromkeys(r.policy for r in specs):
            scale, factor = self._scale(top, policy.format)
            orders = _wanted_layouts([r for r in specs if r.policy == policy])
            codes = fp8_cast.fp8_cast_transpose(flat, scale, element=FP8_ELEMENT_NAMES[policy.format], **orders)
            made[policy] = _fp8_operand(codes, orders, factor, policy, x.shape)
        return [_only_layout(made[r.policy], r) for r in specs]

    def activate_to_stacks(self, g, u, specs, into):
        g2, u2, *places = (t.reshape(-1, t.shape[-1]) for t in (g, u, *into))  # [tokens..., features] -> a matrix
        found, *stacks = kernels.swiglu_forward_amax(g2, u2, hadamard=False, stack_slices=places)
        (top,) = global_amaxes([found], specs[0].dim_axes)
        policy, orders = specs[0].policy, _wanted_layouts(specs)
        scale, factor = self._scale(top, policy.format)
        codes = fp8_cast.fp8_swiglu_cast_forward(g2, u2, scale, element=FP8_ELEMENT_NAMES[policy.format], **orders)
        made = _fp8_operand(codes, orders, factor, policy, g.shape)
        kept = tuple(made.reshape(layer.stack.shape) for made, layer in zip(stacks, into, strict=True))
        return [_only_layout(made, r) for r in specs], kept

    def activate_backward(self, g, u, dh, dg, du, h):
        g2, u2, dh2 = (t.reshape(-1, t.shape[-1]) for t in (g, u, dh))  # [tokens..., features] -> [tokens, features]
        found = kernels.swiglu_backward_amax(g2, u2, dh2, hadamard=False, tensors=3)
        tops = global_amaxes(found, dg[0].dim_axes)
        policies = [specs[0].policy for specs in (dg, du, h)]
        scales, factors = zip(*self._scales(tops, [p.format for p in policies]), strict=True)
        elements = [FP8_ELEMENT_NAMES[p.format] for p in policies]
        made = fp8_cast.fp8_swiglu_cast_backward(  # dg, dg^T, du, du^T, h^T
            g2, u2, dh2, scales, gradient=elements[0], element=elements[2]
        )
        pairs = [Fp8Operand(made[2 * i].reshape(g.shape), made[2 * i + 1], factors[i], policies[i]) for i in (0, 1)]
        pairs.append(Fp8Operand(None, made[4], factors[2], policies[2]))
        return tuple([_only_layout(m, r) for r in specs] for m, specs in zip(pairs, (dg, du, h), strict=True))

    def quantize_weight(self, w: jax.Array | StackSlice, spec: OperandSpec, *, packed: bool = True) -> Fp8Operand:
        """Both orders: W^T is what fprop reads, W what dgrad reads."""
        (top,), policy = global_amaxes([kernels.weight_partial_amax(w)], spec.dim_axes), spec.policy
        scale, factor = self._scale(top, policy.format)
        plain, transposed = fp8_cast.fp8_cast_transpose(w, scale, element=FP8_ELEMENT_NAMES[policy.format])
        return Fp8Operand(plain, transposed, factor, policy)

    def _scale(self, maxima: jax.Array, fmt: BlockFormat) -> tuple[jax.Array, jax.Array]:
        return self._scales([maxima], [fmt])[0]

    def _scales(self, maxima: Sequence[jax.Array], formats: Sequence[BlockFormat]) -> list[tuple[jax.Array, jax.Array]]:
        tops = tuple(fp8_cast.FP8_MAX[FP8_ELEMENT_NAMES[fmt]] for fmt in formats)
        return tag_residual(kernels.compute_scales_and_alphas(*maxima, tops=tops), SCALES_NAME)


def _wanted_layouts(specs: Sequence[OperandSpec]) -> dict[str, Any]:
    axes = {r.axis for r in specs}
    return {"plain": ROW_AXIS in axes, "turned": COLUMN_AXIS in axes}


def _fp8_operand(
    codes: Sequence[jax.Array], orders: dict[str, Any], factor: jax.Array, policy: OperandPolicy, shape: tuple
) -> Fp8Operand:
    """What a cast wrote, plain codes first."""
    rows = codes[0].reshape(shape) if orders["plain"] else None
    return Fp8Operand(rows, codes[-1] if orders["turned"] else None, factor, policy)


def _only_layout(made: Fp8Operand, spec: OperandSpec) -> Fp8Operand:
    """The one order that is requested."""
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
