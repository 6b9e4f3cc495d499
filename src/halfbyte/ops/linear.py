"""One linear y = x W while it is traced: its weight, its random bits, who makes its operands and who multiplies them.

`qdot` is one of these; `mlp` is three and an activation. The three GEMMs are methods, each from the operands of its
sides to its result. What the backward pass keeps of the weight is `keep`, and `restore` makes the linear again there.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from halfbyte.ops.backends import Choice, check_training, choose, problem_of
from halfbyte.ops.gemms import DGRAD, FPROP, WGRAD
from halfbyte.ops.operand import Operand
from halfbyte.ops.passes import Made, Passes, Request, request
from halfbyte.ops.problem import Problem
from halfbyte.ops.weight import QWeight, keep_weight, quantize_weight, restore_weight, weight_operand
from halfbyte.recipe import Recipe
from halfbyte.sharding import WeightSharding


@dataclasses.dataclass(frozen=True)
class LinearPlan:
    """What is settled before tracing."""

    problem: Problem
    choice: Choice
    sharding: WeightSharding | None
    weights_kept: str

    @property
    def recipe(self) -> Recipe:
        return self.problem.recipe

    @property
    def weight_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.problem.weight_dtype)


def plan_linear(
    x: jax.Array, w: Any, recipe: Recipe, *, backend: str, sharding: WeightSharding | None, weights_kept: str
) -> LinearPlan:
    """The plan of x [tokens..., inputs] times w, an array or a QWeight."""
    sharding = w.sharding if isinstance(w, QWeight) else sharding
    problem = problem_of(recipe, x, w, sharding)
    return LinearPlan(problem, choose(backend, problem), sharding, weights_kept)


def quantized(plan: LinearPlan, w: Any, key: jax.Array | None) -> QWeight:
    """w as the plan's linear reads it; a QWeight as it is."""
    if isinstance(w, QWeight):
        return w
    passes = plan.choice.for_weight
    return quantize_weight(w, recipe=plan.recipe, key=key, weight_sharding=plan.sharding, passes=passes)


@dataclasses.dataclass(frozen=True)
class Linear:
    """One linear of a traced program."""

    plan: LinearPlan
    weight: QWeight
    key: jax.Array | None

    @classmethod
    def of(cls, plan: LinearPlan, anchor: Any, codes: Any, key: jax.Array | None) -> "Linear":
        """From the parts of a QWeight, which a VJP takes apart: the anchor has a gradient, the codes have none."""
        return cls(plan, QWeight(anchor, codes[0], codes[1], plan.recipe, plan.sharding), key)

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
        return request(self.plan.recipe, role, self.key, kept=kept)

    def quantize(self, x: jax.Array, *roles: str, kept: tuple[str, ...] = ()) -> list[Made]:
        """Its operands of x (or dy), in one pass; those in `kept` as residuals."""
        return self.passes.quantize(x, [self.request(role, kept=role in kept) for role in roles])

    def load(self, kept: Any, role: str) -> Operand:
        """A residual as an operand."""
        return self.passes.load(kept, getattr(self.plan.recipe, role))

    def fprop(self, x: Operand, dtype: jnp.dtype) -> jax.Array:
        """y = x W."""
        return self._multiply(FPROP, x, self._weight("fprop_w"), dtype)

    def dgrad(self, dy: Operand, dtype: jnp.dtype) -> jax.Array:
        """dx = dy W^T."""
        return self._multiply(DGRAD, dy, self._weight("dgrad_w"), dtype)

    def wgrad(self, x: Operand, dy: Operand) -> jax.Array:
        """dw = x^T dy, in the weight's dtype, where the weight rests."""
        dw = self._multiply(WGRAD, x, dy, self.plan.weight_dtype)
        return dw if self.plan.sharding is None else lax.with_sharding_constraint(dw, self.plan.sharding.stored)

    def _weight(self, role: str) -> Operand:
        """The weight as a GEMM's right operand. One that is not quantized is gathered once: a backward pass that makes
        y again reads it twice, and XLA does not find by itself that both gathers are the same.
        """
        policy = getattr(self.plan.recipe, role)
        if policy.format.quantized:
            return weight_operand(self.weight, role)
        if policy not in self._gathered:
            self._gathered[policy] = weight_operand(self.weight, role)
        return self._gathered[policy]

    @functools.cached_property
    def _gathered(self) -> dict[Any, Operand]:
        return {}

    def _multiply(self, gemm: Any, left: Operand, right: Operand, dtype: jnp.dtype) -> jax.Array:
        return self.plan.choice.multiplier(gemm).gemm(gemm, left, right, dtype)

    def keep(self, *, fprop_again: bool = False) -> QWeight:
        """Its weight as the backward pass keeps it: for dgrad, and `fprop_again` where that computes y once more."""
        check_training(self.plan.problem)
        recipe = self.plan.recipe
        master = not recipe.dgrad_w.format.quantized or (fprop_again and not recipe.fprop_w.format.quantized)
        return keep_weight(self.weight, self.plan.choice.for_weight, kept=self.plan.weights_kept, master=master)


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
