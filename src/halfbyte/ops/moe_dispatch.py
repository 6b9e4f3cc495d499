"""Routing of tokens to experts: router, dispatch to rows, all-to-all between devices, and static capacity.

Every gradient is a gather and a sum in a fixed order. There is no scatter-add, so results do not depend on the order of
execution.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from halfbyte.ops.gemm_problem import target_device
from halfbyte.ops.linear_sharding import num_shards
from halfbyte.ops.operand import round_f32_to

Weights = tuple[jax.Array, ...]


RowsFn = Callable[[jax.Array, Weights, object], jax.Array]


class ExpertLoad(NamedTuple):
    """`counts` int32 [experts] of (token, expert) pairs, and the balance and z losses, as `route` defines them."""

    counts: jax.Array
    balance: jax.Array
    z: jax.Array


class RouterOutput(NamedTuple):
    """`weights` float32 [tokens, k], `experts` int32 [tokens, k], and the load of the experts."""

    weights: jax.Array
    experts: jax.Array
    load: ExpertLoad


@functools.partial(jax.tree_util.register_dataclass, data_fields=["sizes", "order", "rank"], meta_fields=["axes"])
@dataclasses.dataclass(frozen=True)
class ExpertRoute:
    """Row counts of the all-to-all, as one device sees them inside `shard_map` over `axes`.

    Every device knows the target device of each (token, expert) pair, so all know the counts without communication.
    """

    sizes: jax.Array
    """int32 [devices, devices]: pairs of each device, per target device."""
    order: jax.Array
    """int32 [own pairs]: this device's pairs, sorted by target device."""
    rank: jax.Array
    """Its inverse: the position of each pair of this device in that order."""
    axes: tuple[str, ...]

    @classmethod
    def of(cls, owners: jax.Array, axes: tuple[str, ...]) -> "ExpertRoute":
        """Returns the route for `owners` int32 [pairs]: the target device of every pair, counted along `axes`.

        The number of devices marks a pair that is sent nowhere. Pairs are sharded evenly over the devices, in order.
        """
        devices, me = num_shards(axes), lax.axis_index(axes)
        parts = owners.reshape(devices, -1)
        sizes = jnp.sum(parts[:, :, None] == jnp.arange(devices)[None, None], axis=1, dtype=jnp.int32)
        order = jnp.argsort(parts[me], stable=True).astype(jnp.int32)
        return cls(sizes, order, jnp.argsort(order).astype(jnp.int32), axes)


def router_logits(x: jax.Array, router: jax.Array) -> jax.Array:
    """Returns x R, float32 [..., experts], of x float32 [..., width] and a router float32 [width, experts]."""
    return jnp.dot(x, router, precision=lax.Precision.HIGHEST)


def route(logits: jax.Array, k: int, *, normalise: bool, bias: jax.Array | None = None) -> RouterOutput:
    """Chooses k experts per token from logits float32 [tokens, experts], in float32 throughout.

        p = softmax(logits)              or each expert's sigmoid, with a `bias` b float32 [experts]
        chosen = the k largest of p + b  weighted by p, without b, divided by their sum under `normalise`

    A softmax of the chosen logits only (Mixtral) equals normalising. Two losses keep a router healthy. `balance`,
    experts * sum(share of the (token, expert) pairs * mean p), is 1 if all experts have the same load (Switch
    Transformers, arXiv 2101.03961); each token's sigmoids are divided by their sum first (DeepSeek-V3, arXiv
    2412.19437). `z`, the mean of logsumexp(logits)^2, keeps logits small (ST-MoE, arXiv 2202.08906).
    """
    scores = jax.nn.softmax(logits) if bias is None else jax.nn.sigmoid(logits)
    _, experts = lax.top_k(lax.stop_gradient(scores if bias is None else scores + bias[None]), k)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    weights = _normalize_rows(weights) if normalise else weights
    probabilities = scores if bias is None else _normalize_rows(scores)
    count = logits.shape[-1]
    counts = jnp.zeros(count, jnp.int32).at[experts.reshape(-1)].add(1)
    shares = counts.astype(jnp.float32) / jnp.float32(experts.size)
    balance = count * jnp.sum(shares * jnp.mean(probabilities, axis=0))
    return RouterOutput(weights, experts, ExpertLoad(counts, balance, jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2)))


def update_router_bias(bias: jax.Array, load: jax.Array, rate: float) -> jax.Array:
    """Returns the `bias` of routers, float32 [..., experts], after a step with this `load` of the experts.

    It balances without a loss (arXiv 2408.15664, DeepSeek-V3): b rises by `rate` for each expert with less than the
    mean load and falls for each with more. No gradient reaches it.
    """
    return bias + rate * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)


def _normalize_rows(scores: jax.Array) -> jax.Array:
    """Divides scores by the sum of their row. A row of zeros, as sigmoids may give, stays zeros."""
    return scores / jnp.maximum(jnp.sum(scores, axis=-1, keepdims=True), jnp.float32(1e-20))


@jax.custom_vjp
def fan_out_f32(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (x, x in float32), for experts and for their router. Gradients are added in float32 and rounded once."""
    return x, x.astype(jnp.float32)


fan_out_f32.defvjp(
    lambda x: (fan_out_f32(x), None), lambda _, g: (round_f32_to(g[0].astype(jnp.float32) + g[1], g[0].dtype),)
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def dispatch_tokens(x: jax.Array, rows: jax.Array, room: int) -> jax.Array:
    """Copies x [tokens, width] into [room, width]: token t to rows[t, i] for each of its experts i; zero elsewhere.

    The gradient sums over a token's experts in their order.
    """
    tokens, k = rows.shape
    pair = _pairs(rows, room)
    return x.at[jnp.where(pair < tokens * k, pair // k, tokens)].get(mode="fill", fill_value=0)


dispatch_tokens.defvjp(
    lambda x, rows, room: (dispatch_tokens(x, rows, room), rows),
    lambda room, rows, g: (round_f32_to(jnp.sum(g[rows].astype(jnp.float32), axis=1), g.dtype), None),
)


@jax.custom_vjp
def combine_tokens(y: jax.Array, rows: jax.Array | None, weights: jax.Array) -> jax.Array:
    """Sums weight times row of y [room, width] over each token's experts, in their order: [tokens, width].

    Without `rows`, the rows of a token are adjacent in y.
    """
    return round_f32_to(jnp.sum(_of_tokens(y, rows, weights) * weights[..., None], axis=1), y.dtype)


def _combine_bwd(residuals, g):
    y, rows, weights = residuals
    wide = g.astype(jnp.float32)
    if rows is None:
        dy = (wide[:, None] * weights[..., None]).reshape(y.shape)
    else:
        pair = _pairs(rows, y.shape[0])
        has_pair, index = (pair < rows.size)[:, None], jnp.minimum(pair, rows.size - 1)
        dy = wide[index // rows.shape[1]] * weights.reshape(-1)[index][:, None]  # [room, width]
        dy = jnp.where(has_pair, dy, 0)
    return round_f32_to(dy, y.dtype), None, jnp.sum(wide[:, None] * _of_tokens(y, rows, weights), axis=-1)


combine_tokens.defvjp(lambda y, rows, weights: (combine_tokens(y, rows, weights), (y, rows, weights)), _combine_bwd)


def _pairs(rows: jax.Array, room: int) -> jax.Array:
    """Returns int32 [room], the index of the (token, expert) pair in each row; rows.size for a row without one."""
    indices = jnp.arange(rows.size, dtype=jnp.int32)
    return jnp.full(room, rows.size, jnp.int32).at[rows.reshape(-1)].set(indices, unique_indices=True)


def _of_tokens(y: jax.Array, rows: jax.Array | None, weights: jax.Array) -> jax.Array:
    """Returns the rows of each token, float32 [tokens, k, width]."""
    return (y.reshape(*weights.shape, -1) if rows is None else y[rows]).astype(jnp.float32)


@jax.custom_vjp
def all_to_all_dispatch(x: jax.Array, route: ExpertRoute) -> jax.Array:
    """Sends x [own pairs, width] to the target devices: [pairs, width], received rows in order of pairs, then zeros.

    `all_to_all_dispatch` and `all_to_all_combine` are each other's gradient. Neither sums, so no value changes.
    """
    me = lax.axis_index(route.axes)
    ahead = exclusive_cumsum(route.sizes, 0)[me]  # rows of devices before this one, on each device
    capacity = x.shape[0] * route.sizes.shape[0]
    return _exchange(x[route.order], capacity, route.sizes[me], ahead, route.sizes[:, me], x.shape[0], route.axes)


@jax.custom_vjp
def all_to_all_combine(y: jax.Array, route: ExpertRoute) -> jax.Array:
    """Inverts `all_to_all_dispatch`: y [pairs, width] -> [own pairs, width]; zero for pairs that were sent nowhere."""
    me, own = lax.axis_index(route.axes), route.order.shape[0]
    ahead = exclusive_cumsum(route.sizes, 1)[:, me]
    return _exchange(y, own, route.sizes[:, me], ahead, route.sizes[me], own, route.axes)[route.rank]


all_to_all_dispatch.defvjp(
    lambda x, route: (all_to_all_dispatch(x, route), route), lambda route, g: (all_to_all_combine(g, route), None)
)


all_to_all_combine.defvjp(
    lambda y, route: (all_to_all_combine(y, route), route), lambda route, g: (all_to_all_dispatch(g, route), None)
)


def _exchange(
    x: jax.Array, room: int, sent: jax.Array, there: jax.Array, received: jax.Array, most: int, axes: tuple[str, ...]
) -> jax.Array:
    """Sends `sent` [devices] consecutive rows of x to each device, where they start at row `there` [devices].

    Returns [room, width]: the `received` [devices] rows in order of devices, at most `most` per device. On a GPU it is
    XLA's ragged all-to-all, which sends as many rows as there are pairs. A CPU has none: a padded all-to-all sends
    `most` rows to each device.
    """
    output = jnp.zeros((room, x.shape[1]), x.dtype)
    if target_device().capability is not None:
        return lax.ragged_all_to_all(x, output, exclusive_cumsum(sent, 0), sent, there, received, axis_name=axes)
    indices = jnp.arange(most, dtype=jnp.int32)[None]
    rows = jnp.where(indices < sent[:, None], exclusive_cumsum(sent, 0)[:, None] + indices, x.shape[0])
    padded = x.at[rows].get(mode="fill", fill_value=0)  # [devices, most, width]
    received_rows = lax.all_to_all(padded, axes, split_axis=0, concat_axis=0)
    positions = jnp.where(indices < received[:, None], exclusive_cumsum(received, 0)[:, None] + indices, room)
    return output.at[positions].set(received_rows, mode="drop")


def exclusive_cumsum(sizes: jax.Array, axis: int) -> jax.Array:
    """Returns the sum of the elements before each one along `axis`."""
    return jnp.cumsum(sizes, axis=axis, dtype=jnp.int32) - sizes


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def apply_with_capacity(
    run: RowsFn, some: int, rows: jax.Array, weights: Weights, rest: object, count: jax.Array
) -> jax.Array:
    """Applies `run(rows, weights, rest)` to the first `some` rows if `count` <= `some`, else to all rows.

    `run` returns a row for each of rows [all, width], of which the first `count` are used. How many rows choose a
    device's experts is only known at run time, and array sizes are static, so two programs are compiled. Results do
    not depend on which one runs: rows from `some` on are zero in the first. No gradient reaches `rest`. Residuals are
    saved in the first program; the second rematerializes `run` in the backward pass.
    """
    fits = lambda rows, weights, rest: _pad_rows(run(rows[:some], weights, rest), rows.shape[0])  # noqa: E731
    return lax.cond(count <= some, fits, run, rows, weights, rest)


def _forward(run, some, rows, weights, rest, count):
    trees = []

    def fits(rows, weights, rest):
        y, pull = jax.vjp(lambda rows, weights: run(rows, weights, rest), rows[:some], weights)
        residuals, tree = jax.tree.flatten(pull)
        trees.append(tree)
        return _pad_rows(y, rows.shape[0]), residuals

    def all_of_them(rows, weights, rest):
        return run(rows, weights, rest), [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]

    shapes = jax.eval_shape(fits, rows, weights, rest)[1]
    y, residuals = lax.cond(count <= some, fits, all_of_them, rows, weights, rest)
    return y, (jax.tree.unflatten(trees[-1], residuals), rows, weights, rest, count)


def _backward(run, some, kept, dy):
    pull, rows, weights, rest, count = kept

    def fits(dy):
        dx, dweights = pull(dy[:some])
        return _pad_rows(dx, rows.shape[0]), dweights

    def all_of_them(dy):
        return jax.vjp(lambda rows, weights: run(rows, weights, rest), rows, weights)[1](dy)

    return *lax.cond(count <= some, fits, all_of_them, dy), None, None


apply_with_capacity.defvjp(_forward, _backward)


def _pad_rows(x: jax.Array, rows: int) -> jax.Array:
    return jnp.pad(x, ((0, rows - x.shape[0]), (0, 0)))
