"""Plans which dots of a jaxpr become `qdot`, before anything runs.

A plan mirrors a jaxpr: per equation nothing (run it unchanged), a dot to replace, or plans for the jaxprs inside it.
JAX may trace a body any number of times. As the plan is complete before the jaxpr runs, the name of a site, and with it
its random bits, do not depend on that number.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from jax.extend.core import Jaxpr, JaxprEqn
from jax.sharding import AxisType

from halfbyte.devices.jax_versions import scan_counts
from halfbyte.ops.activation import SILU
from halfbyte.ops.adapters.dot_fusion import DotGrouper, ExecutionOrder
from halfbyte.ops.adapters.dot_general import refusal
from halfbyte.ops.adapters.model_structure import is_expert
from halfbyte.ops.adapters.rewrite_report import DotReport
from halfbyte.ops.adapters.weight_provenance import (
    CALL_PRIMITIVES,
    Value,
    WeightOrigin,
    aval,
    called_jaxpr,
    loop_carry_values,
    propagate_equation,
    read_variable,
    scan_inputs,
    scan_slice_value,
    sub_jaxprs,
    unclose_jaxpr,
)
from halfbyte.ops.gemm_problem import LinearProblem, target_device
from halfbyte.ops.linear_plan import ExecutionConfig, plan_linear
from halfbyte.ops.mlp import shared_gated_passes
from halfbyte.recipes import Policy, Recipe, Rule

REMAT_PRIMITIVES = ("checkpoint", "remat", "remat2")
JIT = ("jit", "pjit")
_EINSUM = re.compile(r"([A-Za-z]+),([A-Za-z]+)->")  # of x and a weight
NO_DOTS = {  # other primitives that multiply matrices, and why they are not replaced
    "ragged_dot": "it is a ragged dot, with one weight a group of tokens; recipes serve dots with one weight",
    "ragged_dot_general": "it is a ragged dot, with one weight a group of tokens; recipes serve dots with one weight",
    "conv_general_dilated": "it is a convolution; recipes serve dots",
}


@dataclass(frozen=True)
class DotReplacement:
    """A dot to replace: which operand is the weight, its recipe, and the name that its random bits are derived from."""

    weight: int
    recipe: Recipe
    site: str


@dataclass(frozen=True)
class JaxprPlan:
    """A plan for one jaxpr: one step per equation, and the order in which they run, with dots of one x grouped."""

    steps: tuple[Step | None, ...]
    order: ExecutionOrder

    @property
    def is_noop(self) -> bool:
        """Returns True if the plan replaces nothing."""
        return all(step is None for step in self.steps)


@dataclass(frozen=True)
class NestedPlans:
    """Plans for the jaxprs inside an equation: one for jit, remat and while, one per branch for cond."""

    bodies: tuple[JaxprPlan, ...]


@dataclass(frozen=True)
class ScanSegments:
    """A scan split into one scan per segment of its iterations: (start, stop, plan of the body)."""

    segments: tuple[tuple[int, int, JaxprPlan], ...]


Step = DotReplacement | NestedPlans | ScanSegments


@dataclass
class RewritePlanner:
    """Plans a jaxpr in one walk. Collects the sites, the rules that decided a dot, and the uses of each weight."""

    policy: Policy
    backend: str = "auto"
    sites: list[DotReport] = field(default_factory=list)
    used: set[Rule] = field(default_factory=set)
    uses: dict[str, int] = field(default_factory=dict)
    stacks: dict[Rule, WeightOrigin] = field(default_factory=dict)
    runs: int = 1
    backward: bool = False

    def body(self, jaxpr: Jaxpr, values: Sequence[Value], frozen: str = "") -> JaxprPlan:
        """Returns the plan of a jaxpr whose inputs have these values.

        `frozen` is the reason why nothing inside may be replaced, empty if dots may be.
        """
        env = dict(zip(jaxpr.invars, values, strict=True))
        steps, reported = list[Step | None](), list[int]()
        outer = self.backward
        for eqn in jaxpr.eqns:
            # Reverse mode marks its equations in the name stack, which starts empty inside a body.
            self.backward = outer or "transpose(" in str(eqn.source_info.name_stack)
            operands = [read_variable(env, var) for var in eqn.invars]
            steps.append(self._equation(eqn, operands, frozen))
            reported.append(len(self.sites) - 1)
            env.update(zip(eqn.outvars, propagate_equation(eqn, operands), strict=True))
        self.backward = outer
        body = JaxprPlan(tuple(steps), self._group_dots(jaxpr, steps))
        for unit in body.order:
            dots = {i: body.steps[i] for i in unit.dots_of_x} if len(unit.eqns) > 1 else {}
            names = {i: dot.site for i, dot in dots.items() if isinstance(dot, DotReplacement)}
            for i in names:
                self._note(reported[i], shares_x=tuple(name for j, name in names.items() if j != i))
            if unit.swiglu:
                self._note(reported[unit.eqns[2]], swiglu_of=tuple(names.values()))
        return body

    def _note(self, site: int, **found: tuple[str, ...]) -> None:
        self.sites[site] = dataclasses.replace(self.sites[site], **found)  # type: ignore[arg-type]

    def _equation(self, eqn: JaxprEqn, values: list[Value], frozen: str) -> Step | None:
        name = eqn.primitive.name
        if name == "dot_general":
            return self._dot(eqn, values, frozen)
        if name in NO_DOTS:
            self._keep_dot(eqn, values[:2], frozen or NO_DOTS[name])
            return None
        if name in CALL_PRIMITIVES and not frozen:
            return _nested_plans(self.body(called_jaxpr(eqn), values))
        if name == "scan" and not frozen:
            return self._scan(eqn, values)
        if name == "cond" and not frozen:
            return _nested_plans(*(self.body(unclose_jaxpr(branch), values[1:]) for branch in eqn.params["branches"]))
        if name == "while" and not frozen:
            return self._while(eqn, values)
        for jaxpr in sub_jaxprs(eqn):
            aligned = len(jaxpr.invars) == len(values)
            why = frozen or f"it is inside {name}, whose rules are its own"
            self.body(jaxpr, values if aligned else [None] * len(jaxpr.invars), why)
        return None

    def _while(self, eqn: JaxprEqn, values: list[Value]) -> Step | None:
        cond_consts, body_consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        carry = loop_carry_values(eqn, values)
        condition = unclose_jaxpr(eqn.params["cond_jaxpr"])
        self.body(condition, values[:cond_consts] + carry, "it is in the condition of a while loop")
        return _nested_plans(
            self.body(unclose_jaxpr(eqn.params["body_jaxpr"]), values[cond_consts:][:body_consts] + carry)
        )

    def _scan(self, eqn: JaxprEqn, values: list[Value]) -> Step | None:
        (consts, carries), length = scan_counts(eqn.params, eqn.invars), eqn.params["length"]
        xs, inputs = values[consts + carries :], scan_inputs(eqn, values)
        self._refuse_scanned_layer_groups(xs, length)
        outer, before, sites = self.runs, dict(self.uses), len(self.sites)
        segments = []
        for start, stop in itertools.pairwise(self._scan_split_points(xs, length)):
            # Every segment runs the same dots, so each starts from the same count of uses: a site keeps its name.
            self.uses, self.runs = dict(before), outer * (stop - start)
            slices = [scan_slice_value(value, start, stop) for value in xs]
            body = self.body(called_jaxpr(eqn), inputs[: consts + carries] + slices)
            segments.append((start, stop, body))
        self.runs = outer
        if len(segments) > 1 and len({body for _, _, body in segments}) == 1:
            # No rule distinguishes the layers after all: one scan, reported once.
            del self.sites[sites:]
            self.uses, self.runs = dict(before), outer * length
            segments = [(0, length, self.body(called_jaxpr(eqn), inputs))]
            self.runs = outer
        return None if all(body.is_noop for _, _, body in segments) else ScanSegments(tuple(segments))

    def _refuse_scanned_layer_groups(self, xs: Sequence[Value], length: int) -> None:
        """Raises ValueError for rules by layer if a scan repeats several numbered layers: numbers are not layers."""
        single = [x for x in xs if isinstance(x, WeightOrigin) and not x.stacked and x.layers and len(x.layers) == 1]
        rules = [rule for rule in self.policy.rules if rule.layers is not None]
        grouped = [x for x in single if any(rule.matches(x.path) for rule in rules)]
        if length > 1 and len({x.layers for x in grouped}) > 1:
            raise ValueError(
                f"apply_recipe: rules by layer match {grouped[0].path}, whose path holds a number, but a scan of "
                f"{length} iterations repeats several such layers, so the number is not the layer's; count the "
                "iterations: apply_recipe(..., layers='blocks/*')"
            )

    def _scan_split_points(self, xs: Sequence[Value], length: int) -> list[int]:
        """Returns where a scan may have to be split: the bounds of every rule by layer that matches a stacked leaf."""
        bounds = {0, length}
        for origin in xs:
            if not isinstance(origin, WeightOrigin) or not origin.stacked or not origin.layers or not origin.num_layers:
                continue
            for rule in self.policy.rules:
                if rule.layers is not None and rule.matches(origin.path):
                    covered = rule.layer_range(origin.num_layers)
                    inside = [i for i, layer in enumerate(origin.layers) if layer in covered]
                    bounds |= {inside[0], inside[-1] + 1} if inside else set()
        return sorted(bounds)

    def _group_dots(self, jaxpr: Jaxpr, steps: Sequence[Step | None]) -> ExecutionOrder:
        """Groups dots of one x with the same recipe and dtype, if no axis is explicit or manual."""
        dots, eqns = {i: step for i, step in enumerate(steps) if isinstance(step, DotReplacement)}, jaxpr.eqns
        fusable = {
            i: (dot.recipe, eqns[i].params["dimension_numbers"][0][1 - dot.weight], aval(eqns[i].outvars[0]).dtype)
            for i, dot in dots.items()
            if eqns[i].params["out_sharding"] is None
            and all(set(aval(var).sharding.mesh.axis_types) <= {AxisType.Auto} for var in eqns[i].invars)
        }

        def fuses(*three: int) -> bool:
            return all(i in fusable for i in three) and _can_fuse_swiglu(
                [(eqns[i], dots[i]) for i in three], self.backend
            )

        return DotGrouper(eqns, jaxpr.outvars, {i: 1 - dot.weight for i, dot in dots.items()}, fusable, fuses).order()

    def _keep_dot(self, eqn: JaxprEqn, values: Sequence[Value], why: str) -> None:
        """Reports a dot that is not replaced. Its weight is the right operand if that is a weight, else the left."""
        lhs, rhs = (aval(var) for var in eqn.invars[:2])
        origin = next((value for value in reversed(values) if isinstance(value, WeightOrigin)), None)
        name = None if origin is None else self._name(origin)
        self.sites.append(DotReport(name, lhs.shape, rhs.shape, None, why, _layers_at(origin), self.runs))

    def _dot(self, eqn: JaxprEqn, values: list[Value], frozen: str) -> DotReplacement | None:
        lhs, rhs = (aval(var) for var in eqn.invars)
        why = frozen or refusal(lhs.dtype, rhs.dtype, eqn.params["dimension_numbers"])
        if why:
            self._keep_dot(eqn, values, why)
            return None
        side, origin, rule = self._choose(values)
        if origin is None or _is_ensemble(eqn, side):
            several = "vmap multiplies a stack of weights at once; recipes serve dots with one weight"
            self._keep_dot(eqn, values, several if origin else "neither operand depends on weights alone")
            return None
        if rule is None or rule.recipe is None:
            self.used |= {rule} if rule else set()
            reason = f"no rule matches {origin.path}" if rule is None else f"rule {rule.pattern!r} leaves it alone"
            reason += "; named policies leave routers and experts" if rule is None and is_expert(origin.name) else ""
            self._keep_dot(eqn, [origin], reason)
            return None
        if self.backward:
            raise ValueError(
                f"apply_recipe: the dot of {origin.path} belongs to a backward pass, where fprop, dgrad and wgrad "
                "can no longer be told apart; apply the recipe first and differentiate its result: "
                "grad(apply_recipe(fn, ...))"
            )
        never, untrained = _unblockable(eqn, side, rule.recipe)
        if never:
            self._keep_dot(eqn, [origin], never)
            return None
        self.used.add(rule)
        name = self._name(origin)
        recipe, layers = rule.recipe.name, _layers_at(origin)
        self.sites.append(DotReport(name, lhs.shape, rhs.shape, recipe, "", layers, self.runs, forward_only=untrained))
        return DotReplacement(side, rule.recipe, name)

    def _choose(self, values: list[Value]) -> tuple[int, WeightOrigin | None, Rule | None]:
        """Returns the side of the weight operand, its origin and its rule.

        Of two weights, the one with a rule, then the one that is an unmodified leaf, then the right one.
        """
        weights = [
            (side, value, self._rule(value)) for side in (1, 0) if isinstance(value := values[side], WeightOrigin)
        ]
        weights.sort(key=lambda found: (found[2] is None, not found[1].is_unmodified))
        return weights[0] if weights else (1, None, None)

    def _name(self, origin: WeightOrigin) -> str:
        """Returns the path, numbered from the second use on, so that no two uses of a weight share random bits."""
        count = self.uses[origin.path] = self.uses.get(origin.path, 0) + 1
        return origin.path if count == 1 else f"{origin.path}#{count}"

    def _rule(self, origin: WeightOrigin) -> Rule | None:
        by_layer = [rule for rule in self.policy.rules if rule.layers is not None and rule.matches(origin.path)]
        if not by_layer:
            return next((rule for rule in self.policy.rules if rule.layers is None and rule.matches(origin.path)), None)
        if origin.layers is None or origin.num_layers is None or origin.stacked:
            raise ValueError(
                f"apply_recipe: rule {by_layer[0].pattern!r} selects layers {by_layer[0].layers}, but the layer "
                f"number of {origin.path} is not known at this dot: its path holds no number, and it is neither one "
                "slice of a scan over stacked layers nor a static index into them; select by path alone, scan over "
                "the layers, or say where the number stands: apply_recipe(..., layers='blocks/{layer}/*')"
            )
        self._check_stacks(by_layer, origin)
        rules = {self.policy.rule_for(origin.path, layer, origin.num_layers) for layer in origin.layers}
        if len(rules) != 1:
            raise ValueError(
                f"apply_recipe: the layers {origin.layers} of {origin.path} run in one body, but the policy gives "
                "them different recipes; scan over the stacked layers directly, so that the scan can be split"
            )
        return rules.pop()

    def _check_stacks(self, rules: list[Rule], origin: WeightOrigin) -> None:
        """Raises ValueError if a rule by layer matches stacks of different lengths.

        The other stack may hold experts, or belong to another part of the model.
        """
        for rule in rules:
            other = self.stacks.setdefault(rule, origin)
            if other.num_layers != origin.num_layers and not (_has_number(other) and _has_number(origin)):
                raise ValueError(
                    f"apply_recipe: rule {rule.pattern!r} selects layers {rule.layers}, and matches stacks of "
                    f"different lengths: {other.path} has {other.num_layers}, {origin.path} has {origin.num_layers}; "
                    "write one rule for each, or say which leaves are stacks of layers: apply_recipe(..., "
                    "layers='blocks/*')"
                )


def _layers_at(origin: WeightOrigin | None) -> range | None:
    """Returns the layers that a dot runs for. A leaf that is multiplied whole is not a stack, whatever its dims."""
    return None if origin is None or origin.stacked else origin.layers


def _is_ensemble(eqn: JaxprEqn, side: int) -> bool:
    """Returns True if a vmap over weights produced this dot: dim 0 of the weight runs over its members."""
    contracted, weight = eqn.params["dimension_numbers"][0][side], aval(eqn.invars[side])
    mapped = "vmap(" in str(eqn.source_info.name_stack)
    return mapped and 0 not in contracted and weight.ndim - len(contracted) > 1 and not _is_as_written(eqn, side)


def _is_as_written(eqn: JaxprEqn, side: int) -> bool:
    """Returns True if the dot is an einsum of x and a weight whose subscripts name all dims of the weight.

    Dims added by a vmap then belong to x. The subscripts are in the name stack.
    """
    written = _EINSUM.findall(str(eqn.source_info.name_stack))
    if not written or len(written[-1][1]) != aval(eqn.invars[side]).ndim:
        return False
    contracted, (x, weight) = eqn.params["dimension_numbers"][0], written[-1]
    x = x.rjust(aval(eqn.invars[1 - side]).ndim)
    return [x[dim] for dim in contracted[1 - side]] == [weight[dim] for dim in contracted[side]]


def _can_fuse_swiglu(dots: Sequence[tuple[JaxprEqn, DotReplacement]], backend: str) -> bool:
    """Returns True if the quantize passes of gate, up and down on this device compute silu(g) * u.

    All must have one dtype and one recipe, and multiply x [..., inputs] by a matrix [inputs, outputs].
    """
    passes, recipes = [], [dot.recipe for _, dot in dots]
    x_dtype = aval(dots[0][0].invars[0]).dtype
    for eqn, dot in dots:
        x, w = (aval(var) for var in eqn.invars)
        plain = eqn.params["dimension_numbers"] == (((x.ndim - 1,), (0,)), ((), ())) and w.ndim == 2 and x.ndim > 1
        if (
            dot.weight != 1
            or not plain
            or {x.dtype, aval(eqn.outvars[0]).dtype} != {x_dtype}
            or dot.recipe != recipes[0]
        ):
            return False
        try:
            passes.append(plan_linear(x, w, dot.recipe, ExecutionConfig(backend)).choice.passes)
        except ValueError:  # no backend supports it: raised where the dot runs
            return False
    return shared_gated_passes(passes, SILU, recipes) is not None


def _has_number(origin: WeightOrigin) -> bool:
    return any(character.isdigit() for character in origin.path)


def _unblockable(eqn: JaxprEqn, side: int, recipe: Recipe) -> tuple[str | None, str]:
    """Returns (why the recipe's blocks do not divide this weight, why they do so only without gradients)."""
    (lhs, rhs), _ = eqn.params["dimension_numbers"]
    x, w = aval(eqn.invars[1 - side]), aval(eqn.invars[side])
    contracted = (lhs, rhs)[side]
    inputs = math.prod(w.shape[dim] for dim in contracted)
    problem = LinearProblem(recipe, x.size // max(inputs, 1), inputs, w.size // max(inputs, 1), target_device())
    return dataclasses.replace(problem, tokens=0).block_mismatch_reason(), problem.block_mismatch_reason() or ""


def _nested_plans(*bodies: JaxprPlan) -> NestedPlans | None:
    return None if all(body.is_noop for body in bodies) else NestedPlans(bodies)
