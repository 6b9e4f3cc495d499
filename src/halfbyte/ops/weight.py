"""QWeight: a weight matrix quantized once and used by fprop, dgrad and every microbatch of a step.

W [inputs, outputs] is read along its inputs by fprop and along its outputs by dgrad. Under square blocks both read the
same codes; otherwise there are two sets. The codes carry no gradient. `anchor` is the master weight itself: a linear
returns its weight gradient as the cotangent of the anchor, so gradients pass straight through the rounding, and since
no forward computation reads it, a compiled program does not load it.

Under FSDP the packed codes and the compact scales, as bytes, are pinned first to the weight's own sharding and then to
the gathered one, so that what travels is 4.25 bits a number, once, for both GEMMs; the shards, not the gathered codes,
are what the backward pass keeps.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding

from halfbyte.formats import Packed, quantize
from halfbyte.ops.operand import Operand, WeightScales, load, name_saved, quantize_operand
from halfbyte.ops.passes import XLA, KeptWeight, Passes, QuantizedWeight
from halfbyte.recipe import OperandPolicy, Recipe, role_key
from halfbyte.sharding import WeightSharding

CONTRACTED = {"fprop_w": -2, "dgrad_w": -1}  # the axis of W [inputs, outputs] that each GEMM sums over
WEIGHTS_KEPT = ("master", "codes")


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["anchor", "fprop", "dgrad"], meta_fields=["recipe", "sharding"]
)
@dataclasses.dataclass(frozen=True)
class QWeight:
    """Codes for fprop and for dgrad (None: not quantized, or dgrad shares those of fprop).

    Made by `quantize_weight`; `qdot` takes it in place of the matrix. Among residuals it may hold scales alone.
    """

    anchor: Any  # float32 or bfloat16 [inputs, outputs]; None among residuals if the backward pass does not read it
    fprop: Any  # QuantizedWeight; KeptWeight among residuals
    dgrad: Any
    recipe: Recipe
    sharding: WeightSharding | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.anchor.shape
        return shape


def shares_codes(recipe: Recipe) -> bool:
    """Whether fprop and dgrad read one set of codes: square blocks, a tensor-wide scale, or no quantization."""
    same = recipe.fprop_w == recipe.dgrad_w and not recipe.fprop_w.hadamard and not recipe.fprop_w.stochastic
    return same and (recipe.fprop_w.block == "2d" or recipe.fprop_w.format.block is None)


def quantize_weight(
    w: jax.Array, *, recipe: Recipe, key: jax.Array | None = None, weight_sharding: WeightSharding | None = None,
    passes: Passes = XLA, amax: jax.Array | None = None,
) -> QWeight:  # fmt: skip
    """`w` [inputs, outputs] under the recipe's weight policies. Gradients with respect to it go straight to `w`.

    `amax`, at least that of `w`, stands for the tensor's own where several weights share a tensor scale.
    """
    if w.ndim != 2:
        raise ValueError(
            f"a weight is a matrix [inputs, outputs], got shape {w.shape}; reshape it, or vmap over the leading dims"
        )
    constant = lax.stop_gradient(w)
    given = (key, weight_sharding, passes, amax)
    fprop = _quantize(constant, recipe, "fprop_w", *given)
    dgrad = None if shares_codes(recipe) else _quantize(constant, recipe, "dgrad_w", *given)
    return QWeight(w, fprop, dgrad, recipe, weight_sharding)


def _quantize(
    w: jax.Array, recipe: Recipe, role: str, key: jax.Array | None, sharding: WeightSharding | None, passes: Passes,
    amax: jax.Array | None,
) -> QuantizedWeight | None:  # fmt: skip
    policy: OperandPolicy = getattr(recipe, role)
    if not policy.format.quantized:
        return None
    role_bits = role_key(key, role) if policy.stochastic and key is not None else None
    made: QuantizedWeight
    if amax is not None:  # kernels find a tensor's amax themselves
        made = Packed.of(quantize(w, policy.format, block=policy.block, axis=CONTRACTED[role], amax=amax))
    else:
        made = passes.weight(w, policy, axis=CONTRACTED[role], key=role_bits)
    if not isinstance(made, Packed):
        return made
    return name_saved(made if sharding is None else _pin(made, sharding.stored))


def _pin(packed: Packed, sharding: NamedSharding) -> Packed:
    """`packed` with its codes and scales, as bytes, constrained to the weight's `sharding`."""
    pin = functools.partial(lax.with_sharding_constraint, shardings=sharding)
    scales = None if packed.scales is None else pin(packed.scales)
    return dataclasses.replace(packed, packed=pin(packed.packed), scales=scales)


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


def weight_operand(weight: QWeight, role: str) -> Operand:
    """The weight as the right operand of fprop or dgrad.

    Under a sharding, the gather of its 4-bit codes (or bfloat16 numbers) happens here.
    """
    policy, sharding = getattr(weight.recipe, role), weight.sharding
    if not policy.format.quantized:
        narrow = quantize_operand(lax.stop_gradient(weight.anchor), policy, axis=CONTRACTED[role], key=None)
        return narrow if sharding is None else dataclasses.replace(narrow, array=_gather(narrow.array, sharding))
    codes = weight.fprop if role == "fprop_w" or weight.dgrad is None else weight.dgrad
    assert codes is not None and not isinstance(codes, WeightScales), "restore a kept weight before a GEMM reads it"
    if not isinstance(codes, Packed):
        return codes
    return load(codes if sharding is None else _pin(codes, sharding.gathered), policy)


def _gather(w: jax.Array, sharding: WeightSharding) -> jax.Array:
    """w moved from its stored to its gathered sharding, in the type it has now."""
    return lax.with_sharding_constraint(lax.with_sharding_constraint(w, sharding.stored), sharding.gathered)
