"""Quantize passes: a tensor is read once and written as all operands that GEMMs need of it.

A GEMM needs its operands quantized, and a tensor is often needed as two: blocked along its features for fprop or
dgrad, and along tokens for wgrad. A pass takes a tensor (or the inputs of a gated activation) and writes
all requested operands. `QuantizePasses` is the reference, one operand at a time, for XLA to fuse. A backend with its
own kernels has other passes, which report beforehand what they do not support and must give the same bits.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from halfbyte.formats import Key, PackedQTensor
from halfbyte.kernels.mosaic_launch import StackSlice, materialize_slice
from halfbyte.ops.activation import Activation
from halfbyte.ops.gemm_problem import LinearProblem
from halfbyte.ops.linear_sharding import DimAxes, LinearSharding
from halfbyte.ops.operand import (
    BlockDequantized,
    Fp8Operand,
    Operand,
    QuantizedOperand,
    Residual,
    TwoTermOperand,
    WeightScalesResidual,
    dequantize_operand,
    from_residual,
    quantization_error,
    quantize_operand,
    to_residual,
)
from halfbyte.ops.quantized_weight import CONTRACTED_WEIGHT_AXIS
from halfbyte.recipes import FORWARD_ROLE_OF, LinearKey, OperandPolicy, Recipe, role_key, signs_key

ROW_AXIS, COLUMN_AXIS = -1, -2  # the axis that is blocked: features, for fprop and dgrad; tokens, for wgrad
WeightOperand = PackedQTensor | BlockDequantized | Fp8Operand  # read by several GEMMs
WeightResidual = WeightOperand | WeightScalesResidual
ArrayOrDeferred = Any  # an array, or a DeferredAlpha if the passes accept it
OperandOrResidual = Any  # an Operand, or a Residual if the spec has `as_residual`
Amaxes = tuple[jax.Array, ...] | None  # of the global tensor and, if a spec needs it, of its Hadamard transform


@dataclasses.dataclass(frozen=True)
class OperandSpec:
    """What to quantize for one operand: policy, blocked axis (ROWS or COLUMNS) and random key.

    `as_residual` returns it in the packed form that the VJP saves.
    """

    policy: OperandPolicy
    axis: int
    key: Key | None = None
    as_residual: bool = False
    dim_axes: DimAxes = ()  # mesh axes that the tensor is sharded over
    signs_key: Key | None = None  # the key of the GEMM's Hadamard signs
    forward_spec: "OperandSpec | None" = None  # the operand that is requantized, if that is the policy's source
    two_term: bool = False  # with the quantization error as second term
    amax: jax.Array | None = None  # an amax to scale by, instead of the tensor's own

    def is_same_operand(self, other: "OperandSpec") -> bool:
        """Returns True if one operand serves both specs: they are equal and share keys and amax."""
        own_fields, other_fields = ((r.policy, r.axis, r.as_residual, r.two_term) for r in (self, other))
        same = own_fields == other_fields
        if self.forward_spec is not None and other.forward_spec is not None:
            same = same and self.forward_spec.is_same_operand(other.forward_spec)
        return same and self.key is other.key and self.signs_key is other.signs_key and self.amax is other.amax


def operand_spec(
    recipe: Recipe, role: str, key: LinearKey | None, *, kept: bool = False, cut: DimAxes = ()
) -> OperandSpec:
    """Returns the spec of operand `role` of a linear under `recipe`; `key` is the key of the linear.

    A requantized weight has no `forward_spec`: its passes are passed the forward operand.
    """
    policy, of_weight = getattr(recipe, role), role in CONTRACTED_WEIGHT_AXIS
    axis = CONTRACTED_WEIGHT_AXIS[role] if of_weight else COLUMN_AXIS if role.startswith("wgrad") else ROW_AXIS
    requantized = policy.source == "requantize_forward" and not of_weight
    forward = operand_spec(recipe, FORWARD_ROLE_OF[role], key, cut=cut) if requantized else None
    rounding_key = role_key(key, role) if key is not None and policy.uses_random_bits else None
    hadamard_key = signs_key(key, role.partition("_")[0]) if key is not None and policy.uses_random_signs else None
    return OperandSpec(
        policy, axis, rounding_key, kept, cut, hadamard_key, forward, two_term=recipe.remainder and role == "fprop_x"
    )


def quantize_reference(x: jax.Array, spec: OperandSpec) -> BlockDequantized | QuantizedOperand:
    """Returns the operand of x that `spec` describes, in plain JAX."""
    if spec.forward_spec is not None:
        x = dequantize_operand(quantize_reference(x, spec.forward_spec))
    axis, key, signs = spec.axis, spec.key, spec.signs_key
    return quantize_operand(x, spec.policy, axis=axis, key=key, cut=spec.dim_axes, signs=signs, amax=spec.amax)


def quantize_weight_reference(w: jax.Array, spec: OperandSpec) -> PackedQTensor:
    """Returns the packed codes of a weight, in plain JAX."""
    operand = quantize_reference(w, spec)
    assert not isinstance(operand, BlockDequantized), "a weight in bf16 is not quantized"
    return PackedQTensor.from_qtensor(operand.codes)


class QuantizePasses:
    """Reference of every quantize pass, in plain JAX."""

    name = "xla"
    batches_weights = (
        False  # `quantize_weight` under vmap is one launch for all layers; else layer by layer, to save memory
    )
    reads_stacks = False  # weight methods accept a `StackSlice` and read the weight in place
    single_operand_weight = True  # fprop and dgrad read one operand if they share its codes

    def unsupported(self, problem: LinearProblem) -> str | None:
        """Returns why these passes cannot quantize x and dy, or None."""
        return None

    def format_mismatch(self, recipe: Recipe) -> str | None:
        """Returns why these passes do not support the recipe's formats, or None."""
        return None

    def weight_unsupported(self, problem: LinearProblem, policy: OperandPolicy) -> str | None:
        """Returns why these passes cannot quantize the weight, or None."""
        return None

    def precompute_amax(self, x: jax.Array, specs: Sequence[OperandSpec]) -> Amaxes:
        """Returns the amaxes of x for these specs, None if the passes need none.

        A caller that saves them can requantize x without another read of x for them (`quantize_with_amax`).
        """
        return None

    def quantize(self, x: jax.Array, specs: Sequence[OperandSpec]) -> list[OperandOrResidual]:
        """Returns the operands of x [tokens..., features] that `specs` describe."""
        return self.quantize_with_amax(x, specs, self.precompute_amax(x, specs))

    def quantize_with_amax(self, x: jax.Array, specs: Sequence[OperandSpec], maxima: Amaxes) -> list[OperandOrResidual]:
        """Returns `quantize` with the precomputed `maxima` of x for at least these specs."""
        operands = [quantize_reference(x, spec) for spec in specs]
        return [
            to_residual(operand) if spec.as_residual else operand for operand, spec in zip(operands, specs, strict=True)
        ]

    def quantize_operands(
        self, x: jax.Array, specs: Sequence[OperandSpec], maxima: Amaxes = None
    ) -> list[OperandOrResidual]:
        """Returns `quantize`, with the quantization error as second term where a spec is `two_term`."""
        operands = self.quantize(x, specs) if maxima is None else self.quantize_with_amax(x, specs, maxima)
        return [
            TwoTermOperand(first, *self.quantize(quantization_error(x, first), [spec])) if spec.two_term else first
            for first, spec in zip(operands, specs, strict=True)
        ]

    def quantize_weight(self, w: jax.Array | StackSlice, spec: OperandSpec, *, packed: bool = True) -> WeightOperand:
        """Quantizes a weight that several GEMMs read: a GEMM operand or packed codes.

        With `packed`, for a weight that is all-gathered, always packed codes.
        """
        return quantize_weight_reference(materialize_slice(w), spec)

    def requantize_weight(
        self, w: jax.Array | StackSlice, forward: WeightOperand, spec: OperandSpec, *, packed: bool = True
    ) -> WeightOperand:
        """Requantizes a weight from its forward operand; otherwise as `quantize_weight`."""
        return quantize_weight_reference(dequantize_operand(forward), spec)

    def weight_residual(self, made: WeightOperand) -> WeightResidual:
        """Returns the residual of a weight: without the transpose, as dgrad reads the stored order.

        If it is scales only, `rematerialize_weight` requantizes the master.
        """
        return dataclasses.replace(made, transposed=None) if isinstance(made, Fp8Operand) else made

    def rematerialize_weight(
        self,
        w: jax.Array | StackSlice,
        scales: WeightScalesResidual,
        spec: OperandSpec,
        forward: WeightOperand | None = None,
    ) -> WeightOperand:
        """Rematerializes the operand from the master w and the saved scales, or from its forward operand, bit for bit.

        `spec` is the one that was passed to `quantize_weight` or `requantize_weight`.
        """
        raise AssertionError(f"the {self.name} passes keep their weights as they are")

    def load_packed_weight(self, codes: PackedQTensor, policy: OperandPolicy, *, axis: int) -> Operand:
        """Returns packed codes of a whole weight as the operand of a GEMM that contracts `axis`."""
        return from_residual(codes, policy)

    def all_gather_weight(
        self, codes: PackedQTensor, policy: OperandPolicy, *, axis: int, shards: LinearSharding
    ) -> Operand | None:
        """Returns the operand of a weight from one device's codes, None if these passes do not all-gather it."""
        return None

    def operand_from_residual(self, kept: Residual, policy: OperandPolicy) -> Operand:
        """Returns a saved residual as an operand, bit for bit."""
        return from_residual(kept, policy)


class GatedQuantizePasses(QuantizePasses, abc.ABC):
    """Passes with the activation of a gated MLP fused: from g = x Wg, u = x Wu and dh to operands of h, dg and du.

    h, dg and du are never written to memory.
    """

    accepts_deferred_alpha = False  # `activate` and `activate_backward` apply the alpha of a `DeferredAlpha`
    # `activate_to_stacks` writes g and u into a `StackSlice`, where `activate_backward` reads them.
    supports_stacked_residuals = False

    @abc.abstractmethod
    def unsupported_activation_fusion(self, activation: Activation, recipes: Sequence[Recipe]) -> str | None:
        """Returns why the activation between linears of these recipes (gate, up, down) cannot be fused, or None."""

    def activate(self, g: ArrayOrDeferred, u: ArrayOrDeferred, specs: Sequence[OperandSpec]) -> list[OperandOrResidual]:
        """Returns the operands of h; only if `unsupported_activation_fusion` returns None."""
        return self.activate_to_stacks(g, u, specs, ())[0]

    @abc.abstractmethod
    def activate_backward(
        self, g: ArrayOrDeferred, u: ArrayOrDeferred, dh: ArrayOrDeferred,
        dg: Sequence[OperandSpec], du: Sequence[OperandSpec], h: Sequence[OperandSpec],
    ) -> tuple[list[OperandOrResidual], list[OperandOrResidual], list[OperandOrResidual]]:  # fmt: skip
        """Returns the operands of dg, du and h in one pass; only if `unsupported_activation_fusion` returns None."""

    def activate_to_stacks(
        self, g: ArrayOrDeferred, u: ArrayOrDeferred, specs: Sequence[OperandSpec], into: Sequence[StackSlice]
    ) -> tuple[list[OperandOrResidual], tuple[jax.Array, ...]]:
        """Returns (`activate`, the stacks `into` with g and u); only with `supports_stacked_residuals`."""
        raise AssertionError(f"the {self.name} passes keep nothing in stacks")


XLA_PASSES = QuantizePasses()
