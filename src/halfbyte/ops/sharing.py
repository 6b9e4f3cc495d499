"""Several linears of one x: one pass over x for all of them, and one operand wherever two want the same."""

from collections.abc import Sequence

import jax

from halfbyte.ops.linear import Linear
from halfbyte.ops.passes import Made


def first_wanting(linears: Sequence[Linear], role: str) -> list[int]:
    """For each of several linears of one x, which of them the first is that wants the same operand `role`."""

    def same(a: Linear, b: Linear) -> bool:
        return a is b or (a.passes is b.passes and a.request(role).same(b.request(role)))

    return [next(i for i, other in enumerate(linears) if same(linear, other)) for linear in linears]


def once_each(linears: Sequence[Linear], role: str, made: Sequence[Made]) -> dict[int, Made]:
    """Operands `role` of several linears of one x, each once, by the number of the first linear that wants it."""
    return {first: made[first] for first in first_wanting(linears, role)}


def operands_of_x(
    x: jax.Array, linears: Sequence[Linear], roles: Sequence[str], *, kept: Sequence[str] = ()
) -> list[list[Made]]:
    """Each linear's operands of x: one pass for all that have the same passes, one operand wherever two want the
    same.
    """
    firsts = {role: first_wanting(linears, role) for role in roles}
    made: dict[tuple[int, str], Made] = {}
    for passes in dict.fromkeys(linear.passes for linear in linears):
        mine = [
            (i, role)
            for i, linear in enumerate(linears)
            for role in roles
            if linear.passes is passes and firsts[role][i] == i
        ]
        requests = [linears[i].request(role, kept=role in kept) for i, role in mine]
        made |= dict(zip(mine, passes.operands(x, requests), strict=True))
    return [[made[firsts[role][i], role] for role in roles] for i in range(len(linears))]
