"""Random bytes for stochastic rounding, from a counter and a key: the same on any mesh, and after any restart.

A tensor is seen as [tokens, features]: all leading dims flattened into tokens. Element (t, n) takes byte t % 4 of the
32-bit word number (t // 4) * features + n, so one word serves four tokens of a column, and a kernel that holds 16
tokens in registers draws four words, not sixteen. Words are a function of (key, number) alone. Three generators make
them:

- `COUNTER_HASH` (default): two multiply-xorshift rounds with one half of the key added before each. Key and counter
  meet in the first round and again in the second, so that the streams of two keys are not permutations of each other.
  About ten integer instructions a word. That is little after the second half comes in: halves that differ in a few
  bits give correlated streams. So the key is mixed first, once a tensor (`key_words`).
- `THREEFRY`: `jax.random.bits`, ten times slower on a CPU, for whoever distrusts the first.
- `PHILOX`: Philox-4x32-10, the generator of cuRAND and of Transformer Engine's kernels.

The rounding needs no cryptography: it needs uniform bytes without correlation between neighbours, steps, layers and
operands, and the tests measure that for each generator.
"""

import enum
import math

import jax
import jax.numpy as jnp
from jax import lax


class Generator(enum.Enum):
    COUNTER_HASH = "counter-hash"
    THREEFRY = "threefry"
    PHILOX = "philox"


ROUNDS = (0x243F_6A88, 0x85A3_08D3, 0x1319_8A2E, 0x0370_7344)  # the first digits of pi


def key_words(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The two uint32 words that the counter hash takes of a key, typed or raw.

    Four Feistel rounds of the hash itself: one to one, and any two keys, be they jax.random.key(0) and key(1), differ
    in half of the bits.
    """
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


def _multiply_high_low(a: int, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(high, low) words of the 64-bit product of a constant and uint32 numbers."""
    a1, a0 = jnp.uint32(a >> 16), jnp.uint32(a & 0xFFFF)
    b1, b0 = b >> 16, b & jnp.uint32(0xFFFF)
    low, cross = a0 * b0, a1 * b0
    middle = (low >> 16) + (cross & jnp.uint32(0xFFFF)) + a0 * b1
    return a1 * b1 + (cross >> 16) + (middle >> 16), jnp.uint32(a) * b


def philox4x32(
    counter: tuple[jax.Array, ...], key: tuple[jax.Array, jax.Array], *, rounds: int = 10
) -> tuple[jax.Array, ...]:
    """Four uint32 words for each 128-bit counter (Salmon et al., 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        high0, low0 = _multiply_high_low(0xD251_1F53, c0)
        high1, low1 = _multiply_high_low(0xCD9E_8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + jnp.uint32(0x9E37_79B9), k1 + jnp.uint32(0xBB67_AE85)
    return c0, c1, c2, c3


def _counter(shape: tuple[int, ...]) -> jax.Array:
    """Row-major element numbers of `shape` as uint32, built from iotas so that every shard makes its own."""
    number = jnp.zeros(shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(len(shape))):
        number = number + lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride % 2**32)
        stride *= shape[axis]
    return number


def _words(key: jax.Array, shape: tuple[int, ...], generator: Generator) -> jax.Array:
    if generator is Generator.THREEFRY:
        return jax.random.bits(key, shape, jnp.uint32)
    if generator is Generator.COUNTER_HASH:
        return hash_words(_counter(shape), *key_words(key))
    zero = jnp.zeros(shape, jnp.uint32)
    return philox4x32((_counter(shape), zero, zero, zero), _data_words(key))[0]


def random_bytes(key: jax.Array, shape: tuple[int, ...], *, generator: Generator = Generator.COUNTER_HASH) -> jax.Array:
    """uint8 [..., tokens, features] uniform bytes for `shape`; a vector is one token. Equal on every mesh."""
    if len(shape) < 2:
        return random_bytes(key, (1, *shape), generator=generator).reshape(shape)
    *lead, tokens, features = shape
    if tokens % 4:  # words straddle the leading dims: flatten them
        rows = math.prod(shape[:-1])
        padded = random_bytes(key, (-(-rows // 4) * 4, features), generator=generator)
        return padded[:rows].reshape(shape)
    words = _words(key, (*lead, tokens // 4, features), generator)
    shifts = jnp.arange(0, 32, 8, dtype=jnp.uint32).reshape(4, 1)
    spread = jnp.broadcast_to(words[..., None, :], (*lead, tokens // 4, 4, features))
    return (spread >> jnp.broadcast_to(shifts, spread.shape)).astype(jnp.uint8).reshape(shape)
