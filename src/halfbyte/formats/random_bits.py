"""Random bytes for stochastic rounding, from a counter and a key: the same on any mesh, and after any restart.

A tensor is viewed as [tokens, features]: all leading dims flattened into tokens. Element (t, n) takes byte t % 4 of the
32-bit word at index (t // 4) * features + n, so one word serves four tokens of a column, and a kernel that holds 16
tokens in registers draws four words, not sixteen. Indices have 64 bits; the upper half is 0 in all but the largest
tensors. A word depends only on (key, index), so a shard of a tensor draws its own bytes (`offset`, `global_shape`).

Rounding needs no cryptographic randomness. It needs uniform bytes without correlation between neighbours, steps,
layers and operands, which tests/recipes/test_random_bits.py measures. Errors average out over tensors only if their
keys differ (`warn_if_key_reused`).
"""

import dataclasses
import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

Offset = int | jax.Array

ROUNDS = (0x243F_6A88, 0x85A3_08D3, 0x1319_8A2E, 0x0370_7344)  # the first digits of pi


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HashedKey:
    """The key at `index`, int32, of a table of `words`, uint32 [keys, 2], of `key_words`.

    All keys of the table are mixed at once, and kernels read their words in place.
    """

    words: jax.Array
    index: jax.Array


Key = jax.Array | HashedKey


class SharedBitsWarning(UserWarning):
    """Different tensors are rounded with the same random bits."""


def random_bytes(
    key: Key, shape: tuple[int, ...], *,
    offset: Sequence[Offset] | None = None, global_shape: tuple[int, ...] | None = None, aligned: bool = False,
) -> jax.Array:  # fmt: skip
    """Returns uint8 [..., tokens, features], uniform bytes for `shape`; a vector is one token. Equal on every mesh.

    With `global_shape` and `offset` the bytes are those of a window: a slice at `offset` of the bytes of a tensor of
    `global_shape`, computed without the others. An offset may be traced: inside shard_map it is `lax.axis_index(...)`
    times the shard's size; `aligned` promises a multiple of four tokens, as blocks have. Without them every device and
    every entry of a vmap with the same key draws the same bytes.
    """
    offset, whole = _checked_window(shape, offset, global_shape)
    if len(shape) < 2:
        row = random_bytes(key, (1, *shape), offset=(0, *offset), global_shape=(1, *whole))
        return row.reshape(shape)  # [1, features] -> [features]
    if whole[-2] % 4 == 0:
        return _bytes_four_per_word(key, shape, offset, whole, aligned)
    if shape == whole:  # words straddle the leading dims: flatten them, [..., tokens, features] -> [rows, features]
        rows = math.prod(shape[:-1])
        padded = (-(-rows // 4) * 4, shape[-1])
        return _bytes_four_per_word(key, padded, (0, 0), padded, True)[:rows].reshape(shape)
    tokens = _global_row_index(shape, offset, whole)
    words = _words(key, _global_element_index(tokens >> 2, offset[-1], whole))
    return (words >> ((tokens & jnp.uint32(3)) * jnp.uint32(8))).astype(jnp.uint8)


def warn_if_key_reused(key: jax.Array, *tensors: jax.Array) -> jax.Array:
    """Returns `key`; warns (SharedBitsWarning) if a tensor varies along a mapped axis and the key does not.

    Stochastic rounding averages out over tensors only if their random bits differ. `jax.vmap(f, (0, None))(xs, key)`
    rounds every x with the same bits, and so does `shard_map` on every device if the key is the same on all of them.
    JAX means this by one key, so the bits stay as they are; the warning is issued when the program is traced.
    `shard_map(..., check_vma=False)` hides the difference.

    Remedy: one key per tensor (`jax.random.split`, `jax.random.fold_in` with `lax.axis_index`), or, on a mesh, the
    bytes of the whole tensor (`random_bytes` with `offset` and `global_shape`), which are the same on any mesh.
    """
    axes = frozenset[str]().union(*map(_varying, tensors)) - _varying(key)
    if axes:
        warn_key_reuse(
            f"on every device along the mesh axes {', '.join(sorted(axes))}", "lax.axis_index, or give an offset"
        )
    return _same_key(key, lax.stop_gradient(tensors))


def warn_key_reuse(where: str, remedy: str) -> None:
    """Warns that tensors `where` share random bits; `remedy` is what to fold their key with."""
    warnings.warn(
        f"one key rounds different tensors {where}: their errors are alike and do not average out; fold the key with "
        f"{remedy}",
        SharedBitsWarning,
        stacklevel=2,
    )


def hashed_key_words(keys: jax.Array) -> jax.Array:
    """Returns `HashedKey.words`, uint32 [..., 2], of keys [...]."""
    return jnp.stack(key_words(keys), axis=-1)


def key_words(key: Key) -> tuple[jax.Array, jax.Array]:
    """Returns the two uint32 words that the counter hash takes of a key, typed, raw or hashed.

    Four Feistel rounds of the hash itself: bijective, and the words of any two keys, even jax.random.key(0) and key(1),
    differ in half of their bits.
    """
    if isinstance(key, HashedKey):
        k0, k1 = lax.dynamic_index_in_dim(key.words, key.index, keepdims=False)
        return k0, k1
    k0, k1 = _data_words(key)
    for constant in ROUNDS:
        k0, k1 = k1, k0 ^ counter_hash(k1, jnp.uint32(constant), jnp.uint32(constant))
    return k0, k1


def _data_words(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the first and the last word of the key's data: all of a threefry key."""
    data = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    return data[..., 0], data[..., -1]


def counter_hash(counter: jax.Array, k0: jax.Array, k1: jax.Array) -> jax.Array:
    """Returns one pseudo-random uint32 for each uint32 of `counter`.

    Two multiply-xorshift rounds with one half of the key added before each, about ten integer instructions. Key and
    counter meet in both rounds, so the streams of two keys are not permutations of each other. The second half is mixed
    little: halves that differ in a few bits give correlated streams. So `key_words` mixes the key first, once per
    tensor.
    """
    h = counter * jnp.uint32(0x9E37_79B9) + k0
    h = (h ^ (h >> 16)) * jnp.uint32(0x7FEB_352D) + k1
    h = (h ^ (h >> 15)) * jnp.uint32(0x846C_A68B)
    return h ^ (h >> 16)


def multiply_high_low(a: int, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (high, low) words of the 64-bit product of a constant and uint32 values."""
    a1, a0 = jnp.uint32(a >> 16), jnp.uint32(a & 0xFFFF)
    b1, b0 = b >> 16, b & jnp.uint32(0xFFFF)
    low, cross = a0 * b0, a1 * b0
    middle = (low >> 16) + (cross & jnp.uint32(0xFFFF)) + a0 * b1
    return a1 * b1 + (cross >> 16) + (middle >> 16), jnp.uint32(a) * b


def key_for_high_counter(high: jax.Array, k0: jax.Array, k1: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the key words for counters whose upper 32 bits are `high`: k0 and k1 themselves if `high` is 0.

    `high` is hashed before it is mixed in, because the streams of two keys that differ in a few bits are correlated.
    """

    def mask(constant: int) -> jax.Array:
        mixed = counter_hash(high, jnp.uint32(constant), jnp.uint32(constant))
        return mixed ^ counter_hash(jnp.zeros_like(high), jnp.uint32(constant), jnp.uint32(constant))

    return k0 ^ mask(ROUNDS[0]), k1 ^ mask(ROUNDS[1])


class _Counter64(NamedTuple):
    """Word indices of up to 64 bits."""

    low: jax.Array
    high: jax.Array | None  # None: all zero


def _index(shape: tuple[int, ...], axis: int, offset: Offset) -> jax.Array:
    """Returns the index along `axis`, uint32 [shape]; from an iota, so that every shard computes its own."""
    index = lax.broadcasted_iota(jnp.uint32, shape, axis)
    at_zero = isinstance(offset, int) and offset == 0
    return index if at_zero else index + jnp.asarray(offset).astype(jnp.uint32)


def _global_row_index(shape: tuple[int, ...], offset: Sequence[Offset], whole: tuple[int, ...]) -> jax.Array:
    """Returns uint32 [shape]: the global row of each element of a window of `whole`, all leading dims flattened."""
    row = jnp.zeros(shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(len(shape) - 1)):
        row = row + _index(shape, axis, offset[axis]) * jnp.uint32(stride % 2**32)
        stride *= whole[axis]
    return row


def _global_element_index(rows: jax.Array, offset: Offset, whole: tuple[int, ...]) -> _Counter64:
    """Returns rows * columns + column, for the columns of a window of `whole` [..., rows, columns]."""
    columns = whole[-1]
    column = _index(rows.shape, rows.ndim - 1, offset)
    if math.prod(whole) <= 2**32:
        return _Counter64(rows * jnp.uint32(columns % 2**32) + column, None)
    high, low = multiply_high_low(columns, rows)
    return _Counter64(low + column, high + (low + column < low).astype(jnp.uint32))


def _words(key: Key, counters: _Counter64) -> jax.Array:
    low, high = counters
    words = key_words(key)
    return counter_hash(low, *(words if high is None else key_for_high_counter(high, *words)))


def _bytes_four_per_word(
    key: Key, shape: tuple[int, ...], offset: Sequence[Offset], whole: tuple[int, ...], aligned: bool
) -> jax.Array:
    """Returns bytes of a window of `whole` [..., tokens, features], whose tokens are a multiple of four."""
    *lead, tokens, features = shape
    first_token = offset[-2]
    # A window may begin within a word: then one more row of words covers it, and the bytes before it are dropped.
    aligned = (aligned or (isinstance(first_token, int) and first_token % 4 == 0)) and tokens % 4 == 0
    word_rows = tokens // 4 if aligned else (tokens + 6) // 4
    grouped, start = (*lead, word_rows, features), (*offset[:-2], first_token // 4, offset[-1])
    whole = (*whole[:-2], whole[-2] // 4, whole[-1])
    words = _words(key, _global_element_index(_global_row_index(grouped, start, whole), start[-1], whole))
    covering = _unpack_word_bytes(words)
    return covering if aligned else _slice(covering, (*[0] * len(lead), first_token % 4, 0), shape)


def _unpack_word_bytes(words: jax.Array) -> jax.Array:
    """uint32 [..., rows, features] -> uint8 [..., 4 * rows, features], the low byte first."""
    *lead, rows, features = words.shape
    shifts = jnp.arange(0, 32, 8, dtype=jnp.uint32).reshape(4, 1)
    spread = jnp.broadcast_to(words[..., None, :], (*lead, rows, 4, features))
    # [..., rows, 4, features] -> [..., 4 * rows, features]
    return (spread >> jnp.broadcast_to(shifts, spread.shape)).astype(jnp.uint8).reshape(*lead, 4 * rows, features)


def _slice(array: jax.Array, offset: Sequence[Offset], shape: tuple[int, ...]) -> jax.Array:
    if array.shape == shape:
        return array
    return lax.dynamic_slice(array, [jnp.asarray(o, jnp.int32) for o in offset], shape)


def _checked_window(
    shape: tuple[int, ...], offset: Sequence[Offset] | None, whole: tuple[int, ...] | None
) -> tuple[tuple[Offset, ...], tuple[int, ...]]:
    """Validates `offset` and `global_shape` of `random_bytes`; if both are None the window is the whole tensor."""
    if (offset is None) != (whole is None):
        raise ValueError("random_bytes takes offset and global_shape together, or neither")
    if offset is None or whole is None:
        return (0,) * len(shape), shape
    known = [(o, n, size) for o, n, size in zip(offset, shape, whole, strict=False) if isinstance(o, int)]
    if not len(offset) == len(shape) == len(whole) or any(o < 0 or o + n > size for o, n, size in known):
        raise ValueError(
            f"random_bytes: a window of shape {shape} at offset {tuple(offset)} does not lie in global_shape {whole}"
        )
    return tuple(offset), whole


def _varying(array: Any) -> frozenset[str]:
    """Returns the manual mesh axes along which an array varies, where JAX tracks them."""
    kind = getattr(jax.typeof(array), "manual_axis_type", None)
    return frozenset() if kind is None else frozenset(kind.varying)


@custom_vmap
def _same_key(key: jax.Array, tensors: tuple[jax.Array, ...]) -> jax.Array:
    return key


@_same_key.def_vmap  # called when a vmap reaches it, also inside jit and custom gradients
def _(size: int, batched: list[Any], key: jax.Array, tensors: tuple[jax.Array, ...]) -> tuple[jax.Array, bool]:
    if any(batched[1]) and not batched[0]:
        warn_key_reuse(f"for all {size} entries of a vmap", "the entry's number, or map over jax.random.split(key)")
    return _same_key(key, tensors), batched[0]
