"""Several linears of one x: one quantization pass over x, and one operand for all linears that need the same."""

import itertools
from collections.abc import Mapping, Sequence

import jax

from halfbyte.ops.linear import QuantizedLinear
from halfbyte.ops.operand import SCALES_NAME, tag_residual
from halfbyte.ops.quantize_passes import Amaxes, OperandOrResidual, QuantizePasses


def first_with_same_operand(linears: Sequence[QuantizedLinear], role: str) -> list[int]:
    """Returns for each linear of one x the index of the first linear that needs the same operand `role`."""

    def same(a: QuantizedLinear, b: QuantizedLinear) -> bool:
        return a is b or (a.passes is b.passes and a.operand_spec(role).is_same_operand(b.operand_spec(role)))

    return [next(i for i, other in enumerate(linears) if same(linear, other)) for linear in linears]


def dedupe_operands(
    linears: Sequence[QuantizedLinear], role: str, made: Sequence[OperandOrResidual]
) -> dict[int, OperandOrResidual]:
    """Returns operands `role` of linears of one x, each once, by the index of the first linear that needs it."""
    return {first: made[first] for first in first_with_same_operand(linears, role)}


def quantize_shared_x(
    x: jax.Array, linears: Sequence[QuantizedLinear], roles: Sequence[str], *, kept: Sequence[str] = (),
    maxima: Sequence[Amaxes] = (),
) -> list[list[OperandOrResidual]]:  # fmt: skip
    """Returns each linear's operands of x: one pass for linears with equal passes, one operand for equal specs.

    `maxima`: the results of `shared_x_amax` for the same linears and at least these roles.
    """
    firsts = {role: first_with_same_operand(linears, role) for role in roles}
    operands: dict[tuple[int, str], OperandOrResidual] = {}
    for (passes, operand_keys), amaxes in itertools.zip_longest(_group_by_passes(linears, firsts).items(), maxima):
        requests = [linears[i].operand_spec(role, kept=role in kept) for i, role in operand_keys]
        operands |= dict(zip(operand_keys, passes.quantize_operands(x, requests, amaxes), strict=True))
    return [[operands[firsts[role][i], role] for role in roles] for i in range(len(linears))]


def shared_x_amax(x: jax.Array, linears: Sequence[QuantizedLinear], roles: Sequence[str]) -> list[Amaxes]:
    """Returns the amaxes of x that the passes of these linears need, named for the remat policy (SCALES_NAME)."""
    amaxes, firsts = [], {role: first_with_same_operand(linears, role) for role in roles}
    for passes, operand_keys in _group_by_passes(linears, firsts).items():
        amaxes.append(passes.precompute_amax(x, [linears[i].operand_spec(role) for i, role in operand_keys]))
    return tag_residual(amaxes, SCALES_NAME)


def _group_by_passes(
    linears: Sequence[QuantizedLinear], firsts: Mapping[str, Sequence[int]]
) -> dict[QuantizePasses, list[tuple[int, str]]]:
    """Returns passes -> (index of the first linear that needs the operand, role), for each operand of one x.

    `firsts`: `first_with_same_operand` of each role.
    """
    groups: dict[QuantizePasses, list[tuple[int, str]]] = {linear.passes: [] for linear in linears}
    for i, linear in enumerate(linears):
        groups[linear.passes] += [(i, role) for role in firsts if firsts[role][i] == i]
    return groups
