"""Which recipe a step runs under: the recipe of the run, and from the switch on another one for some of its GEMMs.

The published long runs leave 4 bits for the last part of training: forward GEMMs in bf16 for the last 18% cut the loss
gap to a third (arXiv 2509.25149). A switch is a new compiled step; phases are known before the first one.
"""

from dataclasses import dataclass, replace

from halfbyte.models import LlamaConfig, linear_sites
from halfbyte.optim import span
from halfbyte.recipe import Recipe, Resolved, blend, policy, recipe

from .config import TrainConfig


@dataclass(frozen=True)
class Phase:
    """Steps `start` (from 0) to `stop` run under `recipe`."""

    start: int
    stop: int
    recipe: Recipe

    def resolved(self, config: TrainConfig) -> Resolved:
        """The recipe, laid out over the model's layers by the run's policy."""
        return resolve(config.model, config.policy, self.recipe)


def resolve(model: LlamaConfig, policy_text: str, chosen: Recipe) -> Resolved:
    """Recipes by segment of layers and by path. Rules that name a recipe of their own keep it, whatever `chosen` is."""
    return policy(policy_text, chosen).resolve(linear_sites(model), model.layers)


def phases(config: TrainConfig) -> tuple[Phase, ...]:
    """The phases of the run, in order, covering every step."""
    base, at = recipe(config.recipe), switch_step(config)
    if at is None:
        return (Phase(0, config.steps, base),)
    after = blend(base, recipe(config.precision.switch_to), config.precision.switch_part)
    return (Phase(0, at, base), Phase(at, config.steps, after)) if at else (Phase(0, config.steps, after),)


def with_fallback(all_phases: tuple[Phase, ...], step: int, name: str) -> tuple[Phase, ...]:
    """The phases with everything after `step` finished steps under the recipe `name`; unchanged where it is ""."""
    if not name:
        return all_phases
    before = [replace(phase, stop=min(phase.stop, step)) for phase in all_phases if phase.start < step]
    return (*before, Phase(step, all_phases[-1].stop, recipe(name)))


def switch_step(config: TrainConfig) -> int | None:
    """Number of steps under the first recipe; None when the run never switches."""
    if not config.precision.switch_at:
        return None
    at = span(config.precision.switch_at, config.steps)
    if at >= config.steps:
        raise ValueError(
            f"precision.switch_at is step {at}, but the run ends at step {config.steps}; lower it, or set it to 0"
        )
    return at


def phase_at(all_phases: tuple[Phase, ...], step: int) -> Phase:
    """The phase of the update that follows `step` finished steps."""
    return next(phase for phase in all_phases if phase.start <= step < phase.stop)
