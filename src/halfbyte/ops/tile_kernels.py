"""Operands and GEMMs of experts as GPU kernels: those of `fused`, with a table in the place of one tensor's numbers.

A tile of rows has one expert, and so one entry of each table: its scales, its key, and where it lies in its expert. The
matrices of all experts are one tall matrix with an entry each. Codes, scales and random bytes are those of
`grouped_linear.py`. For Hopper operands are carriers; for Blackwell codes and tiled scales, as `native` has them
(`unscaled` says where).
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from halfbyte import kernels
from halfbyte.devices import Device, native_training
from halfbyte.formats import NVFP4, BlockFormat
from halfbyte.formats.bits import float_of_bits
from halfbyte.formats.noise import key_words
from halfbyte.kernels import block_scaled, grouped, layout
from halfbyte.kernels.scale import GEMM, SIZE, vector_of
from halfbyte.ops.backends import native
from halfbyte.ops.backends.served import OF_ROWS, SERVED, WEIGHT, scaling
from halfbyte.ops.tiles import Tiles
from halfbyte.recipe import ROLES, WEIGHTS, OperandPolicy, Recipe

DTYPES = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)  # of rows and of weights


def multiplies(*sides: int, device: Device) -> bool:
    """Whether grouped GEMM kernels take matrices with sides of these sizes."""
    return grouped.unsupported(*sides, capability=device.capability) is None


def unscaled(
    recipe: Recipe | None, sides: tuple[int, ...], device: Device, *, backend: str = "auto",
    tile: int = block_scaled.SIDE, dtypes: Sequence[DTypeLike] = DTYPES,
) -> str | None:  # fmt: skip
    """Why experts whose matrices have `sides` are not multiplied as codes by block-scaled units, or None: the step and
    the manifest both ask here. `tile` is the number of a tile's rows, `dtypes` are those of rows and weights before
    they are quantized.
    """
    reason = block_scaled.unsupported(*sides, capability=device.capability)
    if reason is not None:
        return reason
    if recipe is None:
        return "nothing is quantized"
    if backend != "auto":
        return f"backend {backend} was asked for, whose operands are no codes"
    if tile != block_scaled.SIDE:
        return f"block-scaled GEMM kernels of experts read tiles of {block_scaled.SIDE} rows, and these have {tile}"
    if any(jnp.dtype(given) != taken for given, taken in zip(dtypes, DTYPES, strict=True)):
        return f"kernels that write codes for experts read rows and weights in {' and '.join(map(str, DTYPES))}"
    for role in ROLES:
        policy = getattr(recipe, role)
        served = makes(role, policy, sides, device) and native_training(device, policy.format.unit)
        if not served or block_scaled.SIDE % policy.run:
            return f"{role} is {policy}, and block-scaled GEMM kernels of experts multiply what NVFP4 kernels make"
    return None


def makes(role: str, policy: OperandPolicy, sides: tuple[int, ...], device: Device) -> bool:
    """Whether a kernel makes operand `role` of experts' matrices with `sides` (inputs, outputs)."""
    inputs, outputs = sides
    if device.capability is None or device.capability < (9, 0):
        return False
    if role in WEIGHTS:
        return policy == WEIGHT and inputs % layout.BLOCK == 0 and layout.divides(outputs)
    by_division = policy.format.scale.by_step  # no table has its scales
    served = policy in SERVED[role] and policy.source != "forward" and not by_division
    return served and layout.divides(outputs if role.endswith("dy") else inputs)


def scale_table(amax: jax.Array, format: BlockFormat = NVFP4) -> jax.Array:
    """float32 [experts, 8]: the vector of `kernels.tensor_scale` for each amax."""
    scales = jax.vmap(format.tensor_scales)(amax)
    known = vector_of(amax, scales.encode, scales.decode)
    return jnp.stack([known.get(place, jnp.zeros_like(amax)) for place in range(SIZE)], axis=1)


def rows(x, policies, keys, tiles, *, order=None):
    """[(carrier, float32 [experts] factor)] of x [rows, features] in `tiles` for each role of `policies`: a row and a
    column at most, the row first, in one read after that for maxima. `keys`: each expert's key words of those roles
    that draw bytes. With an `order` of scales: [(codes, factor, scales)].
    """
    hadamard = any(policy.hadamard for policy in policies.values())
    tops = [_amaxes(found, tiles) for found in kernels.maxima(x, hadamard=hadamard)]
    tables = {role: scale_table(tops[-1 if p.hadamard else 0], p.format) for role, p in policies.items()}
    count, sides = tiles.experts.shape[0], dict[str, Any]()
    origin = jnp.stack([-jnp.arange(count, dtype=jnp.int32), tiles.first, jnp.zeros(count, jnp.int32)], axis=1)
    window = kernels.Window(origin, tiles.tile, x.shape[0], x.shape[1], x.shape[0] // 4 * x.shape[1])
    for role, policy in policies.items():
        drawn = role in keys
        key = tiles.per_tile(jnp.stack(key_words(keys[role]), axis=-1)) if drawn else None
        place, scale, how = window if drawn else None, tiles.per_tile(tables[role]), scaling(policy)
        if role in OF_ROWS:
            sides["rows"] = kernels.Rowwise(scale, key, place, order, **how)
        else:
            sides["columns"] = kernels.Columnwise(scale, key, place, policy.hadamard, codes=order, **how)
    made = kernels.quantize(x, **sides)
    if order is not None:
        pairs = zip(policies, made[::2], made[1::2], strict=True)
        return [(codes, tables[role][:, GEMM], scales) for role, codes, scales in pairs]
    return [(array, tables[role][:, GEMM]) for role, array in zip(policies, made, strict=True)]


def _amaxes(partial: jax.Array, tiles: Tiles) -> jax.Array:
    """float32 [experts], of the bits that programs down and across an array left."""
    of_tiles = jnp.max(partial.reshape(tiles.experts.shape[0], -1), axis=1).astype(jnp.uint32)
    return tiles.largest(of_tiles)


def weights(w: jax.Array, amax: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """(carrier [experts, inputs, outputs], float32 [experts] factor) of float32 w, each expert under its own scale."""
    flat, table = w.reshape(-1, w.shape[-1]), _weight_scales(w, amax)
    return kernels.quantize_weight(flat, table).reshape(w.shape), table[:, GEMM]


def weight_codes(w: jax.Array, amax: jax.Array | None, axis: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(codes, factor, scales) of the same, contracted along `axis`: codes [experts, outputs, inputs / 2] along -2,
    [experts, inputs, outputs / 2] along -1."""
    table, each = _weight_scales(w, amax), (w.shape[0], -1)
    packed, scales = kernels.pack_weight(w.reshape(-1, w.shape[-1]), table)
    with jax.named_scope("quantize"):
        codes = jax.vmap(functools.partial(native.ordered, axis=axis))(packed.reshape(*each, packed.shape[1]))
        squares = functools.partial(native.of_squares, block=block_scaled.BLOCK, axis=axis)
        return codes, table[:, GEMM], jax.vmap(squares)(scales.reshape(*each, scales.shape[1])).reshape(-1)


def _weight_scales(w: jax.Array, amax: jax.Array | None) -> jax.Array:
    if amax is None:
        partial = kernels.weight_maxima(w.reshape(-1, w.shape[-1])).reshape(w.shape[0], -1)
        amax = float_of_bits(jnp.max(partial, axis=1).astype(jnp.uint32))
    return scale_table(amax)
