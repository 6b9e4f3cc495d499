"""Precision over the steps of a run: phases of recipes.

A run starts under its recipe and may switch some GEMMs to another one at a given step. The published long runs leave
4 bits for the last part of training: forward GEMMs in bf16 for the last 18% cut the loss gap to a third
(arXiv 2509.25149). A switch is a new compiled step; phases are known before the first one.
"""

from dataclasses import dataclass, replace

from halfbyte.models import LlamaConfig, linear_sites
from halfbyte.recipes import Recipe, ResolvedPolicy, mix_recipes, policy, recipe
from halfbyte.train.optimizers import resolve_steps
from halfbyte.train.train_config import TrainConfig


@dataclass(frozen=True)
class PrecisionPhase:
    """Steps `start` (from 0) to `stop` run under `recipe`."""

    start: int
    stop: int
    recipe: Recipe

    def resolved(self, config: TrainConfig) -> ResolvedPolicy:
        """Resolves the policy of the run with this recipe."""
        return resolve_policy(config.model, config.policy, self.recipe)


def phases(config: TrainConfig) -> tuple[PrecisionPhase, ...]:
    """Returns the phases of the run, in order, covering every step."""
    base, switch = recipe(config.recipe), switch_step(config)
    if switch is None:
        return (PrecisionPhase(0, config.steps, base),)
    after = mix_recipes(base, recipe(config.precision.switch_to), config.precision.switch_part)
    return (
        (PrecisionPhase(0, switch, base), PrecisionPhase(switch, config.steps, after))
        if switch
        else (PrecisionPhase(0, config.steps, after),)
    )


def phase_at(all_phases: tuple[PrecisionPhase, ...], step: int) -> PrecisionPhase:
    """Returns the phase of the update that follows `step` finished steps."""
    return next(phase for phase in all_phases if phase.start <= step < phase.stop)


def switch_step(config: TrainConfig) -> int | None:
    """Returns the number of steps under the first recipe; None if the run never switches."""
    if not config.precision.switch_at:
        return None
    step = resolve_steps(config.precision.switch_at, config.steps)
    if step >= config.steps:
        raise ValueError(
            f"precision.switch_at is step {step}, but the run ends at step {config.steps}; lower it, or set it to 0"
        )
    return step


def with_fallback_recipe(all_phases: tuple[PrecisionPhase, ...], step: int, name: str) -> tuple[PrecisionPhase, ...]:
    """Returns the phases with all after `step` finished steps under the recipe `name`; unchanged if it is ""."""
    if not name:
        return all_phases
    before = [replace(phase, stop=min(phase.stop, step)) for phase in all_phases if phase.start < step]
    return (*before, PrecisionPhase(step, all_phases[-1].stop, recipe(name)))


def resolve_policy(model: LlamaConfig, policy_text: str, chosen: Recipe) -> ResolvedPolicy:
    """Returns recipes by segment of layers and by path. Rules that name a recipe have it instead of `chosen`."""
    return policy(policy_text, chosen).resolve(linear_sites(model), model.layers)
