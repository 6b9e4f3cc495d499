"""Whether a tensor that is cut over devices gives the operands of one device, bit for bit: random bits depend on an
element's place in the whole, and tensor scales on the maxima of all parts. By the passes that a run on these devices
would have, kernels included.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from halfbyte import ops
from halfbyte.ops.passes import request
from halfbyte.recipe import Recipe

from .operand_bits import definition

AXIS = "devices"
ROLES = (("fprop_x", "wgrad_x"), ("dgrad_dy", "wgrad_dy"))


def operands_on_mesh(chosen: Recipe, devices: Sequence[Any], *, features: int = 512) -> dict[str, int]:
    """Cut over tokens and cut over features -> how many numbers of the four operands of x and dy differ from what one
    device makes in a program of its own. The largest of each tensor lies in its last corner.
    """
    count = len(devices)
    tokens = 128 * count
    x, dy = (_tensor(seed, tokens, features * count) for seed in (1, 2))
    right = definition(chosen, x, dy, jnp.zeros((features * count, 16), jnp.float32))[:4]
    expected = [np.asarray(each.values().astype(jnp.float32)) for each in right]
    differing = {}
    for name, spec in (("tokens", PartitionSpec(AXIS)), ("features", PartitionSpec(None, AXIS))):
        found = zip(_on_mesh(chosen, devices, spec, x, dy), expected, strict=True)
        differing[name] = sum(int(np.sum(a != b)) for a, b in found)
    return differing


def _tensor(seed: int, tokens: int, features: int) -> jax.Array:
    values = jax.random.normal(jax.random.key(seed), (tokens, features), jnp.float32)
    return values.at[-1, -1].set(30.0).astype(jnp.bfloat16)


def _on_mesh(
    chosen: Recipe, devices: Sequence[Any], spec: PartitionSpec, x: jax.Array, dy: jax.Array
) -> list[np.ndarray]:
    mesh = Mesh(np.array(devices, dtype=object), (AXIS,))
    cut = tuple((AXIS,) if entry == AXIS else () for entry in (*spec, None)[:2])
    tokens, features = (size // (len(devices) if axes else 1) for size, axes in zip(x.shape, cut, strict=True))
    problem = ops.Problem(chosen, tokens, features, features, device=ops.target(), sharded=True)
    passes = ops.choose("auto", problem).passes

    def make(x: jax.Array, dy: jax.Array) -> list[jax.Array]:
        made = []
        for tensor, roles in zip((x, dy), ROLES, strict=True):
            wanted = [request(chosen, role, jax.random.key(2), cut=cut) for role in roles]
            made += [each.values().astype(jnp.float32) for each in passes.quantize(tensor, wanted)]
        return made

    mapped = jax.shard_map(make, mesh=mesh, in_specs=(spec, spec), out_specs=[spec] * 4, check_vma=False)
    return [np.asarray(each) for each in jax.jit(mapped)(*(np.asarray(each) for each in (x, dy)))]
