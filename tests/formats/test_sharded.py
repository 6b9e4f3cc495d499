"""Codes and scales do not depend on the mesh. Oracle: `oracle_table`, on every mesh."""

import jax
import numpy as np
import oracle_table as table
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
def test_quantize_on_any_mesh_equals_table(rows, columns):
    devices = jax.devices("cpu")
    if len(devices) < rows * columns:
        pytest.skip(f"needs {rows * columns} CPU devices, found {len(devices)}")
    mesh = Mesh(np.array(devices[: rows * columns]).reshape(rows, columns), ("rows", "columns"))
    x = np.random.default_rng(9).standard_normal(SHAPE).astype(np.float32)
    x[17, 90] = 40  # in one shard; the tensor's amax is everyone's
    sharded = jax.device_put(x, NamedSharding(mesh, PartitionSpec("rows", "columns")))
    noise = table.random_bytes(SHAPE, table.key_words(*KEY))
    hows = {}, {"square": True}, {"rounding": "stochastic", "noise": noise}
    for (codes, scales, amax), how in zip(jax.jit(everything)(sharded), hows, strict=True):
        want = table.quantize(x, "nvfp4", **how)
        np.testing.assert_array_equal(codes, want.codes)
        np.testing.assert_array_equal(np.asarray(scales).view(np.uint8), want.scales)
        assert amax == want.amax


@pytest.mark.slow
def test_quantize_in_shard_map_uses_shard_amax():
    """Inside shard_map each device quantizes what it holds, with its own amax."""
    devices = jax.devices("cpu")
    if len(devices) < 2:
        pytest.skip(f"needs 2 CPU devices, found {len(devices)}")
    mesh, spec = Mesh(np.array(devices[:2]), ("rows",)), PartitionSpec("rows")
    x = np.random.default_rng(9).standard_normal((32, 64)).astype(np.float32) * np.repeat([1, 1e-3], 16)[:, None]
    x = x.astype(np.float32)
    codes = jax.jit(jax.shard_map(lambda x: quantize(x, NVFP4).codes, mesh=mesh, in_specs=spec, out_specs=spec))(x)
    np.testing.assert_array_equal(
        codes, np.concatenate([table.quantize(half, "nvfp4").codes for half in (x[:16], x[16:])])
    )
