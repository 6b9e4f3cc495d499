"""One op, many backends, each a file with one `BACKEND` and one entry here.

`choose_backend` selects the quantize passes first, then the backend of each GEMM. A GEMM that the backend of the passes
does not support runs on `emulated` over the same operands, and the choice reports it; on `reference` if `emulated` does
not support it either. It is an error to name a backend that serves none of the GEMMs.
"""

import dataclasses
from collections.abc import Iterable

from halfbyte.devices import distrust_reason
from halfbyte.ops.backends import emulated, fp8, fused, native, reference
from halfbyte.ops.backends.backend import Backend
from halfbyte.ops.gemm_problem import GemmKind, LinearProblem
from halfbyte.ops.quantize_passes import XLA_PASSES, QuantizePasses
from halfbyte.recipes import WEIGHT_ROLES, Recipe

# The order in which `auto` asks; `reference` serves everything.
PREFERENCE = ("native", "fp8", "fused", "emulated", "reference")
BACKENDS = {module.BACKEND.name: module.BACKEND for module in (reference, emulated, fused, fp8, native)}


@dataclasses.dataclass(frozen=True)
class BackendChoice:
    """Who serves one linear: `passes` of backend `name` make its operands of x and dy, `multipliers` (GEMM, backend)
    multiply them, and `weight_passes` quantize the weight: the same passes, or `xla`.
    """

    name: str
    multipliers: tuple[tuple[str, str], ...]
    weight_passes: str = XLA_PASSES.name
    passes: QuantizePasses = XLA_PASSES

    @property
    def weight_quantize_passes(self) -> QuantizePasses:
        """What quantizes the weight."""
        return XLA_PASSES if self.weight_passes == XLA_PASSES.name else self.passes

    def operand_passes(self, role: str, *, ahead: bool = False) -> str:
        """The passes that make operand `role`; `ahead`: weights are quantized before the step's linears see them."""
        if role not in WEIGHT_ROLES:
            return self.passes.name
        return XLA_PASSES.name if ahead else self.weight_passes

    def gemm_backend(self, gemm: GemmKind) -> Backend:
        """Who multiplies `gemm`."""
        return BACKENDS[dict(self.multipliers)[gemm.name]]


def check_backend(name: str) -> None:
    """ValueError where there is no backend of that name, whether or not anything asks for one."""
    if name not in ("auto", *BACKENDS):
        raise ValueError(f"unknown backend {name!r}; choose auto, {', '.join(BACKENDS)}")


def choose_backend(name: str, problem: LinearProblem) -> BackendChoice:
    """The choice of backend `name`, or under "auto" that of the first in PREFERENCE that serves and pays."""
    reason = problem.empty_reason() or problem.block_mismatch_reason()
    if reason is not None:
        raise ValueError(f"recipe {problem.recipe.name}: {reason}")
    if name == "auto":
        able = (BACKENDS[n] for n in PREFERENCE if _reason(BACKENDS[n], problem) is None)
        return _choice(next(able), problem)
    check_backend(name)
    reason = BACKENDS[name].unsupported_reason(problem)
    if reason is not None:
        raise ValueError(
            f"backend {name!r} cannot serve recipe {problem.recipe.name}: {reason}; use backend='auto' or another one"
        )
    return _choice(BACKENDS[name], problem)


def _choice(backend: Backend, problem: LinearProblem) -> BackendChoice:
    def multiplies(gemm: GemmKind) -> str:
        able = (b for b in (backend, emulated.BACKEND, reference.BACKEND) if b.unsupported(problem, gemm) is None)
        return next(able).name

    passes = backend.operand_passes(problem)
    reasons = [passes.weight_unsupported(problem, getattr(problem.recipe, role)) for role in WEIGHT_ROLES]
    weight_passes = XLA_PASSES.name if any(reasons) else passes.name
    return BackendChoice(
        backend.name, tuple((gemm.name, multiplies(gemm)) for gemm in problem.gemms), weight_passes, passes
    )


def _reason(backend: Backend, problem: LinearProblem) -> str | None:
    """Why `auto` passes it over."""
    reason = backend.unsupported_reason(problem)
    if reason is not None or all(backend.is_profitable(problem, gemm) for gemm in problem.quantized_gemms):
        return reason
    return distrust_reason(problem.device) or "the device has no units that train in these formats"


def rejected_backends(problem: LinearProblem, chosen: str) -> dict[str, str]:
    """Faster backend -> why it does not serve this problem, for those of its formats that `auto` would have preferred
    to `chosen`; and why the passes of `chosen` itself leave its operands to XLA, if they do.
    """
    preferred = PREFERENCE[: PREFERENCE.index(chosen)] if chosen in PREFERENCE else PREFERENCE
    fitting = [BACKENDS[name] for name in preferred if BACKENDS[name].format_mismatch(problem.recipe) is None]
    found = {backend.name: reason for backend in fitting if (reason := _reason(backend, problem)) is not None}
    own = BACKENDS[chosen].xla_fallback_reason(problem)
    return found if own is None else found | {f"{chosen} kernels": own}


def check_token_blocks(problem: LinearProblem) -> None:
    """Raises where the tokens of the problem cannot be blocked for the backward pass."""
    reason = dataclasses.replace(problem, training=True).block_mismatch_reason()
    if reason is not None:
        raise ValueError(f"recipe {problem.recipe.name}: {reason}")


def backends_for(recipes: Iterable[Recipe]) -> list[Backend]:
    """The backends that may take part in a program of these recipes."""
    quantized = [recipe for recipe in recipes if recipe.quantized]
    return [b for b in BACKENDS.values() if any(b.format_mismatch(recipe) is None for recipe in quantized)]
