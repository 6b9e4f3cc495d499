"""Statistics of the random bytes, under the keys that training derives.

Oracle: the distributions of truly random bytes. All keys are fixed, so a test gives the same verdict each time. There
are about 400 statistics in all; each must lie within 5 standard deviations (chance of a false alarm for all of them
together: 2e-4).
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfbyte.formats import random_bytes
from halfbyte.formats.random_bits import counter_hash
from halfbyte.recipes import ROLES, layer_key, role_key, site_key, step_key

SHAPE = (1024, 256)  # [tokens, features]
COUNT = math.prod(SHAPE)
LIMIT = 5.0  # standard deviations

VARIANTS = {
    "steps": [(step, 0, "layers/mlp/up", "dgrad_dy") for step in range(4)],
    "layers": [(0, layer, "layers/mlp/up", "dgrad_dy") for layer in range(4)],
    "sites": [(0, 0, site, "dgrad_dy") for site in ("layers/mlp/gate", "layers/mlp/up", "layers/mlp/down", "head")],
    "roles": [(0, 0, "layers/mlp/up", role) for role in ROLES],
}


@pytest.fixture(scope="module")
def draw():
    """Bytes of one tensor as int32 [tokens, features], for (step, layer, site, role)."""
    made = {}
    make = jax.jit(lambda key: random_bytes(key, SHAPE))

    def of(step, layer, site, role):
        at = (step, layer, site, role)
        if at not in made:
            key = role_key(site_key(layer_key(step_key(0, step), layer), site), role)
            made[at] = np.asarray(make(key)).astype(np.int32)
        return made[at]

    return of


def chi_square(counts):
    """Standard deviations by which counts over equally likely bins miss the mean of a chi-square."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


def correlation(a, b):
    """Correlation of two streams of bytes, in standard deviations; and the largest over their eight pairs of equal
    bits.
    """
    whole = np.corrcoef(a.ravel(), b.ravel())[0, 1] * math.sqrt(a.size)
    differing = [(((a ^ b) >> bit) & 1).sum() for bit in range(8)]
    bits = [(count - a.size / 2) / math.sqrt(a.size / 4) for count in differing]
    return max(abs(whole), *map(abs, bits))


def joint(a, b):
    """Chi-square of pairs of nibbles (high of a, high of b), in standard deviations."""
    return chi_square(np.bincount(((a >> 4) * 16 + (b >> 4)).ravel(), minlength=256))


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_bytes_are_uniform(draw, variant):
    for at in VARIANTS[variant]:
        assert abs(chi_square(np.bincount(draw(*at).ravel(), minlength=256))) < LIMIT


@pytest.mark.slow(fast_cases=["steps", "layers"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_streams_of_different_steps_layers_sites_and_roles_are_uncorrelated(draw, variant):
    streams = [draw(*at) for at in VARIANTS[variant]]
    for i, a in enumerate(streams):
        for b in streams[:i]:
            assert correlation(a, b) < LIMIT and abs(joint(a, b)) < LIMIT
            # The same word elsewhere: streams that are each other's shift would pass the test above.
            assert correlation(a[:-4], b[4:]) < LIMIT and correlation(a[:, :-1], b[:, 1:]) < LIMIT


# Four tokens share a word, so shifts of 1..3 tokens test the bytes of a word against each other; 16 is a block.
@pytest.mark.parametrize("shift", [(1, 0), (2, 0), (3, 0), (4, 0), (16, 0), (0, 1), (0, 2), (0, 16), (1, 1), (4, 1)])
def test_neighbouring_elements_are_uncorrelated(draw, shift):
    bytes_ = draw(*VARIANTS["steps"][0])
    down, right = shift
    a, b = bytes_[: SHAPE[0] - down, : SHAPE[1] - right], bytes_[down:, right:]
    assert correlation(a, b) < LIMIT and abs(joint(a, b)) < LIMIT


def test_means_of_rows_columns_and_blocks_spread_as_independent_bytes_would(draw):
    bytes_ = (draw(*VARIANTS["steps"][0]) - 127.5) / math.sqrt((256**2 - 1) / 12)
    for means in (bytes_.mean(0), bytes_.mean(1), bytes_.reshape(1024, 16, 16).mean(-1).ravel()):
        scaled = means**2 * (COUNT / means.size)  # chi-square with one degree of freedom each
        assert abs(scaled.mean() - 1) < LIMIT * math.sqrt(2 / means.size)


def bare_keys():
    """Keys as users make them by hand: neighbouring seeds, seeds one bit apart, split and folded keys, raw words."""
    seeds = [jax.random.key_data(jax.random.key(seed)) for seed in (0, 1, 2, 3, 4, 256, 65536, 2**31 - 1)]
    zero = jax.random.key(0)
    derived = [*jax.random.split(zero, 2), *(jax.random.fold_in(zero, i) for i in (2, 3))]  # fold_in 0, 1 are the split
    words = [np.array(w, np.uint32) for w in ((1, 0), (2, 0), (1, 1), (0, 0x9E37_79B9), (0x9E37_79B9, 0))]
    return np.stack([*seeds, *map(jax.random.key_data, derived), *words])


@pytest.mark.slow
def test_streams_of_keys_made_by_hand_are_uncorrelated():
    """17 keys, 136 pairs: 1,000 statistics within 5 standard deviations (chance of a false alarm: 1e-3). Unmixed,
    the last key would have the stream of the first, one word on.
    """
    draw_all = jax.jit(jax.vmap(lambda k: random_bytes(jax.random.wrap_key_data(k), SHAPE)))
    streams = np.asarray(draw_all(bare_keys())).astype(np.int32)
    for i, a in enumerate(streams):
        assert abs(chi_square(np.bincount(a.ravel(), minlength=256))) < LIMIT
        for shift in (1, 2, 3, 4):  # neighbouring tokens
            assert abs(joint(a[:-shift], a[shift:])) < LIMIT
        assert abs(joint(a[:, :-1], a[:, 1:])) < LIMIT  # neighbouring features
        for b in streams[:i]:
            assert correlation(a, b) < LIMIT and abs(joint(a, b)) < LIMIT
            assert abs(joint(a[:-4], b[4:])) < LIMIT and abs(joint(a[:, :-1], b[:, 1:])) < LIMIT


@pytest.mark.slow
def test_unmixed_words_of_neighbouring_keys_would_correlate():
    """Why `key_words` mixes: the hash adds the second word late. Were it not so, the mixing could go."""
    number = jnp.arange(2**16, dtype=jnp.uint32)
    a, b = (np.asarray(counter_hash(number, jnp.uint32(0), jnp.uint32(k))).astype(np.int64) for k in (0, 1))
    assert correlation(a & 0xFF, b & 0xFF) > 20
