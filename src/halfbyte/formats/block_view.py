"""Blocks of a tensor: the reshape that splits its blocked axes, and the order of block scales in memory.

Block-scaled tensor cores read scales in tiles of 128 rows by 4 scales. A compact [rows, scales] array is padded to
multiples of (128, 4) and split into tiles, row-major. Inside a tile, row r and scale c are at offset
(r % 32) * 16 + (r // 32) * 4 + c: 32 rows of 16 bytes, each with the four scales of four rows.
"""

import dataclasses

import jax
import jax.numpy as jnp

ROWS, SCALES = 128, 4  # per tile of swizzled scales


@dataclasses.dataclass(frozen=True)
class BlockView:
    """`shape` is the tensor's with blocked axes split in two; elements along `reduce_axes` share one scale."""

    shape: tuple[int, ...]
    reduce_axes: tuple[int, ...]

    @property
    def scale_shape(self) -> tuple[int, ...]:
        return tuple(n for i, n in enumerate(self.shape) if i not in self.reduce_axes)

    def broadcast_scales(self, scales: jax.Array) -> jax.Array:
        """Broadcasts compact scales: [scale_shape] -> [shape]."""
        return jnp.broadcast_to(jnp.expand_dims(scales, self.reduce_axes), self.shape)


def block_view(shape: tuple[int, ...], size: int | None, *, block: str, axis: int = -1, name: str) -> BlockView:
    """Returns the view of a tensor of `shape` in blocks of `size`: runs along `axis` ("1d") or square tiles of the last
    two axes ("2d"). `size` None is one block for the whole tensor. `name` is the format's, for errors.
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


def swizzle_scales(scales: jax.Array) -> jax.Array:
    """Returns [rows, scales] flat, in tiles of 128x4, zero-padded."""
    rows, columns = scales.shape
    padded = jnp.pad(scales, ((0, -rows % ROWS), (0, -columns % SCALES)))
    # [rows, scales] -> [row tile, 4, 32, column tile, 4] -> [row tile, column tile, 32, 4, 4] -> flat
    tiles = padded.reshape(padded.shape[0] // ROWS, 4, 32, padded.shape[1] // SCALES, SCALES)
    return tiles.transpose(0, 3, 2, 1, 4).reshape(-1)


def unswizzle_scales(tiled: jax.Array, rows: int, columns: int) -> jax.Array:
    """Returns the compact [rows, columns] scales: the inverse of `swizzle_scales`."""
    row_tiles, column_tiles = -(-rows // ROWS), -(-columns // SCALES)
    # flat -> [row tile, column tile, 32, 4, 4] -> [row tile, 4, 32, column tile, 4] -> [rows, scales], padded
    tiles = tiled.reshape(row_tiles, column_tiles, 32, 4, SCALES)
    return tiles.transpose(0, 3, 2, 1, 4).reshape(row_tiles * ROWS, column_tiles * SCALES)[:rows, :columns]


def _check_multiple(shape: tuple[int, ...], axis: int, size: int, name: str) -> None:
    if shape[axis] % size or shape[axis] == 0:
        raise ValueError(
            f"{name} needs a multiple of {size} along its blocked axis, got {shape[axis]} "
            f"(axis {axis} of shape {shape}); pad that axis, or exclude this tensor in the layer policy"
        )
