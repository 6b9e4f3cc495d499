"""What a backend is: who multiplies, who makes the operands, and what a program with it must be compiled with."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.stages import Compiled, Lowered

from halfbyte.ops.gemms import Gemm
from halfbyte.ops.operand import Operand, Owed
from halfbyte.ops.passes import XLA, Passes
from halfbyte.ops.problem import Problem
from halfbyte.recipe import Recipe

Multiply = Callable[[Gemm, Operand, Operand, jnp.dtype], jax.Array]


def strays_of(scope: str, stray_gemms: Callable[[str], list[str]], lowered: Lowered, compiled: Compiled) -> list[str]:
    """`stray_gemms` of a compiled program whose GEMMs are named `scope`; or one line that says that nobody can tell,
    because the names are gone.
    """
    text = compiled.as_text() or ""
    if scope not in text and scope in lowered.as_text(debug_info=True):
        return [f"XLA dropped the name {scope}; empty the compilation cache if this program came from one"]
    return stray_gemms(text)


@dataclasses.dataclass(frozen=True)
class Backend:
    """`unsupported(problem, gemm)` says why it cannot multiply that GEMM, or None. `gemm` multiplies two operands:
    exact products, float32 sums, their factors, one rounding. `passes` make its operands, the first of them that can:
    it serves if one can. `owing` is `gemm` for passes that take results with a factor `Owed` to them.

    The rest has defaults. `foreign(recipe)` says why its formats are not this recipe's. `pays(problem, gemm)`: whether
    `auto` should want it where it can serve. `shares_gemms`: where it cannot multiply, `carrier` may, over operands of
    its passes. A program that it takes part in is compiled with `compiler_options`, traced inside `tracing()`, and
    read by `strays(lowered, compiled)`, JAX's two stages: lines that should not be there.
    """

    name: str
    unsupported: Callable[[Problem, Gemm], str | None]
    gemm: Multiply
    passes: tuple[Passes, ...] = (XLA,)
    owing: Callable[[Gemm, Operand, Operand, jnp.dtype], jax.Array | Owed] | None = None
    foreign: Callable[[Recipe], str | None] = lambda recipe: None
    pays: Callable[[Problem, Gemm], bool] = lambda problem, gemm: True
    shares_gemms: bool = False
    compiler_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tracing: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    strays: Callable[[Lowered, Compiled], list[str]] = lambda lowered, compiled: []

    def unable(self, problem: Problem) -> str | None:
        """Why it does not serve the problem, or None: its formats, its passes, or a quantized GEMM that is its own."""
        reasons = [passes.unsupported(problem) for passes in self.passes]
        reason = self.foreign(problem.recipe) or (reasons[0] if all(reasons) else None)
        if reason is not None or self.shares_gemms:
            return reason
        unsupported = (self.unsupported(problem, gemm) for gemm in problem.quantized_gemms)
        return next((found for found in unsupported if found is not None), None)

    def maker(self, problem: Problem) -> Passes:
        """The first of its passes that can make the operands of x and dy."""
        return next(p for p in self.passes if p.unsupported(problem) is None)

    def left_to_xla(self, problem: Problem) -> str | None:
        """Why kernels do not make these operands, or None if they do or there are none: the reason of the first passes
        whose formats these are.
        """
        kernels = [p for p in self.passes if p.name != XLA.name]
        reasons = {p: p.unsupported(problem) for p in kernels}
        if not kernels or None in reasons.values():
            return None
        return next((reasons[p] for p in kernels if p.foreign(problem.recipe) is None), reasons[kernels[0]])
