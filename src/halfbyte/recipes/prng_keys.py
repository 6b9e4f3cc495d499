"""Keys are derived, never carried: seed -> step -> layer -> site -> role, each a `fold_in` of a stable integer.

Nothing here depends on the mesh, on the number of hosts or on what ran before, so a restart finds the same random
bits. Names become integers by CRC-32, which unlike `hash` is the same in every process. The element index is the last
word: the generator in `halfbyte.formats` hashes it with the two words of the role's key.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import overload

import jax
import numpy as np
from jax.typing import ArrayLike

from halfbyte.formats import Key, MixedKey, mixed_words
from halfbyte.recipe.operands import GEMMS, ROLES

KEY_IMPL = "threefry2x32"  # two words a key, whatever generator the user's program has made its default
DRAWN = (*ROLES, *(f"{gemm} signs" for gemm in GEMMS))
LinearKey = jax.Array | Mapping[str, MixedKey]
"""The key of a linear, or those of all that it draws, by name."""


def step_key(seed: ArrayLike, step: ArrayLike) -> jax.Array:
    """The typed key of one training step; both may be traced."""
    return jax.random.fold_in(jax.random.key(seed, impl=KEY_IMPL), step)


def layer_key(key: jax.Array, layer: ArrayLike) -> jax.Array:
    """The key of one layer, counted over the whole model; `layer` may be traced (a scan's index)."""
    return jax.random.fold_in(key, layer)


def site_key(key: jax.Array, site: str) -> jax.Array:
    """The key of one linear, named by its path."""
    return jax.random.fold_in(key, _stable_integer(site))


@overload
def role_key(key: jax.Array, role: str) -> jax.Array: ...
@overload
def role_key(key: LinearKey, role: str) -> Key: ...
def role_key(key: LinearKey, role: str) -> Key:
    """The key of one of the six operands of a linear."""
    if role not in ROLES:
        raise ValueError(f"role must be one of {', '.join(ROLES)}, got {role!r}")
    return _drawn(key, role)


def signs_key(key: LinearKey, gemm: str) -> Key:
    """The key of the Hadamard signs that both operands of one GEMM of a linear share, likewise."""
    return _drawn(key, f"{gemm} signs")


def site_keys(keys: jax.Array, sites: Sequence[str]) -> jax.Array:
    """`site_key` of each of `keys` [sites] with its site, in one fold."""
    return jax.vmap(jax.random.fold_in)(keys, _stable_integers(sites))


def operand_words(key: jax.Array) -> jax.Array:
    """The words [9, 2] of the `MixedKey` of all that a linear may draw, in the order of `DRAWN`, in one fold."""
    return mixed_words(jax.vmap(jax.random.fold_in, (None, 0))(key, _stable_integers(DRAWN)))


def _drawn(key: LinearKey, name: str) -> Key:
    return key[name] if isinstance(key, Mapping) else jax.random.fold_in(key, _stable_integer(name))


def _stable_integers(names: Sequence[str]) -> np.ndarray:
    return np.stack([_stable_integer(name) for name in names])


def _stable_integer(name: str) -> np.uint32:
    return np.uint32(zlib.crc32(name.encode()))
