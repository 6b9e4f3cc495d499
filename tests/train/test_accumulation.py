"""Gradients over `data` under accumulation. Oracles: bytes of the parameters, and the gradients of one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfbyte.hlo import find_collectives, parse_hlo
from halfbyte.train import create_state, open_batch_source, phases, run_mesh
from halfbyte.train.batch_source import make_global_batch
from halfbyte.train.train_step import gradients
from tiny import MODEL, ONE_LINEAR, tiny

pytestmark = pytest.mark.slow


def gradients_of(config, devices, **options):
    """(the program of a step's gradients, what it returned, the mesh)."""
    mesh = run_mesh(config, np.array(jax.devices("cpu")[:devices]))
    params, rows = create_state(config, mesh).params, next(open_batch_source(config).loader(mesh))
    batch, resolved = make_global_batch(rows, mesh, batch=config.batch), phases(config)[0].resolved(config)
    run = jax.jit(lambda p, b: gradients(config, resolved, mesh, p, b, key=jax.random.key(0), scale=jnp.float32(1.0)))
    program = run.lower(params, batch).compile(options or None)
    return program, program(params, batch), dict(mesh.shape)


def assert_same(found, alone, tolerance):
    for mine, other in zip(jax.tree.leaves(found), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(mine, other, atol=tolerance * float(jnp.max(jnp.abs(other))))


def test_gradients_meet_over_data_once_a_step():
    config = tiny(recipe="bf16", accumulate=2, batch=16, mesh="data=2,fsdp=2,tensor=2")
    program, (found, sums), sizes = gradients_of(config, 8, xla_backend_optimization_level=1)  # says how loops turn
    met = [
        each
        for each in find_collectives(parse_hlo(program.as_text()), sizes)
        if "data" in each.axes and "f32" in each.dtypes
    ]
    parts = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(found))
    assert parts <= sum(each.array_bytes for each in met) <= parts + 64  # beside them the sums of metrics
    assert_same((found, sums), gradients_of(dataclasses.replace(config, mesh=""), 1)[1], 2**-8)  # operands are bf16


def test_codes_are_those_of_one_device():
    """Other random bits move the gradient of the linear that rounds by 0.25 of its largest, those behind it by 0.1 or
    more; another order of sums moves a bfloat16 number of attention by a unit, and its gradients by 0.001."""
    one_layer = MODEL.replace(layers=1)
    config = tiny(model=one_layer, recipe="nvfp4", policy=ONE_LINEAR, accumulate=2, mesh="data=2,fsdp=2")
    (found, sums), (alone, alone_sums) = (
        gradients_of(each, count)[1] for each, count in ((config, 4), (dataclasses.replace(config, mesh=""), 1))
    )
    assert_same((found["layers"]["mlp"], sums), (alone["layers"]["mlp"], alone_sums), 1e-4)
    assert_same(found, alone, 2**-8)
