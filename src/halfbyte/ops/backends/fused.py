"""`fused`: the quantize passes as GPU kernels of our own, and bfloat16 GEMMs over their carriers.

On a Hopper GPU the GEMMs of `emulated` already run at the speed of bfloat16; what an emulated step owes on top are the
passes that quantize. Here each tensor is read once for its maxima and once for all the operands requested of it, with
the Hadamard transform, the random bits and SwiGLU inside (`kernels`). The operands are those of the definition, bit
for bit; for SwiGLU that holds on the numbers that the kernels compute with the GPU's own exp.

An operand whose source is the forward one is made of that one's carrier, in two further reads: kernels multiply it by
the tensor's decode scale, which gives the numbers of `QTensor.dequantize`. Under MS-EDEN it is made of the tensor
itself (`kernels/ms_eden.py`), and is a pass of its own, like every operand that is transformed in runs of 128.

The GEMM kernel multiplies its float32 accumulator by the factors before it rounds; XLA would write the float32 sums to
memory and read them again. A GEMM whose sizes its tiles do not divide is `emulated`'s, over the same operands.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from halfbyte import kernels
from halfbyte.formats import PackedQTensor
from halfbyte.formats.hadamard import random_signs
from halfbyte.kernels import ColumnwiseOperand, GlobalWindow, RowwiseOperand, amax_target, ms_eden
from halfbyte.kernels.hopper_gemm import unsupported_gemm as gemm_unsupported
from halfbyte.kernels.mosaic_launch import StackSlice
from halfbyte.kernels.tensor_scale_kernel import AMAX, DECODE, GEMM_ALPHA_INDEX, SCALE_VECTOR_SIZE
from halfbyte.kernels.triton_launch import NVFP4_BLOCK
from halfbyte.ops.activation import SILU, Activation
from halfbyte.ops.backends.backend import Backend
from halfbyte.ops.backends.kernel_support import (
    KERNEL_FORMATS,
    KERNEL_WEIGHT_POLICIES,
    WEIGHT_2D,
    kernel_scaling,
    nvfp4_format_mismatch,
    rule_of,
    separate_pass_reason,
    uses_hadamard128,
)
from halfbyte.ops.gemm_problem import DGRAD, FPROP, WGRAD, GemmKind, LinearProblem, result_shape
from halfbyte.ops.linear_sharding import axes_in, global_amaxes, global_shape, shard_offsets
from halfbyte.ops.operand import (
    SCALES_NAME,
    BlockDequantized,
    DeferredAlpha,
    Operand,
    Residual,
    WeightScalesResidual,
    check_rounding_keys,
    key_words_arg,
    operand_decode_scale,
    tag_residual,
)
from halfbyte.ops.quantize_passes import (
    ROW_AXIS,
    Amaxes,
    ArrayOrDeferred,
    GatedQuantizePasses,
    OperandOrResidual,
    OperandSpec,
    WeightOperand,
    WeightResidual,
)
from halfbyte.recipes import OperandPolicy, Recipe

LAYOUT_OF_GEMM = {FPROP: "nn", DGRAD: "nt", WGRAD: "tn"}  # as the GEMM kernel names them


def fused_unsupported(problem: LinearProblem, gemm: GemmKind) -> str | None:
    """Why the GEMM kernel cannot multiply, or None."""
    m, n, k = problem.gemm_sizes_mnk(gemm)
    dtype = problem.weight_dtype if gemm is WGRAD else problem.dtype
    return gemm_unsupported(
        m, n, k, layout=LAYOUT_OF_GEMM[gemm], out_dtype=jnp.dtype(dtype), capability=problem.device.capability
    )


def fused_gemm(gemm: GemmKind, left: Operand, right: Operand, dtype: jnp.dtype) -> jax.Array:
    """Exact products, float32 sums, the operands' factors, one rounding to `dtype`."""
    a, b = left.values(), right.values()
    x, w = (t.reshape(-1, t.shape[-1]).astype(jnp.bfloat16) for t in (a, b))  # [tokens..., features] -> a matrix
    y = kernels.matmul(x, w, _factors(left), _factors(right), layout=LAYOUT_OF_GEMM[gemm], out_dtype=dtype)
    return y.reshape(result_shape(a.shape, b.shape, gemm.contracting_axes(a.ndim)))


def _factors(operand: Operand) -> jax.Array:
    """The scale vector as the GEMM kernel reads it, also for operands of other passes: weights made once a step."""
    vector = getattr(operand, "scale_vector", None)
    if vector is not None:
        return vector
    return jnp.full((SCALE_VECTOR_SIZE,), jnp.float32(1) if operand.decode_scale is None else operand.decode_scale)


@dataclasses.dataclass(frozen=True)
class FusedQuantizePasses(GatedQuantizePasses):
    """The passes as kernels."""

    name = "fused"
    supports_stacked_residuals = True
    reads_stacks = True
    packs_weights = False  # also those that do not travel

    def unsupported(self, problem: LinearProblem) -> str | None:
        """Needs one Hopper or newer NVIDIA GPU, bfloat16 tensors, and sizes that the kernels' tiles divide."""
        reason = problem.no_pallas_reason()
        for columns in (problem.inputs, problem.outputs):
            reason = reason or kernels.unsupported_tiled(problem.tokens, columns, capability=problem.device.capability)
        return reason

    def weight_unsupported(self, problem: LinearProblem, policy: OperandPolicy) -> str | None:
        if policy not in KERNEL_WEIGHT_POLICIES:
            known = ", ".join(fmt.name for fmt in KERNEL_FORMATS)
            return f"its kernels make nvfp4 2d rne, or 1d of {known}; this is {policy}"
        if policy != WEIGHT_2D and (problem.gathered or self.packs_weights):
            return f"its kernels pack weights in square tiles, this is {policy}"
        if problem.weight_dtype not in kernels.WEIGHT_DTYPES:
            return f"its kernel reads {' or '.join(kernels.WEIGHT_DTYPES)} weights, got {problem.weight_dtype}"
        return kernels.unsupported_tiled(*problem.weight_shard_shape)

    def unsupported_activation_fusion(self, activation: Activation, recipes: Sequence[Recipe]) -> str | None:
        if activation != SILU:
            return f"its kernels compute {SILU.name}, not {activation.name}"
        gate, up, down = recipes
        if reason := separate_pass_reason(recipes):
            return reason
        if down.wgrad_x.source == "requantize_forward":
            return "its kernels make h's operands of h, not one of the other"
        transforms = {gate.wgrad_dy.hadamard, up.wgrad_dy.hadamard, down.wgrad_x.hadamard}
        return None if len(transforms) == 1 else "its kernels transform the columns of dg, du and h alike"

    def precompute_amax(self, x: jax.Array, specs: Sequence[OperandSpec]) -> Amaxes:
        """Of what is not transformed in runs."""
        beside = [r for r in specs if not uses_hadamard128(r.policy)]
        if not beside and all(r.forward_spec is None for r in specs):
            return None
        flat = x.reshape(-1, x.shape[-1])  # [tokens..., features] -> [tokens, features]
        found = kernels.partial_amax(flat, hadamard=_transformed(_direct_specs(beside)))
        return _merge_amaxes(found, specs)

    def quantize_with_amax(self, x: jax.Array, specs: Sequence[OperandSpec], maxima: Amaxes) -> list[OperandOrResidual]:
        flat, tops = x.reshape(-1, x.shape[-1]), maxima or ()  # [tokens..., features] -> [tokens, features]
        beside = [r for r in specs if not uses_hadamard128(r.policy)]
        made = iter(
            self._run_pass(functools.partial(kernels.quantize_tiled, flat), tops, beside, x.shape) if beside else ()
        )

        def run(spec: OperandSpec) -> OperandOrResidual:
            forward = None
            if spec.axis != ROW_AXIS and x.shape[-2] % ms_eden.POINTS:
                raise ValueError(
                    f"a Hadamard transform of {ms_eden.POINTS} tokens does not divide the {x.shape[-2]} of a sequence "
                    "that this device has; take another mesh"
                )
            if spec.forward_spec is not None:
                policy = spec.forward_spec.policy
                scale = kernels.compute_tensor_scale(tops[0], top=amax_target(rule_of(policy)))
                forward = ms_eden.ForwardOperand(scale, **kernel_scaling(policy))
            scale = _scale_of_runs(flat, spec, forward)
            codes = _quantize_hadamard128(flat, spec, scale, forward, x.shape)
            return self._operands(codes, [spec], [scale], x.shape)[0]

        return [run(r) if uses_hadamard128(r.policy) else next(made) for r in specs]

    def _run_pass(
        self, run, tops: Sequence[jax.Array], specs: Sequence[OperandSpec], shape: tuple
    ) -> list[OperandOrResidual]:
        """Quantizes the tensor, and first, once each, the forward operands that others are quantized from."""
        direct = _direct_specs(specs)
        made = self._run_in_rounds(run, tops, direct, shape)

        def answer(wish: OperandSpec) -> OperandOrResidual:
            return next(o for r, o in zip(direct, made, strict=True) if r is wish or r.is_same_operand(wish))

        return [
            answer(r) if r.forward_spec is None else self._requantize_column(answer(r.forward_spec), r) for r in specs
        ]

    def _requantize_column(self, forward: BlockDequantized, spec: OperandSpec) -> OperandOrResidual:
        """Quantizes a forward operand again along columns."""
        shape, owed = forward.array.shape, _decode_scale_of(forward)
        flat = forward.array.reshape(-1, shape[-1])  # [tokens..., features] -> [tokens, features]
        tops = _merge_amaxes(kernels.partial_amax(flat, deferred_alpha=owed), [spec])
        (_, column), scales = self._kernel_operands(tops, None, spec, shape)
        made = kernels.quantize_tiled(flat, columns=dataclasses.replace(column, deferred_alpha=owed))
        return self._operands(made, [spec], scales, shape)[0]

    def activate_to_stacks(self, g, u, specs, into):
        flat, owed = _matrices(g, u)
        hadamard, places = _transformed(specs), [layer.reshape(-1, layer.shape[-1]) for layer in into]
        found = kernels.swiglu_forward_amax(*flat, deferred_alpha=owed, hadamard=hadamard, stack_slices=places)
        tops, stacks = found[: len(found) - len(into)], found[len(found) - len(into) :]
        run = functools.partial(kernels.swiglu_quantize_forward, *flat, deferred_alpha=owed)
        made = self._run_in_rounds(run, _merge_amaxes(tops, specs), specs, g.shape)
        return made, tuple(s.reshape(layer.stack.shape) for s, layer in zip(stacks, into, strict=True))

    def _run_in_rounds(
        self, run, tops: Sequence[jax.Array], specs: Sequence[OperandSpec], shape: tuple
    ) -> list[OperandOrResidual]:
        """Launches the kernel, which writes at most one operand per axis, until all specs are done."""
        rows = [r for r in specs if r.axis == ROW_AXIS]
        columns = [r for r in specs if r.axis != ROW_AXIS]
        made: dict[int, OperandOrResidual] = {}
        for row, column in itertools.zip_longest(rows, columns):
            sides, scales = self._kernel_operands(tops, row, column, shape)
            wrote = run(rows=sides[0], columns=sides[1])
            pair = [r for r in (row, column) if r is not None]
            for r, operand in zip(pair, self._operands(wrote, pair, scales, shape), strict=True):
                made[id(r)] = operand
        return [made[id(r)] for r in specs]

    def _kernel_operands(
        self, tops: Sequence[jax.Array], row: OperandSpec | None, column: OperandSpec | None, shape: tuple[int, ...]
    ):
        """Returns ((row, column) as kernel arguments, their scales) from the amax of a tensor and of its transform."""
        pair = [r for r in (row, column) if r is not None]
        own = [tops[-1 if r.policy.hadamard else 0] for r in pair]
        scales = tag_residual(
            kernels.compute_tensor_scales(*own, tops=tuple(amax_target(rule_of(r.policy)) for r in pair)), SCALES_NAME
        )
        sides = (
            None if row is None else self._rowwise(row, scales[0], shape),
            None if column is None else self._columnwise(column, scales[-1], shape),
        )
        return sides, scales

    def activate_backward(self, g, u, dh, dg, du, h):
        flat, owed = _matrices(g, u, dh)
        found = kernels.swiglu_backward_amax(*flat, deferred_alpha=owed, tensors=3, hadamard=_transformed(h))
        tops = _merge_amaxes(found, dg)
        each = len(tops) // 3
        (dg_sides, dg_scales), (du_sides, du_scales), (h_sides, h_scales) = (
            self._kernel_operands(tops[i * each : (i + 1) * each], *pair, g.shape)
            for i, pair in enumerate(((dg[0], dg[1]), (du[0], du[1]), (None, h[0])))
        )
        made = kernels.swiglu_quantize_backward(*flat, deferred_alpha=owed, dg=dg_sides, du=du_sides, h=h_sides[1])
        per = len(made) // 5  # arrays an operand
        return (
            self._operands(made[: 2 * per], dg, dg_scales, g.shape),
            self._operands(made[2 * per : 4 * per], du, du_scales, g.shape),
            self._operands(made[4 * per :], h, h_scales, g.shape),
        )

    def _rowwise(self, row: OperandSpec, scale: jax.Array, shape: tuple[int, ...]) -> RowwiseOperand:
        """Returns the kernel's argument for a rowwise operand."""
        return RowwiseOperand(
            scale, key=key_words_arg(row.key), window=_window(row, shape), **kernel_scaling(row.policy)
        )

    def _columnwise(self, column: OperandSpec, scale: jax.Array, shape: tuple[int, ...]) -> ColumnwiseOperand:
        """Returns the kernel's argument for a columnwise operand."""
        key, window, policy = key_words_arg(column.key), _window(column, shape), column.policy
        return ColumnwiseOperand(
            scale, key, window, policy.hadamard, packed=column.as_residual, **kernel_scaling(policy)
        )

    def _operands(
        self, made: Sequence[jax.Array], specs: Sequence[OperandSpec], scales: Sequence[jax.Array],
        shape: tuple[int, ...],
    ) -> list[OperandOrResidual]:  # fmt: skip
        """Returns the kernel's outputs, row before column, as operands: block-dequantized or packed codes."""
        arrays, operands = list(made), list[OperandOrResidual]()
        for spec, scale in zip(specs, scales, strict=True):
            if spec.as_residual:
                # [tokens / 2, features] and [tokens / 16, features] -> with the leading dims of the tensor
                codes, blocks = (t.reshape(*shape[:-2], -1, shape[-1]) for t in (arrays.pop(0), arrays.pop(0)))
                packed = PackedQTensor(codes, blocks, scale[AMAX], scale[DECODE], spec.policy.format, "1d", spec.axis)
                operands.append(tag_residual(packed))
            else:
                operands.append(
                    BlockDequantized(arrays.pop(0).reshape(shape), scale[GEMM_ALPHA_INDEX], spec.policy, scale)
                )
        return operands

    def quantize_weight(self, w: jax.Array | StackSlice, spec: OperandSpec, *, packed: bool = True) -> WeightOperand:
        policy = spec.policy
        if packed and policy != WEIGHT_2D:  # no kernel packs blocks along an axis
            return super().quantize_weight(w, spec, packed=packed)
        (tops,) = global_amaxes([kernels.weight_partial_amax(w)], spec.dim_axes)
        scale = tag_residual(kernels.compute_tensor_scale(tops, top=amax_target(rule_of(policy))), SCALES_NAME)
        if not packed:
            axis = None if policy.block == "2d" else spec.axis
            made = kernels.quantize_weight_kernel(w, scale, axis=axis, **kernel_scaling(policy))
            return BlockDequantized(made, scale[GEMM_ALPHA_INDEX], policy, scale)
        codes, scales = kernels.pack_weight_kernel(w, scale)
        return PackedQTensor(codes, scales, scale[AMAX], scale[DECODE], policy.format, policy.block, spec.axis)

    def requantize_weight(
        self, w: jax.Array | StackSlice, forward: WeightOperand, spec: OperandSpec, *, packed: bool = True
    ) -> WeightOperand:
        if packed or not isinstance(forward, BlockDequantized):
            return super().requantize_weight(w, forward, spec, packed=packed)
        if uses_hadamard128(spec.policy):
            scale = _scale_of_runs(w, spec, _forward_operand(forward))
        else:
            (tops,) = global_amaxes(
                [kernels.weight_partial_amax(forward.array, deferred_alpha=_decode_scale_of(forward))], spec.dim_axes
            )
            scale = kernels.compute_tensor_scale(tops, top=amax_target(rule_of(spec.policy)))
        return self.rematerialize_weight(w, WeightScalesResidual(tag_residual(scale, SCALES_NAME)), spec, forward)

    def load_packed_weight(self, codes: PackedQTensor, policy: OperandPolicy, *, axis: int) -> Operand:
        """The carrier of packed codes, by the kernel where it takes them."""
        rows, columns = codes.packed.shape
        if (
            policy != WEIGHT_2D
            or codes.axis != -2
            or codes.scales is None
            or kernels.unsupported_tiled(2 * rows, columns)
        ):
            return super().load_packed_weight(codes, policy, axis=axis)
        scales = jnp.repeat(codes.scales, NVFP4_BLOCK, axis=1)  # [inputs / 16, outputs / 16] -> [inputs / 16, outputs]
        return BlockDequantized(kernels.unpack_tiled(codes.packed, scales), operand_decode_scale(codes), policy)

    def weight_residual(self, made: WeightOperand) -> WeightResidual:
        """A carrier is four times as large as its codes, and its master is there anyway: the tensor's scales stay."""
        return (
            WeightScalesResidual(made.scale_vector)
            if isinstance(made, BlockDequantized) and made.scale_vector is not None
            else made
        )

    def rematerialize_weight(
        self,
        w: jax.Array | StackSlice,
        scales: WeightScalesResidual,
        spec: OperandSpec,
        forward: WeightOperand | None = None,
    ) -> WeightOperand:
        vector, policy = scales.vector, spec.policy
        axis, how = None if policy.block == "2d" else spec.axis, kernel_scaling(policy)
        if policy.source != "requantize_forward":
            made = kernels.quantize_weight_kernel(w, vector, axis=axis, **how)
            return BlockDequantized(made, vector[GEMM_ALPHA_INDEX], policy, vector)
        assert isinstance(forward, BlockDequantized), "what is quantized again is a carrier"
        if uses_hadamard128(policy):
            (made,) = _quantize_hadamard128(w, spec, vector, _forward_operand(forward), w.shape)
        else:
            made = kernels.quantize_weight_kernel(
                forward.array, vector, axis=axis, deferred_alpha=_decode_scale_of(forward), **how
            )
        return BlockDequantized(made, vector[GEMM_ALPHA_INDEX], policy, vector)

    def operand_from_residual(self, kept: Residual, policy: OperandPolicy) -> Operand:
        assert isinstance(kept, PackedQTensor) and kept.scales is not None, "these passes keep packed columns"
        features = kept.packed.shape[-1]
        # [.., tokens / 2, features] and [.., tokens / 16, features] -> matrices
        flat = [t.reshape(-1, features) for t in (kept.packed, kept.scales)]
        shape = (*kept.packed.shape[:-2], 2 * kept.packed.shape[-2], features)
        return BlockDequantized(kernels.unpack_tiled(*flat).reshape(shape), operand_decode_scale(kept), policy)


def _decode_scale_of(operand: BlockDequantized) -> jax.Array:
    """Returns the decode scale of block-dequantized values, float32 [1].

    NaN if the tensor's amax is not finite, as in `dequantize_codes`.
    """
    assert operand.scale_vector is not None, "a kernel made it, with the tensor's scales"
    return operand.scale_vector[GEMM_ALPHA_INDEX][None]


def _forward_operand(operand: BlockDequantized) -> ms_eden.ForwardOperand:
    """A forward operand as the kernels of runs make it again."""
    assert operand.scale_vector is not None, "a kernel made it, with the tensor's scales"
    return ms_eden.ForwardOperand(operand.scale_vector, **kernel_scaling(operand.policy))


def _scale_of_runs(x: jax.Array | StackSlice, spec: OperandSpec, forward: ms_eden.ForwardOperand | None) -> jax.Array:
    """The scales of x's runs, transformed."""
    check_rounding_keys(spec.policy, spec.key, spec.signs_key)
    found = ms_eden.eden_partial_amax(x, _signs(spec), axis=spec.axis, forward=forward)
    return tag_residual(
        kernels.compute_tensor_scale(*_merge_amaxes([found], [spec]), top=amax_target(rule_of(spec.policy))),
        SCALES_NAME,
    )


def _quantize_hadamard128(
    x: jax.Array | StackSlice,
    spec: OperandSpec,
    scale: jax.Array,
    forward: ms_eden.ForwardOperand | None,
    shape: tuple[int, ...],
) -> tuple[jax.Array, ...]:
    """What a kernel makes of x's runs."""
    key, window, rule = key_words_arg(spec.key), _window(spec, shape), rule_of(spec.policy)
    assert key is not None, "scales are rounded by chance"
    drawn = ms_eden.EdenQuantization(scale, key, rule, window)
    return ms_eden.eden_quantize(x, _signs(spec), drawn, axis=spec.axis, forward=forward, packed=spec.as_residual)


def _signs(spec: OperandSpec) -> jax.Array:
    assert spec.signs_key is not None, "signs are drawn"
    return random_signs(spec.signs_key, ms_eden.POINTS)


def _matrices(*tensors: ArrayOrDeferred) -> tuple[list[jax.Array], jax.Array | None]:
    """([tokens, features] of each, the factors that are owed to them; None where nothing is)."""
    arrays = [t.array if isinstance(t, DeferredAlpha) else t for t in tensors]
    flat = [a.reshape(-1, a.shape[-1]) for a in arrays]  # [tokens..., features] -> [tokens, features]
    if not any(isinstance(t, DeferredAlpha) for t in tensors):
        return flat, None
    return flat, jnp.stack([t.alpha if isinstance(t, DeferredAlpha) else jnp.float32(1) for t in tensors])


def _direct_specs(specs: Sequence[OperandSpec]) -> list[OperandSpec]:
    """What is to be made of the tensor itself: operands, and those of which others are made."""
    direct = [r for r in specs if r.forward_spec is None]
    for forward in (r.forward_spec for r in specs if r.forward_spec is not None):
        direct += [] if any(forward.is_same_operand(r) for r in direct) else [forward]
    return direct


def _transformed(specs: Sequence[OperandSpec]) -> bool:
    return any(r.policy.hadamard for r in specs)


def _window(spec: OperandSpec, shape: tuple[int, ...]) -> GlobalWindow | None:
    """Where the tensor lies in the whole one, for random bits; None if it is whole, or none are drawn."""
    if spec.key is None or not axes_in(spec.dim_axes):
        return None
    return GlobalWindow.from_offset(shape, shard_offsets(shape, spec.dim_axes), global_shape(shape, spec.dim_axes))


def _merge_amaxes(maxima: Sequence[jax.Array], specs: Sequence[OperandSpec]) -> tuple[jax.Array, ...]:
    return global_amaxes(maxima, specs[0].dim_axes)


BACKEND = Backend(
    "fused",
    fused_unsupported,
    fused_gemm,
    (FusedQuantizePasses(),),
    format_mismatch=nvfp4_format_mismatch,
    allows_per_gemm_fallback=True,
)
