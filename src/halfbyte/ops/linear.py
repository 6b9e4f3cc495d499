"""One linear y = x W while it is traced: its weight, its random bits, who makes its operands and who multiplies them.

`qdot` is one of these or several of one x; `mlp` is three and an activation. The three GEMMs are methods, each from the
operands of its sides to its result. What the backward pass keeps of the weight is `keep`, and `restore` makes the
linear again there. On a mesh a linear sees local arrays; its `Shards` say what travels, and the methods send it.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from halfbyte.formats import Packed
from halfbyte.ops.backends import Choice, check_training, choose
from halfbyte.ops.gemms import DGRAD, FPROP, WGRAD, Gemm, finish
from halfbyte.ops.operand import EightBit, Operand
from halfbyte.ops.passes import Made, Passes, Read, Request, request
from halfbyte.ops.problem import Problem, target
from halfbyte.ops.shards import WHOLE, Cut, Shards, alone, axes_of, gather, scatter_gradient, scatter_sum, size_of
from halfbyte.ops.surroundings import several_devices
from halfbyte.ops.weight import (
    CONTRACTED,
    QWeight,
    gather_packed,
    keep_weight,
    quantize_part,
    restore_weight,
    shares_codes,
    weight_operand,
)
from halfbyte.recipe import Recipe

FLOAT32 = jnp.dtype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class LinearPlan:
    """What is settled before tracing."""

    problem: Problem
    choice: Choice
    shards: Shards
    weights_kept: str

    @property
    def recipe(self) -> Recipe:
        return self.problem.recipe

    @property
    def weight_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.problem.weight_dtype)


def plan_linear(
    x: jax.ShapeDtypeStruct, w: Any, recipe: Recipe, *, backend: str, weights_kept: str, shards: Shards = WHOLE,
    sharded: bool = False,
) -> LinearPlan:  # fmt: skip
    """The plan of x [tokens..., inputs], as it is inside, times w, an array or a QWeight as it rests.

    It asks for all three GEMMs, or for fprop alone if the tokens cannot be blocked for wgrad (a decoder's single token,
    say).
    """
    parts = size_of(shards.stored[0]), size_of(shards.stored[1])
    dtype = (w.anchor if isinstance(w, QWeight) else w).dtype.name
    problem = Problem(
        recipe,
        math.prod(x.shape[:-1]),
        w.shape[0] * parts[0],
        w.shape[1] * parts[1],
        target(),
        dtype=x.dtype.name,
        weight_dtype=dtype,
        sharded=sharded or several_devices(),
        parts=parts,
    )
    if problem.unblockable() is not None:
        problem = dataclasses.replace(problem, training=False)
    return LinearPlan(problem, choose(backend, problem), shards, weights_kept)


def quantized(plan: LinearPlan, w: Any, key: jax.Array | None) -> QWeight:
    """w as the plan's linear reads it; a QWeight as it is."""
    if isinstance(w, QWeight):
        return w
    passes, packed = plan.choice.for_weight, plan.problem.gathered
    return quantize_part(w, plan.recipe, key, cut=plan.shards.w, passes=passes, packed=packed)


@dataclasses.dataclass(frozen=True)
class Linear:
    """One linear of a traced program."""

    plan: LinearPlan
    weight: QWeight
    key: jax.Array | None

    @classmethod
    def of(cls, plan: LinearPlan, anchor: Any, codes: Any, key: jax.Array | None) -> "Linear":
        """From the parts of a QWeight, which a VJP takes apart: the anchor has a gradient, the codes have none."""
        return cls(plan, QWeight(anchor, codes[0], codes[1], plan.recipe), key)

    @classmethod
    def restore(cls, plan: LinearPlan, kept: QWeight, key: jax.Array | None, *, after: jax.Array) -> "Linear":
        """The linear whose weight `keep` kept, not before `after` is there."""
        return cls(plan, restore_weight(kept, plan.choice.for_weight, after=after), key)

    @property
    def passes(self) -> Passes:
        """What makes its operands of x and dy."""
        return self.plan.choice.passes

    def request(self, role: str, *, kept: bool = False) -> Request:
        """The wish for one of its operands."""
        shards = self.plan.shards
        cut = shards.dy if role.endswith("dy") else shards.x
        return request(self.plan.recipe, role, self.key, kept=kept, cut=cut)

    def quantize(self, x: jax.Array, *roles: str, kept: tuple[str, ...] = ()) -> list[Made]:
        """Its operands of x (or dy), in one pass; those in `kept` as residuals."""
        return self.passes.quantize(x, [self.request(role, kept=role in kept) for role in roles])

    def load(self, kept: Any, role: str) -> Operand:
        """A residual as an operand."""
        return self.passes.load(kept, getattr(self.plan.recipe, role))

    def fprop_owing(self, x: Operand, dtype: jnp.dtype) -> Read:
        """`fprop`, for passes that take what is owed to its result."""
        if self.plan.shards.inputs:
            return self.fprop(x, dtype)
        return self._multiply_owing(FPROP, x, self._weight("fprop_w"), dtype)

    def dgrad_owing(self, dy: Operand, dtype: jnp.dtype) -> Read:
        """`dgrad`, for passes that take what is owed to its result."""
        if self.plan.shards.outputs:
            return self.dgrad(dy, dtype)
        return self._multiply_owing(DGRAD, dy, self._weight("dgrad_w"), dtype)

    def fprop(self, x: Operand, dtype: jnp.dtype) -> jax.Array:
        """y = x W, where y goes."""
        shards = self.plan.shards
        return self._summed(FPROP, x, self._weight("fprop_w"), dtype, over=shards.inputs, cut=shards.y_lead)

    def dgrad(self, dy: Operand, dtype: jnp.dtype) -> jax.Array:
        """dx = dy W^T, where x came from."""
        shards = self.plan.shards
        return self._summed(DGRAD, dy, self._weight("dgrad_w"), dtype, over=shards.outputs, cut=shards.x_lead)

    def _weight(self, role: str) -> Operand:
        """The weight as a GEMM's right operand, gathered once where fprop and dgrad read the same: a backward pass
        that makes y again reads it twice, and XLA does not find by itself that both gathers are the same.
        """
        shared, fprop = shares_codes(self.plan.recipe), self.weight.fprop
        if shared and isinstance(fprop, Packed) and not self.passes.one_weight:
            policy, axis = self.plan.recipe.fprop_w, CONTRACTED[role]
            made = self.passes.gather_weight(fprop, policy, axis=axis, shards=self.plan.shards)
            return made or self.passes.load_weight(self._shared_codes, policy, axis=axis)
        if not shared or isinstance(fprop, EightBit):
            return weight_operand(self.weight, role, self.plan.shards, self.passes)
        return self._shared_weight

    @functools.cached_property
    def _shared_weight(self) -> Operand:
        return weight_operand(self.weight, "fprop_w", self.plan.shards, self.passes)

    @functools.cached_property
    def _shared_codes(self) -> Packed:
        return gather_packed(self.weight.fprop, self.plan.shards)

    def _summed(
        self, gemm: Gemm, left: Operand, right: Operand, dtype: jnp.dtype, *, over: tuple[str, ...], cut: Cut
    ) -> jax.Array:
        """A GEMM whose sums are partial over the axes `over`: added up in float32, and rounded once."""
        if not over:
            return self._multiply(gemm, left, right, dtype)
        sums = scatter_sum(self._multiply(gemm, left, right, FLOAT32), (*cut, ()))
        rest = tuple(axis for axis in over if axis not in axes_of(cut))
        return finish(lax.psum(sums, rest) if rest else sums, None, dtype)

    def wgrad(self, x: Operand, dy: Operand) -> jax.Array:
        """dw = x^T dy, in the weight's dtype, where the weight rests: sums over the axes that it is gathered over."""
        shards, dtype = self.plan.shards, self.plan.weight_dtype
        if self.plan.problem.turned_wgrad:
            turned = alone(self._multiply(WGRAD, dy, x, dtype), shards.idle)  # [outputs, inputs]
            return scatter_gradient(turned, shards.stored[::-1], shards.reduce_dtype).T
        dw = alone(self._multiply(WGRAD, x, dy, dtype), shards.idle)
        return scatter_gradient(dw, shards.stored, shards.reduce_dtype)

    def _multiply(self, gemm: Gemm, left: Operand, right: Operand, dtype: jnp.dtype) -> jax.Array:
        return self.plan.choice.multiplier(gemm).gemm(gemm, left, right, dtype)

    def _multiply_owing(self, gemm: Gemm, left: Operand, right: Operand, dtype: jnp.dtype) -> Read:
        backend = self.plan.choice.multiplier(gemm)
        return (backend.owing or backend.gemm)(gemm, left, right, dtype)

    def keep(self, *, fprop_again: bool = False) -> QWeight:
        """Its weight as the backward pass keeps it: for dgrad, and `fprop_again` where that computes y once more."""
        check_training(self.plan.problem)
        recipe = self.plan.recipe
        master = not recipe.dgrad_w.format.quantized or (fprop_again and not recipe.fprop_w.format.quantized)
        return keep_weight(self.weight, self.plan.choice.for_weight, kept=self.plan.weights_kept, master=master)


def places_of(linears: Sequence[Linear], role: str) -> list[int]:
    """For each of several linears of one x, which of them the first is that wants the same operand `role`: one pass
    and one operand serve both.
    """

    def same(a: Linear, b: Linear) -> bool:
        return a is b or (a.passes is b.passes and a.request(role).same(b.request(role)))

    return [next(i for i, other in enumerate(linears) if same(linear, other)) for linear in linears]


def once_each(linears: Sequence[Linear], role: str, made: Sequence[Made]) -> dict[int, Made]:
    """Operands `role` of several linears of one x, each once, by the place of the first linear that wants it."""
    return {place: made[place] for place in places_of(linears, role)}


def operands_of_x(
    x: jax.Array, linears: Sequence[Linear], roles: Sequence[str], *, kept: Sequence[str] = ()
) -> list[list[Made]]:
    """Each linear's operands of x: one pass for all that have the same passes, one operand wherever two want the
    same.
    """
    firsts = {role: places_of(linears, role) for role in roles}
    made: dict[tuple[int, str], Made] = {}
    for passes in dict.fromkeys(linear.passes for linear in linears):
        mine = [
            (i, role)
            for i, linear in enumerate(linears)
            for role in roles
            if linear.passes is passes and firsts[role][i] == i
        ]
        requests = [linears[i].request(role, kept=role in kept) for i, role in mine]
        made |= dict(zip(mine, passes.quantize(x, requests), strict=True))
    return [[made[firsts[role][i], role] for role in roles] for i in range(len(linears))]


def gathered_in(x: jax.Array, shards: Shards) -> jax.Array:
    """x as its linears read it."""
    # A compiler that may keep excess precision would gather float32 numbers: twice the bytes, unrounded.
    return gather(lax.optimization_barrier(x), shards.x_lead) if axes_of(shards.x_lead) else x


def gathered_back(dy: jax.Array, shards: Shards) -> jax.Array:
    """dy as its linears read it."""
    return gather(dy, shards.y_lead)


def token_block(recipe: Recipe) -> int:
    """How many tokens wgrad's operands block together."""
    return max(recipe.wgrad_x.run, recipe.wgrad_dy.run)


def token_view(x: jax.Array, block: int) -> jax.Array:
    """x as [tokens..., inputs] such that blocks of tokens lie along the next to last axis: unchanged if they fit there,
    else with all leading dims made one.
    """
    if x.ndim == 1:
        return x[None]
    return x if x.shape[-2] % block == 0 else x.reshape(-1, x.shape[-1])  # [..., inputs] -> [tokens, inputs]


def prepare(
    x: jax.Array, weights: Sequence[Any], keys: Sequence[jax.Array | None], *, recipes: Sequence[Recipe], backend: str,
    kept: str, shards: Sequence[Shards], sharded: bool = False,
) -> tuple[jax.Array, tuple[LinearPlan, ...], tuple[Any, ...], tuple[Any, ...]]:  # fmt: skip
    """(x as its blocks of tokens want it, and of each linear: its plan, its weight's anchor, its weight's codes).

    The first linear is one that reads x; all see as many tokens.
    """
    block = math.lcm(*(token_block(recipe) for recipe in recipes))
    tokens = token_view(x, block) if shards[0] == WHOLE else x
    inside = inside_shape(tokens, shards[0])
    plans = tuple(
        plan_linear(inside, w, recipe, backend=backend, weights_kept=kept, shards=s, sharded=sharded)
        for w, recipe, s in zip(weights, recipes, shards, strict=True)
    )
    ready = [quantized(plan, w, key) for plan, w, key in zip(plans, weights, keys, strict=True)]
    return tokens, plans, tuple(w.anchor for w in ready), tuple((w.fprop, w.dgrad) for w in ready)


def inside_shape(x: jax.Array, shards: Shards) -> jax.ShapeDtypeStruct:
    """The shape of x after `gathered_in`."""
    sizes = [size_of(axes) for axes in shards.x_lead] or [1] * (x.ndim - 1)
    return jax.ShapeDtypeStruct((*(n * s for n, s in zip(x.shape, sizes, strict=False)), x.shape[-1]), x.dtype)
