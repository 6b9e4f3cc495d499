"""What looped layers keep for the backward pass, in stacks [layers, ...] that kernels read where they lie.

`lax.scan` stacks what its layers keep, but hands the body of its backward pass a copy of each layer's part: XLA fuses
that slice into its own fusions and not into a kernel, which reads a whole buffer. So here a layer returns what it keeps
as a result of the loop, which stacks it, and reads the stack itself in the backward pass. How it gets there: a loop's
backward pass carries the cotangents of what the loop carries. The loop carries a `ghost` of the stack, which nobody
reads or writes and no program holds; `hand_back`, after the loop, returns the stack as the *ghost's cotangent*, each
layer passes that on unchanged, and a `Layer` of it is what the layer kept.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layer:
    """The array at `index`, an int32 scalar, of a stack [layers, ...]."""

    stack: jax.Array
    index: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stack.shape[1:]

    @property
    def ndim(self) -> int:
        return self.stack.ndim - 1

    @property
    def dtype(self) -> Any:
        return self.stack.dtype

    def reshape(self, *shape: int) -> "Layer":
        """The same numbers in another shape."""
        return Layer(self.stack.reshape(self.stack.shape[0], *shape), self.index)

    def array(self) -> jax.Array:
        """A copy, unless XLA fuses it with what reads it."""
        return lax.dynamic_index_in_dim(self.stack, self.index, keepdims=False)


def array_of(x: jax.Array | Layer) -> jax.Array:
    """x as an array."""
    return x.array() if isinstance(x, Layer) else x


def ghost(layers: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """What stands for a stack of `layers` arrays in the forward pass."""
    return jnp.zeros((layers, *shape), dtype)


@jax.custom_vjp
def hand_back(x: jax.Array, ghosts: Any, stacks: Any) -> jax.Array:
    """x; the cotangent of each ghost is its stack. The stacks themselves have none."""
    return x


def _forward(x: jax.Array, ghosts: Any, stacks: Any) -> tuple[jax.Array, Any]:
    return x, stacks


def _backward(stacks: Any, dx: jax.Array) -> tuple[jax.Array, Any, None]:
    return dx, stacks, None


hand_back.defvjp(_forward, _backward)
