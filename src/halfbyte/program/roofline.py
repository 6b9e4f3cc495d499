"""How long each launch of a program should take on a device, as XLA's scheduler wants to be told.

XLA gives every GEMM and every collective the same constant; in a layer of few and long ones it then waits for a
reduce-scatter of 18 ms behind 4 ms of products. It takes a profile of an earlier run instead (PGLE), and no run is
needed to make one: FLOPs and bytes over the rates that a device reaches are near enough to put things in order.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from .attention import BACKWARD, attention_of
from .collectives import Collective, collectives, kind_of
from .gemms import gemms_of
from .schedule import Launch, launches
from .text import Instruction, Program
from .traffic import bytes_of

LAUNCH, ARRIVAL, FAR_ARRIVAL = 2e-6, 15e-6, 40e-6  # seconds at least: of a kernel, of a collective, over a network
WEIGHTS, COPIES = "fsdp", "data"  # axes over which weights travel, and along which they are the same
TOKENS = ("tensor", "context", "expert")  # over which travels what is made of tokens


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
    found = _travels(collectives(program, mesh), mesh, roofline)
    for launch in launches(program):
        each = launch.instruction
        if not kind_of(each) and not each.opcode.endswith("-done"):
            found.setdefault(each.name, max(_works(program, each, roofline), LAUNCH))
    return {name: round(1e6 * seconds, 3) for name, seconds in found.items()}


def _travels(sent: list[Collective], mesh: Mapping[str, int], roofline: Roofline) -> dict[str, float]:
    """Seconds of every collective. A layer waits for what is made of its tokens, and weights that are under way have
    the link when that is through: XLA, which knows of no link, would else put all of them where a layer stands still,
    beside what it stands still for. Not so in turns in which gradients travel over `data` as well: weights that are
    thought late leave them no room.
    """
    found = {each.instruction.name: roofline.sends(each, mesh) for each in sent}
    copies = [each for each in sent if COPIES in each.axes and WEIGHTS not in each.axes]  # of gradients
    crowded = {each.instruction.computation for each in copies}
    first: dict[str, float] = {}
    for each in sent:
        if set(each.axes) & set(TOKENS) and each not in copies:
            place = each.instruction.computation
            first[place] = first.get(place, 0.0) + found[each.instruction.name]
    for each in sent:
        weights = WEIGHTS in each.axes and COPIES not in each.axes  # over both: a tensor's maxima
        if weights and each.instruction.computation not in crowded:
            found[each.instruction.name] += first.get(each.instruction.computation, 0.0)
    return found


def as_profile(found: Mapping[str, float]) -> str:
    """`costs` as the text of XLA's ProfiledInstructionsProto."""
    return "".join(f'costs {{ name: "{name}" cost_us: {microseconds} }}\n' for name, microseconds in found.items())


def _works(program: Program, found: Instruction, roofline: Roofline) -> float:
    launch = Launch(found, 1)
    for each in attention_of(program, launch):
        return each.each / roofline.attention[each.products == BACKWARD]
    products = [gemm.each / roofline.gemm.get(gemm.format, roofline.gemm["bf16"]) for gemm in gemms_of(program, launch)]
    return math.fsum(products) if products else sum(bytes_of(program, found)) / roofline.memory
