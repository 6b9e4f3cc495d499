"""One op, many backends, each a file. `choose` asks them in order; naming one that cannot serve is an error."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from halfbyte.devices import native_training
from halfbyte.ops.backends import carrier, native, reference
from halfbyte.ops.backends.gemm import Contraction
from halfbyte.ops.operand import Operand
from halfbyte.ops.passes import XlaPasses
from halfbyte.ops.problem import Problem
from halfbyte.recipe import ROLES

Gemm = Callable[[Operand, Operand, Contraction, jnp.dtype], jax.Array]


@dataclasses.dataclass(frozen=True)
class Backend:
    """`unsupported(problem)` says why it cannot serve, or None.

    `gemm` multiplies two operands: exact products, float32 sums, their factors, one rounding. `passes` make operands.
    """

    name: str
    unsupported: Callable[[Problem], str | None]
    gemm: Gemm
    passes: XlaPasses = XlaPasses()


BACKENDS = {m.NAME: Backend(m.NAME, m.unsupported, m.gemm) for m in (reference, carrier, native)}


def choose(name: str, problem: Problem) -> Backend:
    """The backend called `name`, or under "auto" the fastest that serves: native where the device trains in these
    formats, else carrier.
    """
    reason = problem.unblockable()
    if reason is not None:
        raise ValueError(f"recipe {problem.recipe.name}: {reason}")
    if name == "auto":
        return BACKENDS["native"] if _native_pays(problem) else BACKENDS["carrier"]
    if name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}; choose auto, {', '.join(BACKENDS)}")
    reason = BACKENDS[name].unsupported(problem)
    if reason is not None:
        raise ValueError(
            f"backend {name!r} cannot serve recipe {problem.recipe.name}: {reason}; use backend='auto' or another one"
        )
    return BACKENDS[name]


def _native_pays(problem: Problem) -> bool:
    formats = {getattr(problem.recipe, role).format.name for role in ROLES}
    return all(native_training(problem.device, name) for name in formats) and native.unsupported(problem) is None
