"""What looped layers keep for the backward pass, in stacks [layers, ...] that kernels write and read where they lie.

`lax.scan` stacks what its layers keep: it fills the stacks with zeros, copies each layer's part into them, and hands
the body of its backward pass a copy of each part, because XLA fuses that slice into its own fusions and not into a
kernel, which reads a whole buffer. So here the loop carries the stacks, `empty` at first, and each layer's kernel
writes its part. How the backward pass gets them: it carries the cotangents of what the loop carries. `hand_back`, after
the loop, returns the stacks as *their own cotangents*, each layer passes those on unchanged, and a `Layer` of one is
what the layer kept.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layer:
    """The array at `index`, an int32 scalar, of a stack [layers, ...]. There must be such a layer: `lax` would take the
    nearest, a kernel reads what lies there.
    """

    stack: jax.Array
    index: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stack.shape[1:]

    @property
    def ndim(self) -> int:
        return self.stack.ndim - 1

    @property
    def dtype(self) -> jnp.dtype:
        return self.stack.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def reshape(self, *shape: int) -> "Layer":
        """The same numbers in another shape."""
        return Layer(self.stack.reshape(self.stack.shape[0], *shape), self.index)

    def filled(self, array: jax.Array) -> jax.Array:
        """The stack with `array` here."""
        return lax.dynamic_update_index_in_dim(self.stack, array, self.index, 0)

    def array(self) -> jax.Array:
        """A copy, unless XLA fuses it with what reads it."""
        return lax.dynamic_index_in_dim(self.stack, self.index, keepdims=False)


def array_of(x: jax.Array | Layer) -> jax.Array:
    """x as an array."""
    return x.array() if isinstance(x, Layer) else x


def empty(layers: int, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """A stack of `layers` arrays of `shape`, whose numbers nobody may read before they are written."""
    return lax.empty((layers, *shape), dtype)


@jax.custom_vjp
def hand_back(x: jax.Array, stacks: object) -> jax.Array:
    """x; the cotangent of each stack is the stack."""
    return x


hand_back.defvjp(lambda x, stacks: (x, stacks), lambda stacks, dx: (dx, stacks))
