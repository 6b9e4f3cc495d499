"""A mixture of experts in the place of a layer's MLP: route, sort by expert, three grouped linears, weigh and add up.

Nothing is dropped: an expert takes all tokens that chose it. Those that are sorted together are those of one
microbatch, on every mesh. The router is float32 and never quantized; the load is left in `here.routed`.

On a mesh every device knows the logits of all tokens, each made on its token's device, and multiplies its share of the
experts, with all rows that these have in the microbatch: codes, scales and random bits are those of one device. Rows
come from their tokens' devices and go back there (`ops.exchange`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from halfbyte.distributed.mesh import ALL_MESH_AXES, EXPERT_AXIS
from halfbyte.models.config import EXPERT_SITES, LlamaConfig
from halfbyte.models.linear_layers import is_float32_product
from halfbyte.models.model_context import RESIDUAL_STREAM_AXES, LayerContext
from halfbyte.models.params import Params
from halfbyte.models.quantized_params import has_shared_scale, matrix_amaxes
from halfbyte.ops.activation import ACTIVATIONS, gated_activation
from halfbyte.ops.expert_tiles import ExpertTiles, apply_in_tiles, buffer_capacity, choose_tile_rows, row_of_pair
from halfbyte.ops.grouped_linear import check_grouped_support, grouped_matmul
from halfbyte.ops.linear_sharding import DimAxes, axes_in, dim_axes_of_spec, run_in_shard_map
from halfbyte.ops.moe_dispatch import (
    ExpertRoute,
    RouterOutput,
    all_to_all_combine,
    all_to_all_dispatch,
    apply_with_capacity,
    combine_tokens,
    dispatch_tokens,
    fan_out_f32,
    route,
    router_logits,
    update_router_bias,
)
from halfbyte.recipes import Recipe

MIN_TWO_CAPACITY_PAIRS = 1 << 15  # with fewer pairs, compiling for two capacities does not pay off
Matrices = tuple[jax.Array, ...]
Keys = Sequence[jax.Array | None]


def moe_mlp(cfg: LlamaConfig, weights: Params, h: jax.Array, here: LayerContext) -> jax.Array:
    """h [batch, seq, embed] through the experts that each token chooses, in h's dtype."""
    own, wide = fan_out_f32(here.ctx.constrain(h, *RESIDUAL_STREAM_AXES))
    logits = here.ctx.constrain(
        router_logits(wide, weights["router"]), *RESIDUAL_STREAM_AXES[:2], None
    )  # of a device's own tokens
    logits = here.ctx.constrain(logits, *(None,) * logits.ndim)  # of all tokens, which choose as on one device
    tokens, logits = (each.reshape(-1, each.shape[-1]) for each in (own, logits))
    found = route(logits, cfg.experts_per_token, normalise=cfg.norm_topk, bias=weights.get("router_bias"))
    if here.expert_loads is not None:
        here.expert_loads.append(found.load)
    recipes = [None if is_float32_product(h, r) else r for r in (here.recipe("mlp", name) for name in EXPERT_SITES)]
    check_grouped_support(recipes)
    tile, capacity = moe_tile_layout(cfg, tokens.shape[0], recipes)
    keys: list[Any] = [here.keys.get(f"mlp/{name}") for name in EXPERT_SITES]
    matrices = tuple(weights[name] for name in EXPERT_SITES)

    def run(x: jax.Array, weights: Matrices, keys: Keys, tiles: ExpertTiles, first: jax.Array | int = 0) -> jax.Array:
        amaxes, tiles = _shared_amaxes(weights[:2], recipes), dataclasses.replace(tiles, backend=here.ctx.backend)

        def dot(x: jax.Array, n: int) -> jax.Array:
            how: dict[str, Any] = {"recipe": recipes[n], "key": keys[n], "amax": amaxes[n], "first": first}
            y = grouped_matmul(here.observe_input(x, "mlp", EXPERT_SITES[n : n + 1]), weights[n], tiles, **how)
            return here.observe_output(y, "mlp", EXPERT_SITES[n])

        return dot(gated_activation(ACTIVATIONS[cfg.activation], dot(x, 0), dot(x, 1)), 2)

    if here.on_mesh:
        assert here.ctx.mesh is not None
        rest = tuple(here.placement("mlp", name).w for name in EXPERT_SITES)
        made = moe_expert_parallel(run, tokens, found, (matrices, keys), rest, mesh=here.ctx.mesh, tile=tile)
        return here.ctx.constrain(made.reshape(h.shape), *RESIDUAL_STREAM_AXES)
    rows = row_of_pair(found.experts.reshape(-1), found.load.counts, tile).reshape(found.experts.shape)
    # [tokens, embed] -> [capacity, embed], sorted by expert, each from a new tile on
    tiles = ExpertTiles.from_counts(found.load.counts, capacity, tile)
    y = run(dispatch_tokens(tokens, rows, capacity), matrices, keys, tiles)
    return combine_tokens(y, rows, found.weights).reshape(h.shape)


def update_router_biases(params: Params, load: jax.Array | None, rate: float) -> Params:
    """`params` after a step whose experts had this `load`, [layers, experts]: the biases of routers, if there are any,
    have moved.
    """
    mlp = params["layers"]["mlp"]
    if load is None or "router_bias" not in mlp:
        return params
    moved = mlp | {"router_bias": update_router_bias(mlp["router_bias"], load, rate)}
    return params | {"layers": params["layers"] | {"mlp": moved}}


def moe_tile_layout(cfg: LlamaConfig, tokens: int, recipes: Sequence[Recipe | None]) -> tuple[int, int]:
    """(rows of a tile, rows of all tiles) of so many tokens on one device."""
    pairs = tokens * cfg.experts_per_token
    tile = choose_tile_rows(pairs, cfg.experts, recipes)
    return tile, buffer_capacity(pairs, cfg.experts, tile)


def moe_expert_parallel(
    run: Callable[..., jax.Array], x: jax.Array, found: RouterOutput, given: tuple[Matrices, Keys],
    rest: Sequence[PartitionSpec], *, mesh: Mesh, tile: int,
) -> jax.Array:  # fmt: skip
    """x [tokens, embed] through their experts, weighed and added up. All devices of `mesh` share experts evenly: each
    has its experts' rows of the whole microbatch, as one device would have them. Tokens are cut over all devices, and
    send a row to each of their experts. Weights come from where they `rest`: parts of many experts, cut over fsdp or
    tensor, are exchanged for whole ones.
    """
    axes = tuple(sorted((axis for axis, size in mesh.shape.items() if size > 1), key=lambda axis: axis != EXPERT_AXIS))
    order = tuple(axis for axis in ALL_MESH_AXES if axis in axes)  # as tokens are cut
    experts = found.load.counts.shape[0]
    own = experts // mesh.size
    sizes = [mesh.shape[axis] for axis in axes]
    # of each share of the experts, in the order of `axes`: the number of its device in the order of tokens
    device = np.argsort(np.arange(mesh.size).reshape(sizes).transpose([axes.index(axis) for axis in order]).reshape(-1))

    def local(_: Any, arrays: tuple[Any, ...], keys: Keys) -> jax.Array:
        words = tuple(None if key is None else jax.random.key_data(key) for key in keys)
        (x, scale, chosen, counts), weights = arrays[0], tuple(map(whole, arrays[1], cuts))
        pairs = jnp.arange(scale.size, dtype=jnp.int32).reshape(scale.shape)
        first, chosen = lax.axis_index(axes) * own, chosen.reshape(-1)
        owners = jnp.append(jnp.asarray(device, jnp.int32), jnp.int32(mesh.size))[chosen // own]
        route = ExpertRoute.of(owners, order)
        here = jnp.nonzero(owners == lax.axis_index(order), size=chosen.size, fill_value=chosen.size)[0]
        mine = jnp.append(chosen, first + own)[here] - first
        rows = all_to_all_dispatch(dispatch_tokens(x, pairs, scale.size), route)
        counts = lax.dynamic_slice_in_dim(counts, first, own)
        given = rows, weights, (mine, counts, words, first)
        y = through(*given) if some == chosen.size else apply_with_capacity(through, some, *given, jnp.sum(counts))
        return combine_tokens(all_to_all_combine(y, route), None, scale)

    def through(rows: jax.Array, weights: Matrices, rest: Any) -> jax.Array:
        mine, counts, words, first = rest
        typed = tuple(
            None if w is None else jax.random.wrap_key_data(w, impl=k) for w, k in zip(words, kinds, strict=True)
        )
        return apply_in_tiles(
            rows, mine[: rows.shape[0]], counts, tile, lambda rows, tiles: run(rows, weights, typed, tiles, first)
        )

    def whole(w: jax.Array, cut: DimAxes) -> jax.Array:
        for axis, dim in ((axis, dim) for axis in axes for dim in (1, 2) if axis in cut[dim]):
            w = lax.all_to_all(w, axis, split_axis=0, concat_axis=dim, tiled=True)
        return w

    filled = ((0, -x.shape[0] % mesh.size), (0, 0))  # with tokens that no expert has
    chosen = jnp.pad(found.experts, filled, constant_values=experts)
    matrices, keys = given
    kinds = [None if key is None else jax.random.key_impl(key) for key in keys]
    some = _initial_capacity(chosen.size, mesh.size)
    cuts = [dim_axes_of_spec(spec, 3) for spec in rest]
    outer = [tuple(axis for axis in axes if axis not in axes_in(cut[1:])) for cut in cuts]
    arrays = (jnp.pad(x, filled), jnp.pad(found.weights, filled), chosen, found.load.counts), matrices
    tokens, everywhere = PartitionSpec(order), PartitionSpec()
    cut = (
        (tokens, tokens, everywhere, everywhere),
        tuple(PartitionSpec(o, *c[1:]) for o, c in zip(outer, cuts, strict=True)),
    )
    return run_in_shard_map(local, ((), arrays, keys), ((), cut), tokens, mesh=mesh)[: x.shape[0]]


def _initial_capacity(pairs: int, devices: int) -> int:
    """Returns the initial capacity of a device in rows: twice the average load, or all rows if they are few."""
    return pairs if pairs < MIN_TWO_CAPACITY_PAIRS else min(-(-2 * pairs // devices), pairs)


def _shared_amaxes(gate_up: Sequence[jax.Array], recipes: Sequence[Recipe | None]) -> list[jax.Array | None]:
    """Returns the shared amax float32 [experts] of gate, up and down; None without `shared_scales`."""
    shares = [recipe is not None and has_shared_scale(recipe) for recipe in recipes[:2]]
    if not any(shares):
        return [None, None, None]
    amaxes = [matrix_amaxes(lax.stop_gradient(w)) for w, shared in zip(gate_up, shares, strict=True) if shared]
    shared_amax = functools.reduce(jnp.maximum, amaxes)
    return [shared_amax if shared else None for shared in (*shares, False)]
