"""PRNG keys: derived statelessly, seed -> step -> layer -> site -> role, each by a `fold_in` of a stable integer.

The keys do not depend on the mesh, the number of hosts or earlier steps, so that a restart has the same random bits.
Names are hashed to integers by CRC-32, which unlike `hash` is the same in every process. The element index is the last
word: the generator in `halfbyte.formats` hashes it with the two words of the role's key.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import overload

import jax
import numpy as np
from jax.typing import ArrayLike

from halfbyte.formats import HashedKey, Key, hashed_key_words
from halfbyte.recipes.operand_policy import GEMM_ROLES, ROLES

KEY_IMPL = "threefry2x32"  # two words per key, whatever the default PRNG of the user's program is
RANDOM_STREAMS = (*ROLES, *(f"{gemm} signs" for gemm in GEMM_ROLES))
LinearKey = jax.Array | Mapping[str, HashedKey]
"""The key of a linear, or the keys of its random streams by name (RANDOM_STREAMS)."""


def step_key(seed: ArrayLike, step: ArrayLike) -> jax.Array:
    """Returns the typed key of one training step. `seed` and `step` may be traced."""
    return jax.random.fold_in(jax.random.key(seed, impl=KEY_IMPL), step)


def layer_key(key: jax.Array, layer: ArrayLike) -> jax.Array:
    """Returns the key of one layer, numbered over the whole model. `layer` may be traced (a scan index)."""
    return _fold_in(key, layer)


def site_key(key: jax.Array, site: str) -> jax.Array:
    """Returns the key of one linear, identified by its path."""
    return _fold_in(key, _stable_integer(site))


@overload
def role_key(key: jax.Array, role: str) -> jax.Array: ...
@overload
def role_key(key: LinearKey, role: str) -> Key: ...
def role_key(key: LinearKey, role: str) -> Key:
    """Returns the key of one of the six operands of a linear."""
    if role not in ROLES:
        raise ValueError(f"role must be one of {', '.join(ROLES)}, got {role!r}")
    return _stream_key(key, role)


def signs_key(key: LinearKey, gemm: str) -> Key:
    """Returns the key of the Hadamard signs that both operands of one GEMM of a linear share."""
    return _stream_key(key, f"{gemm} signs")


def site_keys(keys: jax.Array, sites: Sequence[str]) -> jax.Array:
    """Returns `site_key` of each of `keys` [sites] and its site, in one fold."""
    return jax.vmap(_fold_in)(keys, _stable_integers(sites))


def stream_key_words(key: jax.Array) -> jax.Array:
    """Returns the `HashedKey` words [9, 2] of a linear's random streams, in order of `RANDOM_STREAMS`, in one fold."""
    return hashed_key_words(jax.vmap(_fold_in, (None, 0))(key, _stable_integers(RANDOM_STREAMS)))


def _stream_key(key: LinearKey, name: str) -> Key:
    return key[name] if isinstance(key, Mapping) else _fold_in(key, _stable_integer(name))


def _fold_in(key: jax.Array, number: ArrayLike) -> jax.Array:
    return jax.random.fold_in(as_threefry_key(key), number)


def as_threefry_key(key: jax.Array) -> jax.Array:
    """Returns a key whose `fold_in` is a hash: `key` itself, or for `unsafe_rbg` a threefry key of its four words.

    The `fold_in` of `unsafe_rbg` is an exclusive or with a hash of the number. The order of two numbers then has no
    effect, and folding in the same number twice (step 3, layer 3) cancels. Numbers that the caller has folded in before
    are not changed.
    """
    if str(jax.random.key_impl(key)) != "unsafe_rbg":
        return key
    words = jax.random.key_data(key)  # u32[4]
    threefry = jax.random.wrap_key_data(words[:2], impl=KEY_IMPL)
    return jax.random.fold_in(jax.random.fold_in(threefry, words[2]), words[3])


def _stable_integers(names: Sequence[str]) -> np.ndarray:
    return np.stack([_stable_integer(name) for name in names])


def _stable_integer(name: str) -> np.uint32:
    return np.uint32(zlib.crc32(name.encode()))
