"""Quantize passes: what is read once and written as operands.

A GEMM needs its operands quantized, and a tensor is often needed as two: blocked along its features for fprop or
dgrad, and along tokens for wgrad. A pass takes a tensor (or the tensors from which a gated activation makes one) and
makes all the operands that are requested of it. `Passes` is the definition, one operand at a time, for XLA to fuse; a
backend with kernels of its own has other passes, which say beforehand what they cannot make and must give the same
bits.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from halfbyte.formats import Packed
from halfbyte.kernels.stacks import Layer
from halfbyte.ops.activation import Activation
from halfbyte.ops.operand import Carrier, EightBit, Kept, Operand, WeightScales, keep, load, quantize_operand
from halfbyte.ops.problem import Problem
from halfbyte.ops.shards import Cut, Shards
from halfbyte.recipe import OperandPolicy, Recipe, role_key

ROWS, COLUMNS = -1, -2  # the axis that is blocked: features, for fprop and dgrad; tokens, for wgrad
QuantizedWeight = Packed | Carrier | EightBit  # read by several GEMMs
KeptWeight = QuantizedWeight | WeightScales
Read = Any  # an array, or Owed where the passes take it
Made = Any  # an Operand, or Kept where the request says so


@dataclasses.dataclass(frozen=True)
class Request:
    """One operand wanted of a tensor: policy, axis (ROWS or COLUMNS), random bits; `kept` wants it as a residual."""

    policy: OperandPolicy
    axis: int
    key: jax.Array | None = None
    kept: bool = False
    cut: Cut = ()  # of the tensor, over a mesh

    def same(self, other: "Request") -> bool:
        """Whether one operand answers both: equal but for random bits, of which there are none."""
        return (self.policy, self.axis, self.kept) == (other.policy, other.axis, other.kept) and self.key is other.key


def request(recipe: Recipe, role: str, key: jax.Array | None, *, kept: bool = False, cut: Cut = ()) -> Request:
    """The operand `role` of a linear under `recipe`; `key` is the linear's own."""
    policy = getattr(recipe, role)
    axis = COLUMNS if role.startswith("wgrad") else ROWS
    return Request(policy, axis, role_key(key, role) if policy.stochastic and key is not None else None, kept, cut)


class Passes:
    """The definition of every pass, in plain JAX."""

    name = "xla"
    batches_weights = False  # `weight` under vmap is one launch for all layers; else layer by layer, for memory's sake
    one_weight = True  # one operand of a weight serves fprop and dgrad, where they share its codes

    def unsupported(self, problem: Problem) -> str | None:
        """Why these passes cannot make the operands of x and dy, or None."""
        return None

    def foreign(self, recipe: Recipe) -> str | None:
        """Why its formats are not this recipe's, or None."""
        return None

    def weight_unsupported(self, problem: Problem, policy: OperandPolicy) -> str | None:
        """Why these passes cannot quantize the weight, or None."""
        return None

    def quantize(self, x: jax.Array, requests: Sequence[Request]) -> list[Made]:
        """What is requested of x [tokens..., features]."""
        made = [quantize_operand(x, r.policy, axis=r.axis, key=r.key, cut=r.cut) for r in requests]
        return [keep(operand) if r.kept else operand for operand, r in zip(made, requests, strict=True)]

    def weight(
        self, w: jax.Array, policy: OperandPolicy, *, axis: int, key: jax.Array | None, cut: Cut = (),
        packed: bool = True,
    ) -> QuantizedWeight:  # fmt: skip
        """A weight, quantized once and read by several GEMMs: what a kernel multiplies, or packed codes; always those
        where `packed` says that the weight is to travel.
        """
        made = quantize_operand(w, policy, axis=axis, key=key, cut=cut)
        assert not isinstance(made, Carrier), "a weight in bf16 is not quantized"
        return Packed.of(made.codes)

    def keep_weight(self, made: QuantizedWeight) -> KeptWeight:
        """What the backward pass keeps of a weight: no transpose, for dgrad reads it as it lies.

        Scales alone mean that `remake_weight` makes it again from the master.
        """
        return dataclasses.replace(made, transposed=None) if isinstance(made, EightBit) else made

    def remake_weight(self, w: jax.Array, scales: WeightScales) -> QuantizedWeight:
        """The weight of which only scales were kept, bit for bit, from its master w."""
        raise AssertionError(f"the {self.name} passes keep their weights as they are")

    def load_weight(self, codes: Packed, policy: OperandPolicy, *, axis: int) -> Operand:
        """Packed codes of a whole weight as the operand of a GEMM that sums over `axis`."""
        return load(codes, policy)

    def gather_weight(self, codes: Packed, policy: OperandPolicy, *, axis: int, shards: Shards) -> Operand | None:
        """The operand of a weight of which these are one device's codes, if these passes gather it themselves."""
        return None

    def load(self, kept: Kept, policy: OperandPolicy) -> Operand:
        """An operand that was kept, bit for bit."""
        return load(kept, policy)


class GatedPasses(Passes, abc.ABC):
    """Passes that hold the activation of a gated MLP as well: from g = x Wg, u = x Wu and dh to the operands of h, dg
    and du, which never reach memory.
    """

    takes_owed = False  # `activate` and `activate_backward` apply the factors of `Owed` tensors themselves
    keeps_in_stacks = False  # `activate_into` writes g and u where `activate_backward` reads them, a `stacks.Layer`

    @abc.abstractmethod
    def unfused(self, activation: Activation, recipes: Sequence[Recipe]) -> str | None:
        """Why an activation between linears of these recipes (gate, up, down) is not part of these passes, or None."""

    @abc.abstractmethod
    def activate(self, g: Read, u: Read, requests: Sequence[Request]) -> list[Made]:
        """What is requested of h; only where `unfused` is None."""

    @abc.abstractmethod
    def activate_backward(
        self, g: Read, u: Read, dh: Read,
        dg: Sequence[Request], du: Sequence[Request], h: Sequence[Request],
    ) -> tuple[list[Made], list[Made], list[Made]]:  # fmt: skip
        """What is requested of dg, du and h, in one pass; only where `unfused` is None."""

    def activate_into(
        self, g: Read, u: Read, requests: Sequence[Request], into: Sequence[Layer]
    ) -> tuple[list[Made], tuple[jax.Array, ...]]:
        """(`activate`, the stacks of the layers `into` which g and u were written); only with `keeps_in_stacks`."""
        raise AssertionError(f"the {self.name} passes keep nothing in stacks")


XLA = Passes()
