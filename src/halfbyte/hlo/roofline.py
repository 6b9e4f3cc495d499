"""How long each launch of a program should take on a device, as XLA's scheduler wants to be told.

XLA gives every GEMM and every collective the same constant; in a layer of few and long ones it then waits for a
reduce-scatter of 18 ms behind 4 ms of products. It takes a profile of an earlier run instead (PGLE), and no run is
needed to make one: FLOPs and bytes over the rates that a device reaches are near enough to put things in order.
"""

import collections
import math
from collections.abc import Mapping
from dataclasses import dataclass

from .attention import BACKWARD, attention_of
from .collectives import Collective, collectives, kind_of
from .gemms import gemms_of
from .schedule import Launch, launches
from .text import Instruction, Program
from .traffic import bytes_of
from .turns import SAME

LAUNCH, ARRIVAL, FAR_ARRIVAL = 2e-6, 15e-6, 40e-6  # seconds at least: of a kernel, of a collective, over a network
WEIGHTS, COPIES = "fsdp", "data"  # axes over which weights travel, and along which they are the same
TOKENS = ("tensor", "context", "expert")  # over which travels what is made of tokens
GATHER, SCATTER = "all-gather", "reduce-scatter"  # of weights, of their gradients
LINEARS, LAYER = 3, 7  # of an MLP, of a layer


@dataclass(frozen=True)
class Roofline:
    """Rates that a device reaches: FLOP/s by format of GEMM, of attention forward and backward; bytes/s of its memory,
    of its link one way and of its network card; and how many devices the link joins.
    """

    gemm: Mapping[str, float]
    attention: tuple[float, float]
    memory: float
    link: float
    network: float
    domain: int

    def sends(self, found: Collective, mesh: Mapping[str, int]) -> float:
        """Seconds of one call: what leaves a domain goes through as many network cards as it has members there."""
        inner = self._within(found.axes, mesh)
        if inner == found.group:
            return found.wire_each / self.link + ARRIVAL
        ways = 2 if found.kind == "all-reduce" else 1
        leaves = found.moved_each * ways * (1 - inner / found.group) / inner
        return max(found.wire_each / self.link, leaves / self.network) + FAR_ARRIVAL

    def _within(self, axes: tuple[str, ...], mesh: Mapping[str, int]) -> int:
        """Members of a group that the link joins. Devices stand in the order of the mesh, the last axis inside."""
        inner, stride = 1, 1
        for axis, size in reversed(list(mesh.items())):
            inner *= min(size, max(self.domain // stride, 1)) if axis in axes else 1
            stride *= size
        return inner


def costs(program: Program, mesh: Mapping[str, int], roofline: Roofline) -> dict[str, float]:
    """Microseconds of every launch, by its name. Raises Unreadable where the program cannot be read."""
    found = _travels(program, collectives(program, mesh), mesh, roofline)
    for launch in launches(program):
        each = launch.instruction
        if not kind_of(each) and not each.opcode.endswith("-done"):
            found.setdefault(each.name, max(_works(program, each, roofline), LAUNCH))
    return {name: round(1e6 * seconds, 3) for name, seconds in found.items()}


def _travels(program: Program, sent: list[Collective], mesh: Mapping[str, int], roofline: Roofline) -> dict[str, float]:
    """Seconds of every collective, on a link that XLA does not know of. A layer waits for what is made of its tokens,
    and weights that are under way have the link when that is through: XLA would else put all of them where a layer
    stands still, beside what it stands still for. Not so in turns in which gradients travel over `data` as well:
    weights that are thought late leave them no room.

    Gradients that are scattered in the turn of a layer that makes them have the rest of it, and the link to themselves:
    those of an MLP's three linears travel together, and weights that are gathered for the next turn are told to be
    there when all are, so that they leave before. A loop over microbatches is no turn of a layer, whether its layers
    are a loop inside it or one after the other.
    """
    alone = {each.instruction.name: roofline.sends(each, mesh) for each in sent}
    found = dict(alone)
    copies = [each for each in sent if COPIES in each.axes and WEIGHTS not in each.axes]  # of gradients
    crowded = {each.instruction.computation for each in copies}
    weights = [each for each in sent if WEIGHTS in each.axes and COPIES not in each.axes]  # over both: maxima
    first, together = collections.defaultdict[str, float](float), collections.defaultdict[str, float](float)
    for each in sent:
        if set(each.axes) & set(TOKENS) and each not in copies:
            first[each.instruction.computation] += alone[each.instruction.name]
    for each in weights:
        together[each.instruction.computation] += alone[each.instruction.name]
    here = [each.instruction for each in weights if each.kind == SCATTER and not _carried(program, each.instruction)]
    scattered = collections.Counter(each.computation for each in here)
    own_turn = {place for place, count in scattered.items() if count <= LAYER and _is_turn(program, place)}
    for each in weights:
        name, place = each.instruction.name, each.instruction.computation
        shared = {GATHER: together[place], SCATTER: LINEARS * alone[name]} if place in own_turn else {}
        if place not in crowded:
            found[name] = first[place] + shared.get(each.kind, alone[name])
    return found


def _is_turn(program: Program, place: str) -> bool:
    """Whether a computation is a loop's that has no loop inside."""
    return place != program.entry and all(each.opcode != "while" for each in program.computations[place])


def _carried(program: Program, sent: Instruction) -> bool:
    """Whether a collective sends what an earlier turn has handed to this one, be it a copy that is out of the way of
    what this one hands on."""

    def handed(found: Instruction) -> bool:
        views = found.opcode in (*SAME, "get-tuple-element")
        return handed(program.operand(found, 0)) if views else found.opcode == "parameter"

    return all(handed(program.operand(sent, at)) for at in range(len(sent.operands)))


def as_profile(found: Mapping[str, float]) -> str:
    """`costs` as the text of XLA's ProfiledInstructionsProto."""
    return "".join(f'costs {{ name: "{name}" cost_us: {microseconds} }}\n' for name, microseconds in found.items())


def _works(program: Program, found: Instruction, roofline: Roofline) -> float:
    launch = Launch(found, 1)
    for each in attention_of(program, launch):
        return each.each / roofline.attention[each.products == BACKWARD]
    products = [gemm.each / roofline.gemm.get(gemm.format, roofline.gemm["bf16"]) for gemm in gemms_of(program, launch)]
    return math.fsum(products) if products else sum(bytes_of(program, found)) / roofline.memory
