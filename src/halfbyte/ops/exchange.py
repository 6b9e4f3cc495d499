"""Rows between the device of a token and the device of its expert, both ways: what is needed travels, and nothing else.

Every device knows which device each (token, expert) pair goes to, so all know how many rows pass from whom to whom, and
nobody asks. Pairs are cut evenly over the devices, in their order; `dispatch` brings each to the device of its expert,
where they lie in the order of pairs, one after another from the first row on; `collect` brings rows back. Each is the
other's gradient, and neither adds anything up: no number changes.

On a GPU it is XLA's ragged all-to-all: a device sends as many rows as it has pairs. A CPU has none, and sends to each
device as many rows as it might (a padded all-to-all).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from halfbyte.ops.problem import target
from halfbyte.ops.shards import size_of


@functools.partial(jax.tree_util.register_dataclass, data_fields=["sizes", "order", "rank"], meta_fields=["axes"])
@dataclasses.dataclass(frozen=True)
class Route:
    """Who sends how much to whom, as one device sees it inside `shard_map` over `axes`."""

    sizes: jax.Array
    """int32 [devices, devices]: pairs of each device, by the device that they go to."""
    order: jax.Array
    """int32 [own pairs]: this device's pairs, by the device that they go to."""
    rank: jax.Array
    """Its inverse: where a pair of this device stands in that order."""
    axes: tuple[str, ...]

    @classmethod
    def of(cls, owners: jax.Array, axes: tuple[str, ...]) -> "Route":
        """Of `owners` int32 [pairs], all of them: the device that each goes to, counted along `axes`; the number of
        devices for a pair that goes nowhere.
        """
        devices, me = size_of(axes), lax.axis_index(axes)
        parts = owners.reshape(devices, -1)
        sizes = jnp.sum(parts[:, :, None] == jnp.arange(devices)[None, None], axis=1, dtype=jnp.int32)
        order = jnp.argsort(parts[me], stable=True).astype(jnp.int32)
        return cls(sizes, order, jnp.argsort(order).astype(jnp.int32), axes)


@jax.custom_vjp
def dispatch(x: jax.Array, route: Route) -> jax.Array:
    """x [own pairs, width] -> [pairs, width]: the rows of all pairs that come to this device, in their order from the
    first row on, zero behind them.
    """
    me = lax.axis_index(route.axes)
    ahead = before(route.sizes, 0)[me]  # rows of devices before this one, on each device
    room = x.shape[0] * route.sizes.shape[0]
    return _exchange(x[route.order], room, route.sizes[me], ahead, route.sizes[:, me], x.shape[0], route.axes)


@jax.custom_vjp
def collect(y: jax.Array, route: Route) -> jax.Array:
    """What `dispatch` does, undone: y [pairs, width] -> [own pairs, width]; zero for pairs that went nowhere."""
    me, own = lax.axis_index(route.axes), route.order.shape[0]
    ahead = before(route.sizes, 1)[:, me]
    return _exchange(y, own, route.sizes[:, me], ahead, route.sizes[me], own, route.axes)[route.rank]


dispatch.defvjp(lambda x, route: (dispatch(x, route), route), lambda route, g: (collect(g, route), None))
collect.defvjp(lambda y, route: (collect(y, route), route), lambda route, g: (dispatch(g, route), None))


def before(sizes: jax.Array, axis: int) -> jax.Array:
    """Sums of what stands before each element along `axis`."""
    return jnp.cumsum(sizes, axis=axis, dtype=jnp.int32) - sizes


def _exchange(
    x: jax.Array, room: int, sent: jax.Array, there: jax.Array, received: jax.Array, most: int, axes: tuple[str, ...]
) -> jax.Array:
    """[room, width]: x's rows go to each device, `sent` [devices] of them one after another, and arrive there from row
    `there` [devices] on; `received` [devices] come, in the order of devices, `most` of one at most.
    """
    output = jnp.zeros((room, x.shape[1]), x.dtype)
    if target().capability is not None:
        return lax.ragged_all_to_all(x, output, before(sent, 0), sent, there, received, axis_name=axes)
    numbers = jnp.arange(most, dtype=jnp.int32)[None]
    rows = jnp.where(numbers < sent[:, None], before(sent, 0)[:, None] + numbers, x.shape[0])
    padded = x.at[rows].get(mode="fill", fill_value=0)  # [devices, most, width]
    arrived = lax.all_to_all(padded, axes, split_axis=0, concat_axis=0)
    places = jnp.where(numbers < received[:, None], before(received, 0)[:, None] + numbers, room)
    return output.at[places].set(arrived, mode="drop")
