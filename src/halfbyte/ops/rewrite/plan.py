"""Which dots of a jaxpr become `qdot`, decided before anything runs.

A plan mirrors a jaxpr: for each equation either nothing (run it as it is), a dot to replace, or plans for the jaxprs
inside it. Deciding first, and running afterwards, keeps a site's name, and with it its random bits, apart from how
often JAX traces a body.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import Literal

from halfbyte.ops.contraction import refusal
from halfbyte.ops.rewrite.origin import Origin, follow, open_jaxpr, scan_counts, sub_jaxprs
from halfbyte.ops.rewrite.report import Site
from halfbyte.recipe import Policy, Recipe, Rule

REMAT = ("checkpoint", "remat", "remat2")
JIT = ("jit", "pjit")
CALL = ("closed_call", "core_call")


@dataclass(frozen=True)
class Dot:
    """A dot to replace: which operand is the weight, its recipe, and the name that its random bits are derived from."""

    weight: int
    recipe: Recipe
    site: str


@dataclass(frozen=True)
class Body:
    """A plan for one jaxpr: one step an equation."""

    steps: tuple[Any, ...]

    @property
    def idle(self) -> bool:
        """True if nothing in it is replaced."""
        return all(step is None for step in self.steps)


@dataclass(frozen=True)
class Inner:
    """Plans for the jaxprs inside an equation: one for jit, remat and while, one a branch for cond."""

    bodies: tuple[Body, ...]


@dataclass(frozen=True)
class Split:
    """A scan as one scan a segment of its iterations: (start, stop, plan of the body)."""

    segments: tuple[tuple[int, int, Body], ...]


Found = tuple[Body, list[Origin | None]]


@dataclass
class Planner:
    """One walk over a jaxpr. Collects the sites, the rules that decided something, and how often each weight was
    used.
    """

    policy: Policy
    sites: list[Site] = field(default_factory=list)
    used: set[Rule] = field(default_factory=set)
    uses: dict[str, int] = field(default_factory=dict)
    runs: int = 1
    backward: bool = False

    def body(self, jaxpr: Any, origins: Sequence[Origin | None], frozen: str = "") -> Found:
        """The plan of a jaxpr whose inputs have these origins, and the origins of its outputs.

        `frozen` is the reason why nothing inside may be replaced, if there is one.
        """
        env = {var: origin for var, origin in zip(jaxpr.invars, origins, strict=True) if origin is not None}
        steps = []
        outer = self.backward
        for eqn in jaxpr.eqns:
            # JAX marks what reverse mode made in the name stack, which inside a body starts anew.
            self.backward = outer or "transpose(" in str(eqn.source_info.name_stack)
            step, outs = self._equation(eqn, [_read(env, var) for var in eqn.invars], frozen)
            steps.append(step)
            env.update({var: origin for var, origin in zip(eqn.outvars, outs, strict=True) if origin is not None})
        self.backward = outer
        return Body(tuple(steps)), [_read(env, var) for var in jaxpr.outvars]

    def _equation(self, eqn: Any, origins: list[Origin | None], frozen: str) -> tuple[Any, list[Origin | None]]:
        name = eqn.primitive.name
        nothing: list[Origin | None] = [None] * len(eqn.outvars)
        if name == "dot_general":
            return self._dot(eqn, origins, frozen), nothing
        if name in JIT + REMAT + CALL and not frozen:
            body, outs = self.body(open_jaxpr(eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))), origins)
            return (None if body.idle else Inner((body,))), outs
        if name == "scan" and not frozen:
            return self._scan(eqn, origins), nothing
        if name == "cond" and not frozen:
            return self._cond(eqn, origins)
        if name == "while" and not frozen:
            return self._while(eqn, origins), nothing
        if name == "optimization_barrier":
            return None, origins
        inside = sub_jaxprs(eqn)
        for jaxpr in inside:
            aligned = len(jaxpr.invars) == len(origins)
            why = frozen or f"it is inside {name}, whose rules are its own"
            self.body(jaxpr, origins if aligned else [None] * len(jaxpr.invars), why)
        if inside or not origins or origins[0] is None:
            return None, nothing
        return None, follow(eqn, origins[0])

    def _cond(self, eqn: Any, origins: list[Origin | None]) -> tuple[Any, list[Origin | None]]:
        found = [self.body(open_jaxpr(branch), origins[1:]) for branch in eqn.params["branches"]]
        bodies = tuple(body for body, _ in found)
        outs = [group[0] if len(set(group)) == 1 else None for group in zip(*(o for _, o in found), strict=True)]
        return (None if all(body.idle for body in bodies) else Inner(bodies)), outs

    def _while(self, eqn: Any, origins: list[Origin | None]) -> Any:
        cond_consts, body_consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        carry: list[Origin | None] = [None] * (len(origins) - cond_consts - body_consts)
        condition = open_jaxpr(eqn.params["cond_jaxpr"])
        self.body(condition, origins[:cond_consts] + carry, "it is in the condition of a while loop")
        body, _ = self.body(open_jaxpr(eqn.params["body_jaxpr"]), origins[cond_consts:][:body_consts] + carry)
        return None if body.idle else Inner((body,))

    def _scan(self, eqn: Any, origins: list[Origin | None]) -> Any:
        (consts, carries), length = scan_counts(eqn), eqn.params["length"]
        xs = origins[consts + carries :]
        head = origins[:consts] + [None] * carries
        outer, before, sites = self.runs, dict(self.uses), len(self.sites)
        segments = []
        for start, stop in itertools.pairwise(self._cuts(xs, length)):
            # Every segment runs the same dots, so each starts from the same count of uses: a site keeps its name.
            self.uses, self.runs = dict(before), outer * (stop - start)
            inner = [_slice_of(origin, start, stop) for origin in xs]
            body, _ = self.body(open_jaxpr(eqn.params["jaxpr"]), head + inner)
            segments.append((start, stop, body))
        self.runs = outer
        if len(segments) > 1 and len({body for _, _, body in segments}) == 1:
            # No rule tells the layers apart after all: one scan, reported once.
            del self.sites[sites:]
            self.uses, self.runs = dict(before), outer * length
            whole = [_slice_of(origin, 0, length) for origin in xs]
            segments = [(0, length, self.body(open_jaxpr(eqn.params["jaxpr"]), head + whole)[0])]
            self.runs = outer
        return None if all(body.idle for _, _, body in segments) else Split(tuple(segments))

    def _cuts(self, xs: Sequence[Origin | None], length: int) -> list[int]:
        """Where a scan's iterations may have to be told apart: the bounds of every rule by layer that fits a stacked
        leaf.
        """
        cuts = {0, length}
        for origin in xs:
            if origin is None or not origin.stacked or origin.layers is None or origin.num_layers is None:
                continue
            for rule in self.policy.rules:
                if rule.layers is not None and rule.matches(origin.path):
                    covered = rule.layer_range(origin.num_layers)
                    inside = [i for i, layer in enumerate(origin.layers) if layer in covered]
                    cuts |= {inside[0], inside[-1] + 1} if inside else set()
        return sorted(cuts)

    def _dot(self, eqn: Any, origins: list[Origin | None], frozen: str) -> Dot | None:
        lhs, rhs = (var.aval for var in eqn.invars)
        why = frozen or refusal(lhs.dtype, rhs.dtype, eqn.params["dimension_numbers"])
        side, origin, rule = self._choose(origins, decide=not why)
        name = None if origin is None else self._name(origin)
        layers = None if origin is None else origin.layers
        if origin is None or name is None or rule is None:
            why = why or (f"no rule matches {origin.path}" if origin else "no weight reaches it unchanged")
            self.sites.append(Site(name, lhs.shape, rhs.shape, None, why, layers, self.runs))
            return None
        if self.backward:
            raise ValueError(
                f"apply_recipe: the dot of {origin.path} belongs to a backward pass, where fprop, dgrad and wgrad "
                "can no longer "
                "be told apart; apply the recipe first and differentiate its result: grad(apply_recipe(fn, ...))"
            )
        self.used.add(rule)
        self.sites.append(Site(name, lhs.shape, rhs.shape, rule.recipe.name, "", layers, self.runs))
        return Dot(side, rule.recipe, name)

    def _choose(self, origins: list[Origin | None], *, decide: bool) -> tuple[int, Origin | None, Rule | None]:
        """The operand that is the weight and its rule: the right one if a rule matches it, else the left one."""
        weights = [(side, origin) for side in (1, 0) if (origin := origins[side]) is not None]
        for side, origin in weights if decide else ():
            rule = self._rule(origin)
            if rule is not None:
                return side, origin, rule
        return (*weights[0], None) if weights else (1, None, None)

    def _name(self, origin: Origin) -> str:
        """The path, numbered from the second use on: no two uses of a weight share random bits."""
        count = self.uses[origin.path] = self.uses.get(origin.path, 0) + 1
        return origin.path if count == 1 else f"{origin.path}#{count}"

    def _rule(self, origin: Origin) -> Rule | None:
        by_layer = [rule for rule in self.policy.rules if rule.layers is not None and rule.matches(origin.path)]
        if not by_layer:
            return next((rule for rule in self.policy.rules if rule.layers is None and rule.matches(origin.path)), None)
        if origin.layers is None or origin.num_layers is None or origin.stacked:
            raise ValueError(
                f"apply_recipe: rule {by_layer[0].pattern!r} selects layers {by_layer[0].layers}, but the layer "
                "number of "
                f"{origin.path} is not known at this dot: it is neither one slice of a scan over stacked layers, "
                "nor a static "
                "index into them, nor an element of a list; select by path alone, or scan over the layers"
            )
        rules = {self.policy.rule_for(origin.path, layer, origin.num_layers) for layer in origin.layers}
        if len(rules) != 1:
            raise ValueError(
                f"apply_recipe: the layers {origin.layers} of {origin.path} run in one body, but the policy gives "
                "them different "
                "recipes; scan over the stacked layers directly, so that the scan can be split"
            )
        return rules.pop()


def _slice_of(origin: Origin | None, start: int, stop: int) -> Origin | None:
    if origin is None:
        return None
    known = origin.stacked and origin.layers is not None
    return origin.iteration(origin.layers[start:stop] if known and origin.layers is not None else None)


def _read(env: dict[Any, Origin], var: Any) -> Origin | None:
    return None if isinstance(var, Literal) else env.get(var)
