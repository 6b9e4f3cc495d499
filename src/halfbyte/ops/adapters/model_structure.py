"""Structure of a model, read from weight names and the jaxpr: its MLPs, its attention, and the layer of each weight.

The named policies use it for models of other libraries. All names are paths without the `value` or `data_array` that a
framework puts between a variable and its array, with `/` as the only separator.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from halfbyte.ops.adapters.weight_provenance import (
    CALL_PRIMITIVES,
    CONSTANT,
    Value,
    WeightOrigin,
    called_jaxpr,
    propagate_equation,
    scan_inputs,
    unclose_jaxpr,
)
from halfbyte.recipes import ATTENTION_PATTERNS, MLP_PATTERNS, Policy, Rule

LAYER_PLACEHOLDER = "{layer}"


_MLP_NAMES = re.compile(
    r"(?:^|[/_.])(?:mlps?|ffn?s?|ffw|feed_?forward|intermediate|(?:up|gate|down)(?:_proj)?|c_fc|fc_?(?:in|out|1|2)|"
    r"gating_einsum|w[io](?:_\d)?|dense_h_to_4h|dense_4h_to_h|linear_fc[12])(?:[/_.]|$)",
    re.IGNORECASE,
)


_MLP_FOLDER = re.compile(r"(?:^|/)(?:mlps?|ffn?s?|ffw|feed_?forward)/", re.IGNORECASE)


_ATTENTION_NAMES = re.compile(r"att|(?:^|[/_])(?:[qkvo]|qkv|kv|query|key|value)(?:_proj|_einsum)?(?:[/_]|$)", re.I)


# Routers, and weights of experts. The last alternative is a weight, or a scope of one, directly in a block of experts.
_ROUTER = re.compile(
    r"router|gate_logits|gating_network|expert|moe[^/]*/gate(?:/|$)|moe(?:_?block|_?mlp|_?ffn)?(?:_\d+)?/[^/]+(?:/[^/]+)?$",
    re.IGNORECASE,
)


# Both halves of a gated MLP or both of its linears (`wi_0`, `wi_1`; `fc_1`, `fc_2`), if there are no more of them.
_MLP_PART = re.compile(r"(?:^|/)(?:w[io]|fc)_$", re.IGNORECASE)


_NUMBERS = re.compile(r"\d+")


_NUMBER = re.compile(r"(?:^|/)((?:[^/]*_)?)(\d+)(?=/|$)")


_WRAPPERS = {"value", "raw_value", "data_array", "array"}


_NO_LAYERS = re.compile(r"expert|moe|heads", re.IGNORECASE)


_KINDS = {MLP_PATTERNS: "mlp", ATTENTION_PATTERNS: "attention"}


_ELEMENTWISE_PRIMITIVES = {
    "select_n",
    "add",
    "add_any",
    "sub",
    "mul",
    "max",
    "min",
    "div",
    "pow",
}  # of several operands


def expand_named_policy(policy: Policy, jaxpr: Jaxpr, origins: Sequence[Value]) -> Policy:
    """Returns the policy with its rules for `mlp` and `attention` expanded into the weights of this function.

    Rules whose patterns match the paths of this model stay as they are. If the model has none of the kinds that the
    policy names, the policy is returned unchanged.

    First by name: most models call an MLP mlp, ffn or feed_forward, or its weights up, gate and down. If none does, by
    the jaxpr: a dot's result that reaches the next weight through elementwise operations only (activations, gates,
    biases, dropout) is a hidden layer. A residual sum, a norm or attention, whose products have no weight, ends that.
    Attention is detected by name as well, and if none is named, it is the rest of a layer. Never an embedding, a head
    or a router: if layers are numbered or stacked, nothing outside of them is attention. Without such names neither is
    the first weight that reads the data, unless later layers have a similar one, nor a weight that no other follows.
    """
    weights = {origin.path: origin for origin in origins if isinstance(origin, WeightOrigin)}
    named_rules = [rule for rule in policy.rules if rule.pattern in _KINDS and not any(map(rule.matches, weights))]
    if not named_rules:
        return policy
    kinds = _kinds(weights, jaxpr, origins)
    expanded = {rule: [path for path in weights if kinds.get(path) == _KINDS[rule.pattern]] for rule in named_rules}
    if not any(expanded.values()):
        return policy
    rules = list[Rule]()
    for rule in policy.rules:
        escaped = [re.sub(r"([*?[])", r"[\1]", path) for path in expanded.get(rule, ())]
        rules += [dataclasses.replace(rule, pattern=path) for path in escaped] if rule in expanded else [rule]
    return dataclasses.replace(policy, rules=tuple(rules))


def _kinds(weights: dict[str, WeightOrigin], jaxpr: Jaxpr, origins: Sequence[Value]) -> dict[str, str]:
    walk = _WeightUseWalk()
    walk.body(jaxpr, [TracedValue(value) for value in origins])
    dots = {path: origin for path, origin in weights.items() if path in walk.weights}
    dense = {p for p, w in dots.items() if not _ROUTER.search(w.name)}
    mlps = {p for p in dense if _is_mlp(dots[p].name)} or walk.hidden & dense
    others = dense - mlps
    layered = {p for p in others if dots[p].layers is not None}
    named = {p for p in others if _ATTENTION_NAMES.search(dots[p].name)}
    named = named & layered or named
    rest = layered & walk.followed
    alike = {_NUMBERS.sub("", dots[p].name) for p in rest - walk.first}  # a first layer too may read the data
    rest -= {p for p in walk.first if _NUMBERS.sub("", dots[p].name) not in alike}
    return dict.fromkeys(mlps, "mlp") | dict.fromkeys(named or rest, "attention")


def leaves_experts(rule: Rule, name: str) -> bool:
    """Returns True for a rule of a named policy and a router, or a weight of experts: they keep the model's dtype."""
    return rule.pattern in _KINDS and is_expert(name)


def is_expert(name: str) -> bool:
    """Returns True for the name of a router or of a weight of experts."""
    return bool(_ROUTER.search(name))


def _is_mlp(name: str) -> bool:
    """Returns True for a weight in a scope of an MLP's name, also if it is called `value` as in attention."""
    folder = _MLP_FOLDER.search(name)
    prefix = name[: folder.start()] if folder else name
    return bool(_MLP_NAMES.search(name)) and not _ATTENTION_NAMES.search(prefix)


class TracedValue(NamedTuple):
    """A value, the weights whose dots reach it elementwise, and all weights since the last dot with a weight."""

    value: Value
    elementwise_weights: frozenset[str] = frozenset()
    contributing_weights: frozenset[str] = frozenset()


class _WeightUseWalk:
    """Walks a jaxpr and collects the weights of dots.

    `hidden`: their result reaches another weight elementwise. `followed`: it reaches another weight in any way.
    `first`: they read data that no weight has touched.
    """

    def __init__(self) -> None:
        self.weights: set[str] = set()
        self.hidden: set[str] = set()
        self.followed: set[str] = set()
        self.first: set[str] = set()

    def body(self, jaxpr: Jaxpr, inputs: Sequence[TracedValue]) -> list[TracedValue]:
        env = dict(zip(jaxpr.invars, inputs, strict=True))

        def at(var: Var | Literal) -> TracedValue:
            return TracedValue(CONSTANT) if isinstance(var, Literal) else env.get(var, TracedValue(CONSTANT))

        for eqn in jaxpr.eqns:
            operands = [at(var) for var in eqn.invars]
            env.update(zip(eqn.outvars, self._equation(eqn, operands), strict=True))
        return [at(var) for var in jaxpr.outvars]

    def _equation(self, eqn: JaxprEqn, operands: list[TracedValue]) -> list[TracedValue]:
        name, values = eqn.primitive.name, [operand.value for operand in operands]
        if name in CALL_PRIMITIVES or name in ("custom_jvp_call", "custom_vjp_call"):
            inner = called_jaxpr(eqn)
            if inner is not None and len(inner.invars) == len(operands):
                return self.body(inner, operands)
        seen = frozenset[str]().union(*(_weights_seen(operand) for operand in operands))
        if name == "scan":
            for _ in range(2):  # the second iteration follows the first
                inputs = [TracedValue(value, contributing_weights=seen) for value in scan_inputs(eqn, values)]
                seen = seen.union(*(out.contributing_weights for out in self.body(called_jaxpr(eqn), inputs)))
        if name == "cond":
            branches = [self.body(unclose_jaxpr(branch), operands[1:]) for branch in eqn.params["branches"]]
            return branches[-1]
        outs, pending = propagate_equation(eqn, values), frozenset[str]()
        if name == "dot_general" and not eqn.params["dimension_numbers"][0][0]:
            pending = _elementwise(operands)  # nothing is contracted: the scale of a norm as an einsum
        elif name == "dot_general":
            pending = self._dot(operands)
            seen = pending or seen
        elif len(eqn.invars) == 1 and not name.startswith(("reduce", "arg", "cum")):
            pending = operands[0].elementwise_weights
        elif name in _ELEMENTWISE_PRIMITIVES:
            pending = _elementwise(operands[1:] if name == "select_n" else operands)
        return [TracedValue(out, pending, seen if out is None else frozenset()) for out in outs]

    def _dot(self, operands: list[TracedValue]) -> frozenset[str]:
        for side in (1, 0):
            weight, x = operands[side].value, operands[1 - side]
            if isinstance(weight, WeightOrigin):
                self.weights.add(weight.path)
                self.hidden |= {weight.path, *x.elementwise_weights} if x.elementwise_weights else set()
                self.followed |= x.contributing_weights
                self.first |= set() if x.contributing_weights else {weight.path}
                return frozenset([weight.path])
        return frozenset()


def _weights_seen(operand: TracedValue) -> frozenset[str]:
    return (
        operand.contributing_weights | {operand.value.path}
        if isinstance(operand.value, WeightOrigin)
        else operand.contributing_weights
    )


def _elementwise(operands: list[TracedValue]) -> frozenset[str]:
    """Returns the weights that reach an elementwise result: none if an operand is data but no hidden layer."""
    if any(operand.value is None and not operand.elementwise_weights for operand in operands):
        return frozenset()
    return frozenset().union(*(operand.elementwise_weights for operand in operands))


@dataclass(frozen=True)
class NumberedPath:
    """A number in a path: the path up to it with a placeholder for it, and the number."""

    template: str
    number: int


def weight_origins(paths: list[str], shapes: list[tuple[int, ...]], patterns: Sequence[str] = ()) -> list[WeightOrigin]:
    """Returns an origin for each weight leaf, with its layer if that is known.

    A number in a path is a layer's if it stands alone (`layers/3/w`) or ends a name after `_` (`block_3`, `linear_3`),
    and if other paths differ only in that number. The numbers of `wi_0` and `wi_1`, and of `fc_1` and `fc_2`, are parts
    of one MLP, unless there are more than two. Of several numbers, the outermost. A leaf without such a number and with
    more than two dims may be a stack of layers along dim 0; one of three dims whose name contains experts or heads is a
    stack of those. `patterns` override this: `blocks/{layer}/*` is the position of the number, `stack/*` are stacked
    leaves.
    """
    names = leaf_names(paths)
    candidates = [
        _by_pattern(p, patterns) if patterns else _numbered_paths(name) for p, name in zip(paths, names, strict=True)
    ]
    members = _layer_counts(candidates)
    if not patterns:
        candidates = [[path for path in numbered if not _is_mlp_part(path, members)] for numbered in candidates]
        members = _layer_counts(candidates)
    candidates = [
        numbered or _unnumbered_first(name, members) for name, numbered in zip(names, candidates, strict=True)
    ]
    members = _layer_counts(candidates)
    origins = [
        _origin(path, shape, _select_layer_number(numbered, members), members, patterns)
        for path, shape, numbered in zip(paths, shapes, candidates, strict=True)
    ]
    return [dataclasses.replace(origin, name=name) for origin, name in zip(origins, names, strict=True)]


def leaf_names(paths: Sequence[str]) -> list[str]:
    """Returns the paths with `/` for `.`, without a wrapper's name at the end.

    A wrapper holds nothing but its array. A leaf with siblings in its scope (query, key and value) is not wrapped.
    """
    names = [path.replace(".", "/") for path in paths]
    while True:
        folders = collections.Counter(folder for name in names for folder in _parent_scopes(name))
        shorter = [
            folder if folder and last in _WRAPPERS and folders[folder] == 1 else name
            for name in names
            for folder, _, last in [name.rpartition("/")]
        ]
        if shorter == names:
            return names
        names = shorter


def _parent_scopes(name: str) -> Iterator[str]:
    """Yields the scopes around a leaf from the outermost one."""
    return itertools.accumulate(name.split("/")[:-1], "{}/{}".format)


def _origin(
    path: str, shape: tuple[int, ...], place: NumberedPath | None, members: dict[str, set[int]], patterns: Sequence[str]
) -> WeightOrigin:
    if place is not None:
        numbers = sorted(members[place.template])
        # Names that count from 1 are numbered in their order; others may leave gaps, and count from 0.
        layer = place.number if numbers[0] == 0 else numbers.index(place.number)
        count = numbers[-1] + 1 if numbers[0] == 0 else len(numbers)
        return WeightOrigin(path, range(layer, layer + 1), count)
    named = any(LAYER_PLACEHOLDER not in pattern and _regex(pattern).fullmatch(path) for pattern in patterns)
    if named or (not patterns and len(shape) > 2 + bool(_NO_LAYERS.search(path))):
        return WeightOrigin(path, range(shape[0]), shape[0], stacked=True)
    return WeightOrigin(path)


def _select_layer_number(found: list[NumberedPath], members: dict[str, set[int]]) -> NumberedPath | None:
    """Returns the outermost number that other paths vary, else the outermost."""
    return next((path for path in found if len(members[path.template]) > 1), found[0] if found else None)


def _numbered_paths(path: str) -> list[NumberedPath]:
    return [
        NumberedPath(f"{path[: match.start(2)]}{LAYER_PLACEHOLDER}", int(match[2])) for match in _NUMBER.finditer(path)
    ]


def _is_mlp_part(place: NumberedPath, members: dict[str, set[int]]) -> bool:
    name = place.template.removesuffix(LAYER_PLACEHOLDER)
    return bool(_MLP_PART.search(name)) and len(members[place.template]) <= 2


def _layer_counts(places: list[list[NumberedPath]]) -> dict[str, set[int]]:
    members: dict[str, set[int]] = {}
    for path in (path for numbered in places for path in numbered):
        members.setdefault(path.template, set()).add(path.number)
    return members


def _unnumbered_first(path: str, members: dict[str, set[int]]) -> list[NumberedPath]:
    """Returns number 0 for a name without one: Haiku calls its layers linear, linear_1, linear_2."""
    parts = path.split("/")
    families = ("/".join(parts[: depth + 1]) + f"_{LAYER_PLACEHOLDER}" for depth in range(len(parts)))
    return [NumberedPath(family, 0) for family in families if 0 not in members.get(family, {0})]


def _by_pattern(path: str, patterns: Sequence[str]) -> list[NumberedPath]:
    for pattern in patterns:
        match = _regex(pattern).fullmatch(path) if LAYER_PLACEHOLDER in pattern else None
        if match:
            return [NumberedPath(f"{path[: match.start(1)]}{LAYER_PLACEHOLDER}", int(match[1]))]
    return []


def _regex(pattern: str) -> re.Pattern[str]:
    parts = pattern.split(LAYER_PLACEHOLDER)
    if len(parts) > 2:
        raise ValueError(f"layers: {pattern!r} holds {LAYER_PLACEHOLDER} more than once; a leaf has one layer number")
    return re.compile(r"(\d+)".join(re.escape(part).replace(r"\*", ".*").replace(r"\?", ".") for part in parts))
