"""How a tensor falls into blocks: a reshape that splits the blocked axes, and the axes that share a scale."""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class BlockView:
    """`shape` is the tensor's with blocked axes split in two; `shared` are its axes over which one scale holds."""

    shape: tuple[int, ...]
    shared: tuple[int, ...]

    @property
    def scale_shape(self) -> tuple[int, ...]:
        return tuple(n for i, n in enumerate(self.shape) if i not in self.shared)

    def spread(self, scales: jax.Array) -> jax.Array:
        """Compact scales, broadcast: [scale_shape] -> [shape]."""
        return jnp.broadcast_to(jnp.expand_dims(scales, self.shared), self.shape)


def block_view(shape: tuple[int, ...], size: int | None, *, block: str, axis: int = -1, name: str) -> BlockView:
    """The view of a tensor of `shape` in blocks of `size`: runs along `axis` ("1d"), square tiles of the last two axes
    ("2d"), or all of it (no size). `name` is the format's, for the error.
    """
    if block not in ("1d", "2d"):
        raise ValueError(f'block must be "1d" or "2d", got {block!r}')
    if size is None:
        return BlockView(shape, tuple(range(len(shape))))
    if block == "1d":
        axis = axis % len(shape)
        _check_multiple(shape, axis, size, name)
        return BlockView((*shape[:axis], shape[axis] // size, size, *shape[axis + 1 :]), (axis + 1,))
    if len(shape) < 2:
        raise ValueError(f'block="2d" needs a matrix, got a vector of shape {shape}; use block="1d"')
    rank = len(shape)
    _check_multiple(shape, rank - 2, size, name)
    _check_multiple(shape, rank - 1, size, name)
    rows, columns = shape[-2] // size, shape[-1] // size
    return BlockView((*shape[:-2], rows, size, columns, size), (rank - 1, rank + 1))


def _check_multiple(shape: tuple[int, ...], axis: int, size: int, name: str) -> None:
    if shape[axis] % size or shape[axis] == 0:
        raise ValueError(
            f"{name} needs a multiple of {size} along its blocked axis, got {shape[axis]} "
            f"(axis {axis} of shape {shape}); pad that axis, or exclude this tensor in the layer policy"
        )
