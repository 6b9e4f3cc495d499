"""A stack of layers as separate layers, without a loop.

`lax.scan(..., unroll=all)` returns the gradient of a stack as a concatenation of its layers'. A compiler fuses that
with whatever reads it, once for each reader, and until then all pieces stay. Here each layer's gradient is written
into its place as soon as it is there. On a mesh (`cut`) the place begins as zeros: XLA makes an empty array of the
whole stack on every device, and zeros of a device's part, which it need not write.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def unstack(stacked: Any, count: int, *, cut: bool = False) -> list[Any]:
    """The `count` layers of a tree of stacked arrays [count, ...], which lie on several devices if `cut`."""
    leaves, structure = jax.tree.flatten(stacked)
    floats = jnp.float32, jnp.bfloat16  # what may have a gradient
    pieces = [_unstack(leaf, count, cut) if leaf.dtype in floats else list(leaf) for leaf in leaves]
    return [jax.tree.unflatten(structure, layer) for layer in zip(*pieces, strict=True)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _unstack(stacked: jax.Array, count: int, cut: bool) -> list[jax.Array]:
    return [stacked[i] for i in range(count)]


def _backward(count: int, cut: bool, _: None, pieces: list[jax.Array]) -> tuple[jax.Array]:
    begin = jnp.zeros if cut else lax.empty
    joined = begin((count, *pieces[0].shape), pieces[0].dtype)
    for i in reversed(range(count)):  # in the order in which a backward pass makes them
        joined = lax.dynamic_update_index_in_dim(joined, pieces[i], i, 0)
    return (joined,)


_unstack.defvjp(lambda stacked, count, cut: (_unstack(stacked, count, cut), None), _backward)
