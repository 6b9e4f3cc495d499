"""Several linears of one x: one pass over x for all of them, and one operand wherever two want the same."""

import itertools
from collections.abc import Mapping, Sequence

import jax

from halfbyte.ops.linear import Linear
from halfbyte.ops.operand import SCALES, name_saved
from halfbyte.ops.passes import Made, Maxima, Passes


def first_wanting(linears: Sequence[Linear], role: str) -> list[int]:
    """For each of several linears of one x, which of them the first is that wants the same operand `role`."""

    def same(a: Linear, b: Linear) -> bool:
        return a is b or (a.passes is b.passes and a.request(role).same(b.request(role)))

    return [next(i for i, other in enumerate(linears) if same(linear, other)) for linear in linears]


def once_each(linears: Sequence[Linear], role: str, made: Sequence[Made]) -> dict[int, Made]:
    """Operands `role` of several linears of one x, each once, by the number of the first linear that wants it."""
    return {first: made[first] for first in first_wanting(linears, role)}


def operands_of_x(
    x: jax.Array, linears: Sequence[Linear], roles: Sequence[str], *, kept: Sequence[str] = (),
    maxima: Sequence[Maxima] = (),
) -> list[list[Made]]:  # fmt: skip
    """Each linear's operands of x: one pass for all that have the same passes, one operand wherever two want the
    same. `maxima` are those of `maxima_of_x`, for
    the same linears and for these roles or more.
    """
    firsts = {role: first_wanting(linears, role) for role in roles}
    made: dict[tuple[int, str], Made] = {}
    for (passes, mine), known in itertools.zip_longest(_by_passes(linears, firsts).items(), maxima):
        requests = [linears[i].request(role, kept=role in kept) for i, role in mine]
        made |= dict(zip(mine, passes.operands(x, requests, known), strict=True))
    return [[made[firsts[role][i], role] for role in roles] for i in range(len(linears))]


def maxima_of_x(x: jax.Array, linears: Sequence[Linear], roles: Sequence[str]) -> list[Maxima]:
    """What the passes of these linears must know of all of x, under the name by which a remat policy saves it."""
    found, firsts = [], {role: first_wanting(linears, role) for role in roles}
    for passes, mine in _by_passes(linears, firsts).items():
        found.append(passes.maxima(x, [linears[i].request(role) for i, role in mine]))
    return name_saved(found, SCALES)


def _by_passes(linears: Sequence[Linear], firsts: Mapping[str, Sequence[int]]) -> dict[Passes, list[tuple[int, str]]]:
    """The operands that each kind of passes makes of one x: the number of the first linear that wants it, and its
    role. `firsts` are `first_wanting` of each role.
    """
    found: dict[Passes, list[tuple[int, str]]] = {linear.passes: [] for linear in linears}
    for i, linear in enumerate(linears):
        found[linear.passes] += [(i, role) for role in firsts if firsts[role][i] == i]
    return found
