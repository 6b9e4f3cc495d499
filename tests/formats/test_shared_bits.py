"""One key for several tensors is said where JAX shows it. Oracle: the bytes themselves."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from halfbyte.formats import NVFP4, SharedBitsWarning, quantize, warn_if_key_reused

X = np.random.default_rng(0).standard_normal((4, 16, 32)).astype(np.float32)
KEY = np.array([1, 2], np.uint32)


def codes(x, key):
    return quantize(x, NVFP4, rounding="stochastic", key=jax.random.wrap_key_data(key)).codes


@jax.custom_vjp
def through(x, key):
    return x


through.defvjp(lambda x, key: (x, key), lambda key, dy: (quantized_values(dy, key), None))


def quantized_values(x, key):
    return quantize(x, NVFP4, rounding="stochastic", key=jax.random.wrap_key_data(key)).dequantize()


def test_one_key_under_vmap_is_said():
    same = np.stack([X[0]] * 4)
    with pytest.warns(SharedBitsWarning, match="for all 4 entries of a vmap"):
        found = np.asarray(jax.jit(jax.vmap(codes, (0, None)))(same, KEY))
    assert (found == found[0]).all()


@pytest.mark.slow
def test_also_inside_jit_and_in_a_backward_pass():
    def gradient(x, key):
        return jax.grad(lambda x: jnp.sum(through(x, key) ** 2))(x)

    with pytest.warns(SharedBitsWarning):
        jax.eval_shape(jax.vmap(jax.jit(gradient), (0, None)), X, KEY)


@pytest.mark.slow
def test_a_key_each_and_one_tensor_are_no_matter():
    keys = np.stack([KEY + np.uint32(i) for i in range(4)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(jax.vmap(codes), X, keys)
        jax.eval_shape(jax.vmap(codes, (None, 0)), X[0], keys)
        jax.eval_shape(jax.vmap(lambda x: quantize(x, NVFP4).codes), X)
        assert (warn_if_key_reused(KEY, X) == KEY).all()


def on_shards(fn):
    mesh = Mesh(np.array(jax.devices("cpu")[:4]), ("data",))
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    return jax.eval_shape(jax.jit(mapped), X, KEY)


@pytest.mark.slow
def test_one_key_on_every_shard_is_said():
    with pytest.warns(SharedBitsWarning, match="along the mesh axes data.*lax.axis_index"):
        on_shards(codes)


def test_a_key_of_each_shard_is_no_matter():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_shards(lambda x, key: codes(x, key + lax.axis_index("data").astype(jnp.uint32)))
