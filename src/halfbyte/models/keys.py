"""The keys of a model's linears, for many layers at once.

A fold of a key is a hundred instructions of one number, and mixing its words fifty more. Here both are done for all
linears of all layers of a segment at once, before the first of them: a program of sixteen layers without a loop
compiles in less than half the time, and no layer folds a key, or cuts one out of a table: kernels read them where they
lie.
"""

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from halfbyte.formats import MixedKey
from halfbyte.recipe import DRAWN, LinearKey, Recipe, layer_key, operand_words, site_keys

EXPERTS = "mlp/expert_"


Drawn = dict[str, jax.Array | dict[str, jax.Array]]


def keys_of_layers(key: jax.Array | None, recipes: Mapping[str, Recipe], layers: jax.Array) -> dict[str, jax.Array]:
    """The keys [layers] of the linears that have `recipes`, by site ("mlp/up"), from that of their step; `layers` are
    their layers' numbers."""
    if key is None:
        return {}
    groups = _by_length([path.removeprefix("layers/") for path in recipes])
    return {site: each for sites in groups for site, each in zip(sites, _keys(key, sites, layers), strict=True)}


def drawn_in_layers(key: jax.Array | None, recipes: Mapping[str, Recipe], layers: jax.Array) -> Drawn:
    """Of those that draw random bits the words of all that they draw (`operand_words`) by its name, [layers, 2] each;
    of experts, which derive their own, the key [layers]. Kept from a compiler that would fold them again in every
    layer."""
    if key is None:
        return {}
    drawing = {path: recipe for path, recipe in recipes.items() if recipe.stochastic}
    experts = {path: recipe for path, recipe in drawing.items() if path.startswith(f"layers/{EXPERTS}")}
    drawn: Drawn = {**keys_of_layers(key, experts, layers)}
    for sites in _by_length([path.removeprefix("layers/") for path in drawing if path not in experts]):
        words = jax.vmap(jax.vmap(operand_words))(_keys(key, sites, layers))  # [sites, layers, 9, 2]
        drawn |= {site: {name: words[i, :, n] for n, name in enumerate(DRAWN)} for i, site in enumerate(sites)}
    made: Drawn = lax.optimization_barrier(drawn)
    return made


def _by_length(sites: Sequence[str]) -> list[list[str]]:
    """Sites whose ways are equally long, together."""
    return [[site for site in sites if len(way(site)) == length] for length in sorted({len(way(s)) for s in sites})]


def _keys(step: jax.Array, sites: Sequence[str], layers: jax.Array) -> jax.Array:
    """The keys [sites, layers] of sites whose ways are equally long: a fold a step of the way."""

    def of_layer(number: jax.Array) -> jax.Array:
        begin = jnp.broadcast_to(layer_key(step, number), (len(sites),))
        return functools.reduce(site_keys, zip(*map(way, sites), strict=True), begin)

    return jax.vmap(of_layer, out_axes=1)(layers)


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
