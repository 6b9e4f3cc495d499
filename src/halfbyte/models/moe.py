"""Mixture of experts instead of the MLP of a layer: route, sort by expert, three grouped linears, weighted combine.

No token is dropped: an expert processes all tokens that chose it. On every mesh the tokens of one microbatch are sorted
together. The router is float32 and never quantized; the load is appended to `LayerContext.expert_loads`.

On a mesh each device computes the logits of its own tokens, which are then all-gathered. It multiplies its share of the
experts by all their rows in the microbatch, so that codes, scales and random bits are those of one device. Rows are
dispatched from the devices of their tokens and combined there (`ops.moe_dispatch`).
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
    """Applies the experts that each token chooses to h [batch, seq, embed]; the result has the dtype of h."""
    hidden, hidden_f32 = fan_out_f32(here.ctx.constrain(h, *RESIDUAL_STREAM_AXES))
    # Computed for the tokens of this device, then all-gathered: tokens choose experts as on one device.
    logits = here.ctx.constrain(router_logits(hidden_f32, weights["router"]), *RESIDUAL_STREAM_AXES[:2], None)
    logits = here.ctx.constrain(logits, *(None,) * logits.ndim)
    tokens, logits = (array.reshape(-1, array.shape[-1]) for array in (hidden, logits))
    routed = route(logits, cfg.experts_per_token, normalise=cfg.norm_topk, bias=weights.get("router_bias"))
    if here.expert_loads is not None:
        here.expert_loads.append(routed.load)
    recipes = [None if is_float32_product(h, r) else r for r in (here.recipe("mlp", name) for name in EXPERT_SITES)]
    check_grouped_support(recipes)
    tile, capacity = moe_tile_layout(cfg, tokens.shape[0], recipes)
    keys: list[Any] = [here.keys.get(f"mlp/{name}") for name in EXPERT_SITES]
    matrices = tuple(weights[name] for name in EXPERT_SITES)

    def run(x: jax.Array, weights: Matrices, keys: Keys, tiles: ExpertTiles, first: jax.Array | int = 0) -> jax.Array:
        amaxes, tiles = _shared_amaxes(weights[:2], recipes), dataclasses.replace(tiles, backend=here.ctx.backend)

        def dot(x: jax.Array, n: int) -> jax.Array:
            options: dict[str, Any] = {"recipe": recipes[n], "key": keys[n], "amax": amaxes[n], "first": first}
            y = grouped_matmul(here.observe_input(x, "mlp", EXPERT_SITES[n : n + 1]), weights[n], tiles, **options)
            return here.observe_output(y, "mlp", EXPERT_SITES[n])

        return dot(gated_activation(ACTIVATIONS[cfg.activation], dot(x, 0), dot(x, 1)), 2)

    if here.on_mesh:
        assert here.ctx.mesh is not None
        weight_specs = tuple(here.placement("mlp", name).w for name in EXPERT_SITES)
        outputs = moe_expert_parallel(
            run, tokens, routed, (matrices, keys), weight_specs, mesh=here.ctx.mesh, tile=tile
        )
        return here.ctx.constrain(outputs.reshape(h.shape), *RESIDUAL_STREAM_AXES)
    rows = row_of_pair(routed.experts.reshape(-1), routed.load.counts, tile).reshape(routed.experts.shape)
    # [tokens, embed] -> [capacity, embed], sorted by expert; each expert begins a new tile
    tiles = ExpertTiles.from_counts(routed.load.counts, capacity, tile)
    y = run(dispatch_tokens(tokens, rows, capacity), matrices, keys, tiles)
    return combine_tokens(y, rows, routed.weights).reshape(h.shape)


def update_router_biases(params: Params, load: jax.Array | None, rate: float) -> Params:
    """Returns `params` with router biases, if there are any, updated for the `load` [layers, experts] of a step."""
    mlp = params["layers"]["mlp"]
    if load is None or "router_bias" not in mlp:
        return params
    moved = mlp | {"router_bias": update_router_bias(mlp["router_bias"], load, rate)}
    return params | {"layers": params["layers"] | {"mlp": moved}}


def moe_tile_layout(cfg: LlamaConfig, tokens: int, recipes: Sequence[Recipe | None]) -> tuple[int, int]:
    """Returns the rows per tile and the rows of all tiles for `tokens` tokens on one device."""
    pairs = tokens * cfg.experts_per_token
    tile = choose_tile_rows(pairs, cfg.experts, recipes)
    return tile, buffer_capacity(pairs, cfg.experts, tile)


def moe_expert_parallel(
    run: Callable[..., jax.Array], x: jax.Array, found: RouterOutput, given: tuple[Matrices, Keys],
    rest: Sequence[PartitionSpec], *, mesh: Mesh, tile: int,
) -> jax.Array:  # fmt: skip
    """Applies experts to x [tokens, embed] on a mesh and combines their outputs with the router's weights.

    All devices of `mesh` have equally many experts, with the rows of these experts in the whole microbatch. Tokens are
    sharded over all devices; each sends a row to each of its experts. `rest` are the PartitionSpecs of weights at rest:
    if they are sharded over fsdp or tensor, an all-to-all exchanges shards of many experts for whole experts.
    """
    axes = tuple(sorted((axis for axis, size in mesh.shape.items() if size > 1), key=lambda axis: axis != EXPERT_AXIS))
    order = tuple(axis for axis in ALL_MESH_AXES if axis in axes)  # the order in which tokens are sharded
    experts = found.load.counts.shape[0]
    experts_per_device = experts // mesh.size
    sizes = [mesh.shape[axis] for axis in axes]
    # share of the experts (in the order of `axes`) -> index of its device (in the order of tokens)
    device = np.argsort(np.arange(mesh.size).reshape(sizes).transpose([axes.index(axis) for axis in order]).reshape(-1))

    def local(_: Any, arrays: tuple[Any, ...], keys: Keys) -> jax.Array:
        words = tuple(None if key is None else jax.random.key_data(key) for key in keys)
        (x, scale, chosen, counts), weights = arrays[0], tuple(map(gather_experts, arrays[1], cuts))
        pairs = jnp.arange(scale.size, dtype=jnp.int32).reshape(scale.shape)
        first, chosen = lax.axis_index(axes) * experts_per_device, chosen.reshape(-1)
        owners = jnp.append(jnp.asarray(device, jnp.int32), jnp.int32(mesh.size))[chosen // experts_per_device]
        route = ExpertRoute.of(owners, order)
        local_pairs = jnp.nonzero(owners == lax.axis_index(order), size=chosen.size, fill_value=chosen.size)[0]
        local_experts = jnp.append(chosen, first + experts_per_device)[local_pairs] - first
        rows = all_to_all_dispatch(dispatch_tokens(x, pairs, scale.size), route)
        counts = lax.dynamic_slice_in_dim(counts, first, experts_per_device)
        inputs = rows, weights, (local_experts, counts, words, first)
        y = (
            apply_local_experts(*inputs)
            if capacity == chosen.size
            else apply_with_capacity(apply_local_experts, capacity, *inputs, jnp.sum(counts))
        )
        return combine_tokens(all_to_all_combine(y, route), None, scale)

    def apply_local_experts(rows: jax.Array, weights: Matrices, rest: Any) -> jax.Array:
        local_experts, counts, words, first = rest
        typed_keys = tuple(
            None if w is None else jax.random.wrap_key_data(w, impl=k) for w, k in zip(words, kinds, strict=True)
        )
        return apply_in_tiles(
            rows,
            local_experts[: rows.shape[0]],
            counts,
            tile,
            lambda rows, tiles: run(rows, weights, typed_keys, tiles, first),
        )

    def gather_experts(w: jax.Array, cut: DimAxes) -> jax.Array:
        for axis, dim in ((axis, dim) for axis in axes for dim in (1, 2) if axis in cut[dim]):
            w = lax.all_to_all(w, axis, split_axis=0, concat_axis=dim, tiled=True)
        return w

    padding = ((0, -x.shape[0] % mesh.size), (0, 0))  # padding tokens, whose expert index is none of the experts
    chosen = jnp.pad(found.experts, padding, constant_values=experts)
    matrices, keys = given
    kinds = [None if key is None else jax.random.key_impl(key) for key in keys]
    capacity = _initial_capacity(chosen.size, mesh.size)
    cuts = [dim_axes_of_spec(spec, 3) for spec in rest]
    outer = [tuple(axis for axis in axes if axis not in axes_in(cut[1:])) for cut in cuts]
    arrays = (jnp.pad(x, padding), jnp.pad(found.weights, padding), chosen, found.load.counts), matrices
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
