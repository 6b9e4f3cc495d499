"""Programs for compute capability 12.0, compiled on a machine without a GPU. Oracle: the program's own text. Compiled,
not executed: docs/unverified.md. test_spark.py has capability 12.1."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.experimental.mosaic.gpu import core
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import halfbyte as hb
from halfbyte import devices, ops
from halfbyte.devices.compile_target import block_limits
from halfbyte.models import LlamaConfig
from halfbyte.train import TrainConfig, lower_train_step, phases, run_mesh

pytestmark = [pytest.mark.cuda_compiler, pytest.mark.slow]

NATIVE = 'custom_call_target="__cudnn$blockScaledDot"'
MODEL = LlamaConfig(
    name="tiny", vocab_size=256, embed=128, mlp=256, layers=2, heads=2, kv_heads=2, head_dim=64, max_seq=256
)


@functools.cache
def topology(name):
    return devices.topology(devices.device_by_name(name), hosts=1, per_host=1)


@pytest.fixture(scope="module")
def shared_memory():
    """Bytes that each kernel of ours has asked for so far, as Mosaic counts them; one that is lowered again is not
    counted again."""
    found, counted = [], core._smem_tree_size
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "_smem_tree_size", lambda tree: found.append(counted(tree)) or found[-1])
        yield found


@pytest.mark.parametrize("backend, native", [("auto", 3), ("fused", 0)])
def test_a_linear_under_grad(backend, native, shared_memory):
    check_linear("rtx-pro-6000", backend, native, shared_memory)


def check_linear(name, backend, native, shared_memory):
    """Compiles a linear with its gradients for the device `name`, and checks its FP4 GEMMs and shared memory."""
    mesh = topologies.make_mesh(topology(name), (1,), ("fsdp",))
    x, w = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))
        for shape, dtype in (((256, 128), jnp.bfloat16), ((128, 256), jnp.float32))
    )

    def loss(x, w):
        y = hb.qdot(x, w, recipe=hb.recipe("nvfp4"), key=jax.random.key(0), backend=backend)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    with ops.compile_for(devices.device_by_name(name)):
        text = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(x, w).compile().as_text()
    assert text.count(NATIVE) == native
    assert shared_memory or "mosaic_gpu" not in text
    assert max(shared_memory, default=0) <= block_limits(devices.device_by_name(name))["shared"]


def test_a_train_step(shared_memory):
    device = devices.device_by_name("rtx-pro-6000")
    config = TrainConfig(name="tiny", model=MODEL, data="synthetic", batch=2, seq=256)
    mesh = run_mesh(config, topology(device.name).devices)
    with ops.compile_for(device), devices.target_cudnn():
        text = lower_train_step(config, phases(config)[0].resolved(config), mesh, seq=256).compile().as_text()
    assert text.count(NATIVE) >= 3 * 3  # the MLP's linears in the layers' loop, forward and backward
    assert max(shared_memory) <= block_limits(device)["shared"]
