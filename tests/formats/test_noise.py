"""Random bytes. Oracle: `oracle_table`, word by word. Statistics: tests/recipes/test_random_bits.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle_table as table
import pytest

from halfbyte.formats import HashedKey, hashed_key_words, key_words, random_bytes

pytestmark = pytest.mark.usefixtures("quick_code")

KEY = np.array([0xDEAD_BEEF, 0x0BAD_CAFE], np.uint32)
WORDS = table.key_words(*KEY)


@functools.cache
def drawn(shape):
    return table.random_bytes(shape if len(shape) > 1 else (1, *shape), WORDS).reshape(shape)


def test_random_bytes_of_any_shape_equal_table():
    shapes = [(8, 16), (6, 16), (2, 8, 5), (2, 3, 16), (32,), (1, 4, 4, 4)]
    made = jax.jit(lambda key: [random_bytes(jax.random.wrap_key_data(key), shape) for shape in shapes])(KEY)
    for shape, array in zip(shapes, made, strict=True):
        np.testing.assert_array_equal(array, drawn(shape))


def test_key_words_of_typed_raw_or_hashed_key_equal_table():
    keys = jnp.asarray([[5, 6], KEY, [7, 8]], jnp.uint32)
    hashed = HashedKey(hashed_key_words(keys), jnp.int32(1))
    for key in (jax.random.wrap_key_data(jnp.asarray(KEY)), jnp.asarray(KEY), hashed):
        assert tuple(map(int, key_words(key))) == WORDS


def test_no_two_keys_share_words():
    """65,536 neighbouring keys give as many pairs of words. Chance would let 0.5 pairs collide in one word of 2**32."""
    keys = np.stack(np.meshgrid(np.arange(256), np.arange(256)), -1).reshape(-1, 2).astype(np.uint32)
    words = np.stack([np.asarray(w) for w in jax.jit(key_words)(keys)], -1).astype(np.uint64)
    assert len(np.unique(words[:, 0] << np.uint64(32) | words[:, 1])) == len(keys)
    assert all(len(np.unique(words[:, i])) > len(keys) - 5 for i in range(2))


@pytest.mark.slow
def test_key_bit_flips_half_of_the_bits_of_its_words():
    keys = np.random.default_rng(0).integers(0, 2**32, (512, 1, 2), dtype=np.uint64).astype(np.uint32)
    one_bit = np.uint32(1) << np.arange(32, dtype=np.uint32)
    flipped = keys ^ np.kron(np.eye(2, dtype=np.uint32), one_bit).T  # [512, 64, 2]
    mixed = jax.jit(lambda k: jnp.stack(key_words(k), -1))
    flips = np.asarray(mixed(keys) ^ mixed(flipped))  # [keys, flipped bits, words]
    share = np.unpackbits(flips.view(np.uint8), axis=-1).mean(0)  # [64, 64]
    assert np.abs(share - 0.5).max() < 0.12  # 4096 shares of 512 coins each: 0.12 is 5.4 standard deviations


WINDOWS = [  # global shape, offset, shape
    ((64, 48), (16, 32), (32, 16)),
    ((63, 48), (5, 3), (10, 7)),  # tokens no multiple of four
    ((4, 16, 8), (1, 4, 0), (2, 8, 8)),
    ((4, 6, 8), (1, 3, 2), (2, 3, 4)),  # words straddle the leading dims
    ((40,), (7,), (16,)),
    ((3, 8, 16), (0, 0, 0), (3, 8, 16)),
]


@pytest.mark.parametrize("traced", [False, True])
def test_random_bytes_window_is_slice_of_whole(traced):
    """With offsets that are known and with offsets that are traced."""

    def draw(offsets):
        key = jax.random.wrap_key_data(KEY)
        return [
            random_bytes(key, shape, offset=tuple(o) if traced else known, global_shape=whole)
            for (whole, known, shape), o in zip(WINDOWS, offsets, strict=True)
        ]

    windows = jax.jit(draw)([np.array(offset, np.int32) for _, offset, _ in WINDOWS])
    for (whole, offset, shape), window in zip(WINDOWS, windows, strict=True):
        index = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
        np.testing.assert_array_equal(window, drawn(whole)[index])


def test_random_bytes_window_at_each_offset_is_a_slice():
    """A window of a few tokens that starts anywhere in a word of four."""
    key, sizes = jax.random.wrap_key_data(KEY), (1, 2, 3, 5)

    @jax.jit
    def draw(offset):
        return [random_bytes(key, (n, 8), offset=(offset, 0), global_shape=(16, 8)) for n in sizes]

    for offset in range(8):
        for tokens, window in zip(sizes, draw(offset), strict=True):
            np.testing.assert_array_equal(window, drawn((16, 8))[offset : offset + tokens])


def test_random_bytes_beyond_32_bits_have_their_own_words():
    """The end of a tensor of 2**34 elements, which is never made whole: the second half has indices above 2**32, whose
    key words are masked by the hash of the upper half."""
    whole, shape = (2**20 + 4, 2**14), (8, 16)
    offset = (2**20 - 4, 100)
    made = jax.jit(lambda o: random_bytes(jax.random.wrap_key_data(KEY), shape, offset=o, global_shape=whole))(offset)
    token, feature = np.arange(offset[0], offset[0] + 8)[:, None], np.arange(100, 116)
    index = token // 4 * 2**14 + feature  # int64
    assert index[0, 0] < 2**32 <= index[4, 0]

    def masked(word, constant):
        one, zero = (int(table.hash_words(np.array(u), constant, constant)) for u in (1, 0))
        return word ^ one ^ zero

    high = masked(WORDS[0], 0x243F_6A88), masked(WORDS[1], 0x85A3_08D3)
    words = np.where(index < 2**32, table.hash_words(index % 2**32, *WORDS), table.hash_words(index % 2**32, *high))
    np.testing.assert_array_equal(made, (words >> (8 * (token % 4)).astype(np.uint32)).astype(np.uint8))


def test_random_bytes_window_outside_is_refused():
    key = jax.random.key(0)
    with pytest.raises(ValueError, match=r"shape \(8, 8\) at offset \(1, 0\) does not lie in global_shape \(8, 8\)"):
        random_bytes(key, (8, 8), offset=(1, 0), global_shape=(8, 8))
    with pytest.raises(ValueError, match="together"):
        random_bytes(key, (8, 8), offset=(0, 0))
