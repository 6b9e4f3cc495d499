"""Gradients that travel in bfloat16. Oracles: the float32 gradient, and the bytes of two programs for eight H200."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import halfbyte as hb
from halfbyte import devices, hlo, ops
from halfbyte.distributed import make_mesh


def gradient(mesh, dtype, x, w):
    placement = ops.Placement(mesh, P("fsdp"), P("fsdp"), P("fsdp"), reduce_dtype=dtype)

    def total(w):
        y = hb.qdot(x, w, recipe=hb.recipe("bf16"), placement=placement)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    return jax.grad(total)(w)


@pytest.mark.slow
def test_each_devices_part_is_rounded_once():
    """CPU collectives add bfloat16 numbers up in float32 and round the sum."""
    mesh = make_mesh({"fsdp": 4}, jax.devices("cpu")[:4])
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(64, 32)), jnp.bfloat16)
    w = jnp.asarray(rng.normal(size=(32, 48)), jnp.float32)
    exact, rounded = (jax.jit(functools.partial(gradient, mesh, dtype))(x, w) for dtype in ("float32", "bfloat16"))
    assert rounded.dtype == jnp.float32 and not np.array_equal(exact, rounded)
    # Four summands and a sum, each off by half of 2^-8 at most; summands may be larger than the sum.
    assert np.abs(exact - rounded).max() <= 5 * 2**-9 * np.abs(exact).max()


@pytest.mark.cuda_compiler
def test_half_the_bytes_are_scattered():
    h200 = devices.device_by_name("h200")
    mesh = make_mesh({"fsdp": 8}, np.asarray(devices.topology(h200, hosts=1, per_host=8).devices))
    x, w = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P("fsdp")))
        for shape, dtype in (((1024, 512), jnp.bfloat16), ((512, 256), jnp.float32))
    )

    def scattered(dtype):
        with ops.compile_for(h200):
            text = jax.jit(functools.partial(gradient, mesh, dtype)).lower(x, w).compile().as_text()
        found = hlo.find_collectives(hlo.parse_hlo(text), dict(mesh.shape))
        return sum(each.array_bytes for each in found if each.kind == "reduce-scatter")

    assert scattered("float32") == 2 * scattered("bfloat16") > 0
