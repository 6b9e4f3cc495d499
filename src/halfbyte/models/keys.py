"""The keys of a model's linears, for many layers at once.

A fold of a key is a hundred instructions of one number, and mixing its words fifty more. Here both are done for all
layers of a segment at once, before the first of them: a program of sixteen layers without a loop compiles in less than
half the time, and no layer folds a key, or cuts one out of a table: kernels read them where they lie.
"""

import functools
from collections.abc import Mapping

import jax
from jax import lax

from halfbyte.formats import MixedKey
from halfbyte.recipe import LinearKey, Recipe, layer_key, operand_words, site_key

EXPERTS = "mlp/expert_"


def keys_of_layers(key: jax.Array | None, recipes: Mapping[str, Recipe], layers: jax.Array) -> dict[str, jax.Array]:
    """The keys [layers] of the linears that have `recipes`, by site ("mlp/up"), from that of their step; `layers` are
    their layers' numbers."""
    if key is None:
        return {}
    step, sites = key, [path.removeprefix("layers/") for path in recipes]

    def of_layer(number: jax.Array) -> dict[str, jax.Array]:
        return {site: functools.reduce(site_key, way(site), layer_key(step, number)) for site in sites}

    return jax.vmap(of_layer)(layers)


Drawn = dict[str, jax.Array | dict[str, jax.Array]]


def drawn_in_layers(key: jax.Array | None, recipes: Mapping[str, Recipe], layers: jax.Array) -> Drawn:
    """`keys_of_layers` of those that draw random bits, and in the place of a linear's key the words of all that it
    draws (`operand_words`), [layers, 2] each; experts derive their own. Kept from a compiler that would fold them again
    in every layer."""
    found = keys_of_layers(key, {path: recipe for path, recipe in recipes.items() if recipe.stochastic}, layers)
    drawn = {site: each if site.startswith(EXPERTS) else jax.vmap(operand_words)(each) for site, each in found.items()}
    made: Drawn = lax.optimization_barrier(drawn)
    return made


def drawn_in_layer(drawn: Drawn, at: jax.Array) -> dict[str, LinearKey]:
    """What the linears of the layer at place `at` draw, by site."""

    def of_linear(each: jax.Array | dict[str, jax.Array]) -> LinearKey:
        if isinstance(each, dict):
            return {name: MixedKey(words, at) for name, words in each.items()}
        return lax.dynamic_index_in_dim(each, at, keepdims=False)

    return {site: of_linear(each) for site, each in drawn.items()}


def way(site: str) -> tuple[str, ...]:
    """The names that lead from a layer's key to a linear's: those of a gated MLP that is one op lie under its own."""
    group, _, name = site.partition("/")
    if group != "mlp" or site.startswith(EXPERTS):
        return (f"layers/{site}",)
    op, _, part = name.rpartition("_")
    return (f"layers/mlp/{op}" if op else "layers/mlp", part)
