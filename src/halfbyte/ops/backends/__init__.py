"""One op, many backends, each a file. `choose` asks them in order; naming one that cannot serve is an error."""

import dataclasses
import math
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp

from halfbyte.devices import native_training
from halfbyte.ops.backends import carrier, fp8, fused, native, reference
from halfbyte.ops.backends.gemm import Contraction
from halfbyte.ops.operand import Operand
from halfbyte.ops.passes import XLA, XlaPasses
from halfbyte.ops.problem import Problem, target
from halfbyte.recipe import ROLES, Recipe
from halfbyte.sharding import WeightSharding

Gemm = Callable[[Operand, Operand, Contraction, jnp.dtype], jax.Array]


class Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclasses.dataclass(frozen=True)
class Backend:
    """`unsupported(problem)` says why it cannot serve, or None.

    `gemm` multiplies two operands: exact products, float32 sums, their factors, one rounding. `passes` make operands.
    """

    name: str
    unsupported: Callable[[Problem], str | None]
    gemm: Gemm
    passes: XlaPasses


BACKENDS = {m.NAME: Backend(m.NAME, m.unsupported, m.gemm, XLA) for m in (reference, carrier, native)}
BACKENDS[fused.NAME] = Backend(fused.NAME, fused.unsupported, fused.gemm, fused.FusedPasses())
BACKENDS[fp8.NAME] = Backend(fp8.NAME, fp8.unsupported, fp8.gemm, fp8.F8Passes())


def choose(name: str, problem: Problem) -> Backend:
    """The backend called `name`, or under "auto" the fastest that serves: native where the device trains in these
    formats, the one with kernels for them where those fit, else carrier.
    """
    reason = problem.unblockable()
    if reason is not None:
        raise ValueError(f"recipe {problem.recipe.name}: {reason}")
    if name == "auto":
        if _native_pays(problem):
            return BACKENDS["native"]
        own = _with_kernels(problem)
        return BACKENDS[carrier.NAME if own.unsupported(problem) else own.name]
    if name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}; choose auto, {', '.join(BACKENDS)}")
    reason = BACKENDS[name].unsupported(problem)
    if reason is not None:
        raise ValueError(
            f"backend {name!r} cannot serve recipe {problem.recipe.name}: {reason}; use backend='auto' or another one"
        )
    return BACKENDS[name]


def passed_over(problem: Problem, chosen: str) -> dict[str, str]:
    """Faster backend -> why it does not serve this problem, for those that "auto" would have preferred to `chosen`."""
    own = _with_kernels(problem)
    reasons = {
        native.NAME: native.unsupported(problem) or "the device has no units that train in these formats",
        own.name: own.unsupported(problem),
    }
    order = list(reasons)
    preferred = order[: order.index(chosen)] if chosen in order else order
    return {name: reason for name in preferred if (reason := reasons[name]) is not None}


def problem_of(recipe: Recipe, x: jax.Array, weight: Shaped, sharding: WeightSharding | None) -> Problem:
    """The question that x [tokens..., inputs] times `weight` asks: all three GEMMs, or fprop alone if the tokens cannot
    be blocked for wgrad (a decoder's single token, say).
    """
    inputs, outputs = weight.shape
    sharded = sharding is not None and sharding.stored.mesh.size > 1
    tokens = math.prod(x.shape[:-1])
    problem = Problem(recipe, tokens, inputs, outputs, target(), dtype=x.dtype.name, sharded=sharded)
    return problem if problem.unblockable() is None else dataclasses.replace(problem, training=False)


def check_training(name: str, recipe: Recipe, x: jax.Array, weight: Shaped, sharding: WeightSharding | None) -> None:
    """Raises where backend `name` cannot serve all three GEMMs."""
    choose(name, dataclasses.replace(problem_of(recipe, x, weight, sharding), training=True))


def _with_kernels(problem: Problem) -> Backend:
    """The backend whose kernels are written for this recipe's formats."""
    return BACKENDS[fp8.NAME if fp8.serves(problem.recipe) else fused.NAME]


def _native_pays(problem: Problem) -> bool:
    units = {getattr(problem.recipe, role).format.unit for role in ROLES}
    return all(native_training(problem.device, unit) for unit in units) and native.unsupported(problem) is None
