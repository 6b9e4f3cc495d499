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

from halfbyte.formats import Key, Packed
from halfbyte.kernels.stacks import Layer, array_of
from halfbyte.ops.activation import Activation
from halfbyte.ops.operand import (
    Carrier,
    EightBit,
    InTwo,
    Kept,
    Operand,
    Quantized,
    WeightScales,
    dequantized,
    keep,
    left_over,
    load,
    quantize_operand,
)
from halfbyte.ops.problem import Problem
from halfbyte.ops.shards import Cut, Shards
from halfbyte.ops.weight import CONTRACTED
from halfbyte.recipe import AGAIN, LinearKey, OperandPolicy, Recipe, role_key, signs_key

ROWS, COLUMNS = -1, -2  # the axis that is blocked: features, for fprop and dgrad; tokens, for wgrad
QuantizedWeight = Packed | Carrier | EightBit  # read by several GEMMs
KeptWeight = QuantizedWeight | WeightScales
Read = Any  # an array, or Owed where the passes take it
Made = Any  # an Operand, or Kept where the request says so
Maxima = tuple[jax.Array, ...] | None  # of a whole tensor and, where one is asked for, of its transform


@dataclasses.dataclass(frozen=True)
class Request:
    """One operand wanted of a tensor: policy, axis (ROWS or COLUMNS), random bits; `kept` wants it as a residual."""

    policy: OperandPolicy
    axis: int
    key: Key | None = None
    kept: bool = False
    cut: Cut = ()  # of the tensor, over a mesh
    signs: Key | None = None  # the key of the GEMM's Hadamard signs
    forward: "Request | None" = None  # the operand that is quantized again, where the policy's source is that
    in_two: bool = False  # with what rounding leaves over
    amax: jax.Array | None = None  # what the tensor is scaled by, where that is not its own

    def same(self, other: "Request") -> bool:
        """Whether one operand answers both: equal but for random bits, of which there are none."""
        mine, theirs = ((r.policy, r.axis, r.kept, r.in_two) for r in (self, other))
        alike = mine == theirs
        if self.forward is not None and other.forward is not None:
            alike = alike and self.forward.same(other.forward)
        return alike and self.key is other.key and self.signs is other.signs and self.amax is other.amax


def request(recipe: Recipe, role: str, key: LinearKey | None, *, kept: bool = False, cut: Cut = ()) -> Request:
    """The operand `role` of a linear under `recipe`; `key` is the linear's own. A weight that is quantized again has
    its forward operand, and asks for none.
    """
    policy, of_weight = getattr(recipe, role), role in CONTRACTED
    axis = CONTRACTED[role] if of_weight else COLUMNS if role.startswith("wgrad") else ROWS
    again = policy.source == "forward" and not of_weight
    forward = request(recipe, AGAIN[role], key, cut=cut) if again else None
    bits = role_key(key, role) if key is not None and policy.draws_bytes else None
    signs = signs_key(key, role.partition("_")[0]) if key is not None and policy.draws_signs else None
    return Request(policy, axis, bits, kept, cut, signs, forward, in_two=recipe.remainder and role == "fprop_x")


def quantize_as(x: jax.Array, wanted: Request) -> Carrier | Quantized:
    """The operand that is wanted of x, by the definition."""
    if wanted.forward is not None:
        x = dequantized(quantize_as(x, wanted.forward))
    axis, key, signs = wanted.axis, wanted.key, wanted.signs
    return quantize_operand(x, wanted.policy, axis=axis, key=key, cut=wanted.cut, signs=signs, amax=wanted.amax)


def defined_weight(w: jax.Array, wanted: Request) -> Packed:
    """The packed codes of a weight, by the definition."""
    made = quantize_as(w, wanted)
    assert not isinstance(made, Carrier), "a weight in bf16 is not quantized"
    return Packed.of(made.codes)


class Passes:
    """The definition of every pass, in plain JAX."""

    name = "xla"
    batches_weights = False  # `weight` under vmap is one launch for all layers; else layer by layer, for memory's sake
    reads_stacks = False  # methods of weights take one where it lies among others, a `stacks.Layer`
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

    def maxima(self, x: jax.Array, requests: Sequence[Request]) -> Maxima:
        """What these passes must know of all of x before they can answer the requests: a reading of x that whoever
        keeps it is spared when x is quantized again (`quantize_by`). None where they keep nothing.
        """
        return None

    def quantize(self, x: jax.Array, requests: Sequence[Request]) -> list[Made]:
        """What is requested of x [tokens..., features]."""
        return self.quantize_by(x, requests, self.maxima(x, requests))

    def quantize_by(self, x: jax.Array, requests: Sequence[Request], maxima: Maxima) -> list[Made]:
        """`quantize`, with the `maxima` of x for these requests, or for more of them."""
        made = [quantize_as(x, r) for r in requests]
        return [keep(operand) if r.kept else operand for operand, r in zip(made, requests, strict=True)]

    def operands(self, x: jax.Array, requests: Sequence[Request], maxima: Maxima = None) -> list[Made]:
        """`quantize`, what rounding leaves over included."""
        made = self.quantize(x, requests) if maxima is None else self.quantize_by(x, requests, maxima)
        return [
            InTwo(first, *self.quantize(left_over(x, first), [r])) if r.in_two else first
            for first, r in zip(made, requests, strict=True)
        ]

    def weight(self, w: jax.Array | Layer, wanted: Request, *, packed: bool = True) -> QuantizedWeight:
        """A weight, quantized once and read by several GEMMs: what a kernel multiplies, or packed codes; always those
        where `packed` says that the weight is to travel.
        """
        return defined_weight(array_of(w), wanted)

    def weight_again(
        self, w: jax.Array | Layer, forward: QuantizedWeight, wanted: Request, *, packed: bool = True
    ) -> QuantizedWeight:
        """A weight whose source is the forward operand, itself of w, as `weight` makes others."""
        return defined_weight(dequantized(forward), wanted)

    def keep_weight(self, made: QuantizedWeight) -> KeptWeight:
        """What the backward pass keeps of a weight: no transpose, for dgrad reads it as it lies.

        Scales alone mean that `remake_weight` makes it again from the master.
        """
        return dataclasses.replace(made, transposed=None) if isinstance(made, EightBit) else made

    def remake_weight(
        self, w: jax.Array | Layer, scales: WeightScales, wanted: Request, forward: QuantizedWeight | None = None
    ) -> QuantizedWeight:
        """The weight of which only scales were kept, bit for bit, from its master w, or from its forward operand; as it
        was wanted of `weight` or `weight_again`.
        """
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

    def activate(self, g: Read, u: Read, requests: Sequence[Request]) -> list[Made]:
        """What is requested of h; only where `unfused` is None."""
        return self.activate_into(g, u, requests, ())[0]

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
