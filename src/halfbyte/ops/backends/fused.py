"""`fused`: quantize passes as GPU kernels, and bfloat16 GEMMs over block-dequantized operands.

On a Hopper GPU the GEMMs of `emulated` already run at the speed of bfloat16; an emulated step is slower by its quantize
passes. Here each tensor is read once for its amax and once for all requested operands, with the Hadamard transform, the
random bits and SwiGLU fused (`kernels`). The operands match the reference bit for bit; with SwiGLU they do for the
values that the kernels compute with the GPU's own exp.

An operand that is requantized from the forward operand takes two further reads of that block-dequantized operand:
kernels multiply it by the tensor's decode scale, which gives the values of `QTensor.dequantize`. Under MS-EDEN it is
quantized from the tensor itself (`kernels/ms_eden.py`) in a separate pass, as every operand with 128-point transforms.

The GEMM kernel multiplies its float32 accumulator by alpha before it rounds; XLA would write the float32 sums to memory
and read them again. A GEMM whose sizes its tiles do not divide runs on `emulated`, over the same operands.
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

LAYOUT_OF_GEMM = {FPROP: "nn", DGRAD: "nt", WGRAD: "tn"}  # the GEMM kernel's names


def fused_unsupported(problem: LinearProblem, gemm: GemmKind) -> str | None:
    """Returns why the GEMM kernel does not support `gemm`, or None."""
    m, n, k = problem.gemm_sizes_mnk(gemm)
    dtype = problem.weight_dtype if gemm is WGRAD else problem.dtype
    return gemm_unsupported(
        m, n, k, layout=LAYOUT_OF_GEMM[gemm], out_dtype=jnp.dtype(dtype), capability=problem.device.capability
    )


def fused_gemm(gemm: GemmKind, left: Operand, right: Operand, dtype: jnp.dtype) -> jax.Array:
    """Returns exact products summed in float32, times alpha, rounded once to `dtype`."""
    a, b = left.values(), right.values()
    x, w = (t.reshape(-1, t.shape[-1]).astype(jnp.bfloat16) for t in (a, b))  # [tokens..., features] -> a matrix
    y = kernels.matmul(x, w, _scale_vector(left), _scale_vector(right), layout=LAYOUT_OF_GEMM[gemm], out_dtype=dtype)
    return y.reshape(result_shape(a.shape, b.shape, gemm.contracting_axes(a.ndim)))


def _scale_vector(operand: Operand) -> jax.Array:
    """Returns the scale vector that the GEMM kernel reads; built from `decode_scale` for operands of other passes."""
    vector = getattr(operand, "scale_vector", None)
    if vector is not None:
        return vector
    return jnp.full((SCALE_VECTOR_SIZE,), jnp.float32(1) if operand.decode_scale is None else operand.decode_scale)


@dataclasses.dataclass(frozen=True)
class FusedQuantizePasses(GatedQuantizePasses):
    """The quantize passes of NVFP4 as kernels."""

    name = "fused"
    supports_stacked_residuals = True
    reads_stacks = True
    packs_weights = False  # True: weights are packed even if they are not all-gathered

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
        """Returns the partial amaxes of x and its transform; operands with 128-point transforms compute their own."""
        tiled_specs = [spec for spec in specs if not uses_hadamard128(spec.policy)]
        if not tiled_specs and all(spec.forward_spec is None for spec in specs):
            return None
        flat = x.reshape(-1, x.shape[-1])  # [tokens..., features] -> [tokens, features]
        amaxes = kernels.partial_amax(flat, hadamard=_any_hadamard(_direct_specs(tiled_specs)))
        return _merge_amaxes(amaxes, specs)

    def quantize_with_amax(self, x: jax.Array, specs: Sequence[OperandSpec], maxima: Amaxes) -> list[OperandOrResidual]:
        flat, amaxes = x.reshape(-1, x.shape[-1]), maxima or ()  # [tokens..., features] -> [tokens, features]
        tiled = [spec for spec in specs if not uses_hadamard128(spec.policy)]
        operands = iter(
            self._run_pass(functools.partial(kernels.quantize_tiled, flat), amaxes, tiled, x.shape) if tiled else ()
        )

        def quantize_separately(spec: OperandSpec) -> OperandOrResidual:
            forward = None
            if spec.axis != ROW_AXIS and x.shape[-2] % ms_eden.POINTS:
                raise ValueError(
                    f"a Hadamard transform of {ms_eden.POINTS} tokens does not divide the {x.shape[-2]} of a sequence "
                    "that this device has; take another mesh"
                )
            if spec.forward_spec is not None:
                policy = spec.forward_spec.policy
                scale = kernels.compute_tensor_scale(amaxes[0], top=amax_target(rule_of(policy)))
                forward = ms_eden.ForwardOperand(scale, **kernel_scaling(policy))
            scale = _eden_scale(flat, spec, forward)
            codes = _quantize_hadamard128(flat, spec, scale, forward, x.shape)
            return self._operands(codes, [spec], [scale], x.shape)[0]

        return [quantize_separately(spec) if uses_hadamard128(spec.policy) else next(operands) for spec in specs]

    def _run_pass(
        self, run, tops: Sequence[jax.Array], specs: Sequence[OperandSpec], shape: tuple
    ) -> list[OperandOrResidual]:
        """Quantizes the tensor directly, including forward operands, then requantizes operands from those."""
        direct = _direct_specs(specs)
        operands = self._run_in_rounds(run, tops, direct, shape)

        def find(wish: OperandSpec) -> OperandOrResidual:
            return next(
                operand
                for spec, operand in zip(direct, operands, strict=True)
                if spec is wish or spec.is_same_operand(wish)
            )

        return [
            find(spec) if spec.forward_spec is None else self._requantize_column(find(spec.forward_spec), spec)
            for spec in specs
        ]

    def _requantize_column(self, forward: BlockDequantized, spec: OperandSpec) -> OperandOrResidual:
        """Requantizes a forward operand along columns."""
        shape, decode_scale = forward.array.shape, _decode_scale_of(forward)
        flat = forward.array.reshape(-1, shape[-1])  # [tokens..., features] -> [tokens, features]
        amaxes = _merge_amaxes(kernels.partial_amax(flat, deferred_alpha=decode_scale), [spec])
        (_, column), scales = self._kernel_operands(amaxes, None, spec, shape)
        outputs = kernels.quantize_tiled(flat, columns=dataclasses.replace(column, deferred_alpha=decode_scale))
        return self._operands(outputs, [spec], scales, shape)[0]

    def activate_to_stacks(self, g, u, specs, into):
        flat, alphas = _matrices(g, u)
        hadamard, slices = _any_hadamard(specs), [layer.reshape(-1, layer.shape[-1]) for layer in into]
        outputs = kernels.swiglu_forward_amax(*flat, deferred_alpha=alphas, hadamard=hadamard, stack_slices=slices)
        amaxes, stacks = outputs[: len(outputs) - len(into)], outputs[len(outputs) - len(into) :]
        run = functools.partial(kernels.swiglu_quantize_forward, *flat, deferred_alpha=alphas)
        operands = self._run_in_rounds(run, _merge_amaxes(amaxes, specs), specs, g.shape)
        return operands, tuple(stack.reshape(layer.stack.shape) for stack, layer in zip(stacks, into, strict=True))

    def _run_in_rounds(
        self, run, tops: Sequence[jax.Array], specs: Sequence[OperandSpec], shape: tuple
    ) -> list[OperandOrResidual]:
        """Launches the kernel, which writes at most one operand per axis, until all specs are done."""
        rows = [spec for spec in specs if spec.axis == ROW_AXIS]
        columns = [spec for spec in specs if spec.axis != ROW_AXIS]
        operands: dict[int, OperandOrResidual] = {}
        for row, column in itertools.zip_longest(rows, columns):
            kernel_operands, scales = self._kernel_operands(tops, row, column, shape)
            outputs = run(rows=kernel_operands[0], columns=kernel_operands[1])
            pair = [spec for spec in (row, column) if spec is not None]
            for spec, operand in zip(pair, self._operands(outputs, pair, scales, shape), strict=True):
                operands[id(spec)] = operand
        return [operands[id(spec)] for spec in specs]

    def _kernel_operands(
        self, tops: Sequence[jax.Array], row: OperandSpec | None, column: OperandSpec | None, shape: tuple[int, ...]
    ):
        """Returns ((row, column) as kernel arguments, their scales) from the amax of a tensor and of its transform."""
        pair = [spec for spec in (row, column) if spec is not None]
        amaxes = [tops[-1 if spec.policy.hadamard else 0] for spec in pair]
        scales = tag_residual(
            kernels.compute_tensor_scales(*amaxes, tops=tuple(amax_target(rule_of(spec.policy)) for spec in pair)),
            SCALES_NAME,
        )
        operands = (
            None if row is None else self._rowwise(row, scales[0], shape),
            None if column is None else self._columnwise(column, scales[-1], shape),
        )
        return operands, scales

    def activate_backward(self, g, u, dh, dg, du, h):
        flat, alphas = _matrices(g, u, dh)
        partial = kernels.swiglu_backward_amax(*flat, deferred_alpha=alphas, tensors=3, hadamard=_any_hadamard(h))
        amaxes = _merge_amaxes(partial, dg)
        count = len(amaxes) // 3
        (dg_args, dg_scales), (du_args, du_scales), (h_args, h_scales) = (
            self._kernel_operands(amaxes[i * count : (i + 1) * count], *pair, g.shape)
            for i, pair in enumerate(((dg[0], dg[1]), (du[0], du[1]), (None, h[0])))
        )
        outputs = kernels.swiglu_quantize_backward(*flat, deferred_alpha=alphas, dg=dg_args, du=du_args, h=h_args[1])
        per = len(outputs) // 5  # arrays per operand
        return (
            self._operands(outputs[: 2 * per], dg, dg_scales, g.shape),
            self._operands(outputs[2 * per : 4 * per], du, du_scales, g.shape),
            self._operands(outputs[4 * per :], h, h_scales, g.shape),
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
        if packed and policy != WEIGHT_2D:  # no kernel packs 1D blocks
            return super().quantize_weight(w, spec, packed=packed)
        (amax,) = global_amaxes([kernels.weight_partial_amax(w)], spec.dim_axes)
        scale = tag_residual(kernels.compute_tensor_scale(amax, top=amax_target(rule_of(policy))), SCALES_NAME)
        if not packed:
            axis = None if policy.block == "2d" else spec.axis
            array = kernels.quantize_weight_kernel(w, scale, axis=axis, **kernel_scaling(policy))
            return BlockDequantized(array, scale[GEMM_ALPHA_INDEX], policy, scale)
        codes, scales = kernels.pack_weight_kernel(w, scale)
        return PackedQTensor(codes, scales, scale[AMAX], scale[DECODE], policy.format, policy.block, spec.axis)

    def requantize_weight(
        self, w: jax.Array | StackSlice, forward: WeightOperand, spec: OperandSpec, *, packed: bool = True
    ) -> WeightOperand:
        if packed or not isinstance(forward, BlockDequantized):
            return super().requantize_weight(w, forward, spec, packed=packed)
        if uses_hadamard128(spec.policy):
            scale = _eden_scale(w, spec, _forward_operand(forward))
        else:
            (amax,) = global_amaxes(
                [kernels.weight_partial_amax(forward.array, deferred_alpha=_decode_scale_of(forward))], spec.dim_axes
            )
            scale = kernels.compute_tensor_scale(amax, top=amax_target(rule_of(spec.policy)))
        return self.rematerialize_weight(w, WeightScalesResidual(tag_residual(scale, SCALES_NAME)), spec, forward)

    def load_packed_weight(self, codes: PackedQTensor, policy: OperandPolicy, *, axis: int) -> Operand:
        """Returns packed codes block-dequantized, by the kernel if it supports them."""
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
        """Returns only the scales of a block-dequantized weight: it is four times as large as its codes."""
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
        axis, scaling = None if policy.block == "2d" else spec.axis, kernel_scaling(policy)
        if policy.source != "requantize_forward":
            array = kernels.quantize_weight_kernel(w, vector, axis=axis, **scaling)
            return BlockDequantized(array, vector[GEMM_ALPHA_INDEX], policy, vector)
        assert isinstance(forward, BlockDequantized), "what is quantized again is a carrier"
        if uses_hadamard128(policy):
            (array,) = _quantize_hadamard128(w, spec, vector, _forward_operand(forward), w.shape)
        else:
            array = kernels.quantize_weight_kernel(
                forward.array, vector, axis=axis, deferred_alpha=_decode_scale_of(forward), **scaling
            )
        return BlockDequantized(array, vector[GEMM_ALPHA_INDEX], policy, vector)

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
    """Returns the scales and rounding by which MS-EDEN kernels requantize a forward operand from its tensor."""
    assert operand.scale_vector is not None, "a kernel made it, with the tensor's scales"
    return ms_eden.ForwardOperand(operand.scale_vector, **kernel_scaling(operand.policy))


def _eden_scale(x: jax.Array | StackSlice, spec: OperandSpec, forward: ms_eden.ForwardOperand | None) -> jax.Array:
    """Returns the scale vector of x after its 128-point transforms."""
    check_rounding_keys(spec.policy, spec.key, spec.signs_key)
    amax = ms_eden.eden_partial_amax(x, _signs(spec), axis=spec.axis, forward=forward)
    return tag_residual(
        kernels.compute_tensor_scale(*_merge_amaxes([amax], [spec]), top=amax_target(rule_of(spec.policy))),
        SCALES_NAME,
    )


def _quantize_hadamard128(
    x: jax.Array | StackSlice,
    spec: OperandSpec,
    scale: jax.Array,
    forward: ms_eden.ForwardOperand | None,
    shape: tuple[int, ...],
) -> tuple[jax.Array, ...]:
    """Returns the MS-EDEN kernel's outputs for x: block-dequantized values, or codes and block scales."""
    key, window, rule = key_words_arg(spec.key), _window(spec, shape), rule_of(spec.policy)
    assert key is not None, "scales are rounded by chance"
    eden = ms_eden.EdenQuantization(scale, key, rule, window)
    return ms_eden.eden_quantize(x, _signs(spec), eden, axis=spec.axis, forward=forward, packed=spec.as_residual)


def _signs(spec: OperandSpec) -> jax.Array:
    assert spec.signs_key is not None, "signs are drawn"
    return random_signs(spec.signs_key, ms_eden.POINTS)


def _matrices(*tensors: ArrayOrDeferred) -> tuple[list[jax.Array], jax.Array | None]:
    """Returns (the tensors as [tokens, features], their deferred alphas stacked; None if no alpha is deferred)."""
    arrays = [t.array if isinstance(t, DeferredAlpha) else t for t in tensors]
    flat = [a.reshape(-1, a.shape[-1]) for a in arrays]  # [tokens..., features] -> [tokens, features]
    if not any(isinstance(t, DeferredAlpha) for t in tensors):
        return flat, None
    return flat, jnp.stack([t.alpha if isinstance(t, DeferredAlpha) else jnp.float32(1) for t in tensors])


def _direct_specs(specs: Sequence[OperandSpec]) -> list[OperandSpec]:
    """Returns the specs to quantize from the tensor itself: direct ones and forward operands of the others."""
    direct = [spec for spec in specs if spec.forward_spec is None]
    for forward in (spec.forward_spec for spec in specs if spec.forward_spec is not None):
        direct += [] if any(forward.is_same_operand(spec) for spec in direct) else [forward]
    return direct


def _any_hadamard(specs: Sequence[OperandSpec]) -> bool:
    return any(spec.policy.hadamard for spec in specs)


def _window(spec: OperandSpec, shape: tuple[int, ...]) -> GlobalWindow | None:
    """Returns the shard's offset in the global tensor, for random bits; None if it is unsharded or draws none."""
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
