"""QWeight: a weight matrix quantized once and used by fprop, dgrad and every microbatch of a step.

W [inputs, outputs] is read along its inputs by fprop and along its outputs by dgrad. Under square blocks both read the
same codes; otherwise there are two sets. The codes carry no gradient. `anchor` is the master weight itself: a linear
returns its weight gradient as the cotangent of the anchor, so gradients pass straight through the rounding, and since
no forward computation reads it, a compiled program does not load it.

On a mesh a device quantizes its part of the weight, under the maximum of the whole. Where a weight is gathered before a
GEMM reads it, its codes and compact scales travel, 4.25 bits a number under NVFP4; the parts, not the gathered codes,
are what the backward pass keeps.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from halfbyte.formats import Packed, quantize
from halfbyte.ops.operand import Carrier, EightBit, Operand, WeightScales, name_saved, quantize_operand
from halfbyte.ops.passes import XLA, KeptWeight, Passes, QuantizedWeight
from halfbyte.ops.shards import WHOLE, Cut, Shards, axes_of, cut_of, gather
from halfbyte.recipe import OperandPolicy, Recipe, as_recipe, role_key

CONTRACTED = {"fprop_w": -2, "dgrad_w": -1}  # the axis of W [inputs, outputs] that each GEMM sums over
WEIGHTS_KEPT = ("master", "codes")


@functools.partial(jax.tree_util.register_dataclass, data_fields=["anchor", "fprop", "dgrad"], meta_fields=["recipe"])
@dataclasses.dataclass(frozen=True)
class QWeight:
    """Codes for fprop and for dgrad (None: not quantized, or dgrad shares those of fprop).

    Made by `quantize_weight`; `qdot` takes it in place of the matrix. Among residuals it may hold scales alone.
    """

    anchor: Any  # float32 or bfloat16 [inputs, outputs]; None among residuals if the backward pass does not read it
    fprop: Any  # QuantizedWeight; KeptWeight among residuals
    dgrad: Any
    recipe: Recipe

    @property
    def shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.anchor.shape
        return shape


def shares_codes(recipe: Recipe) -> bool:
    """Whether fprop and dgrad read one set of codes: square blocks, a tensor-wide scale, or no quantization."""
    same = recipe.fprop_w == recipe.dgrad_w and not recipe.fprop_w.hadamard and not recipe.fprop_w.stochastic
    return same and (recipe.fprop_w.block == "2d" or recipe.fprop_w.format.block is None)


def quantize_weight(
    w: jax.Array, *, recipe: Recipe | str, key: jax.Array | None = None, sharding: NamedSharding | None = None,
    amax: jax.Array | None = None,
) -> QWeight:  # fmt: skip
    """`w` [inputs, outputs] under the recipe's weight policies. Gradients with respect to it go straight to `w`.

    With a `sharding` each device of its mesh quantizes the part of w that rests there. `amax`, at least that of `w`,
    stands for the tensor's own where several weights share a tensor scale.
    """
    if w.ndim != 2:
        raise ValueError(
            f"a weight is a matrix [inputs, outputs], got shape {w.shape}; reshape it, or vmap over the leading dims"
        )
    chosen = as_recipe(recipe, "quantize_weight")
    if sharding is None or sharding.mesh.size == 1:
        return quantize_part(w, chosen, key, amax=amax)
    cut = cut_of(sharding.spec, 2)

    def codes(w: jax.Array, amax: jax.Array | None, cut: Cut = ((), ())) -> QWeight:
        return dataclasses.replace(quantize_part(w, chosen, key, cut=cut, amax=amax), anchor=None)

    specs = weight_specs(jax.eval_shape(codes, w, amax), sharding.spec)
    given = (sharding.spec, None if amax is None else PartitionSpec())
    part = functools.partial(codes, cut=cut)
    made = jax.shard_map(part, mesh=sharding.mesh, in_specs=given, out_specs=specs, check_vma=False)(w, amax)
    return dataclasses.replace(made, anchor=w)


def weight_specs(weight: Any, spec: PartitionSpec, *, lead: int = 0) -> Any:
    """The PartitionSpecs of a weight, array or QWeight, whose matrix is cut by `spec`, under `lead` dims that are not:
    codes and scales of blocks as the matrix, a transpose the other way round, scalars not at all.
    """
    inner = (*spec, *(None,) * (2 - len(spec)))
    whole, turned = (PartitionSpec(*(None,) * lead, *dims) for dims in (inner, inner[::-1]))

    def of(path: Any, leaf: Any) -> PartitionSpec:
        if leaf.ndim != 2 + lead:
            return PartitionSpec()
        return turned if path and path[-1] == jax.tree_util.GetAttrKey("transposed") else whole

    return jax.tree_util.tree_map_with_path(of, weight)


def quantize_part(
    w: jax.Array, recipe: Recipe, key: jax.Array | None, *, cut: Cut = ((), ()), passes: Passes = XLA,
    amax: jax.Array | None = None, packed: bool = True,
) -> QWeight:  # fmt: skip
    """The weight, or one device's part of one that is `cut`, quantized by `passes` (`packed`, where it is to travel),
    or by the definition under a given `amax`.
    """
    constant = lax.stop_gradient(w)
    given = (key, cut, passes, amax, packed)
    fprop = _quantize(constant, recipe, "fprop_w", *given)
    dgrad = None if shares_codes(recipe) else _quantize(constant, recipe, "dgrad_w", *given)
    return QWeight(w, fprop, dgrad, recipe)


def _quantize(
    w: jax.Array, recipe: Recipe, role: str, key: jax.Array | None, cut: Cut, passes: Passes, amax: jax.Array | None,
    packed: bool,
) -> QuantizedWeight | None:  # fmt: skip
    policy: OperandPolicy = getattr(recipe, role)
    if not policy.format.quantized:
        return None
    role_bits = role_key(key, role) if policy.stochastic and key is not None else None
    made: QuantizedWeight
    if amax is not None:  # kernels find a tensor's amax themselves
        made = Packed.of(quantize(w, policy.format, block=policy.block, axis=CONTRACTED[role], amax=amax))
    else:
        made = passes.weight(w, policy, axis=CONTRACTED[role], key=role_bits, cut=cut, packed=packed)
    return name_saved(made) if isinstance(made, Packed) else made


def check_kept(weights_kept: str) -> None:
    if weights_kept not in WEIGHTS_KEPT:
        raise ValueError(f"weights_kept must be one of {', '.join(WEIGHTS_KEPT)}, got {weights_kept!r}")


def keep_weight(weight: QWeight, passes: Passes, *, kept: str, master: bool) -> QWeight:
    """The weight as the backward pass keeps it; its anchor only if it is read again: by a bf16 GEMM (`master`), or to
    make again what the passes leave out. Where codes are `kept` they leave nothing out.
    """
    passes = passes if kept == "master" else XLA
    fprop, dgrad = (None if c is None else passes.keep_weight(c) for c in (weight.fprop, weight.dgrad))
    master = master or any(isinstance(c, WeightScales) for c in (fprop, dgrad))
    return dataclasses.replace(weight, anchor=weight.anchor if master else None, fprop=fprop, dgrad=dgrad)


def restore_weight(kept: QWeight, passes: Passes, *, after: jax.Array) -> QWeight:
    """The weight of `keep_weight`, bit for bit, and not before `after` is there: a compiler that sees all layers would
    else make the weights of all of them first.
    """

    def restore(codes: KeptWeight | None) -> KeptWeight | None:
        if not isinstance(codes, WeightScales):
            return codes
        late, _ = lax.optimization_barrier((codes, after))
        return passes.remake_weight(kept.anchor, late)

    return dataclasses.replace(kept, fprop=restore(kept.fprop), dgrad=restore(kept.dgrad))


def weight_operand(weight: QWeight, role: str, shards: Shards = WHOLE, passes: Passes = XLA) -> Operand:
    """The weight as the right operand of fprop or dgrad; where it is gathered, that happens here. `passes` read packed
    codes.
    """
    policy, axis = getattr(weight.recipe, role), CONTRACTED[role]
    if not policy.format.quantized:
        narrow = quantize_operand(lax.stop_gradient(weight.anchor), policy, axis=axis, key=None)
        return dataclasses.replace(narrow, array=gather(narrow.array, shards.stored))
    codes = weight.fprop if role == "fprop_w" or weight.dgrad is None else weight.dgrad
    assert codes is not None and not isinstance(codes, WeightScales), "restore a kept weight before a GEMM reads it"
    if isinstance(codes, Packed):
        made = passes.gather_weight(codes, policy, axis=axis, shards=shards)
        return made or passes.load_weight(gather_packed(codes, shards), policy, axis=axis)
    return _gathered(codes, role, shards) if axes_of(shards.stored) else codes


def gather_packed(codes: Packed, shards: Shards) -> Packed:
    """The codes of a whole weight."""
    scales = None if codes.scales is None else gather(codes.scales, shards.stored)
    return dataclasses.replace(codes, packed=gather(codes.packed, shards.stored), scales=scales)


def _gathered(codes: Carrier | EightBit, role: str, shards: Shards) -> Operand:
    """A weight that a kernel made, put together; of 8-bit codes the one order that the GEMM reads, as bytes."""
    if isinstance(codes, Carrier):
        return dataclasses.replace(codes, array=gather(codes.array, shards.stored))

    def bytes_of(array: jax.Array, cut: Any) -> jax.Array:
        whole = gather(lax.bitcast_convert_type(array, "uint8"), cut)
        return lax.bitcast_convert_type(whole, array.dtype)

    if role == "fprop_w" and codes.transposed is not None:
        return dataclasses.replace(codes, rows=None, transposed=bytes_of(codes.transposed, shards.stored[::-1]))
    assert codes.rows is not None, "dgrad reads a weight as it lies"
    return dataclasses.replace(codes, rows=bytes_of(codes.rows, shards.stored), transposed=None)
