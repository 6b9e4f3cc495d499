"""Codes and scales do not depend on the mesh. Oracle: the NumPy definitions, on every mesh."""

import format_oracle as oracle
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from halfbyte.formats import NVFP4, quantize

pytestmark = pytest.mark.usefixtures("quick_code")

KEY = np.array([3, 5], np.uint32)
SHAPE = (64, 128)


def everything(x):
    key = jax.random.wrap_key_data(KEY)
    made = [
        quantize(x, NVFP4),
        quantize(x, NVFP4, block="2d"),
        quantize(x, NVFP4, rounding="stochastic", key=key),
    ]
    return [(q.codes, q.scales, q.amax) for q in made]


@pytest.mark.slow(fast_cases=["2-2"])
@pytest.mark.parametrize("rows, columns", [(1, 1), (4, 1), (2, 2), (1, 4)])
def test_any_mesh(rows, columns):
    devices = jax.devices("cpu")
    if len(devices) < rows * columns:
        pytest.skip(f"needs {rows * columns} CPU devices, found {len(devices)}")
    mesh = Mesh(np.array(devices[: rows * columns]).reshape(rows, columns), ("rows", "columns"))
    x = np.random.default_rng(9).standard_normal(SHAPE).astype(np.float32)
    x[17, 90] = 40  # in one shard; the tensor's amax is everyone's
    sharded = jax.device_put(x, NamedSharding(mesh, PartitionSpec("rows", "columns")))
    words = oracle.key_words(*KEY)
    noise = oracle.random_bytes(lambda n: oracle.hash_words(n, *words), SHAPE)
    expected = [oracle.nvfp4(x), oracle.nvfp4(x, square=True), oracle.nvfp4(x, noise=noise)]
    for found, (codes, scales, amax, _) in zip(jax.jit(everything)(sharded), expected):
        np.testing.assert_array_equal(found[0], codes)
        np.testing.assert_array_equal(np.asarray(found[1]).view(np.uint8), scales)
        assert found[2] == amax


@pytest.mark.slow
def test_a_shard_alone_is_its_own_tensor():
    """Inside shard_map each device quantizes what it holds, with its own amax."""
    devices = jax.devices("cpu")
    if len(devices) < 2:
        pytest.skip(f"needs 2 CPU devices, found {len(devices)}")
    mesh, spec = Mesh(np.array(devices[:2]), ("rows",)), PartitionSpec("rows")
    x = np.random.default_rng(9).standard_normal((32, 64)).astype(np.float32) * np.repeat([1, 1e-3], 16)[:, None]
    x = x.astype(np.float32)
    codes = jax.jit(jax.shard_map(lambda x: quantize(x, NVFP4).codes, mesh=mesh, in_specs=spec, out_specs=spec))(x)
    np.testing.assert_array_equal(codes, np.concatenate([oracle.nvfp4(half)[0] for half in (x[:16], x[16:])]))
