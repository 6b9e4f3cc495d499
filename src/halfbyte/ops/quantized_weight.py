"""QWeight: a weight matrix quantized once and used by fprop, dgrad and every microbatch of a step.

W [inputs, outputs] is read along its inputs by fprop and along its outputs by dgrad. Under square blocks both read the
same codes; otherwise there are two sets. The codes have no gradient. `master` is the master weight: a linear returns
its weight gradient as the cotangent of `master`, so gradients pass straight through the rounding, and since
no forward computation reads it, a compiled program does not load it.

On a mesh a device quantizes its part of the weight, under the maximum of the whole. Where a weight is gathered before a
GEMM reads it, its codes and compact scales travel, 4.25 bits a number under NVFP4; the parts, not the gathered codes,
are what the backward pass keeps.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from halfbyte.formats import PackedQTensor
from halfbyte.ops.linear_sharding import DimAxes, LinearSharding, all_gather_dims
from halfbyte.ops.operand import BlockDequantized, Fp8Operand, Operand
from halfbyte.recipes import Recipe
from halfbyte.renamed import renamed_members

CONTRACTED_WEIGHT_AXIS = {"fprop_w": -2, "dgrad_w": -1}  # the axis of W [inputs, outputs] that each GEMM sums over


@functools.partial(jax.tree_util.register_dataclass, data_fields=["master", "fprop", "dgrad"], meta_fields=["recipe"])
@renamed_members(anchor="master")
@dataclasses.dataclass(frozen=True)
class QWeight:
    """Codes for fprop and for dgrad (None: not quantized, or dgrad shares those of fprop).

    `quantize_weight` returns it; `qdot` takes it in place of the matrix. As a residual it may hold scales only.
    """

    master: Any  # float32 or bfloat16 [inputs, outputs]; None among residuals if the backward pass does not read it
    fprop: Any  # WeightOperand; WeightResidual among residuals
    dgrad: Any
    recipe: Recipe

    @property
    def shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.master.shape
        return shape

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(self.master.dtype)

    def codes(self, role: str) -> Any:
        """What the GEMM reads whose weight is `role`; None if it is not quantized."""
        if not getattr(self.recipe, role).format.quantized:
            return None
        return self.fprop if role == "fprop_w" or self.dgrad is None else self.dgrad


@functools.partial(jax.tree_util.register_dataclass, data_fields=["weight", "amaxes"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class DelayedScalingWeight:
    """A weight, and what its linear is scaled by under a recipe with a history: `amaxes` float32 [3], of x, W and dy in
    steps before; 0 gives a scale of 1.

    The cotangent of `amaxes` is no gradient: it is the largest magnitudes of this x, W and dy, for steps to come.
    """

    weight: jax.Array
    amaxes: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def dtype(self) -> jnp.dtype:
        return self.weight.dtype


Weight = jax.Array | QWeight | DelayedScalingWeight


def shares_fprop_dgrad_codes(recipe: Recipe) -> bool:
    """Whether fprop and dgrad read one set of codes: square blocks, a tensor-wide scale, or no quantization."""
    same = recipe.fprop_w == recipe.dgrad_w and not recipe.fprop_w.hadamard and not recipe.fprop_w.stochastic
    return same and (recipe.fprop_w.block == "2d" or recipe.fprop_w.format.block is None)


def weight_specs(weight: Any, spec: PartitionSpec, *, lead: int = 0) -> Any:
    """The PartitionSpecs of a weight, array or QWeight, whose matrix is cut by `spec`, under `lead` dims that are not:
    codes and scales of blocks as the matrix, a transpose the other way round, scalars not at all.
    """
    inner = (*spec, *(None,) * (2 - len(spec)))
    whole, turned = (PartitionSpec(*(None,) * lead, *dims) for dims in (inner, inner[::-1]))

    def of(path: tuple[object, ...], leaf: jax.Array) -> PartitionSpec:
        if leaf.ndim != 2 + lead:
            return PartitionSpec()
        return turned if path and path[-1] == jax.tree_util.GetAttrKey("transposed") else whole

    return jax.tree_util.tree_map_with_path(of, weight)


def all_gather_codes(codes: PackedQTensor, shards: LinearSharding) -> PackedQTensor:
    """The codes of a whole weight; outer scales as well, where it has one a block."""
    scales = None if codes.scales is None else all_gather_dims(codes.scales, shards.weight_storage_axes)
    amax, outer = (
        all_gather_dims(t, shards.weight_storage_axes) if t.ndim else t for t in (codes.amax, codes.decode_scale)
    )
    packed = all_gather_dims(codes.packed, shards.weight_storage_axes)
    return dataclasses.replace(codes, packed=packed, scales=scales, amax=amax, decode_scale=outer)


def gather_kernel_weight(codes: BlockDequantized | Fp8Operand, role: str, shards: LinearSharding) -> Operand:
    """A weight that a kernel made, put together; of 8-bit codes the one order that the GEMM reads, as bytes."""
    if isinstance(codes, BlockDequantized):
        return dataclasses.replace(codes, array=all_gather_dims(codes.array, shards.weight_storage_axes))

    def bytes_of(array: jax.Array, cut: DimAxes) -> jax.Array:
        whole = all_gather_dims(lax.bitcast_convert_type(array, "uint8"), cut)
        return lax.bitcast_convert_type(whole, array.dtype)

    if role == "fprop_w" and codes.transposed is not None:
        return dataclasses.replace(
            codes, as_stored=None, transposed=bytes_of(codes.transposed, shards.weight_storage_axes[::-1])
        )
    assert codes.as_stored is not None, "dgrad reads a weight as it lies"
    return dataclasses.replace(codes, as_stored=bytes_of(codes.as_stored, shards.weight_storage_axes), transposed=None)
