"""Tiles of rows sorted by expert, and the GPU kernels that quantize and multiply them.

Every expert begins with a new tile, and the last tile of an expert is filled with zero rows. So no block, no Hadamard
run and no scale crosses two experts, and a zero row changes no amax, no code and no sum. Tiles without rows come last
and are never read.

The kernels are those of backend `fused`, with a table of scales, keys and offsets (one entry per tile, or per expert
for weights) in place of the scalars of one tensor. The matrices of all experts are one tall matrix with an entry each.
Codes, scales and random bytes equal those of `grouped_linear.py`. On Hopper operands are block-dequantized (bf16). On
Blackwell they are codes and tiled scales, as in backend `native`; `block_scaled_refusal` decides.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from halfbyte import kernels
from halfbyte.devices import Device, native_training
from halfbyte.formats import NVFP4, BlockFormat
from halfbyte.formats.exact_float32 import bitcast_to_float32
from halfbyte.formats.random_bits import key_words
from halfbyte.kernels import blackwell_grouped_gemm, hopper_grouped_gemm, triton_launch
from halfbyte.kernels.tensor_scale_kernel import GEMM_ALPHA_INDEX, SCALE_VECTOR_SIZE, scale_vector
from halfbyte.ops.backends import native
from halfbyte.ops.backends.kernel_support import KERNEL_POLICIES, OF_ROWS, WEIGHT_2D, kernel_scaling
from halfbyte.ops.gemm_problem import target_device
from halfbyte.ops.trace_context import is_multi_device_program
from halfbyte.recipes import ROLES, WEIGHT_ROLES, OperandPolicy, Recipe

MAX_TILE_ROWS = 128


KERNEL_DTYPES = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)  # of rows and of weights


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["counts", "experts", "first_tile_of_expert"],
    meta_fields=["tile", "backend", "partitioned_by_xla"],
)
@dataclasses.dataclass(frozen=True)
class ExpertTiles:
    """Tiles of a buffer of rows that are sorted by expert.

    `counts`: int32 [experts], rows per expert. `experts`: int32 [tiles], the expert of each tile; the number of experts
    for a tile without one. `first_tile_of_expert`: int32 [tiles], the first row of each tile, counted in its expert.
    With a `backend` other than "auto" the GEMMs are XLA's. No Pallas kernel is used if the compiler shards the rows
    (`partitioned_by_xla`).
    """

    counts: jax.Array
    experts: jax.Array
    first_tile_of_expert: jax.Array
    tile: int
    backend: str = "auto"
    partitioned_by_xla: bool = False

    @classmethod
    def from_counts(cls, counts: jax.Array, rows: int, tile: int) -> "ExpertTiles":
        """Returns the tiles of a buffer of `rows`, a multiple of `tile`."""
        ends = jnp.cumsum(padded_group_sizes(counts, tile))
        start = jnp.arange(rows // tile, dtype=jnp.int32) * tile
        experts = jnp.searchsorted(ends, start, side="right", method="compare_all").astype(jnp.int32)
        before = jnp.concatenate([jnp.zeros(1, ends.dtype), ends])[experts]
        return cls(
            counts, experts, (start - before).astype(jnp.int32), tile, partitioned_by_xla=is_multi_device_program()
        )

    @property
    def num_used(self) -> jax.Array:
        """Returns how many tiles have an expert."""
        return jnp.sum((self.experts < self.counts.shape[0]).astype(jnp.int32))

    def per_tile(self, per_expert: jax.Array) -> jax.Array:
        """[experts, ...] -> [tiles, ...]. A tile without an expert gets the last one's entry, which is never read."""
        return per_expert[jnp.minimum(self.experts, per_expert.shape[0] - 1)]

    def amax_per_expert(self, bits: jax.Array) -> jax.Array:
        """Returns float32 [experts] from uint32 [tiles] bits of magnitudes. Infinity and NaN are kept."""
        return bitcast_to_float32(jnp.zeros(self.counts.shape[0] + 1, jnp.uint32).at[self.experts].max(bits)[:-1])

    def slice(self, array: jax.Array, number: jax.Array) -> jax.Array:
        """Returns the rows of one tile."""
        return lax.dynamic_slice_in_dim(array, number * self.tile, self.tile)


def apply_in_tiles(
    x: jax.Array,
    experts_of: jax.Array,
    counts: jax.Array,
    tile: int,
    run: Callable[[jax.Array, ExpertTiles], jax.Array],
) -> jax.Array:
    """Applies `run(rows, tiles)` to x [pairs, width] with its rows sorted into tiles; returns them in order of pairs.

    Rows of pairs without an expert (`experts_of` is the number of experts) are 0.
    """
    experts = counts.shape[0]
    row = row_of_pair(experts_of, jnp.append(counts, 0), tile)
    row = jnp.where(experts_of < experts, row, 2**31 - 1)
    capacity = buffer_capacity(x.shape[0], experts, tile)
    buffer = jnp.zeros((capacity, x.shape[1]), x.dtype).at[row].set(x, mode="drop")
    return run(buffer, ExpertTiles.from_counts(counts, capacity, tile)).at[row].get(mode="fill", fill_value=0)


def choose_tile_rows(rows: int, experts: int, recipes: Sequence[Recipe | None], *, device: Device | None = None) -> int:
    """Returns the rows of a tile: a multiple of every operand's quantization group.

    On a GPU it is what its kernels read. Elsewhere it grows while experts have several tiles on average. `device`
    defaults to the target device.
    """
    policies = [getattr(recipe, role) for recipe in recipes if recipe is not None for role in ROLES]
    # Random bytes are drawn four rows at a time.
    tile = math.lcm(4, *(policy.quantization_group_size for policy in policies))
    if (device or target_device()).capability is not None:
        return math.lcm(tile, MAX_TILE_ROWS)
    while 2 * tile <= MAX_TILE_ROWS and 8 * tile * experts <= rows:
        tile *= 2
    return tile


def buffer_capacity(pairs: int, experts: int, tile: int) -> int:
    """Returns the rows that hold any routing of this many (token, expert) pairs."""
    return -(-(pairs + min(experts, pairs) * (tile - 1)) // tile) * tile


def padded_group_sizes(counts: jax.Array, tile: int) -> jax.Array:
    """Returns the rows of each expert, rounded up to whole tiles."""
    return (counts + (tile - 1)) // tile * tile


def row_of_pair(experts_of: jax.Array, counts: jax.Array, tile: int) -> jax.Array:
    """Returns int32 [pairs], the row of each pair. The pairs of an expert keep their order."""
    sizes = padded_group_sizes(counts, tile)
    before, start = jnp.cumsum(counts) - counts, jnp.cumsum(sizes) - sizes
    order = jnp.argsort(experts_of, stable=True)
    expert = experts_of[order]
    row = jnp.arange(experts_of.shape[0], dtype=jnp.int32) - before[expert] + start[expert]
    return jnp.zeros_like(experts_of).at[order].set(row.astype(experts_of.dtype), unique_indices=True)


def has_grouped_gemm_kernel(*sides: int, device: Device) -> bool:
    """Returns True if the grouped GEMM kernels take matrices with sides of these sizes."""
    return hopper_grouped_gemm.unsupported_grouped_gemm(*sides, capability=device.capability) is None


def has_quantize_kernel(role: str, policy: OperandPolicy, sides: tuple[int, ...], device: Device) -> bool:
    """Returns True if a kernel quantizes operand `role` of experts with matrices of `sides` (inputs, outputs)."""
    inputs, outputs = sides
    if device.capability is None or device.capability < (9, 0):
        return False
    if role in WEIGHT_ROLES:
        return policy == WEIGHT_2D and inputs % triton_launch.NVFP4_BLOCK == 0 and triton_launch.is_tileable(outputs)
    by_division = policy.format.scale.uses_effective_step  # no table has its scales
    served = policy in KERNEL_POLICIES[role] and policy.source != "requantize_forward" and not by_division
    return served and triton_launch.is_tileable(outputs if role.endswith("dy") else inputs)


def block_scaled_refusal(
    recipe: Recipe | None, sides: tuple[int, ...], device: Device, *, backend: str = "auto",
    tile: int = blackwell_grouped_gemm.OUTPUT_TILE_SIZE, dtypes: Sequence[DTypeLike] = KERNEL_DTYPES,
) -> str | None:  # fmt: skip
    """Returns why experts with matrices of `sides` cannot run on block-scaled units, or None.

    The train step and the precision manifest both decide by it. `tile`: rows of a tile. `dtypes`: those of rows and
    weights before quantization.
    """
    reason = blackwell_grouped_gemm.unsupported_block_scaled_gemm(*sides, capability=device.capability)
    if reason is not None:
        return reason
    if recipe is None:
        return "nothing is quantized"
    if backend != "auto":
        return f"backend {backend} was asked for, whose operands are no codes"
    if tile != blackwell_grouped_gemm.OUTPUT_TILE_SIZE:
        rows = blackwell_grouped_gemm.OUTPUT_TILE_SIZE
        return f"block-scaled GEMM kernels of experts read tiles of {rows} rows, and these have {tile}"
    if any(jnp.dtype(dtype) != required for dtype, required in zip(dtypes, KERNEL_DTYPES, strict=True)):
        return f"kernels that write codes for experts read rows and weights in {' and '.join(map(str, KERNEL_DTYPES))}"
    for role in ROLES:
        policy = getattr(recipe, role)
        served = has_quantize_kernel(role, policy, sides, device) and native_training(
            device, policy.format.hardware_unit
        )
        if not served or blackwell_grouped_gemm.OUTPUT_TILE_SIZE % policy.quantization_group_size:
            return f"{role} is {policy}, and block-scaled GEMM kernels of experts multiply what NVFP4 kernels make"
    return None


def expert_scale_vectors(amax: jax.Array, format: BlockFormat = NVFP4) -> jax.Array:
    """Returns float32 [experts, 8]: the scale vector of `kernels.tensor_scale_kernel` for each amax."""
    scales = jax.vmap(format.tensor_scales)(amax)
    entries = scale_vector(amax, scales.encode, scales.decode)
    return jnp.stack([entries.get(index, jnp.zeros_like(amax)) for index in range(SCALE_VECTOR_SIZE)], axis=1)


def quantize_expert_rows(x, policies, keys, tiles, *, order=None):
    """Quantizes x [rows, features] in `tiles` for each role of `policies`: one rowwise and one columnwise at most.

    The rowwise role comes first. One launch reads x for the amaxes, one for the operands. `keys`: the key words of each
    expert, for the roles that round stochastically. Returns [(block-dequantized rows, float32 [experts] decode
    scales)], with an `order` of scales [(codes, decode scales, block scales)].
    """
    hadamard = any(policy.hadamard for policy in policies.values())
    amaxes = [_amaxes(partial, tiles) for partial in kernels.partial_amax(x, hadamard=hadamard)]
    tables = {role: expert_scale_vectors(amaxes[-1 if p.hadamard else 0], p.format) for role, p in policies.items()}
    count, operands = tiles.experts.shape[0], dict[str, Any]()
    origin = jnp.stack(
        [-jnp.arange(count, dtype=jnp.int32), tiles.first_tile_of_expert, jnp.zeros(count, jnp.int32)], axis=1
    )
    window = kernels.GlobalWindow(origin, tiles.tile, x.shape[0], x.shape[1], x.shape[0] // 4 * x.shape[1])
    for role, policy in policies.items():
        stochastic = role in keys
        key = tiles.per_tile(jnp.stack(key_words(keys[role]), axis=-1)) if stochastic else None
        origins, scale, scaling = window if stochastic else None, tiles.per_tile(tables[role]), kernel_scaling(policy)
        if role in OF_ROWS:
            operands["rows"] = kernels.RowwiseOperand(scale, key, origins, order, **scaling)
        else:
            operands["columns"] = kernels.ColumnwiseOperand(
                scale, key, origins, policy.hadamard, code_scale_layout=order, **scaling
            )
    outputs = kernels.quantize_tiled(x, **operands)
    if order is not None:
        pairs = zip(policies, outputs[::2], outputs[1::2], strict=True)
        return [(codes, tables[role][:, GEMM_ALPHA_INDEX], scales) for role, codes, scales in pairs]
    return [(array, tables[role][:, GEMM_ALPHA_INDEX]) for role, array in zip(policies, outputs, strict=True)]


def quantize_expert_weights(w: jax.Array, amax: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Quantizes float32 w per expert: (block-dequantized w, float32 [experts] decode scales)."""
    flat, table = w.reshape(-1, w.shape[-1]), _weight_scales(w, amax)
    return kernels.quantize_weight_kernel(flat, table).reshape(w.shape), table[:, GEMM_ALPHA_INDEX]


def expert_weight_codes(w: jax.Array, amax: jax.Array | None, axis: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (codes, decode scales, block scales) of w, contracted along `axis`.

    codes: [experts, outputs, inputs / 2] for axis -2, [experts, inputs, outputs / 2] for axis -1.
    """
    table, dims = _weight_scales(w, amax), (w.shape[0], -1)  # of codes and scales, per expert
    packed, scales = kernels.pack_weight_kernel(w.reshape(-1, w.shape[-1]), table)
    with jax.named_scope("quantize"):
        codes = jax.vmap(functools.partial(native.to_k_major_codes, axis=axis))(packed.reshape(*dims, packed.shape[1]))
        expand = functools.partial(native.expand_2d_scales, block=blackwell_grouped_gemm.NVFP4_SCALE_BLOCK, axis=axis)
        return codes, table[:, GEMM_ALPHA_INDEX], jax.vmap(expand)(scales.reshape(*dims, scales.shape[1])).reshape(-1)


def _amaxes(partial: jax.Array, tiles: ExpertTiles) -> jax.Array:
    """Returns float32 [experts] from the amax bits that the programs of the kernel wrote."""
    of_tiles = jnp.max(partial.reshape(tiles.experts.shape[0], -1), axis=1).astype(jnp.uint32)
    return tiles.amax_per_expert(of_tiles)


def _weight_scales(w: jax.Array, amax: jax.Array | None) -> jax.Array:
    if amax is None:
        partial = kernels.weight_partial_amax(w.reshape(-1, w.shape[-1])).reshape(w.shape[0], -1)
        amax = bitcast_to_float32(jnp.max(partial, axis=1).astype(jnp.uint32))
    return expert_scale_vectors(amax)
