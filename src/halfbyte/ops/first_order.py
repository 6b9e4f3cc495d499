"""What the gradient of a quantized dot refuses: a second derivative, and stochastic rounding without a key.

A quantized dot has a first derivative and no second: rounding passes gradients straight through, and the codes
kept for the backward pass know nothing of the numbers they were made from. Differentiated again, it would be silently
constant; `first_order` makes that an error.
"""

from __future__ import annotations

import functools
from typing import NoReturn

import jax

MESSAGE = (
    "a quantized dot has no second derivative: its backward pass multiplies codes, in which the weight and the "
    "activation are constants; take Hessians, gradient penalties and the like of the function without the recipe, or "
    "leave these dots alone in the policy"
)


@jax.custom_jvp
def _once(dy: jax.Array, tags: list[jax.Array]) -> jax.Array:
    return dy


@_once.defjvp
def _refuse(primals: object, tangents: object) -> NoReturn:
    raise NotImplementedError(MESSAGE)


@jax.custom_vjp
def _marked(y: jax.Array, tags: list[jax.Array]) -> jax.Array:
    return y


def first_order(y: jax.Array, *operands: jax.Array) -> jax.Array:
    """`y`, computed from `operands`; the derivative of its derivative, with respect to any of them, raises."""
    # One element each: none at all, passed out of a jit inside shard_map, crashes the partitioner of JAX 0.11.
    return _marked(y, [operand.reshape(-1)[:1] for operand in operands])


_marked.defvjp(lambda y, tags: (y, tags), lambda tags, dy: (_once(dy, tags), None))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def needs_stream(y: jax.Array, stream: str) -> jax.Array:
    """`y`, computed without a key since no rng stream of that name was passed; its derivative raises."""
    return y


def _no_stream(y: jax.Array, stream: str) -> NoReturn:
    raise ValueError(
        f"dot_general: key={stream!r} names a Linen rng stream that does not reach this layer, and the gradient rounds "
        f"stochastically; pass rngs={{{stream!r}: step_key(seed, step)}} to apply, with another key at each step, and "
        f"split_rngs={{{stream!r}: True}} to an nn.scan or nn.vmap around the layer"
    )


needs_stream.defvjp(_no_stream, lambda stream, residuals, dy: (dy,))
