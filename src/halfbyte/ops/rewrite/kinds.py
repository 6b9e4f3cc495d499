"""The MLPs and the attention of somebody else's model, so that the named policies mean something there.

By name first: most trees call an MLP mlp, ffn or feed_forward, or its weights up, gate and down. Where none does, by
shape of the program: a dot's result that reaches the next weight through elementwise operations alone (activations,
gates, biases, dropout) was a hidden layer. A residual sum or a norm in between ends that, and so does attention, whose
products have no weight. Attention too is known by name, and where none is named, what else belongs to a layer is it.
Never an embedding, a head or a router: where layers are numbered or stacked nothing outside of them is attention, and
without names neither is what reads the data first, unless later layers have its like, nor what no weight follows.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from halfbyte.ops.rewrite.origin import CALLS, CONSTANT, Origin, Value, called_jaxpr, flow, open_jaxpr, scan_inputs
from halfbyte.recipe import ATTENTION, MLP, Policy, Rule

_MLP_NAMES = re.compile(
    r"(?:^|[/_.])(?:mlps?|ffn?s?|ffw|feed_?forward|intermediate|(?:up|gate|down)(?:_proj)?|c_fc|fc_?(?:in|out|1|2)|"
    r"gating_einsum|w[io](?:_\d)?|dense_h_to_4h|dense_4h_to_h|linear_fc[12])(?:[/_.]|$)",
    re.IGNORECASE,
)
_MLP_FOLDER = re.compile(r"(?:^|/)(?:mlps?|ffn?s?|ffw|feed_?forward)/", re.IGNORECASE)
_ATTENTION_NAMES = re.compile(r"att|(?:^|[/_])(?:[qkvo]|qkv|kv|query|key|value)(?:_proj|_einsum)?(?:[/_]|$)", re.I)
_ROUTER = re.compile(r"router|gate_logits|gating_network|expert|moe[^/]*/gate(?:/|$)", re.IGNORECASE)
_NUMBERS = re.compile(r"\d+")
_KINDS = {MLP: "mlp", ATTENTION: "attention"}
_PASSES = {"select_n", "add", "add_any", "sub", "mul", "max", "min", "div", "pow"}  # elementwise, of several operands


def for_this_model(policy: Policy, jaxpr: Jaxpr, origins: Sequence[Value]) -> Policy:
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
    rules = list[Rule]()
    for rule in policy.rules:
        escaped = [re.sub(r"([*?[])", r"[\1]", path) for path in spelled.get(rule, ())]
        rules += [dataclasses.replace(rule, pattern=path) for path in escaped] if rule in spelled else [rule]
    return dataclasses.replace(policy, rules=tuple(rules))


def _kinds(weights: dict[str, Origin], jaxpr: Jaxpr, origins: Sequence[Value]) -> dict[str, str]:
    used = _Uses()
    used.body(jaxpr, [Traced(value) for value in origins])
    dots = {path: origin for path, origin in weights.items() if path in used.weights}
    mlps = {p for p, w in dots.items() if _is_mlp(w.name)} or used.hidden
    others = {p for p, w in dots.items() if not _ROUTER.search(w.name)} - mlps
    layered = {p for p in others if dots[p].layers is not None}
    named = {p for p in others if _ATTENTION_NAMES.search(dots[p].name)}
    named = named & layered or named
    rest = layered & used.followed
    alike = {_NUMBERS.sub("", dots[p].name) for p in rest - used.first}  # a first layer too may read the data
    rest -= {p for p in used.first if _NUMBERS.sub("", dots[p].name) not in alike}
    return dict.fromkeys(mlps, "mlp") | dict.fromkeys(named or rest, "attention")


def _is_mlp(name: str) -> bool:
    """What lies in a folder of that name is the MLP's, also where it is called `value` as attention's are."""
    folder = _MLP_FOLDER.search(name)
    asked = name[: folder.start()] if folder else name
    return bool(_MLP_NAMES.search(name)) and not _ATTENTION_NAMES.search(asked) and not _ROUTER.search(name)


class Traced(NamedTuple):
    """A value in this walk: the weights whose dot it came from elementwise, and all that took part in it since the last
    dot with a weight.
    """

    value: Value
    pending: frozenset[str] = frozenset()
    seen: frozenset[str] = frozenset()


class _Uses:
    """One walk that finds weights of dots; those whose result reaches another weight elementwise (`hidden`), or any way
    (`followed`); and those that read what no weight has touched (`first`).
    """

    def __init__(self) -> None:
        self.weights: set[str] = set()
        self.hidden: set[str] = set()
        self.followed: set[str] = set()
        self.first: set[str] = set()

    def body(self, jaxpr: Jaxpr, inputs: Sequence[Traced]) -> list[Traced]:
        env = dict(zip(jaxpr.invars, inputs, strict=True))

        def at(var: Var | Literal) -> Traced:
            return Traced(CONSTANT) if isinstance(var, Literal) else env.get(var, Traced(CONSTANT))

        for eqn in jaxpr.eqns:
            operands = [at(var) for var in eqn.invars]
            env.update(zip(eqn.outvars, self._equation(eqn, operands), strict=True))
        return [at(var) for var in jaxpr.outvars]

    def _equation(self, eqn: JaxprEqn, operands: list[Traced]) -> list[Traced]:
        name, values = eqn.primitive.name, [operand.value for operand in operands]
        if name in CALLS or name in ("custom_jvp_call", "custom_vjp_call"):
            inner = called_jaxpr(eqn)
            if inner is not None and len(inner.invars) == len(operands):
                return self.body(inner, operands)
        seen = frozenset[str]().union(*(_seen(operand) for operand in operands))
        if name == "scan":
            for _ in range(2):  # the second time after itself
                inputs = [Traced(value, seen=seen) for value in scan_inputs(eqn, values)]
                seen = seen.union(*(out.seen for out in self.body(called_jaxpr(eqn), inputs)))
        if name == "cond":
            branches = [self.body(open_jaxpr(branch), operands[1:]) for branch in eqn.params["branches"]]
            return branches[-1]
        outs, pending = flow(eqn, values), frozenset[str]()
        if name == "dot_general" and not eqn.params["dimension_numbers"][0][0]:
            pending = _elementwise(operands)  # nothing is contracted: the scale of a norm, written as an einsum
        elif name == "dot_general":
            pending = self._dot(operands)
            seen = pending or seen
        elif len(eqn.invars) == 1 and not name.startswith(("reduce", "arg", "cum")):
            pending = operands[0].pending
        elif name in _PASSES:
            pending = _elementwise(operands[1:] if name == "select_n" else operands)
        return [Traced(out, pending, seen if out is None else frozenset()) for out in outs]

    def _dot(self, operands: list[Traced]) -> frozenset[str]:
        for side in (1, 0):
            weight, x = operands[side].value, operands[1 - side]
            if isinstance(weight, Origin):
                self.weights.add(weight.path)
                self.hidden |= {weight.path, *x.pending} if x.pending else set()
                self.followed |= x.seen
                self.first |= set() if x.seen else {weight.path}
                return frozenset([weight.path])
        return frozenset()


def _seen(operand: Traced) -> frozenset[str]:
    return operand.seen | {operand.value.path} if isinstance(operand.value, Origin) else operand.seen


def _elementwise(operands: list[Traced]) -> frozenset[str]:
    """What several operands pass on: nothing if data that is no hidden layer takes part, such as a residual."""
    if any(operand.value is None and not operand.pending for operand in operands):
        return frozenset()
    return frozenset().union(*(operand.pending for operand in operands))
