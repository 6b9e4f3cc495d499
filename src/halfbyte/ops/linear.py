"""One linear y = x W while it is traced: its weight, its random bits, who makes its operands and who multiplies them.

`qdot` is one of these or several of one x; `mlp` is three and an activation. A `Linear` is a pytree, so that it goes
through a custom gradient as it is; its three GEMMs are methods, each from the operands of its sides to its result:

    fprop  y  = x W         dgrad  dx = dy W^T         wgrad  dw = x^T dy

What the backward pass keeps of it is `kept`, and `restored` makes the linear again there. On a mesh a linear sees local
arrays; its `Shards` say what travels, and the methods send it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from halfbyte.formats import Packed, quantize
from halfbyte.kernels.stacks import Layer, array_of
from halfbyte.ops.backends import check_training
from halfbyte.ops.execution import Execution, LinearPlan, plan_linear
from halfbyte.ops.gemms import DGRAD, FPROP, WGRAD, Gemm, added_up, finish
from halfbyte.ops.operand import EightBit, InTwo, Operand, Owed, Quantized, WeightScales, name_saved, quantize_operand
from halfbyte.ops.passes import (
    XLA,
    KeptWeight,
    Made,
    Passes,
    QuantizedWeight,
    Read,
    Request,
    defined_weight,
    request,
)
from halfbyte.ops.problem import check_weight
from halfbyte.ops.shards import (
    WHOLE,
    Cut,
    Shards,
    alone,
    axes_of,
    cut_of,
    gather,
    inside_shape,
    on_mesh,
    scatter_gradient,
    travelling_dtype,
)
from halfbyte.ops.weight import (
    CONTRACTED,
    QWeight,
    Remembered,
    Weight,
    gather_packed,
    gathered,
    shares_codes,
    weight_specs,
)
from halfbyte.recipe import LinearKey, Recipe, as_recipe
from halfbyte.sharding import on_parts

FLOAT32 = jnp.dtype(jnp.float32)
TENSORS = ("x", "w", "dy")  # of a linear, as a history has them
_Result = TypeVar("_Result")


def with_linears(
    op: Callable[..., _Result], given: Sequence[Any], weights: Sequence[Weight], keys: Sequence[LinearKey | None], *,
    recipes: Sequence[Recipe], execution: Execution, specs: tuple[Any, Any] = ((), ()),
) -> _Result:  # fmt: skip
    """op(x, linears, ...) of `given` = (x, ...), with x as its blocks of tokens want it and each weight quantized; on
    every device of the placements' mesh, if there are any: `specs` are those of `given` and of the results.

    The first linear is one that reads x; all see as many tokens.
    """
    cuts, layers = execution.shards(len(recipes), given[0].ndim), execution.layers or (None,) * len(recipes)

    def local(given: Sequence[Any], weights: Sequence[Weight], keys: Sequence[LinearKey | None]) -> _Result:
        x, *rest = given
        tokens = token_view(x, recipes) if cuts[0] == WHOLE else x
        inside, linears = inside_shape(tokens, cuts[0]), []
        for w, key, recipe, cut, layer in zip(weights, keys, recipes, cuts, layers, strict=True):
            amaxes = w.amaxes if isinstance(w, Remembered) and recipe.history else None
            w = w.weight if isinstance(w, Remembered) else w
            plan = plan_linear(inside, w, recipe, execution, cut)
            if not isinstance(w, QWeight):
                passes, packed = plan.choice.for_weight, plan.problem.gathered
                before = None if amaxes is None else amaxes[TENSORS.index("w")]
                layer = layer if passes.reads_stacks else None
                read = w if layer is None else layer
                made = quantize_part(read, recipe, key, cut=cut.w, passes=passes, packed=packed, amax=before)
                w = dataclasses.replace(made, anchor=w)
            else:
                layer = None
            linears.append(Linear(plan, w, key, amaxes, layer))
        return op(tokens, tuple(linears), *rest)

    if execution.placements is None:
        return local(given, weights, keys)
    placed = [weight_specs(w, p.w) for w, p in zip(weights, execution.placements, strict=True)]
    inputs = (tuple(given), tuple(weights), tuple(keys))
    return on_mesh(local, inputs, (specs[0], tuple(placed)), specs[1], mesh=execution.placements[0].mesh)


def token_view(x: jax.Array, recipes: Sequence[Recipe]) -> jax.Array:
    """x as [tokens..., inputs] such that the recipes' blocks of tokens lie along the next to last axis: unchanged if
    they fit there, else with all leading dims made one.
    """
    if x.ndim == 1:
        return x[None]
    block = math.lcm(*(max(recipe.wgrad_x.run, recipe.wgrad_dy.run) for recipe in recipes))
    return x if x.shape[-2] % block == 0 else x.reshape(-1, x.shape[-1])  # [..., inputs] -> [tokens, inputs]


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
    check_weight(w, "quantize_weight")
    chosen = as_recipe(recipe, "quantize_weight")
    if sharding is None or sharding.mesh.size == 1:
        return quantize_part(w, chosen, key, amax=amax)
    cut = cut_of(sharding.spec, 2)

    def codes(w: jax.Array, amax: jax.Array | None, cut: Cut = ((), ())) -> QWeight:
        return dataclasses.replace(quantize_part(w, chosen, key, cut=cut, amax=amax), anchor=None)

    specs = weight_specs(jax.eval_shape(codes, w, amax), sharding.spec)
    given = (sharding.spec, None if amax is None else PartitionSpec())
    part = functools.partial(codes, cut=cut)
    made: QWeight = on_parts(part, sharding.mesh, given, specs)(w, amax)
    return dataclasses.replace(made, anchor=w)


def quantize_part(
    w: jax.Array | Layer, recipe: Recipe, key: LinearKey | None, *, cut: Cut = ((), ()), passes: Passes = XLA,
    amax: jax.Array | None = None, packed: bool = True,
) -> QWeight:  # fmt: skip
    """The weight, or one device's part of one that is `cut`, quantized by `passes` (`packed`, where it is to travel),
    which may read it where it lies, or by the definition under a given `amax`; of a recipe with a history, that of
    steps before.
    """
    constant = lax.stop_gradient(w)
    array = array_of(constant)

    def codes(role: str, forward: QuantizedWeight | None = None) -> QuantizedWeight | None:
        wanted = request(recipe, role, key, cut=cut)
        policy = wanted.policy
        if not policy.format.quantized:
            return None
        made: QuantizedWeight
        if amax is not None and recipe.history:
            made = defined_weight(array, dataclasses.replace(wanted, amax=amax))
        elif amax is not None:  # kernels find a tensor's amax themselves
            made = Packed.of(quantize(array, policy.format, block=policy.block, axis=wanted.axis, amax=amax))
        elif forward is not None:
            made = passes.weight_again(constant, forward, wanted, packed=packed)
        elif wanted.signs is not None:  # no kernel makes these
            made = defined_weight(array, wanted)
        else:
            made = passes.weight(constant, wanted, packed=packed)
        return name_saved(made) if isinstance(made, Packed) else made

    fprop = codes("fprop_w")
    source = fprop if recipe.dgrad_w.source == "forward" else None
    return QWeight(w, fprop, None if shares_codes(recipe) else codes("dgrad_w", source), recipe)


def weight_operand(
    weight: QWeight, role: str, shards: Shards = WHOLE, passes: Passes = XLA, *, made: dict[str, Any] | None = None
) -> Operand:
    """The weight as the right operand of fprop or dgrad; where it is gathered, that happens here. `passes` read packed
    codes. In `made` is what was made of it before: both GEMMs may read the same, a backward pass that makes y again
    reads it twice, and XLA does not find by itself that two gathers are the same.
    """
    made = {} if made is None else made
    shared, codes = shares_codes(weight.recipe), weight.codes(role)
    one = shared and not isinstance(codes, EightBit) and (passes.one_weight or not isinstance(codes, Packed))
    role = "fprop_w" if one else role
    if role in made:
        return made[role]
    policy, axis = getattr(weight.recipe, role), CONTRACTED[role]
    if codes is None:
        narrow = quantize_operand(lax.stop_gradient(weight.anchor), policy, axis=axis, key=None)
        made[role] = dataclasses.replace(narrow, array=gather(narrow.array, shards.stored))
    elif not isinstance(codes, Packed):
        made[role] = gathered(codes, role, shards) if axes_of(shards.stored) else codes
    else:
        made[role] = passes.gather_weight(codes, policy, axis=axis, shards=shards)
    if made[role] is None:
        whole = "shared codes" if shared else f"codes of {role}"
        made[whole] = made[whole] if whole in made else gather_packed(codes, shards)
        made[role] = passes.load_weight(made[whole], policy, axis=axis)
    return made[role]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["weight", "key", "amaxes", "layer"], meta_fields=["plan"]
)
@dataclasses.dataclass(frozen=True)
class Linear:
    """One linear of a traced program."""

    plan: LinearPlan
    weight: QWeight
    key: LinearKey | None
    amaxes: jax.Array | None = None  # as `Remembered` has them
    layer: Layer | None = None  # where the weight lies among others, for passes that read it there

    @property
    def passes(self) -> Passes:
        """What makes its operands of x and dy."""
        return self.plan.choice.passes

    def request(self, role: str, *, kept: bool = False) -> Request:
        """The wish for one of its operands."""
        shards = self.plan.shards
        cut = shards.dy if role.endswith("dy") else shards.x
        wanted = request(self.plan.recipe, role, self.key, kept=kept, cut=cut)
        if self.amaxes is None:
            return wanted
        return dataclasses.replace(wanted, amax=self.amaxes[TENSORS.index(role.partition("_")[2])])

    def quantize(self, x: jax.Array, *roles: str, kept: tuple[str, ...] = ()) -> list[Made]:
        """Its operands of x (or dy), in one pass; those in `kept` as residuals."""
        return self.passes.operands(x, [self.request(role, kept=role in kept) for role in roles])

    def load(self, kept: Any, role: str) -> Operand:
        """A residual as an operand."""
        return self.passes.load(kept, getattr(self.plan.recipe, role))

    def fprop(self, x: Operand | InTwo, dtype: jnp.dtype, *, owing: bool = False) -> Read:
        """y = x W, where y goes; `owing` for passes that take what is owed to it."""
        shards = self.plan.shards
        w = weight_operand(self.weight, "fprop_w", shards, self.passes, made=self._made)
        given = FLOAT32 if shards.inputs else dtype
        multiply = self._multiplier(FPROP, owing=owing and not shards.inputs and not isinstance(x, InTwo))
        if isinstance(x, InTwo):
            y = finish(multiply(FPROP, x.first, w, FLOAT32) + multiply(FPROP, x.rest, w, FLOAT32), None, given)
        else:
            y = multiply(FPROP, x, w, given)
        return added_up(y, shards.inputs, shards.y_lead, dtype) if shards.inputs else y

    def dgrad(self, dy: Operand, dtype: jnp.dtype, *, owing: bool = False, beside: Sequence[Read] = ()) -> Read:
        """dx = dy W^T, where x came from; `owing` as for fprop. Sums that travel do so `beside` these products."""
        shards = self.plan.shards
        w = weight_operand(self.weight, "dgrad_w", shards, self.passes, made=self._made)
        multiply = self._multiplier(DGRAD, owing=owing and not shards.outputs)
        dx = multiply(DGRAD, dy, w, FLOAT32 if shards.outputs else dtype)
        return added_up(dx, shards.outputs, shards.x_lead, dtype, beside=beside) if shards.outputs else dx

    def wgrad(self, x: Operand, dy: Operand) -> Read:
        """dw = x^T dy of this device's tokens, in what it travels in; [outputs, inputs] where `turned_wgrad` says."""
        sides = (dy, x) if self.plan.problem.turned_wgrad else (x, dy)
        travels = self._travels
        return self._multiplier(WGRAD, owing=travels != self.plan.weight_dtype)(WGRAD, *sides, travels)

    def gradient(self, dw: Read, x: Operand, dy: Operand) -> "Linear":
        """`wgrad` of x and dy in the dtype of the weight, where it rests: sums over the axes that it is gathered over;
        as the cotangent of this linear.
        """
        shards, dtype = self.plan.shards, self.plan.weight_dtype
        owed = dw.factor if isinstance(dw, Owed) else None  # the same on all devices: of whole tensors
        dw = alone(dw.array if isinstance(dw, Owed) else dw, shards.idle)
        dw = scatter_gradient(dw, self._stored, shards.reduce_dtype)
        dw = dw.astype(dtype) if owed is None else dw.astype(dtype) * owed
        turned = self.plan.problem.turned_wgrad
        weight = QWeight(dw.T if turned else dw, None, None, self.plan.recipe)
        return Linear(self.plan, weight, None, None if self.amaxes is None else self._seen(x, dy))

    def _seen(self, x: Operand, dy: Operand) -> jax.Array:
        """float32 [3]: the largest magnitudes of whole x, W and dy; on one device, for all of them are summed over."""
        assert isinstance(x, Quantized) and isinstance(dy, Quantized), "by the definition, which takes a given amax"
        found, shards = (x.codes.amax, self.weight.fprop.amax, dy.codes.amax), self.plan.shards
        return alone(jnp.stack(found), (*axes_of(shards.lead), *shards.inputs, *shards.outputs, *shards.idle))

    @property
    def _stored(self) -> Cut:
        """Axes that dw is scattered over, as wgrad has it."""
        return self.plan.shards.stored[:: -1 if self.plan.problem.turned_wgrad else 1]

    @property
    def _travels(self) -> jnp.dtype:
        return travelling_dtype(self.plan.weight_dtype, self._stored, self.plan.shards.reduce_dtype)

    def _multiplier(self, gemm: Gemm, *, owing: bool = False) -> Callable[..., Any]:
        backend = self.plan.choice.multiplier(gemm)
        return backend.owing if owing and backend.owing is not None else backend.gemm

    @functools.cached_property
    def _made(self) -> dict[str, Any]:
        """What GEMMs have read of the weight so far."""
        return {}

    def kept(self, *, fprop_again: bool = False) -> "Linear":
        """The linear as the backward pass keeps it: for dgrad, and `fprop_again` where that computes y once more. Its
        anchor stays only if it is read again: by a bf16 GEMM, or to make again what the passes leave out. Where codes
        are kept they leave nothing out.
        """
        check_training(self.plan.problem)
        recipe, weight = self.plan.recipe, self.weight
        passes = self.plan.choice.for_weight if self.plan.weights_kept == "master" else XLA
        fprop, dgrad = (None if made is None else passes.keep_weight(made) for made in (weight.fprop, weight.dgrad))
        read = not recipe.dgrad_w.format.quantized or (fprop_again and not recipe.fprop_w.format.quantized)
        anchor = weight.anchor if read or self.layer is None else self.layer
        read = read or any(isinstance(c, WeightScales) for c in (fprop, dgrad))
        return dataclasses.replace(self, weight=QWeight(anchor if read else None, fprop, dgrad, recipe), layer=None)

    def restored(self, *, after: jax.Array) -> "Linear":
        """The linear of `kept`, bit for bit, and not before `after` is there: a compiler that sees all layers would
        else make the weights of all of them first.
        """
        kept = self.weight

        def restore(
            role: str, codes: KeptWeight | None, forward: QuantizedWeight | None = None
        ) -> QuantizedWeight | None:
            if not isinstance(codes, WeightScales):
                return codes
            late, _ = lax.optimization_barrier((codes, after))
            wanted = request(self.plan.recipe, role, self.key, cut=self.plan.shards.w)
            return self.plan.choice.for_weight.remake_weight(kept.anchor, late, wanted, forward)

        fprop = restore("fprop_w", kept.fprop)
        made = dataclasses.replace(kept, fprop=fprop, dgrad=restore("dgrad_w", kept.dgrad, fprop))
        return dataclasses.replace(self, weight=made)
