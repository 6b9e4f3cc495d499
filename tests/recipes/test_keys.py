"""Keys. Oracle: integers written down once (a key is part of a run's identity), and pairwise difference of all keys
of a model.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfbyte.formats import HashedKey, key_words
from halfbyte.recipes import (
    GEMM_ROLES,
    ROLES,
    layer_key,
    role_key,
    signs_key,
    site_key,
    site_keys,
    step_key,
    stream_key_words,
)

SITES = ("layers/mlp/gate", "layers/mlp/up", "layers/mlp/down", "layers/attention/q")


def full_key(seed, step, layer, site, role):
    return role_key(site_key(layer_key(step_key(seed, step), layer), site), role)


def words(key):
    return tuple(int(w) for w in jax.random.key_data(key))


def test_keys_never_change():
    # A change here changes every run's random bits: it must be deliberate.
    assert words(full_key(0, 3, 1, "layers/mlp/up", "dgrad_dy")) == (3637866579, 3051378665)


def test_every_step_layer_site_and_role_has_its_own_key():
    @jax.jit
    def all_of(step, layer):
        return jnp.stack([jax.random.key_data(full_key(7, step, layer, s, r)) for s in SITES for r in ROLES])

    grid = np.concatenate([np.asarray(all_of(step, layer)) for step, layer in itertools.product(range(5), range(4))])
    assert len(np.unique(grid, axis=0)) == 5 * 4 * len(SITES) * len(ROLES)
    assert len(np.unique(grid[:, 0])) == len(grid) and len(np.unique(grid[:, 1])) == len(grid)


@pytest.mark.slow
def test_step_and_layer_may_be_traced():
    traced = jax.jit(lambda step, layer: jax.random.key_data(full_key(0, step, layer, "layers/mlp/up", "dgrad_dy")))(
        3, 1
    )
    assert tuple(int(w) for w in traced) == words(full_key(0, 3, 1, "layers/mlp/up", "dgrad_dy"))


def test_the_key_has_two_words_whatever_the_default_generator():
    with jax.default_prng_impl("rbg"):
        assert words(full_key(0, 3, 1, "layers/mlp/up", "dgrad_dy")) == (3637866579, 3051378665)


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey], ids=["typed", "raw"])
def test_unsafe_rbg_steps_and_layers_have_own_keys(make_key):
    """`fold_in` of unsafe_rbg is an exclusive or: (step 3, layer 3) and (step 4, layer 4) would have one key."""
    with jax.default_prng_impl("unsafe_rbg"):
        root = make_key(0)
        found = jax.vmap(
            lambda s, n: jax.random.key_data(site_key(layer_key(jax.random.fold_in(root, s), n), "mlp/up"))
        )(*(place.ravel() for place in jnp.indices((5, 5))))
        assert len(np.unique(found, axis=0)) == 25
        assert words(layer_key(layer_key(root, 1), 2)) != words(layer_key(layer_key(root, 2), 1))


def test_a_raw_key_is_as_good_as_a_typed_one():
    raw, typed = jax.random.PRNGKey(3), jax.random.key(3)
    assert tuple(int(w) for w in role_key(raw, "dgrad_dy")) == words(role_key(typed, "dgrad_dy"))
    assert tuple(int(w) for w in signs_key(raw, "wgrad")) == words(signs_key(typed, "wgrad"))


@pytest.mark.slow
def test_of_all_that_is_drawn_each_has_the_key_that_the_linears_own_gives():
    found, own = stream_key_words(step_key(0, 0)), step_key(0, 0)
    keys = [*(role_key(own, role) for role in ROLES), *(signs_key(own, gemm) for gemm in GEMM_ROLES)]
    assert found.tolist() == [[int(word) for word in key_words(key)] for key in keys]


@pytest.mark.slow
def test_keys_of_several_sites_are_folded_at_once():
    keys = jax.random.split(step_key(0, 0), 2)
    found = site_keys(keys, SITES[:2])
    assert [words(key) for key in found] == [words(site_key(*pair)) for pair in zip(keys, SITES, strict=False)]


@pytest.mark.slow
def test_of_keys_mixed_before_each_is_found_by_its_name():
    table = jnp.arange(6, dtype=jnp.uint32).reshape(3, 2)
    drawn = {name: HashedKey(table + 10 * n, jnp.int32(1)) for n, name in enumerate(("dgrad_dy", "wgrad signs"))}
    assert [int(word) for word in key_words(role_key(drawn, "dgrad_dy"))] == [2, 3]
    assert [int(word) for word in key_words(signs_key(drawn, "wgrad"))] == [12, 13]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4, 6])
def test_an_array_of_keys_is_not_taken_for_one(count):
    with pytest.raises(ValueError, match="fold_in accepts a single key"):
        role_key(jax.random.split(step_key(0, 0), count), "wgrad_dy")


def test_an_unknown_role_is_refused():
    with pytest.raises(ValueError, match=r"role must be one of fprop_x, .*, got 'dgrad_x'"):
        role_key(step_key(0, 0), "dgrad_x")
