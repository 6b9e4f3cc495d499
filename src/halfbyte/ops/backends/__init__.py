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

# The order in which `auto` tries them; `reference` supports every problem.
PREFERENCE = ("native", "fp8", "fused", "emulated", "reference")
BACKENDS = {module.BACKEND.name: module.BACKEND for module in (reference, emulated, fused, fp8, native)}


@dataclasses.dataclass(frozen=True)
class BackendChoice:
    """The backends of one linear, chosen before tracing.

    `passes` of backend `name` quantize x and dy. `multipliers` are pairs (GEMM, backend). `weight_passes`, which
    quantize the weight, are the same passes or `xla`.
    """

    name: str
    multipliers: tuple[tuple[str, str], ...]
    weight_passes: str = XLA_PASSES.name
    passes: QuantizePasses = XLA_PASSES

    @property
    def weight_quantize_passes(self) -> QuantizePasses:
        """Returns the passes that quantize the weight."""
        return XLA_PASSES if self.weight_passes == XLA_PASSES.name else self.passes

    def operand_passes(self, role: str, *, ahead: bool = False) -> str:
        """Returns the name of the passes that quantize operand `role`; `ahead`: weights are prequantized."""
        if role not in WEIGHT_ROLES:
            return self.passes.name
        return XLA_PASSES.name if ahead else self.weight_passes

    def gemm_backend(self, gemm: GemmKind) -> Backend:
        """Returns the backend that runs `gemm`."""
        return BACKENDS[dict(self.multipliers)[gemm.name]]


def check_backend(name: str) -> None:
    """Raises ValueError if there is no backend of that name."""
    if name not in ("auto", *BACKENDS):
        raise ValueError(f"unknown backend {name!r}; choose auto, {', '.join(BACKENDS)}")


def choose_backend(name: str, problem: LinearProblem) -> BackendChoice:
    """Returns the choice for backend `name`; "auto": the first of PREFERENCE that is supported and profitable."""
    reason = problem.empty_reason() or problem.block_mismatch_reason()
    if reason is not None:
        raise ValueError(f"recipe {problem.recipe.name}: {reason}")
    if name == "auto":
        supported = (BACKENDS[n] for n in PREFERENCE if _reason(BACKENDS[n], problem) is None)
        return _choice(next(supported), problem)
    check_backend(name)
    reason = BACKENDS[name].unsupported_reason(problem)
    if reason is not None:
        raise ValueError(
            f"backend {name!r} cannot serve recipe {problem.recipe.name}: {reason}; use backend='auto' or another one"
        )
    return _choice(BACKENDS[name], problem)


def _choice(backend: Backend, problem: LinearProblem) -> BackendChoice:
    def gemm_backend_name(gemm: GemmKind) -> str:
        supported = (b for b in (backend, emulated.BACKEND, reference.BACKEND) if b.unsupported(problem, gemm) is None)
        return next(supported).name

    passes = backend.operand_passes(problem)
    reasons = [passes.weight_unsupported(problem, getattr(problem.recipe, role)) for role in WEIGHT_ROLES]
    weight_passes = XLA_PASSES.name if any(reasons) else passes.name
    return BackendChoice(
        backend.name, tuple((gemm.name, gemm_backend_name(gemm)) for gemm in problem.gemms), weight_passes, passes
    )


def _reason(backend: Backend, problem: LinearProblem) -> str | None:
    """Returns why `auto` skips this backend, or None."""
    reason = backend.unsupported_reason(problem)
    if reason is not None or all(backend.is_profitable(problem, gemm) for gemm in problem.quantized_gemms):
        return reason
    return distrust_reason(problem.device) or "the device has no units that train in these formats"


def rejected_backends(problem: LinearProblem, chosen: str) -> dict[str, str]:
    """Returns backend -> why it does not serve this problem, for those that `auto` would have preferred to `chosen`.

    Backends that do not support the recipe's formats are left out. The key `{chosen} kernels` gives the reason if XLA
    quantizes the operands instead of the kernels of `chosen`.
    """
    preferred = PREFERENCE[: PREFERENCE.index(chosen)] if chosen in PREFERENCE else PREFERENCE
    format_matches = [BACKENDS[name] for name in preferred if BACKENDS[name].format_mismatch(problem.recipe) is None]
    reasons = {backend.name: reason for backend in format_matches if (reason := _reason(backend, problem)) is not None}
    fallback_reason = BACKENDS[chosen].xla_fallback_reason(problem)
    return reasons if fallback_reason is None else reasons | {f"{chosen} kernels": fallback_reason}


def check_token_blocks(problem: LinearProblem) -> None:
    """Raises ValueError if the recipe's blocks do not divide the tokens, as the backward pass needs."""
    reason = dataclasses.replace(problem, training=True).block_mismatch_reason()
    if reason is not None:
        raise ValueError(f"recipe {problem.recipe.name}: {reason}")


def backends_for(recipes: Iterable[Recipe]) -> list[Backend]:
    """Returns the backends that a program of these recipes may use."""
    quantized = [recipe for recipe in recipes if recipe.quantized]
    return [b for b in BACKENDS.values() if any(b.format_mismatch(recipe) is None for recipe in quantized)]
