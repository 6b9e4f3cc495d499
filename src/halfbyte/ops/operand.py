"""What a GEMM consumes, and how a tensor becomes it.

An `Operand` is a matrix as the hardware reads it: a *carrier* whose numbers are element x block scale, exact in the
carrier's type, and one float32 factor for the whole tensor. A GEMM over carriers computes the true products of the
quantized operands; the factors multiply its float32 result:

    y = (carrier_left . carrier_right) * (decode_left * decode_right)
"""

import dataclasses
import functools
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from halfbyte.formats import Packed, QTensor, key_words, random_bytes, store, to_grid, transform_runs
from halfbyte.formats.bits import round_bfloat16
from halfbyte.recipe import OperandPolicy


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["carrier", "decode_scale", "quantized", "vector", "turned"],
    meta_fields=["policy"],
)
@dataclasses.dataclass(frozen=True)
class Operand:
    """`carrier` float32 or bfloat16 (None if only the codes were made).

    `decode_scale` float32 scalar, None for 1; `quantized` the codes, None under bf16.
    """

    carrier: jax.Array | None
    decode_scale: jax.Array | None
    quantized: QTensor | Packed | None
    policy: OperandPolicy
    vector: jax.Array | None = None  # the tensor's scales as the GPU kernels pass them on
    turned: jax.Array | None = None  # the carrier as a matrix, transposed: 8-bit GEMMs want the contraction last

    def values(self) -> jax.Array:
        """The carrier; made from the codes or the transpose if need be."""
        if self.carrier is not None:
            return self.carrier
        return self.codes().carrier() if self.turned is None else self.turned.T

    def codes(self) -> QTensor:
        assert self.quantized is not None, "an operand without codes has a carrier"
        return self.quantized.unpack() if isinstance(self.quantized, Packed) else self.quantized


_Tree = TypeVar("_Tree")
SAVED = "quantized"  # the checkpoint name of packed residuals: a remat policy may save them by it
SCALES = "scales"  # of the scales of a tensor or the statistics of a row: a few bytes that spare a pass over the tensor
Kept = Packed | Operand | jax.Array  # until the backward pass: packed codes, 8-bit codes, the bfloat16 tensor itself


def gemm_scale(tensor: QTensor | Packed) -> jax.Array:
    """The factor that a GEMM's result owes this operand: its decode scale, NaN if its amax is not finite."""
    return jnp.where(jnp.isfinite(tensor.amax), tensor.decode_scale, jnp.float32(jnp.nan))


def key_pair(key: jax.Array | None) -> jax.Array | None:
    """uint32 [2]: the key as kernels take it; None stays None."""
    return None if key is None else jnp.stack(key_words(key))


def to_bfloat16(x: jax.Array) -> jax.Array:
    """x as bfloat16, by a rounding that survives: XLA drops a cast to bfloat16 and back within one program."""
    return x if x.dtype == jnp.bfloat16 else round_bfloat16(x.astype(jnp.float32)).astype(jnp.bfloat16)


@jax.named_scope("quantize")
def quantize_operand(x: jax.Array, policy: OperandPolicy, *, axis: int, key: jax.Array | None) -> Operand:
    """x under `policy`, blocked and transformed along `axis` (-1 or -2), the axis that the GEMM contracts.

    The definition for every backend.
    """
    if policy.hadamard:
        x = transform_runs(x, axis=axis)
    if not policy.format.quantized:
        return Operand(to_bfloat16(x), None, None, policy)
    noise = None
    if policy.stochastic:
        if key is None:
            raise ValueError(
                "this recipe rounds stochastically and needs a key; pass key=..., or use a recipe "
                "without stochastic rounding (nvfp4_no_sr)"
            )
        noise = random_bytes(key, x.shape)
    grid = to_grid(x, policy.format, block=policy.block, axis=axis, noise=noise)
    quantized = store(grid, policy.format, block=policy.block, axis=axis)
    return Operand(grid.carrier(), gemm_scale(quantized), quantized, policy)


def keep(operand: Operand) -> Kept:
    """The operand as it is kept for the backward pass: 4.5 bits a number under NVFP4.

    Of two orders only the transpose stays, the one that wgrad reads.
    """
    if operand.quantized is not None:
        return operand.quantized if isinstance(operand.quantized, Packed) else Packed.of(operand.quantized)
    if not operand.policy.format.quantized:
        return operand.values()
    return operand if operand.turned is None else dataclasses.replace(operand, carrier=None)


@jax.named_scope("quantize")
def name_saved(kept: _Tree, name: str = SAVED) -> _Tree:
    """`kept`, under the name by which a remat policy may save it."""
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, name), kept)


def keep_named(operand: Operand) -> Kept:
    """`keep`, with packed codes under the name by which a remat policy may save them.

    A tensor that is kept as it came stays the caller's own array, so that linears with one input share the residual.
    """
    kept = keep(operand)
    return name_saved(kept) if operand.policy.format.quantized else kept


def load(kept: Kept, policy: OperandPolicy) -> Operand:
    """The operand of `keep`, bit for bit."""
    if isinstance(kept, Operand):
        return kept
    if not isinstance(kept, Packed):
        return Operand(kept, None, None, policy)
    tensor = kept.unpack()
    return Operand(tensor.carrier(), gemm_scale(kept), tensor, policy)
