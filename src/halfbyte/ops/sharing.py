"""Several linears of one x: one pass over x for all of them, and one operand wherever two want the same."""

import itertools
from collections.abc import Mapping, Sequence

import jax

from halfbyte.ops.backends import Choice
from halfbyte.ops.execution import ALONE, Execution, plan_linear
from halfbyte.ops.linear import Linear
from halfbyte.ops.operand import SCALES, name_saved
from halfbyte.ops.passes import Made, Maxima, Normed, Passes
from halfbyte.ops.surroundings import several_devices
from halfbyte.ops.weight import Weight
from halfbyte.recipe import Recipe


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
    normed: Normed | None = None, maxima: Sequence[Maxima] = (),
) -> list[list[Made]]:  # fmt: skip
    """Each linear's operands of x: one pass for all that have the same passes, one operand wherever two want the
    same. With `normed`, which is x, passes make x themselves (`norm_outside`); `maxima` are those of `maxima_of_x`, for
    the same linears and for these roles or more.
    """
    firsts = {role: first_wanting(linears, role) for role in roles}
    made: dict[tuple[int, str], Made] = {}
    for (passes, mine), known in itertools.zip_longest(_by_passes(linears, firsts).items(), maxima):
        requests = [linears[i].request(role, kept=role in kept) for i, role in mine]
        made |= dict(zip(mine, passes.operands(x, requests, normed, known), strict=True))
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


def norm_outside(
    x: jax.Array, weights: Sequence[Weight], *, recipes: Sequence[Recipe], execution: Execution = ALONE
) -> str | None:
    """Why linears of one x, the result of a norm, are handed it as an array, or None if they take it as `Normed`."""
    if execution.sharded or several_devices():
        return "passes that norm read whole rows on one device"
    inside = jax.ShapeDtypeStruct(x.shape, x.dtype)
    plans = [plan_linear(inside, w, recipe, execution) for w, recipe in zip(weights, recipes, strict=True)]
    return handed_normed([plan.choice for plan in plans], recipes)


def handed_normed(choices: Sequence[Choice], recipes: Sequence[Recipe]) -> str | None:
    """`norm_outside` of linears on one device, each served as chosen."""
    several = any(choice.passes != choices[0].passes for choice in choices)
    return "its readers have passes of several kinds" if several else choices[0].passes.unnormed(recipes)
