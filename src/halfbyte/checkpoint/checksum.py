"""A checksum of every array of a tree, the same on any mesh and any number of hosts.

Storage loses bits, and the array format we store in does not notice. So a checkpoint carries two 32-bit words an array:

    word_j(a) = sum over elements of mix_j(bits(a[i]) + hash_j(i))        mod 2^32,  j = 0, 1

`mix` is a bijection of 32-bit words, so that a change of one element, whatever it is, always changes the sum; the index
enters, so that swapped elements change it too. Sums of integers do not depend on their order: shards add up to the same
word on every mesh.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

LARGEST = 2.0**63
"""Values from here on have no square in float32: a norm over one is infinite, what it divides is zero, and a model that
holds one computes the same for every text, with a gradient of zero, and finite numbers everywhere."""
PRIMES = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1)
MIXERS = ((0x7FEB352D, 0x846CA68B), (0x2C1B3C6D, 0x297A2D39))


def named_leaves(tree: Any) -> dict[str, Any]:
    """Leaves by path, `a/b/0`, in tree order: the names under which a checkpoint stores, checks and reports them."""
    return {"/".join(map(_key_name, path)): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def _key_name(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _bits(x: jax.Array) -> jax.Array:
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    words = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    return lax.bitcast_convert_type(x, words).astype(jnp.uint32)


def _index_hash(shape: tuple[int, ...], salt: int) -> jax.Array:
    index = jnp.full(shape, salt, jnp.uint32)
    for dim in range(len(shape)):
        step = jnp.uint32(PRIMES[dim % len(PRIMES)])
        index = index * jnp.uint32(31) + lax.broadcasted_iota(jnp.uint32, shape, dim) * step
    return index


def _mix(h: jax.Array, multipliers: tuple[int, int]) -> jax.Array:
    h = (h ^ (h >> 16)) * jnp.uint32(multipliers[0])
    h = (h ^ (h >> 15)) * jnp.uint32(multipliers[1])
    return h ^ (h >> 16)


def checksum(x: jax.Array) -> jax.Array:
    """uint32 [2]: the two words of an array of any dtype of 1, 2 or 4 bytes."""
    bits = _bits(x)
    words = [
        jnp.sum(_mix(bits + _index_hash(x.shape, salt), mixers), dtype=jnp.uint32) for salt, mixers in enumerate(MIXERS)
    ]
    return jnp.stack(words)


def not_finite(x: jax.Array) -> jax.Array:
    """int32 scalar: how many values of a float array are NaN, infinite or not below LARGEST; 0 for any other dtype."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.zeros((), jnp.int32)
    return jnp.sum(~(jnp.abs(x.astype(jnp.float32)) < LARGEST), dtype=jnp.int32)


@dataclass(frozen=True)
class Inspected:
    """One array as it is in memory: its checksum, sixteen hexadecimal digits, and how many values are not finite."""

    checksum: str
    not_finite: int


@jax.jit
def _inspect(leaves: dict[str, jax.Array]) -> dict[str, tuple[jax.Array, jax.Array]]:
    return {name: (checksum(leaf), not_finite(leaf)) for name, leaf in leaves.items()}


def inspect(tree: Any) -> dict[str, Inspected]:
    """Every leaf by path, in one pass. Every process of a distributed array must call it, and gets the same."""
    found = jax.device_get(_inspect(named_leaves(tree)))
    return {
        name: Inspected("".join(f"{int(word):08x}" for word in words), int(count))
        for name, (words, count) in found.items()
    }
