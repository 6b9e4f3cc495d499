"""Random bytes. Oracle: the definition in NumPy, word by word.

Statistics: tests/recipes/test_random_bits.py.
"""

import functools

import format_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfbyte.formats import HashedKey, hashed_key_words, key_words, random_bytes
from halfbyte.formats.random_bits import counter_hash

pytestmark = pytest.mark.usefixtures("quick_code")

KEY = np.array([0xDEAD_BEEF, 0x0BAD_CAFE], np.uint32)


@functools.cache
def drawn(shape):
    return np.asarray(jax.jit(lambda k: random_bytes(jax.random.wrap_key_data(k), shape))(KEY))


@pytest.mark.parametrize("shape", [(8, 16), (6, 16), (2, 8, 5), (2, 3, 16), (32,), (1, 4, 4, 4)])
def test_the_definition(shape):
    whole = shape if len(shape) > 1 else (1, *shape)
    words = oracle.key_words(*KEY)
    expected = oracle.random_bytes(lambda n: oracle.hash_words(n, *words), whole).reshape(shape)
    np.testing.assert_array_equal(drawn(shape), expected)


@pytest.mark.slow
def test_numbers_wrap_at_32_bits():
    number = np.array([0, 1, 0xFFFF_FFFF, 0x8000_0000], np.uint32)
    np.testing.assert_array_equal(counter_hash(number, *KEY), oracle.hash_words(number, *KEY))


@pytest.mark.slow
def test_leading_dims_are_tokens():
    """[2, 4, 16] and [8, 16] are the same tokens."""
    np.testing.assert_array_equal(drawn((2, 4, 16)).reshape(8, 16), drawn((8, 16)))


@pytest.mark.slow
def test_a_key_is_typed_or_raw():
    typed = jax.random.wrap_key_data(jnp.asarray(KEY))
    for key in (typed, jnp.asarray(KEY)):
        assert tuple(map(int, key_words(key))) == tuple(map(int, oracle.key_words(*KEY)))


@pytest.mark.slow
def test_a_key_may_be_mixed_among_others():
    keys = jnp.asarray([[5, 6], KEY, [7, 8]], jnp.uint32)
    key = HashedKey(hashed_key_words(keys), jnp.int32(1))
    np.testing.assert_array_equal(random_bytes(key, (8, 4)), random_bytes(jnp.asarray(KEY), (8, 4)))


@pytest.mark.slow
def test_keys_differ():
    a = np.asarray(random_bytes(jax.random.key(0), (64, 64)))
    b = np.asarray(random_bytes(jax.random.key(1), (64, 64)))
    assert abs((a == b).mean() - 1 / 256) < 0.005  # 4096 bytes: three standard deviations are 0.003


def test_no_two_keys_share_words():
    """65,536 neighbouring keys give as many pairs of words. Chance would let 0.5 pairs collide in one word of 2**32."""
    keys = np.stack(np.meshgrid(np.arange(256), np.arange(256)), -1).reshape(-1, 2).astype(np.uint32)
    words = np.stack([np.asarray(w) for w in jax.jit(key_words)(keys)], -1).astype(np.uint64)
    assert len(np.unique(words[:, 0] << np.uint64(32) | words[:, 1])) == len(keys)
    assert all(len(np.unique(words[:, i])) > len(keys) - 5 for i in range(2))


@pytest.mark.slow
def test_a_bit_of_the_key_turns_half_of_the_bits_of_its_words():
    keys = np.random.default_rng(0).integers(0, 2**32, (512, 1, 2), dtype=np.uint64).astype(np.uint32)
    one_bit = np.uint32(1) << np.arange(32, dtype=np.uint32)
    turned = keys ^ np.kron(np.eye(2, dtype=np.uint32), one_bit).T  # [512, 64, 2]
    mixed = jax.jit(lambda k: jnp.stack(key_words(k), -1))
    flips = np.asarray(mixed(keys) ^ mixed(turned))  # [keys, turned bits, words]
    share = np.unpackbits(flips.view(np.uint8), axis=-1).mean(0)  # [64, 64]
    assert np.abs(share - 0.5).max() < 0.12  # 4096 shares of 512 coins each: 0.12 is 5.4 standard deviations


WINDOWS = [  # global shape, offset, shape
    ((64, 48), (16, 32), (32, 16)),
    ((64, 48), (5, 3), (10, 7)),  # within a word
    ((63, 48), (5, 3), (10, 7)),  # tokens no multiple of four
    ((4, 16, 8), (1, 4, 0), (2, 8, 8)),
    ((4, 6, 8), (1, 3, 2), (2, 3, 4)),  # words straddle the leading dims
    ((40,), (7,), (16,)),
    ((3, 8, 16), (0, 0, 0), (3, 8, 16)),
]


def test_a_window_is_a_slice_of_the_whole():
    """With offsets that are known and with offsets that are traced."""

    def draw(offsets, traced):
        key = jax.random.wrap_key_data(KEY)
        return [
            random_bytes(key, shape, offset=tuple(t if traced else o), global_shape=whole)
            for (whole, o, shape), t in zip(WINDOWS, offsets, strict=True)
        ]

    offsets = [np.array(offset, np.int32) for _, offset, _ in WINDOWS]
    for traced in (False, True):
        found = jax.jit(draw, static_argnums=1)(offsets, traced)
        for (whole, offset, shape), window in zip(WINDOWS, found, strict=True):
            place = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
            np.testing.assert_array_equal(window, drawn(whole)[place])


@pytest.mark.slow
def test_a_shard_makes_its_own_bytes():
    """The end of a tensor of 2**34 elements, which is never made whole; its bytes come from 64-bit numbers."""
    whole, shape = (2**20 + 4, 2**14), (8, 16)
    offset = (2**20 - 4, 100)
    found = jax.jit(lambda o: random_bytes(jax.random.wrap_key_data(KEY), shape, offset=o, global_shape=whole))(offset)
    token, feature = np.arange(offset[0], offset[0] + 8)[:, None], np.arange(100, 116)
    number = token // 4 * 2**14 + feature  # int64; the second half is above 2**32
    assert number[0, 0] < 2**32 <= number[4, 0]
    low = oracle.hash_words(number, *oracle.key_words(*KEY))
    np.testing.assert_array_equal(found[:4], (low >> (8 * (token % 4)).astype(np.uint32)).astype(np.uint8)[:4])
    k0, k1 = oracle.key_words(*KEY)
    for i, constant in enumerate((0x243F_6A88, 0x85A3_08D3)):
        mask = oracle.hash_words(np.array(1), constant, constant) ^ oracle.hash_words(np.array(0), constant, constant)
        k0, k1 = (k0 ^ mask, k1) if i == 0 else (k0, k1 ^ mask)
    high = oracle.hash_words(number, k0, k1)
    np.testing.assert_array_equal(found[4:], (high >> (8 * (token % 4)).astype(np.uint32)).astype(np.uint8)[4:])


@pytest.mark.slow
def test_numbers_do_not_wrap():
    """At width 16384, tokens t and t + 2**20 have bytes of their own."""
    whole = (2**21, 2**14)
    make = jax.jit(lambda t: random_bytes(jax.random.wrap_key_data(KEY), (64, 1024), offset=(t, 0), global_shape=whole))
    a, b = (np.asarray(make(t)) for t in (0, 2**20))
    assert abs((a == b).mean() - 1 / 256) < 0.001  # 65,536 bytes: four standard deviations
    assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.016
    np.testing.assert_array_equal(a, drawn((64, 2**14))[:, :1024])


def test_a_window_that_does_not_fit():
    key = jax.random.key(0)
    with pytest.raises(ValueError, match=r"shape \(8, 8\) at offset \(1, 0\) does not lie in global_shape \(8, 8\)"):
        random_bytes(key, (8, 8), offset=(1, 0), global_shape=(8, 8))
    with pytest.raises(ValueError, match="together"):
        random_bytes(key, (8, 8), offset=(0, 0))


@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
def test_random_bytes_window_at_each_offset_is_a_slice(tokens):
    """A window of a few tokens that starts anywhere in a word of four."""
    key = jax.random.wrap_key_data(KEY)
    draw = jax.jit(lambda offset: random_bytes(key, (tokens, 8), offset=(offset, 0), global_shape=(16, 8)))
    for offset in range(8):
        np.testing.assert_array_equal(draw(offset), drawn((16, 8))[offset : offset + tokens])
