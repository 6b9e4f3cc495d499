"""The MLPs and the attention of somebody else's model, so that the named policies mean something there.

By name first: most trees call an MLP mlp, ffn or feed_forward, or its weights up, gate and down. Where none does, by
shape of the program: a dot's result that reaches the next weight through elementwise operations alone (activations,
gates, biases, dropout) was a hidden layer. A residual sum or a norm in between ends that, and so does attention, whose
products have no weight. What else belongs to a numbered or stacked layer, and is no router, is its attention.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend.core import Literal

from halfbyte.ops.rewrite.origin import CALLS, CONSTANT, Origin, Value, called_jaxpr, flow, open_jaxpr, scan_inputs
from halfbyte.recipe import ATTENTION, MLP, Policy, Rule

_MLP_NAMES = re.compile(
    r"(?:^|[/_.])(?:mlps?|ffn?s?|ffw|feed_?forward|intermediate|(?:up|gate|down)(?:_proj)?|c_fc|fc_?(?:in|out|1|2)|"
    r"gating_einsum|w[io](?:_\d)?|dense_h_to_4h|dense_4h_to_h|linear_fc[12])(?:[/_.]|$)",
    re.IGNORECASE,
)
_MLP_FOLDER = re.compile(r"(?:^|/)(?:mlps?|ffn?s?|ffw|feed_?forward)/", re.IGNORECASE)
_ATTENTION_NAMES = re.compile(r"att|(?:^|[/_])(?:[qkvo]|qkv|kv|query|key|value)(?:_proj|_einsum)?(?:[/_]|$)", re.I)
_ROUTER = re.compile(r"router|gate_logits|gating_network|expert", re.IGNORECASE)
_KINDS = {MLP: "mlp", ATTENTION: "attention"}
_PASSES = {"select_n", "add", "add_any", "sub", "mul", "max", "min", "div", "pow"}  # elementwise, of several operands


def for_this_model(policy: Policy, jaxpr: Any, origins: Sequence[Value]) -> Policy:
    """The policy with the rules of `mlp` and `attention` spelled out for the weights of this function.

    Rules of a tree that has these very paths, and rules for kinds of which the model has none, stay as they are, unless
    another kind was found: a model without attention still has its MLPs.
    """
    weights = {origin.path: origin for origin in origins if isinstance(origin, Origin)}
    asked = [rule for rule in policy.rules if rule.pattern in _KINDS and not any(map(rule.matches, weights))]
    if not asked:
        return policy
    kinds = _kinds(weights, jaxpr, origins)
    spelled = {rule: [path for path in weights if kinds.get(path) == _KINDS[rule.pattern]] for rule in asked}
    if not any(spelled.values()):
        return policy
    rules = (_spell(rule, spelled[rule]) if rule in spelled else (rule,) for rule in policy.rules)
    return dataclasses.replace(policy, rules=tuple(rule for group in rules for rule in group))


def _spell(rule: Rule, paths: Iterable[str]) -> tuple[Rule, ...]:
    return tuple(dataclasses.replace(rule, pattern=re.sub(r"([*?[])", r"[\1]", path)) for path in paths)


def _kinds(weights: dict[str, Origin], jaxpr: Any, origins: Sequence[Value]) -> dict[str, str]:
    used = _Hidden()
    used.body(jaxpr, [(value, frozenset()) for value in origins])
    dots = [path for path in weights if path in used.weights]
    mlps = {p for p in dots if _is_mlp(p)} or used.hidden
    named = {p for p in dots if _ATTENTION_NAMES.search(p)} - mlps
    rest = {p for p in dots if weights[p].layers is not None and not _ROUTER.search(p)} - mlps
    return dict.fromkeys(mlps, "mlp") | dict.fromkeys(named or rest, "attention")


def _is_mlp(path: str) -> bool:
    """By name. What lies in a folder of that name is the MLP's, also where it is called `value` as attention's are."""
    folder = _MLP_FOLDER.search(path)
    asked = path[: folder.start()] if folder else path
    return bool(_MLP_NAMES.search(path)) and not _ATTENTION_NAMES.search(asked) and not _ROUTER.search(path)


Traced = tuple[Value, frozenset[str]]


class _Hidden:
    """One walk that finds weights of dots, and those whose result reaches another weight elementwise."""

    def __init__(self) -> None:
        self.weights: set[str] = set()
        self.hidden: set[str] = set()

    def body(self, jaxpr: Any, inputs: Sequence[Traced]) -> list[Traced]:
        env = dict(zip(jaxpr.invars, inputs, strict=True))

        def at(var: Any) -> Traced:
            return (CONSTANT, frozenset()) if isinstance(var, Literal) else env.get(var, (CONSTANT, frozenset()))

        for eqn in jaxpr.eqns:
            operands = [at(var) for var in eqn.invars]
            env.update(zip(eqn.outvars, self._equation(eqn, operands), strict=True))
        return [at(var) for var in jaxpr.outvars]

    def _equation(self, eqn: Any, operands: list[Traced]) -> list[Traced]:
        name, values = eqn.primitive.name, [value for value, _ in operands]
        if name in CALLS or name in ("custom_jvp_call", "custom_vjp_call"):
            inner = called_jaxpr(eqn)
            if inner is not None and len(inner.invars) == len(operands):
                return self.body(inner, operands)
        if name == "scan":
            self.body(called_jaxpr(eqn), [(value, frozenset()) for value in scan_inputs(eqn, values)])
        if name == "cond":
            branches = [self.body(open_jaxpr(branch), operands[1:]) for branch in eqn.params["branches"]]
            return branches[-1]
        outs, pending = flow(eqn, values), frozenset[str]()
        if name == "dot_general" and not eqn.params["dimension_numbers"][0][0]:
            pending = _elementwise(operands)  # nothing is contracted: the scale of a norm, written as an einsum
        elif name == "dot_general":
            pending = self._dot(eqn, operands)
        elif len(eqn.invars) == 1 and not name.startswith(("reduce", "arg", "cum")):
            pending = operands[0][1]
        elif name in _PASSES:
            pending = _elementwise(operands[1:] if name == "select_n" else operands)
        return [(out, pending) for out in outs]

    def _dot(self, eqn: Any, operands: list[Traced]) -> frozenset[str]:
        for side in (1, 0):
            weight, (_, pending) = operands[side][0], operands[1 - side]
            if isinstance(weight, Origin):
                self.weights.add(weight.path)
                self.hidden |= {weight.path, *pending} if pending else set()
                return frozenset([weight.path])
        return frozenset()


def _elementwise(operands: list[Traced]) -> frozenset[str]:
    """What several operands pass on: nothing if data that is no hidden layer takes part, such as a residual."""
    if any(value is None and not pending for value, pending in operands):
        return frozenset()
    return frozenset().union(*(pending for _, pending in operands))
