"""Random bytes. Oracle: the definition in NumPy, word by word. (Their statistics: tests/recipe/test_random_bits.py.)"""

import format_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfbyte.formats import Generator, key_words, random_bytes
from halfbyte.formats.noise import hash_words, philox4x32

KEY = np.array([0xDEAD_BEEF, 0x0BAD_CAFE], np.uint32)


def drawn(shape, generator=Generator.COUNTER_HASH):
    return np.asarray(jax.jit(lambda k: random_bytes(jax.random.wrap_key_data(k), shape, generator=generator))(KEY))


@pytest.mark.parametrize("shape", [(8, 16), (6, 16), (2, 8, 5), (2, 3, 16), (32,), (1, 4, 4, 4)])
def test_the_definition(shape):
    whole = shape if len(shape) > 1 else (1, *shape)
    words = oracle.key_words(*KEY)
    expected = oracle.random_bytes(lambda n: oracle.hash_words(n, *words), whole).reshape(shape)
    np.testing.assert_array_equal(drawn(shape), expected)


def test_numbers_wrap_at_32_bits():
    number = np.array([0, 1, 0xFFFF_FFFF, 0x8000_0000], np.uint32)
    np.testing.assert_array_equal(hash_words(number, *KEY), oracle.hash_words(number, *KEY))


@pytest.mark.parametrize("generator", list(Generator), ids=lambda g: g.value)
def test_leading_dims_are_tokens(generator):
    """[2, 4, 16] and [8, 16] are the same tokens, whatever makes the words."""
    np.testing.assert_array_equal(drawn((2, 4, 16), generator).reshape(8, 16), drawn((8, 16), generator))


def test_philox_words():
    number = np.arange(12, dtype=np.uint32).reshape(3, 4)
    zero = np.zeros_like(number)
    words = np.asarray(
        philox4x32(tuple(jnp.asarray(c) for c in (number, zero, zero, zero)), tuple(jnp.asarray(KEY)))[0]
    )
    np.testing.assert_array_equal(
        drawn((12, 4), Generator.PHILOX), oracle.random_bytes(lambda n: words.ravel()[n], (12, 4))
    )


def test_a_key_is_typed_or_raw():
    typed = jax.random.wrap_key_data(jnp.asarray(KEY))
    for key in (typed, jnp.asarray(KEY)):
        assert tuple(map(int, key_words(key))) == tuple(map(int, oracle.key_words(*KEY)))


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


def test_a_bit_of_the_key_turns_half_of_the_bits_of_its_words():
    keys = np.random.default_rng(0).integers(0, 2**32, (512, 1, 2), dtype=np.uint64).astype(np.uint32)
    one_bit = np.uint32(1) << np.arange(32, dtype=np.uint32)
    turned = keys ^ np.kron(np.eye(2, dtype=np.uint32), one_bit).T  # [512, 64, 2]
    mixed = jax.jit(lambda k: jnp.stack(key_words(k), -1))
    flips = np.asarray(mixed(keys) ^ mixed(turned))  # [keys, turned bits, words]
    share = np.unpackbits(flips.view(np.uint8), axis=-1).mean(0)  # [64, 64]
    assert np.abs(share - 0.5).max() < 0.12  # 4096 shares of 512 coins each: 0.12 is 5.4 standard deviations
