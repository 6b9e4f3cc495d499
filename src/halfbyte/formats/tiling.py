"""The order in which block-scaled tensor cores read their scales: tiles of 128 rows by 4 scales.

A compact [rows, scales] array is padded to multiples of (128, 4) and cut into tiles, row-major. Inside a tile, row r
and scale c lie at offset (r % 32) * 16 + (r // 32) * 4 + c: 32 rows of 16 bytes, each holding four rows' four scales.
"""

import jax
import jax.numpy as jnp

ROWS, SCALES = 128, 4


def tile_scales(scales: jax.Array) -> jax.Array:
    """[rows, scales] -> flat, in the 128x4 order, zero-padded."""
    rows, columns = scales.shape
    padded = jnp.pad(scales, ((0, -rows % ROWS), (0, -columns % SCALES)))
    # [rows, scales] -> [row tile, 4, 32, column tile, 4] -> [row tile, column tile, 32, 4, 4] -> flat
    tiles = padded.reshape(padded.shape[0] // ROWS, 4, 32, padded.shape[1] // SCALES, SCALES)
    return tiles.transpose(0, 3, 2, 1, 4).reshape(-1)


def untile_scales(tiled: jax.Array, rows: int, columns: int) -> jax.Array:
    """The compact [rows, columns] scales of `tile_scales`' result."""
    row_tiles, column_tiles = -(-rows // ROWS), -(-columns // SCALES)
    # flat -> [row tile, column tile, 32, 4, 4] -> [row tile, 4, 32, column tile, 4] -> [rows, scales], padded
    tiles = tiled.reshape(row_tiles, column_tiles, 32, 4, SCALES)
    return tiles.transpose(0, 3, 2, 1, 4).reshape(row_tiles * ROWS, column_tiles * SCALES)[:rows, :columns]
