"""The linears of a layer, through `ops.qdots` and `ops.mlp`.

Under `compute_dtype=float32` a linear that the policy leaves alone is a plain float32 product: the bf16 recipe would
round its operands, and that mode exists to compare the model with another implementation to the last digits.

On a mesh x comes and goes as it lies between blocks, its positions cut over `tensor` too; inside, features are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from halfbyte import ops
from halfbyte.models.context import BETWEEN, Axes, Context, LayerContext, inside
from halfbyte.models.keys import EXPERTS
from halfbyte.models.params import Params
from halfbyte.models.remat import named
from halfbyte.models.spec import flatten, nest
from halfbyte.nn.norm import by_xla
from halfbyte.ops.shards import axes_of, cut_of, empty_stack
from halfbyte.recipe import Recipe, Segment
from halfbyte.sharding import outer_axes

MLP_SITES = ("gate", "up", "down")
Kept = tuple[tuple[jax.Array, jax.Array] | None, dict[str, jax.Array]]  # `Stacks`, without a layer's number


def remembered(layers: Params, amaxes: jax.Array, segment: Segment, paths: Sequence[str]) -> Params:
    """Stacked `layers` of a segment with `amaxes` [layers, paths, 3] beside the weights of recipes with a history."""

    def with_amaxes(path: str, weight: Any) -> Any:
        if path not in segment.recipes or not segment.recipes[path].history:
            return weight
        return ops.Remembered(weight, amaxes[:, paths.index(path)])

    return nest({path: with_amaxes(f"layers/{path}", weight) for path, weight in flatten(layers).items()})


def quantize_ahead(layers: Params, x: jax.Array, here: LayerContext) -> Params:
    """Stacked `layers` of a loop with the codes of those weights that are gathered as codes; x is the stream."""
    sites = [tuple(path.split("/")[1:]) for path in here.recipes if not path.startswith(f"layers/{EXPERTS}")]
    if not (here.on_mesh and here.ctx.looped and here.divides(x, *(axes for at in sites for axes in here.ends(*at)))):
        return layers
    flat = flatten(layers)
    ahead = {
        path: site
        for path, at in (("/".join(at), at) for at in sites)
        if (site := _site(here, *at)).worth_making_ahead(x.ndim) and not isinstance(flat[path], ops.QWeight)
    }
    if not ahead:
        return layers
    stacks = {path: flat[path] for path in ahead}
    return nest({**flat, **ops.quantize_stacks(stacks, jax.ShapeDtypeStruct(x.shape, x.dtype), ahead)})


def _site(here: LayerContext, group: str, name: str) -> ops.Site:
    recipe = here.recipe(group, name)
    return ops.Site(recipe, here.backend(recipe), here.placement(group, name))


def linears(
    x: jax.Array, weights: Params, here: LayerContext, group: str, names: Sequence[str],
    copies: Sequence[jax.Array] = (),
) -> tuple[jax.Array, ...]:  # fmt: skip
    """x [..., inputs] times each of the weights `names` of `group` ("attention" or "mlp"), in x's dtype. With `copies`,
    x once more for each further linear, each has its own gradient.
    """
    recipes, x = [here.recipe(group, name) for name in names], here.into(x, group, names)

    def given(name: str, y: jax.Array) -> jax.Array:
        return named(here.out_of(y, group, name))

    if all(is_exact(x, recipe) for recipe in recipes):
        return tuple(given(n, jnp.dot(x, here.at_rest(group, n, weights[n]).astype(x.dtype))) for n in names)
    made = ops.qdots(
        x,
        [weights[name] for name in names],
        recipes=recipes,
        keys=[here.keys.get(f"{group}/{name}") for name in names],
        execution=here.execution(x, group, names, weights),
        copies=copies,
    )
    return tuple(given(name, y) for name, y in zip(names, made, strict=True))


def gated_mlp(
    x: jax.Array, weights: Params, here: LayerContext, activation: ops.Activation, sites: Sequence[str] = MLP_SITES
) -> jax.Array:
    """(a(x gate) * (x up)) down, in x's dtype, with the weights that are called `sites`."""
    recipes = dict(zip(MLP_SITES, (here.recipe("mlp", name) for name in sites), strict=True))
    if all(is_exact(x, recipe) for recipe in recipes.values()):
        gate, up = linears(x, weights, here, "mlp", sites[:2])
        (y,) = linears(activation.curve(gate) * up, weights, here, "mlp", sites[2:])
        return y
    stacks, x = here.stacks, here.into(x, "mlp", sites[:2])
    place = None if stacks is None or stacks.both is None else (*stacks.both, stacks.at)
    gate, up, down = (weights[name] for name in sites)
    y, kept = ops.mlp_in_stacks(
        x,
        (gate, up, down),
        place,
        recipe=recipes,
        key=tuple(here.keys.get(f"mlp/{name}") for name in sites),
        middle=ops.Middle(activation, "input" if place is None and here.ctx.remat == "quantized" else "fast"),
        execution=here.execution(x, "mlp", sites, weights),
    )
    if stacks is not None and kept is not None:
        stacks.both = kept[:2]
    return here.out_of(y, "mlp", sites[2])


def stacks_of(segment: Segment, x: jax.Array, width: int, ctx: Context) -> Kept | None:
    """Empty stacks of a segment's looped layers: of gate's and up's results, of `width`, and of what norms read. None
    where each layer keeps its own: without a gradient or a loop, under remat, or where no kernel would read them.
    """
    if not ctx.keeps_stacks:
        return None
    both, norms = _stacks_of_products(segment, x, width, ctx), _stacks_of_norms(segment, x, ctx)
    return (both, norms) if both or norms else None


def _stacks_of_products(segment: Segment, x: jax.Array, width: int, ctx: Context) -> tuple[jax.Array, jax.Array] | None:
    """None without a quantized MLP, or where the mesh does not cut them evenly over all its axes."""
    axes, layers = inside("mlp"), segment.stop - segment.start
    mlps = [segment.recipes[path] for path in segment.recipes if path.removeprefix("layers/mlp/") in MLP_SITES]
    quantized = any(recipe.quantized for recipe in mlps) and x.dtype == jnp.bfloat16
    if not quantized or layers < 2 or not _cut_evenly(x, axes, ctx):
        return None
    spec = None if ctx.mesh is None else ctx.rules.spec(axes, ctx.mesh)
    g, u = (empty_stack(layers, (*x.shape[:-1], width), x.dtype, mesh=ctx.mesh, spec=spec) for _ in range(2))
    return g, u


def _stacks_of_norms(segment: Segment, x: jax.Array, ctx: Context) -> dict[str, jax.Array]:
    """By group; none where norms are XLA's."""
    if by_xla(x.shape, x.dtype, looped=False, mesh=ctx.mesh, rules=ctx.rules):
        return {}
    layers, spec = segment.stop - segment.start, None if ctx.mesh is None else ctx.rules.spec(BETWEEN, ctx.mesh)
    return {group: empty_stack(layers, x.shape, x.dtype, mesh=ctx.mesh, spec=spec) for group in ("attention", "mlp")}


def _cut_evenly(x: jax.Array, axes: Axes, ctx: Context) -> bool:
    """Whether a result of `axes` made of x is cut over every axis of the mesh, evenly."""
    if ctx.mesh is None:
        return True
    cut = axes_of(cut_of(ctx.rules.spec(axes, ctx.mesh), len(axes)))
    over_all = all(axis in (*cut, *outer_axes()) for axis, size in ctx.mesh.shape.items() if size > 1)
    return over_all and LayerContext(ctx, {}, {}, {}).divides(x, BETWEEN, axes)


def is_exact(x: jax.Array, recipe: Recipe) -> bool:
    """Whether this product is plain float32."""
    return x.dtype == jnp.float32 and not recipe.quantized
