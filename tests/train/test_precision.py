"""Oracle: the schedule by hand."""

import dataclasses

import pytest

from halfbyte.recipes import mix_recipes, recipe
from halfbyte.recipes.presets import BACKWARD_ROLES, FORWARD_ROLES
from halfbyte.train import PrecisionConfig, phases
from halfbyte.train.precision_phases import phase_at
from halfbyte.train.run_presets import run_config


def with_switch(**options):
    return dataclasses.replace(run_config("demo"), steps=200, precision=PrecisionConfig(**options))


def test_one_phase_without_a_switch():
    (phase,) = phases(with_switch())
    assert (phase.start, phase.stop, phase.recipe.name) == (0, 200, "nvfp4")


@pytest.mark.parametrize("at, step", [(0.82, 164), (150, 150), (1, 1)])
def test_switch_by_fraction_or_step(at, step):
    first, second = phases(with_switch(switch_at=at, switch_to="fp8"))
    assert (first.stop, second.start, second.stop) == (step, step, 200)
    assert second.recipe == recipe("fp8")
    assert phase_at((first, second), step - 1) is first
    assert phase_at((first, second), step) is second


def test_mixed_recipe_takes_operands_of_one_pass():
    nvfp4, bf16 = recipe("nvfp4"), recipe("bf16")
    for part, changed, kept in (
        ("forward", FORWARD_ROLES, BACKWARD_ROLES),
        ("backward", BACKWARD_ROLES, FORWARD_ROLES),
    ):
        mixed = mix_recipes(nvfp4, bf16, part)
        assert all(getattr(mixed, role) == getattr(bf16, role) for role in changed)
        assert all(getattr(mixed, role) == getattr(nvfp4, role) for role in kept)
        assert mixed.name == f"nvfp4+bf16_{part}"


def test_switch_past_the_end_is_refused():
    with pytest.raises(ValueError, match="switch_at is step 300, but the run ends at step 200"):
        phases(with_switch(switch_at=300))
