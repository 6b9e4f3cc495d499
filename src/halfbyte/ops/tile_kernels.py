"""Operands and GEMMs of experts as GPU kernels: those of `fused`, with a table in the place of one tensor's numbers.

A tile of rows has one expert, and so one entry of each table: its scales, its key, and where it lies in its expert. The
matrices of all experts are one tall matrix with an entry each. Codes, scales and random bytes are those of `tiles.py`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from halfbyte import kernels
from halfbyte.devices import Device
from halfbyte.formats import NVFP4, BlockFormat
from halfbyte.formats.bits import float_of_bits
from halfbyte.formats.noise import key_words
from halfbyte.kernels import grouped, layout
from halfbyte.kernels.scale import GEMM, SIZE, vector_of
from halfbyte.ops.backends import fused
from halfbyte.recipe import WEIGHTS, OperandPolicy


def multiplies(*sides: int, device: Device) -> bool:
    """Whether grouped GEMM kernels take matrices with sides of these sizes."""
    return grouped.unsupported(*sides, capability=device.capability) is None


def makes(role: str, policy: OperandPolicy, sides: tuple[int, ...], device: Device) -> bool:
    """Whether a kernel makes operand `role` of experts' matrices with `sides` (inputs, outputs)."""
    inputs, outputs = sides
    if device.capability is None or device.capability < (9, 0):
        return False
    if role in WEIGHTS:
        return policy == fused.WEIGHT and inputs % layout.BLOCK == 0 and layout.divides(outputs)
    served = policy in fused.SERVED[role] and policy.source != "forward"
    return served and layout.divides(outputs if role.endswith("dy") else inputs)


def scale_table(amax: jax.Array, format: BlockFormat = NVFP4) -> jax.Array:
    """float32 [experts, 8]: the vector of `kernels.tensor_scale` for each amax."""
    scales = jax.vmap(format.tensor_scales)(amax)
    known = vector_of(amax, scales.encode, scales.decode)
    return jnp.stack([known.get(place, jnp.zeros_like(amax)) for place in range(SIZE)], axis=1)


def rows(x, policies, keys, tiles):
    """[(carrier, float32 [experts] factor)] of x [rows, features] in `tiles` for each role of `policies`: a row and a
    column at most, the row first, in one read after that for maxima. `keys`: each expert's key words of those roles
    that draw bytes.
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
        place, scale, how = window if drawn else None, tiles.per_tile(tables[role]), fused.scaling(policy)
        if role in fused.OF_ROWS:
            sides["rows"] = kernels.Rowwise(scale, key, place, **how)
        else:
            sides["columns"] = kernels.Columnwise(scale, key, place, policy.hadamard, **how)
    made = kernels.quantize(x, **sides)
    return [(array, tables[role][:, GEMM]) for role, array in zip(policies, made, strict=True)]


def _amaxes(partial: jax.Array, tiles) -> jax.Array:
    """float32 [experts], of the bits that programs down and across an array left."""
    of_tiles = jnp.max(partial.reshape(tiles.experts.shape[0], -1), axis=1).astype(jnp.uint32)
    return tiles.largest(of_tiles)


def weights(w: jax.Array, amax: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """(carrier [experts, inputs, outputs], float32 [experts] factor) of float32 w, each expert under its own scale."""
    flat = w.reshape(-1, w.shape[-1])
    if amax is None:
        partial = kernels.weight_maxima(flat).reshape(w.shape[0], -1)
        amax = float_of_bits(jnp.max(partial, axis=1).astype(jnp.uint32))
    table = scale_table(amax)
    return kernels.quantize_weight(flat, table).reshape(w.shape), table[:, GEMM]
