"""Random bytes for stochastic rounding, from a counter and a key: the same on any mesh, and after any restart.

A tensor is seen as [tokens, features]: all leading dims flattened into tokens. Element (t, n) takes byte t % 4 of the
32-bit word number (t // 4) * features + n, so one word serves four tokens of a column, and a kernel that holds 16
tokens in registers draws four words, not sixteen. Numbers have 64 bits; the upper half is 0 in all but the largest
tensors. Words are a function of (key, number) alone, so a part of a tensor makes its own bytes (`offset`,
`global_shape`).

A word is a counter hash: two multiply-xorshift rounds with one half of the key added before each. Key and counter meet
in the first round and again in the second, so the streams of two keys are not permutations of each other. It takes
about ten integer instructions per word. That is little after the second half comes in: halves that differ in a few bits
give correlated streams. So the key is mixed first, once per tensor (`key_words`).

The rounding needs no cryptography: it needs uniform bytes without correlation between neighbours, steps, layers and
operands, and tests/recipe/test_random_bits.py measures that.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Offset = int | jax.Array

ROUNDS = (0x243F_6A88, 0x85A3_08D3, 0x1319_8A2E, 0x0370_7344)  # the first digits of pi


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MixedKey:
    """One key of many, whose `words`, uint32 [keys, 2], are what `key_words` gives: the one at `index`, int32. Many are
    mixed in one go, and a kernel reads them where they lie.
    """

    words: jax.Array
    index: jax.Array


Key = jax.Array | MixedKey


def mixed_words(keys: jax.Array) -> jax.Array:
    """uint32 [..., 2]: the `words` of keys [...]."""
    return jnp.stack(key_words(keys), axis=-1)


def key_words(key: Key) -> tuple[jax.Array, jax.Array]:
    """The two uint32 words that the counter hash takes of a key, typed, raw or mixed.

    Four Feistel rounds of the hash itself: one to one, and any two keys, be they jax.random.key(0) and key(1), differ
    in half of the bits.
    """
    if isinstance(key, MixedKey):
        k0, k1 = lax.dynamic_index_in_dim(key.words, key.index, keepdims=False)
        return k0, k1
    k0, k1 = _data_words(key)
    for constant in ROUNDS:
        k0, k1 = k1, k0 ^ hash_words(k1, jnp.uint32(constant), jnp.uint32(constant))
    return k0, k1


def _data_words(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first and the last word of the key's data: all there is of a threefry key."""
    data = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    return data[..., 0], data[..., -1]


def hash_words(counter: jax.Array, k0: jax.Array, k1: jax.Array) -> jax.Array:
    """One pseudo-random uint32 for each uint32 of `counter`."""
    h = counter * jnp.uint32(0x9E37_79B9) + k0
    h = (h ^ (h >> 16)) * jnp.uint32(0x7FEB_352D) + k1
    h = (h ^ (h >> 15)) * jnp.uint32(0x846C_A68B)
    return h ^ (h >> 16)


def multiply_high_low(a: int, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(high, low) words of the 64-bit product of a constant and uint32 numbers."""
    a1, a0 = jnp.uint32(a >> 16), jnp.uint32(a & 0xFFFF)
    b1, b0 = b >> 16, b & jnp.uint32(0xFFFF)
    low, cross = a0 * b0, a1 * b0
    middle = (low >> 16) + (cross & jnp.uint32(0xFFFF)) + a0 * b1
    return a1 * b1 + (cross >> 16) + (middle >> 16), jnp.uint32(a) * b


def wide_key(high: jax.Array, k0: jax.Array, k1: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The key words of the counters whose upper 32 bits are `high`: k0 and k1 themselves where that is 0.

    What is added is hashed, because the streams of two keys that differ in a few bits are correlated.
    """

    def mask(constant: int) -> jax.Array:
        mixed = hash_words(high, jnp.uint32(constant), jnp.uint32(constant))
        return mixed ^ hash_words(jnp.zeros_like(high), jnp.uint32(constant), jnp.uint32(constant))

    return k0 ^ mask(ROUNDS[0]), k1 ^ mask(ROUNDS[1])


class _Numbers(NamedTuple):
    """Numbers of words, up to 64 bits."""

    low: jax.Array
    high: jax.Array | None  # None: all zero


def _index(shape: tuple[int, ...], axis: int, offset: Offset) -> jax.Array:
    """uint32 [shape]: the place along `axis`; from an iota, so that every shard makes its own."""
    place = lax.broadcasted_iota(jnp.uint32, shape, axis)
    begins = isinstance(offset, int) and offset == 0
    return place if begins else place + jnp.asarray(offset).astype(jnp.uint32)


def _rows(shape: tuple[int, ...], offset: Sequence[Offset], whole: tuple[int, ...]) -> jax.Array:
    """uint32 [shape]: the row of each element of a window of `whole` [..., rows, columns], all leading dims counted."""
    number = jnp.zeros(shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(len(shape) - 1)):
        number = number + _index(shape, axis, offset[axis]) * jnp.uint32(stride % 2**32)
        stride *= whole[axis]
    return number


def _numbers(rows: jax.Array, offset: Offset, whole: tuple[int, ...]) -> _Numbers:
    """rows * columns + column, for the columns of a window of `whole` [..., rows, columns]."""
    columns = whole[-1]
    column = _index(rows.shape, rows.ndim - 1, offset)
    if math.prod(whole) <= 2**32:
        return _Numbers(rows * jnp.uint32(columns % 2**32) + column, None)
    high, low = multiply_high_low(columns, rows)
    return _Numbers(low + column, high + (low + column < low).astype(jnp.uint32))


def _words(key: Key, numbers: _Numbers) -> jax.Array:
    low, high = numbers
    words = key_words(key)
    return hash_words(low, *(words if high is None else wide_key(high, *words)))


def random_bytes(
    key: Key, shape: tuple[int, ...], *,
    offset: Sequence[Offset] | None = None, global_shape: tuple[int, ...] | None = None, aligned: bool = False,
) -> jax.Array:  # fmt: skip
    """uint8 [..., tokens, features] uniform bytes for `shape`; a vector is one token. Equal on every mesh.

    With `global_shape` and `offset` they are those of a window: what slicing the bytes of a tensor of that shape at
    `offset` would give, made without the rest of it. An offset may be traced: inside shard_map it is
    `lax.axis_index(...)` times the shard's size; `aligned` promises a multiple of four tokens, as blocks are.
    Without them every device and every entry of a vmap that has the same key draws the same bytes (`shared_bits`).
    """
    offset, whole = _checked_window(shape, offset, global_shape)
    if len(shape) < 2:
        made = random_bytes(key, (1, *shape), offset=(0, *offset), global_shape=(1, *whole))
        return made.reshape(shape)  # [1, features] -> [features]
    if whole[-2] % 4 == 0:
        return _bytes_by_four(key, shape, offset, whole, aligned)
    if shape == whole:  # words straddle the leading dims: flatten them, [..., tokens, features] -> [rows, features]
        rows = math.prod(shape[:-1])
        padded = (-(-rows // 4) * 4, shape[-1])
        return _bytes_by_four(key, padded, (0, 0), padded, True)[:rows].reshape(shape)
    tokens = _rows(shape, offset, whole)
    words = _words(key, _numbers(tokens >> 2, offset[-1], whole))
    return (words >> ((tokens & jnp.uint32(3)) * jnp.uint32(8))).astype(jnp.uint8)


def _bytes_by_four(
    key: Key, shape: tuple[int, ...], offset: Sequence[Offset], whole: tuple[int, ...], aligned: bool
) -> jax.Array:
    """Bytes of a window of `whole` [..., tokens, features], with tokens a multiple of four: a word for each four."""
    *lead, tokens, features = shape
    first = offset[-2]
    # A window may begin within a word: then one more row of words covers it, and the bytes before it are cut off.
    aligned = (aligned or (isinstance(first, int) and first % 4 == 0)) and tokens % 4 == 0
    count = tokens // 4 if aligned else (tokens + 6) // 4
    grouped, start = (*lead, count, features), (*offset[:-2], first // 4, offset[-1])
    whole = (*whole[:-2], whole[-2] // 4, whole[-1])
    words = _words(key, _numbers(_rows(grouped, start, whole), start[-1], whole))
    made = _spread(words)
    return made if aligned else _slice(made, (*[0] * len(lead), first % 4, 0), shape)


def _spread(words: jax.Array) -> jax.Array:
    """uint32 [..., rows, features] -> uint8 [..., 4 * rows, features], the low byte first."""
    *lead, rows, features = words.shape
    shifts = jnp.arange(0, 32, 8, dtype=jnp.uint32).reshape(4, 1)
    spread = jnp.broadcast_to(words[..., None, :], (*lead, rows, 4, features))
    # [..., rows, 4, features] -> [..., 4 * rows, features]
    return (spread >> jnp.broadcast_to(shifts, spread.shape)).astype(jnp.uint8).reshape(*lead, 4 * rows, features)


def _slice(made: jax.Array, offset: Sequence[Offset], shape: tuple[int, ...]) -> jax.Array:
    if made.shape == shape:
        return made
    return lax.dynamic_slice(made, [jnp.asarray(o, jnp.int32) for o in offset], shape)


def _checked_window(
    shape: tuple[int, ...], offset: Sequence[Offset] | None, whole: tuple[int, ...] | None
) -> tuple[tuple[Offset, ...], tuple[int, ...]]:
    """`offset` and `global_shape` of `random_bytes`; both None: the window is all of it."""
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
