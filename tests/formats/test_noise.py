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
    expected = oracle.random_bytes(lambda n: oracle.hash_words(n, *KEY), whole).reshape(shape)
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
        assert [int(w) for w in key_words(key)] == KEY.tolist()


def test_keys_differ():
    a = np.asarray(random_bytes(jax.random.key(0), (64, 64)))
    b = np.asarray(random_bytes(jax.random.key(1), (64, 64)))
    assert abs((a == b).mean() - 1 / 256) < 0.005  # 4096 bytes: three standard deviations are 0.003
