"""Oracle: plain indexing of the stack, and the shapes in the text of a program that is compiled for eight H200."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from halfbyte.devices import device_by_name, topology
from halfbyte.distributed import make_mesh, parse_mesh
from halfbyte.models.layer_scan import unstack_layers

LAYERS, ROWS, COLUMNS = 4, 64, 32


def total(layers):
    return sum(jnp.sum((number + 1) * jnp.sin(layer)) for number, layer in enumerate(layers))


def gradient(cut, **how):
    return jax.jit(jax.grad(lambda stack: total(unstack_layers(stack, LAYERS, cut=cut))), **how)


def over_eight(devices):
    return NamedSharding(make_mesh(parse_mesh("fsdp=8"), devices), PartitionSpec(None, "fsdp"))


@pytest.mark.parametrize("cut", [False, True])
def test_each_layer_has_its_gradient(cut):
    stack = np.random.default_rng(1).normal(size=(LAYERS, ROWS, COLUMNS)).astype(np.float32)
    stack = jax.device_put(stack, over_eight(jax.devices()[:8])) if cut else jnp.asarray(stack)
    plain = jax.jit(jax.grad(lambda stack: total([stack[i] for i in range(LAYERS)])))
    np.testing.assert_array_equal(gradient(cut)(stack), plain(stack))


@pytest.mark.slow
@pytest.mark.cuda_compiler
def test_on_a_mesh_no_device_has_the_whole_stack():
    lies = over_eight(np.array(topology(device_by_name("h200"), hosts=1, per_host=8).devices))
    stack = jax.ShapeDtypeStruct((LAYERS, ROWS, COLUMNS), jnp.float32, sharding=lies)

    def has_whole(cut):
        text = gradient(cut, out_shardings=lies).lower(stack).compile().as_text()
        return f"f32[{LAYERS},{ROWS},{COLUMNS}]" in text.partition("ENTRY")[2].partition("\n")[2]

    assert not has_whole(cut=True)
    assert has_whole(cut=False)  # else nothing is left to say
