"""How the 8B step lies on eight H200, compiled without one. Oracle: the model's own FLOPs and bytes."""

import dataclasses

import pytest
from eight_gpus import RECIPES, check, compile_for, config_of

from halfbyte import bench, models
from halfbyte.bench.placement import AGAIN
from halfbyte.devices import device
from halfbyte.models import REMAT

H200 = device("h200")
CONFIG = config_of("bf16", batch=16)


def test_needed_flops_are_the_models_and_what_remat_repeats():
    plain = dataclasses.replace(CONFIG, remat="none")
    linears = {part: flops for part, flops in models.flops_shares(CONFIG.model, 8192).items() if part != "attention"}
    assert sum(bench.needed_flops(plain).values()) == sum(linears.values()) * 16 * 8192
    tokens, layers = 16 * 8192, CONFIG.model.layers
    again = sum(bench.needed_flops(CONFIG).values()) - sum(bench.needed_flops(plain).values())
    assert again == 2 * layers * 2 * tokens * 4096 * 14336  # the forward GEMMs of gate and up
    assert set(AGAIN) == set(REMAT)


@pytest.mark.slow
@pytest.mark.cuda_compiler
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_device_multiplies_gathers_and_hides_what_it_should(recipe):
    config = config_of(recipe, batch=16)
    mesh, compiled = compile_for(H200, config, hosts=1)
    found, _ = check(compiled, config, mesh, H200)
    if recipe == "bf16":
        # Every weight of a layer once for the forward and once for the backward pass; the head once, embedding never.
        layer = models.count_params(config.model) - 2 * 4096 * 128256 - (2 * config.model.layers + 1) * 4096
        tokens = 4 * 16 * 8192  # bytes: whose rows are looked up
        assert found.gathered == {"bf16": 2 * (2 * layer + 4096 * 128256), "s32": tokens}
