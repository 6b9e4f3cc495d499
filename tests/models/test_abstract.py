"""The largest model, without its memory: specs, shardings and traced gradients of llama3.1-405b for 128 devices."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

from halfbyte import models
from halfbyte.distributed import DEFAULT_MESH_AXES
from halfbyte.recipes import policy, recipe, step_key

CFG = models.preset("llama3.1-405b")
SHAPE = {"data": 1, "fsdp": 32, "context": 1, "tensor": 4}


@pytest.fixture(scope="module")
def mesh():
    return AbstractMesh(tuple(SHAPE.values()), DEFAULT_MESH_AXES, axis_types=(AxisType.Auto,) * 4)


def test_every_weight_is_split_over_all_devices(mesh):
    models.check_mesh(CFG, mesh, batch=32, seq=8192)
    params = models.flatten_specs(models.abstract_params(CFG, mesh))
    local = {path: math.prod(x.sharding.shard_shape(x.shape)) for path, x in params.items()}
    norms = {path for path in params if path.endswith("norm")}
    assert {path: params[path].size / local[path] for path in params if path not in norms} == {
        path: 128 for path in params if path not in norms
    }
    assert sum(local.values()) * 4 / 2**30 == pytest.approx(11.8, abs=0.1)  # GiB of float32 weights a device


def test_gradient_traces_without_allocating(mesh):
    resolved = policy("mlp", recipe("nvfp4")).resolve(models.linear_sites(CFG), CFG.layers)
    batch = {name: jax.ShapeDtypeStruct((32, 8192), jnp.int32) for name in ("tokens", "targets")}

    def step(params, batch, number):
        ctx = models.ModelContext(
            policy=resolved, key=step_key(0, number), mesh=mesh, remat="full", attention="xla", backend="emulated"
        )
        return jax.value_and_grad(lambda p: models.loss(CFG, p, batch, ctx)[0])(params)

    loss, grads = jax.eval_shape(step, models.abstract_params(CFG, mesh), batch, 0)
    assert loss.shape == () and loss.dtype == jnp.float32
    assert sum(leaf.size for leaf in jax.tree.leaves(grads)) == 405_853_388_800
