"""The interface of a backend: its GEMMs, its quantize passes, and how a program that uses it is compiled."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.stages import Compiled, Lowered

from halfbyte.ops.gemm_problem import GemmKind, LinearProblem
from halfbyte.ops.operand import DeferredAlpha, Operand
from halfbyte.ops.quantize_passes import XLA_PASSES, QuantizePasses
from halfbyte.recipes import Recipe

GemmFn = Callable[[GemmKind, Operand, Operand, jnp.dtype], jax.Array]


def find_unexpected_gemms(
    scope: str, stray_gemms: Callable[[str], list[str]], lowered: Lowered, compiled: Compiled
) -> list[str]:
    """Returns `stray_gemms(text)` of a compiled program whose GEMMs are named `scope`.

    If XLA dropped the names, it returns one line that reports it.
    """
    text = compiled.as_text() or ""
    if scope not in text and scope in lowered.as_text(debug_info=True):
        return [f"XLA dropped the name {scope}; empty the compilation cache if this program came from one"]
    return stray_gemms(text)


@dataclasses.dataclass(frozen=True)
class Backend:
    """A backend of the three GEMMs.

    `unsupported(problem, gemm)` returns why it cannot run that GEMM, or None. `gemm` multiplies two operands: exact
    products, float32 sums, alpha, one rounding. `passes` quantize its operands; the first supported one is used, and
    one is needed. `gemm_deferred_alpha` is `gemm` for passes that apply alpha of a `DeferredAlpha` themselves.

    The other fields have defaults. `format_mismatch(recipe)` returns why it does not support the recipe's formats.
    `is_profitable(problem, gemm)`: `auto` chooses it only if True. `allows_per_gemm_fallback`: GEMMs that it does not
    support run on `emulated` over operands of its passes. Programs that use it are compiled with `compiler_options`,
    traced inside `trace_context()`, and checked by `unexpected_gemms(lowered, compiled)`, which returns lines of HLO.
    """

    name: str
    unsupported: Callable[[LinearProblem, GemmKind], str | None]
    gemm: GemmFn
    passes: tuple[QuantizePasses, ...] = (XLA_PASSES,)
    gemm_deferred_alpha: Callable[[GemmKind, Operand, Operand, jnp.dtype], jax.Array | DeferredAlpha] | None = None
    format_mismatch: Callable[[Recipe], str | None] = lambda recipe: None
    is_profitable: Callable[[LinearProblem, GemmKind], bool] = lambda problem, gemm: True
    allows_per_gemm_fallback: bool = False
    compiler_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    trace_context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    unexpected_gemms: Callable[[Lowered, Compiled], list[str]] = lambda lowered, compiled: []

    def unsupported_reason(self, problem: LinearProblem) -> str | None:
        """Returns why it does not serve the problem, or None: formats, passes or a quantized GEMM are unsupported."""
        reasons = [passes.unsupported(problem) for passes in self.passes]
        reason = self.format_mismatch(problem.recipe) or (reasons[0] if all(reasons) else None)
        if reason is not None or self.allows_per_gemm_fallback:
            return reason
        unsupported = (self.unsupported(problem, gemm) for gemm in problem.quantized_gemms)
        return next((gemm_reason for gemm_reason in unsupported if gemm_reason is not None), None)

    def operand_passes(self, problem: LinearProblem) -> QuantizePasses:
        """Returns the first of its passes that support the operands of x and dy."""
        return next(p for p in self.passes if p.unsupported(problem) is None)

    def xla_fallback_reason(self, problem: LinearProblem) -> str | None:
        """Returns why no kernels quantize these operands, or None if they do or the backend has no kernels.

        The reason is that of the first passes that support the recipe's formats.
        """
        kernels = [p for p in self.passes if p.name != XLA_PASSES.name]
        reasons = {p: p.unsupported(problem) for p in kernels}
        if not kernels or None in reasons.values():
            return None
        return next((reasons[p] for p in kernels if p.format_mismatch(problem.recipe) is None), reasons[kernels[0]])
