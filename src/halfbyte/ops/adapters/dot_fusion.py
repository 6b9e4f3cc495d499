"""Groups planned dots of a jaxpr that run as one op, and orders its equations accordingly.

Linears that read the same x need the same operands of it, so they run together at the position of the first. The
equations that compute the weights of the others (casts, slices) move before it, unless they depend on one of the dots.
Two values are equal if they are the same variable, or the same cast or view of equal values: a framework casts x once
for each layer that reads it.

A gated MLP is two such dots, silu of one times the other, and a third dot that reads the product. If the quantize
passes compute that product, the five equations run as one op.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from jax.extend.core import JaxprEqn, Literal, Var

from halfbyte.ops.adapters.weight_provenance import unclose_jaxpr

_VIEWS = ("convert_element_type", "reshape", "transpose", "squeeze", "broadcast_in_dim", "copy")


@dataclass(frozen=True)
class DotGroup:
    """Equations that run as one op.

    A single equation, several dots of one x, or with `swiglu` gate, up and down, then the silu and the product.
    """

    eqns: tuple[int, ...]
    swiglu: bool = False

    @property
    def dots_of_x(self) -> tuple[int, ...]:
        """Returns the dots that read the same x."""
        return self.eqns[:2] if self.swiglu else self.eqns


ExecutionOrder = tuple[DotGroup, ...]


@dataclass
class DotGrouper:
    """Groups the dots of one jaxpr, given its equations and results.

    Dots with equal `fusion_key` may run together if they read the same x. If `fuses(gate, up, down)` is true,
    silu(gate) * up may be computed in the passes of down. Dots are identified by the index of their equation.
    """

    eqns: Sequence[JaxprEqn]
    outvars: Sequence[Var | Literal]
    xs: Mapping[int, int]  # equation index of a dot -> which of its operands is x
    fusion_key: Mapping[int, Hashable]
    fuses: Callable[[int, int, int], bool]

    def __post_init__(self) -> None:
        self.makers = {var: i for i, eqn in enumerate(self.eqns) for var in eqn.outvars}
        read = [v for eqn in self.eqns for v in eqn.invars if not isinstance(v, Literal)] + list(self.outvars)
        self.uses = Counter(map(id, read))
        self.gated = dict(match for i in self.fusion_key if (match := self._match_swiglu(i)))

    def order(self) -> ExecutionOrder:
        """Returns the equations in the order in which they run, grouped by those that run as one op."""
        groups: dict[Hashable, list[int]] = {}
        for i, common in self.fusion_key.items():
            groups.setdefault((self._value(self.eqns[i].invars[self.xs[i]]), common), []).append(i)
        group_of = {i: group for group in groups.values() for i in group}
        done: set[int] = set()
        order: list[DotGroup] = []
        for i in range(len(self.eqns)):
            if i in done:
                continue
            unit, ahead = self._ready(i, [j for j in group_of.get(i, []) if j > i], done)
            order += [*(DotGroup((k,)) for k in sorted(ahead)), unit]
            done |= {*ahead, *unit.eqns}
        return tuple(order)

    def _ready(self, first: int, others: Sequence[int], done: set[int]) -> tuple[DotGroup, set[int]]:
        """Returns (`first` and those of `others` that can run with it, the equations that must run before them)."""
        group, ahead = [first], set[int]()
        for j in others:
            needed = self._needed(j, done)
            if first not in needed and self._may_move(needed):
                group.append(j)
                ahead |= needed
        gated = self.gated.get(tuple(group))
        if gated is not None:
            needed = self._needed(gated.eqns[2], done) - {*gated.eqns}
            if self._may_move(needed):
                return gated, ahead | needed
        return DotGroup(tuple(group)), ahead

    def _may_move(self, eqns: set[int]) -> bool:
        return not any(i in self.xs or self.eqns[i].effects for i in eqns)

    def _match_swiglu(self, down: int) -> tuple[tuple[int, ...], DotGroup] | None:
        """Returns (gate and up in program order, their group with down) if `down` reads silu(g) * u, else None.

        The results of gate, up, silu and the product must have no other consumer.
        """
        product = self._single_use_producer(self.eqns[down].invars[self.xs[down]], "mul")
        if product is None:
            return None
        for g, u in (self.eqns[product].invars, self.eqns[product].invars[::-1]):
            silu, up = self._single_use_producer(g, "jit", "pjit"), self._single_use_producer(u, "dot_general")
            if silu is None or up is None or not is_silu(self.eqns[silu]):
                continue
            gate = self._single_use_producer(self.eqns[silu].invars[0], "dot_general")
            if gate is not None and self.fuses(gate, up, down):
                return tuple(sorted((gate, up))), DotGroup((gate, up, down, silu, product), swiglu=True)
        return None

    def _single_use_producer(self, var: Var | Literal, *names: str) -> int | None:
        """Returns the equation that computes `var` if it has one of these names and `var` is read once, else None."""
        i = None if isinstance(var, Literal) or self.uses[id(var)] != 1 else self.makers.get(var)
        return i if i is not None and self.eqns[i].primitive.name in names else None

    def _needed(self, i: int, done: set[int]) -> set[int]:
        """Returns the equations not yet run that equation i depends on, directly or not."""
        needed, pending = set[int](), [i]
        while pending:
            inputs = (v for v in self.eqns[pending.pop()].invars if not isinstance(v, Literal))
            producers = {self.makers[v] for v in inputs if v in self.makers} - done
            pending += producers - needed
            needed |= producers
        return needed

    def _value(self, var: Var | Literal) -> Hashable:
        """Returns a key that is equal for variables with the same value."""
        i = None if isinstance(var, Literal) else self.makers.get(var)
        if i is None or self.eqns[i].primitive.name not in _VIEWS or len(self.eqns[i].invars) != 1:
            return id(var)
        eqn = self.eqns[i]
        return eqn.primitive.name, str(sorted(eqn.params.items(), key=lambda p: p[0])), self._value(eqn.invars[0])


def is_silu(eqn: JaxprEqn) -> bool:
    """Returns True if the equation calls `jax.nn.silu`: x times its logistic function, and nothing else."""
    inner = unclose_jaxpr(eqn.params["jaxpr"])
    if len(inner.invars) != 1 or [e.primitive.name for e in inner.eqns] != ["logistic", "mul"]:
        return False
    (x,), (first, second) = inner.invars, inner.eqns
    return first.invars[0] is x and {*second.invars} == {x, *first.outvars} and inner.outvars == second.outvars
