"""QWeight: a weight matrix quantized once and used by fprop, dgrad and every microbatch of a step.

W [inputs, outputs] is read along its inputs by fprop and along its outputs by dgrad. Under square blocks both read the
same codes; otherwise there are two sets. The codes have no gradient. `master` is the master weight: a linear returns
its weight gradient as the cotangent of `master`, so gradients pass straight through the rounding, and since
no forward computation reads it, a compiled program does not load it.

On a mesh a device quantizes its shard of the weight, under the amax of the global weight. If a weight is all-gathered
before a GEMM, its codes and compact scales are sent, 4.25 bits per element under NVFP4. The residuals are the shards,
not the gathered codes.
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

CONTRACTED_WEIGHT_AXIS = {"fprop_w": -2, "dgrad_w": -1}  # the axis of W [inputs, outputs] that the GEMM contracts


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
        """Returns the operand or codes of `role`, None if the recipe does not quantize it."""
        if not getattr(self.recipe, role).format.quantized:
            return None
        return self.fprop if role == "fprop_w" or self.dgrad is None else self.dgrad


@functools.partial(jax.tree_util.register_dataclass, data_fields=["weight", "amaxes"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class DelayedScalingWeight:
    """A weight and, for delayed scaling, the amaxes of x, W and dy in earlier steps, float32 [3].

    An amax of 0 gives a scale of 1. The cotangent of `amaxes` is no gradient: it holds the amaxes of the current x, W
    and dy, for later steps.
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
    """Returns True if fprop and dgrad read one set of codes: 2D blocks, only a per-tensor scale, or not quantized."""
    same = recipe.fprop_w == recipe.dgrad_w and not recipe.fprop_w.hadamard and not recipe.fprop_w.stochastic
    return same and (recipe.fprop_w.block == "2d" or recipe.fprop_w.format.block is None)


def weight_specs(weight: Any, spec: PartitionSpec, *, lead: int = 0) -> Any:
    """Returns the PartitionSpecs of a weight, array or QWeight, whose matrix is sharded by `spec`.

    Codes and block scales are sharded as the matrix, a transpose by the reversed spec; `lead` leading dims and scalars
    are not sharded.
    """
    matrix_axes = (*spec, *(None,) * (2 - len(spec)))
    plain, transposed = (PartitionSpec(*(None,) * lead, *dims) for dims in (matrix_axes, matrix_axes[::-1]))

    def leaf_spec(path: tuple[object, ...], leaf: jax.Array) -> PartitionSpec:
        if leaf.ndim != 2 + lead:
            return PartitionSpec()
        return transposed if path and path[-1] == jax.tree_util.GetAttrKey("transposed") else plain

    return jax.tree_util.tree_map_with_path(leaf_spec, weight)


def all_gather_codes(codes: PackedQTensor, shards: LinearSharding) -> PackedQTensor:
    """Returns the codes of a weight all-gathered, with its block scales and outer scales that are not scalars."""
    scales = None if codes.scales is None else all_gather_dims(codes.scales, shards.weight_storage_axes)
    amax, outer = (
        all_gather_dims(t, shards.weight_storage_axes) if t.ndim else t for t in (codes.amax, codes.decode_scale)
    )
    packed = all_gather_dims(codes.packed, shards.weight_storage_axes)
    return dataclasses.replace(codes, packed=packed, scales=scales, amax=amax, decode_scale=outer)


def gather_kernel_weight(codes: BlockDequantized | Fp8Operand, role: str, shards: LinearSharding) -> Operand:
    """All-gathers a weight that a kernel wrote; of 8-bit codes only the order that the GEMM reads, as bytes."""
    if isinstance(codes, BlockDequantized):
        return dataclasses.replace(codes, array=all_gather_dims(codes.array, shards.weight_storage_axes))

    def gather(array: jax.Array, cut: DimAxes) -> jax.Array:
        gathered = all_gather_dims(lax.bitcast_convert_type(array, "uint8"), cut)
        return lax.bitcast_convert_type(gathered, array.dtype)

    if role == "fprop_w" and codes.transposed is not None:
        return dataclasses.replace(
            codes, as_stored=None, transposed=gather(codes.transposed, shards.weight_storage_axes[::-1])
        )
    assert codes.as_stored is not None, "dgrad reads a weight as it lies"
    return dataclasses.replace(codes, as_stored=gather(codes.as_stored, shards.weight_storage_axes), transposed=None)
