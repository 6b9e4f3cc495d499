"""A mean over tokens beside the GEMMs (`averis`), in the trainer. Oracle: one device."""

import dataclasses

import jax
import numpy as np
import pytest
from tiny import MODEL, ONE_LINEAR, tiny

from halfbyte.diagnosis import replay
from halfbyte.models import Context
from halfbyte.train import create_state, jit_train_step, open_source, phases, run_mesh
from halfbyte.train.preflight import check
from halfbyte.train.source import to_mesh

RUN = tiny(model=dataclasses.replace(MODEL, embed=64, mlp=128), recipe="averis", policy=ONE_LINEAR, accumulate=2)


def losses(devices, mesh):
    """Of three steps."""
    config = dataclasses.replace(RUN, mesh=mesh)
    on = run_mesh(config, jax.devices("cpu")[:devices])
    step, state = jit_train_step(config, phases(config)[0].resolved(config), on), create_state(config, on)
    loader, found = open_source(config).loader(on), []
    for _ in range(3):
        state, metrics = step(state, to_mesh(next(loader), on, batch=config.batch))
        found.append(float(metrics["loss"]))
    loader.close()
    return found


@pytest.mark.slow
def test_no_mesh_changes_a_run():
    """To the tolerance of sums in another order, and of bfloat16 activations that these are rounded to. Tokens lie
    along two axes, of which `accumulate` takes one away."""
    np.testing.assert_allclose(losses(8, "data=2,fsdp=2,tensor=2"), losses(1, ""), rtol=2e-3)


def test_the_radar_knows_gemms_alone():
    config = dataclasses.replace(RUN, radar=2)
    with pytest.raises(ValueError, match="radar and telemetry: recipe averis takes the mean"):
        check(config, run_mesh(config, jax.devices("cpu")[:1]), seq=32, device=None, memory=None)


def test_a_replayed_step_is_refused():
    context = Context(policy=phases(RUN)[0].resolved(RUN))
    with pytest.raises(ValueError, match="a replayed step: recipe averis takes the mean"):
        replay.forward(RUN.model, context, None, {})
