"""Provenance of the values of a jaxpr: which argument leaf (weight) each value comes from.

A jaxpr has no parameter names. So this module propagates one of three values through it. A `WeightOrigin` is a
weight: the leaf's path, and, if the leaf is a stack of layers, which of them the value holds. `CONSTANT` depends on no
argument. None depends on data. A weight that is transposed, sliced, cast, scaled, masked, padded, gathered or
normalised stays that weight. An operation that also reads data gives an activation, with two exceptions: a slice of a
weight at a traced index, and a choice (cond) between several weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from halfbyte.devices.jax_versions import scan_counts

_IDENTITY_PRIMITIVES = {
    "convert_element_type",
    "copy",
    "copy_p",
    "reduce_precision",
    "sharding_constraint",
    "reshard",
    "name",
}
_IDENTITY_PRIMITIVES |= {"device_put", "stop_gradient", "pvary", "pcast", "optimization_barrier", "mesh_cast"}
CALL_PRIMITIVES = ("jit", "pjit", "checkpoint", "remat", "remat2", "closed_call", "core_call", "shard_map")
_ROUNDS = 8  # of a loop's fixed point: a value can only fall from constant to weight to data


class ConstantValue:
    """The provenance of a value that depends on no argument."""

    def __repr__(self) -> str:
        return "CONSTANT"


CONSTANT = ConstantValue()


@dataclass(frozen=True)
class WeightOrigin:
    """A weight leaf and the layers of it that a value holds.

    `path`: the leaf's path. `layers`: the layers that the value holds, None if unknown (a traced index, a reshaped
    stack). `num_layers`: the number of layers of the stack or model. `stacked`: dim 0 of the value runs over `layers`.
    `is_unmodified`: the value is the leaf itself, transposed or scaled, not computed from it. `name`: the path without
    the wrappers that a framework puts around an array; the structure of a model is read from it.
    """

    path: str
    layers: range | None = None
    num_layers: int | None = None
    stacked: bool = False
    is_unmodified: bool = True
    name: str = ""

    def unstacked(self) -> WeightOrigin:
        """Returns the origin with unknown layers, for a stack whose layers are no longer along dim 0."""
        return dataclasses.replace(self, stacked=False, layers=None) if self.stacked else self

    def computed(self) -> WeightOrigin:
        """Returns the origin of a value that was computed from the leaf."""
        return dataclasses.replace(self.unstacked(), is_unmodified=False)


Value = WeightOrigin | ConstantValue | None


def join_values(a: Value, b: Value) -> Value:
    """Returns the provenance of a value that may be either `a` or `b`."""
    if a == b:
        return a
    if a is None or b is None:
        return None
    origins = [value for value in (a, b) if isinstance(value, WeightOrigin)]
    return origins[0].computed()


def propagate_jaxpr(jaxpr: Jaxpr, values: Sequence[Value]) -> list[Value]:
    """Returns the provenance of a jaxpr's outputs from that of its inputs."""
    env = dict(zip(jaxpr.invars, values, strict=True))
    for eqn in jaxpr.eqns:
        env.update(
            zip(eqn.outvars, propagate_equation(eqn, [read_variable(env, var) for var in eqn.invars]), strict=True)
        )
    return [read_variable(env, var) for var in jaxpr.outvars]


def aval(var: Var | Literal) -> jax.ShapeDtypeStruct:
    """Returns the abstract value of a variable: shape, dtype and sharding."""
    return cast(jax.ShapeDtypeStruct, var.aval)


def read_variable(env: dict[Var, Value], var: Var | Literal) -> Value:
    """Returns the provenance of a variable. Literals and the jaxpr's constants are CONSTANT."""
    return CONSTANT if isinstance(var, Literal) else env.get(var, CONSTANT)


def propagate_equation(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Returns the provenance of an equation's results."""
    name = eqn.primitive.name
    if name in CALL_PRIMITIVES:
        return propagate_jaxpr(called_jaxpr(eqn), values)
    if name == "scan":
        return _flow_scan(eqn, values)
    if name == "while":
        return loop_carry_values(eqn, values)
    if name == "cond":
        branches = [propagate_jaxpr(unclose_jaxpr(branch), values[1:]) for branch in eqn.params["branches"]]
        return [_choice(group) for group in zip(*branches, strict=True)]
    if name == "optimization_barrier":
        return list(values)
    return [_operation(eqn, name, values)] * len(eqn.outvars)


def _choice(group: Sequence[Value]) -> Value:
    joined = group[0]
    for value in group[1:]:
        joined = join_values(joined, value)
    return joined


def _operation(eqn: JaxprEqn, name: str, values: list[Value]) -> Value:
    operand = values[0] if values else CONSTANT
    if name == "dynamic_slice" and isinstance(operand, WeightOrigin):
        return _dynamic_slice(eqn, operand)
    if any(value is None for value in values):
        return None
    weights = [(index, value) for index, value in enumerate(values) if isinstance(value, WeightOrigin)]
    if not weights:
        return CONSTANT
    index, main = max(weights, key=lambda pair: (aval(eqn.invars[pair[0]]).size, pair[1].is_unmodified, -pair[0]))
    if name in _IDENTITY_PRIMITIVES:
        return main
    if name in _SHAPE_RULES and index == 0:
        return _SHAPE_RULES[name](eqn, main)
    same_shape = all(aval(out).shape == aval(eqn.invars[index]).shape for out in eqn.outvars)
    if not same_shape:
        return main.computed()
    return main if len(weights) == 1 else dataclasses.replace(main, is_unmodified=False)


def _broadcast(eqn: JaxprEqn, origin: WeightOrigin) -> WeightOrigin:
    dims, after = eqn.params["broadcast_dimensions"], eqn.params["shape"]
    before = aval(eqn.invars[0]).shape
    return origin if dims and dims[0] == 0 and before[0] == after[0] else origin.unstacked()


def _reshape(eqn: JaxprEqn, origin: WeightOrigin) -> WeightOrigin:
    before, after = aval(eqn.invars[0]).shape, aval(eqn.outvars[0]).shape
    return origin if before and after and before[0] == after[0] else origin.unstacked()


def _transpose(eqn: JaxprEqn, origin: WeightOrigin) -> WeightOrigin:
    first = eqn.params["permutation"][0]
    if first == 0 or not origin.stacked:
        return origin
    # A stack whose layers are not along dim 0 (MaxText's param_scan_axis=1) is transposed before a scan runs over it.
    whole, length = origin.layers == range(origin.num_layers or 0), aval(eqn.invars[0]).shape[first]
    return dataclasses.replace(origin, layers=range(length), num_layers=length) if whole else origin.unstacked()


def _squeeze(eqn: JaxprEqn, origin: WeightOrigin) -> WeightOrigin:
    return dataclasses.replace(origin, stacked=origin.stacked and 0 not in eqn.params["dimensions"])


def _slice(eqn: JaxprEqn, origin: WeightOrigin) -> WeightOrigin:
    if not origin.stacked or origin.layers is None:
        return origin
    stride = (eqn.params["strides"] or (1,))[0]
    layers = origin.layers[eqn.params["start_indices"][0] : eqn.params["limit_indices"][0] : stride]
    return dataclasses.replace(origin, layers=layers)


def _dynamic_slice(eqn: JaxprEqn, origin: WeightOrigin) -> WeightOrigin:
    whole = eqn.params["slice_sizes"][0] == aval(eqn.invars[0]).shape[0]
    return origin if whole else origin.unstacked()


def _split(eqn: JaxprEqn, origin: WeightOrigin) -> WeightOrigin:
    return origin.unstacked() if eqn.params["axis"] == 0 else origin


_SHAPE_RULES: dict[str, Callable[[JaxprEqn, WeightOrigin], WeightOrigin]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "split": _split,
    **dict.fromkeys(
        ("gather", "pad", "all_gather", "all_gather_invariant", "all_gather_reduced", "concatenate", "rev"),
        lambda eqn, origin: origin.unstacked(),
    ),
}


def _flow_scan(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    consts, carries = scan_counts(eqn.params, eqn.invars)
    inner = scan_inputs(eqn, values)
    outs = propagate_jaxpr(called_jaxpr(eqn), inner)
    stacked = [value.computed() if isinstance(value, WeightOrigin) else value for value in outs[carries:]]
    return inner[consts : consts + carries] + stacked


def scan_inputs(eqn: JaxprEqn, values: Sequence[Value]) -> list[Value]:
    """Returns the provenance of the inputs of a scan's body over all iterations: constants, carries, slices."""
    consts, carries = scan_counts(eqn.params, eqn.invars)
    slices = [scan_slice_value(value, 0, eqn.params["length"]) for value in values[consts + carries :]]
    head, start = list(values[:consts]), list(values[consts : consts + carries])

    def step(carry: list[Value]) -> list[Value]:
        return propagate_jaxpr(called_jaxpr(eqn), head + carry + slices)[:carries]

    return head + _iterate_to_fixpoint(step, start) + slices


def scan_slice_value(value: Value, start: int, stop: int) -> Value:
    """Returns the provenance of a scan's slice in iterations start..stop-1: one of those layers if it scans a stack."""
    if not isinstance(value, WeightOrigin) or not value.stacked:
        return value
    return dataclasses.replace(value, stacked=False, layers=None if value.layers is None else value.layers[start:stop])


def loop_carry_values(eqn: JaxprEqn, values: Sequence[Value]) -> list[Value]:
    """Returns the provenance of a while loop's carry over all iterations and after the loop."""
    cond_end, body_end = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
    body, consts = unclose_jaxpr(eqn.params["body_jaxpr"]), list(values[cond_end:body_end])
    return _iterate_to_fixpoint(lambda carry: propagate_jaxpr(body, consts + carry), list(values[body_end:]))


def _iterate_to_fixpoint(step: Callable[[list[Value]], list[Value]], carry: list[Value]) -> list[Value]:
    for _ in range(_ROUNDS):
        after = [join_values(a, b) for a, b in zip(carry, step(carry), strict=True)]
        if after == carry:
            return carry
        carry = after
    return [None] * len(carry)


def called_jaxpr(eqn: JaxprEqn) -> Jaxpr:
    """Returns the jaxpr that a call, a scan or a shard_map runs, without its constants."""
    return unclose_jaxpr(eqn.params["jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"])


def sub_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """Returns every jaxpr among an equation's parameters, without its constants."""
    jaxprs = []
    for value in jax.tree_util.tree_leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
        if _is_jaxpr(value):
            jaxprs.append(unclose_jaxpr(value))
    return jaxprs


def unclose_jaxpr(value: Jaxpr | ClosedJaxpr) -> Jaxpr:
    """Returns the Jaxpr of a ClosedJaxpr, or the Jaxpr itself."""
    return value.jaxpr if hasattr(value, "consts") and hasattr(value, "jaxpr") else value


def _is_jaxpr(value: Any) -> bool:
    return hasattr(unclose_jaxpr(value), "eqns")
