"""One op, many backends, each a file with one `BACKEND` and one entry here.

`choose` asks them: first who makes the operands, then for each GEMM whether the same one multiplies. What it does not,
`carrier` does over the same operands, and the choice says so; `reference`, where not even `carrier` can. Naming a
backend that serves nothing is an error.
"""

import dataclasses
from collections.abc import Iterable

from halfbyte.devices import doubt
from halfbyte.ops.backends import carrier, fp8, fused, native, reference
from halfbyte.ops.backends.backend import Backend
from halfbyte.ops.gemms import Gemm
from halfbyte.ops.passes import XLA, Passes
from halfbyte.ops.problem import Problem
from halfbyte.recipe import WEIGHTS, Recipe

# The order in which `auto` asks; `reference` serves everything.
PREFERENCE = ("native", "fp8", "fused", "carrier", "reference")
BACKENDS = {module.BACKEND.name: module.BACKEND for module in (reference, carrier, fused, fp8, native)}


@dataclasses.dataclass(frozen=True)
class Choice:
    """Who serves one linear: `passes` of backend `name` make its operands of x and dy, `multipliers` (GEMM, backend)
    multiply them, and `weight_passes` quantize the weight: the same passes, or `xla`.
    """

    name: str
    multipliers: tuple[tuple[str, str], ...]
    weight_passes: str = XLA.name
    passes: Passes = XLA

    @property
    def for_weight(self) -> Passes:
        """What quantizes the weight."""
        return XLA if self.weight_passes == XLA.name else self.passes

    def maker(self, role: str, *, ahead: bool = False) -> str:
        """The passes that make operand `role`; `ahead`: weights are quantized before the step's linears see them."""
        if role not in WEIGHTS:
            return self.passes.name
        return XLA.name if ahead else self.weight_passes

    def multiplier(self, gemm: Gemm) -> Backend:
        """Who multiplies `gemm`."""
        return BACKENDS[dict(self.multipliers)[gemm.name]]


def check_backend(name: str) -> None:
    """ValueError where there is no backend of that name, whether or not anything asks for one."""
    if name not in ("auto", *BACKENDS):
        raise ValueError(f"unknown backend {name!r}; choose auto, {', '.join(BACKENDS)}")


def choose(name: str, problem: Problem) -> Choice:
    """The choice of backend `name`, or under "auto" that of the first in PREFERENCE that serves and pays."""
    reason = problem.empty() or problem.unblockable()
    if reason is not None:
        raise ValueError(f"recipe {problem.recipe.name}: {reason}")
    if name == "auto":
        able = (BACKENDS[n] for n in PREFERENCE if _reason(BACKENDS[n], problem) is None)
        return _choice(next(able), problem)
    check_backend(name)
    reason = BACKENDS[name].unable(problem)
    if reason is not None:
        raise ValueError(
            f"backend {name!r} cannot serve recipe {problem.recipe.name}: {reason}; use backend='auto' or another one"
        )
    return _choice(BACKENDS[name], problem)


def _choice(backend: Backend, problem: Problem) -> Choice:
    def multiplies(gemm: Gemm) -> str:
        able = (b for b in (backend, carrier.BACKEND, reference.BACKEND) if b.unsupported(problem, gemm) is None)
        return next(able).name

    passes = backend.maker(problem)
    reasons = [passes.weight_unsupported(problem, getattr(problem.recipe, role)) for role in WEIGHTS]
    weight_passes = XLA.name if any(reasons) else passes.name
    return Choice(backend.name, tuple((gemm.name, multiplies(gemm)) for gemm in problem.gemms), weight_passes, passes)


def _reason(backend: Backend, problem: Problem) -> str | None:
    """Why `auto` passes it over."""
    reason = backend.unable(problem)
    if reason is not None or all(backend.pays(problem, gemm) for gemm in problem.quantized_gemms):
        return reason
    return doubt(problem.device) or "the device has no units that train in these formats"


def passed_over(problem: Problem, chosen: str) -> dict[str, str]:
    """Faster backend -> why it does not serve this problem, for those of its formats that `auto` would have preferred
    to `chosen`; and why the passes of `chosen` itself leave its operands to XLA, if they do.
    """
    preferred = PREFERENCE[: PREFERENCE.index(chosen)] if chosen in PREFERENCE else PREFERENCE
    fitting = [BACKENDS[name] for name in preferred if BACKENDS[name].foreign(problem.recipe) is None]
    found = {backend.name: reason for backend in fitting if (reason := _reason(backend, problem)) is not None}
    own = BACKENDS[chosen].left_to_xla(problem)
    return found if own is None else found | {f"{chosen} kernels": own}


def check_training(problem: Problem) -> None:
    """Raises where the tokens of the problem cannot be blocked for the backward pass."""
    reason = dataclasses.replace(problem, training=True).unblockable()
    if reason is not None:
        raise ValueError(f"recipe {problem.recipe.name}: {reason}")


def serving(recipes: Iterable[Recipe]) -> list[Backend]:
    """The backends that may take part in a program of these recipes."""
    quantized = [recipe for recipe in recipes if recipe.quantized]
    return [b for b in BACKENDS.values() if any(b.foreign(recipe) is None for recipe in quantized)]
