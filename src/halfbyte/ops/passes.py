"""Quantize passes: what is read once and written as operands.

A GEMM needs its operands quantized, and a tensor is often needed as two: blocked along its features for fprop or
dgrad, and along tokens for wgrad. A pass takes a tensor (or the tensors from which SwiGLU makes one) and makes all the
operands that are asked of it. `XlaPasses` is the definition, one operand at a time, for XLA to fuse; a backend with
kernels of its own answers with other passes and must give the same bits.
"""

import dataclasses
from collections.abc import Sequence

import jax

from halfbyte.formats import Packed
from halfbyte.ops.operand import Kept, Operand, load, quantize_operand
from halfbyte.ops.swiglu import swiglu, swiglu_backward
from halfbyte.recipe import OperandPolicy, Recipe, role_key


@dataclasses.dataclass(frozen=True)
class Ask:
    """One operand wanted of a tensor: policy, axis (-1 features, -2 tokens), random bits; `kept` if it is for later."""

    policy: OperandPolicy
    axis: int
    key: jax.Array | None
    kept: bool = False


def ask(recipe: Recipe, role: str, key: jax.Array | None, *, kept: bool = False) -> Ask:
    """The operand `role` of a linear under `recipe`; `key` is the linear's own."""
    policy = getattr(recipe, role)
    axis = -2 if role.startswith("wgrad") else -1
    return Ask(policy, axis, role_key(key, role) if policy.stochastic and key is not None else None, kept)


class XlaPasses:
    """The definition of every pass, in plain JAX."""

    def quantize(self, x: jax.Array, asks: Sequence[Ask]) -> list[Operand]:
        """The operands asked of x [tokens..., features]."""
        return [quantize_operand(x, a.policy, axis=a.axis, key=a.key) for a in asks]

    def swiglu(self, g: jax.Array, u: jax.Array, asks: Sequence[Ask]) -> list[Operand]:
        """The operands asked of h = silu(g) * u."""
        return self.quantize(swiglu(g, u), asks)

    def swiglu_backward(
        self, g: jax.Array, u: jax.Array, dh: jax.Array,
        dg_asks: Sequence[Ask], du_asks: Sequence[Ask], h_asks: Sequence[Ask],
    ) -> tuple[list[Operand], list[Operand], list[Operand]]:  # fmt: skip
        """The operands asked of dg, du and h."""
        dg, du = swiglu_backward(g, u, dh)
        return self.quantize(dg, dg_asks), self.quantize(du, du_asks), self.swiglu(g, u, h_asks)

    def weight(self, w: jax.Array, policy: OperandPolicy, *, axis: int, key: jax.Array | None) -> Packed | Operand:
        """A weight, quantized once and read by several GEMMs: packed codes, or the carrier itself."""
        return Packed.of(quantize_operand(w, policy, axis=axis, key=key).codes())

    def keep_weight(self, made: Packed | Operand) -> Packed | Operand:
        """What the backward pass keeps of a weight: no transpose, for dgrad reads it as it lies.

        One that is left without carrier and codes is made again from the master.
        """
        return dataclasses.replace(made, turned=None) if isinstance(made, Operand) else made

    def weight_again(self, w: jax.Array, kept: Operand) -> Operand:
        """The weight that `keep_weight` stripped, bit for bit, from its master w."""
        raise NotImplementedError("these passes keep their weights as they are")

    def load(self, kept: Kept, policy: OperandPolicy) -> Operand:
        """An operand that was kept, bit for bit."""
        return load(kept, policy)


XLA = XlaPasses()
