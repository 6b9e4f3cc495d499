"""How long each launch of a program should take on a device, as XLA's scheduler wants to be told.

XLA gives every GEMM and every collective the same constant; in a layer of few and long ones it then waits for a
reduce-scatter of 18 ms behind 4 ms of products. It takes a profile of an earlier run instead (PGLE), and no run is
needed to make one: FLOPs and bytes over the rates that a device reaches are near enough to put things in order.
"""

import collections
import math
from collections.abc import Mapping
from dataclasses import dataclass

from halfbyte.hlo.collective_ops import Collective, collective_kind, find_collectives, network_bytes
from halfbyte.hlo.gemm_ops import BACKWARD_GEMMS, attention_call_of, gemms_of_instruction
from halfbyte.hlo.hlo_text import HloInstruction, HloModule
from halfbyte.hlo.memory_traffic import instruction_bytes
from halfbyte.hlo.trip_counts import VALUE_PRESERVING_OPCODES, WeightedInstruction, execution_counts

LAUNCH, ARRIVAL, FAR_ARRIVAL = 2e-6, 15e-6, 40e-6  # seconds at least: of a kernel, of a collective, over a network
WEIGHT_AXES, COPIES = "fsdp", "data"  # axes over which weights travel, and along which they are the same
TOKEN_AXES = ("tensor", "context", "expert")  # over which travels what is made of tokens
GATHER, SCATTER = "all-gather", "reduce-scatter"  # of weights, of their gradients
LINEARS_PER_MLP, LINEARS_PER_LAYER = 3, 7  # of an MLP, of a layer


@dataclass(frozen=True)
class Roofline:
    """Rates that a device reaches: FLOP/s by format of GEMM, of attention forward and backward; bytes/s of its memory,
    of its link one way and of its network card; and how many devices the link joins.
    """

    gemm: Mapping[str, float]
    attention: tuple[float, float]
    memory: float
    nvlink_bandwidth: float
    network_bandwidth: float
    nvlink_domain_size: int

    def collective_seconds(self, found: Collective, mesh: Mapping[str, int]) -> float:
        """Seconds of one call: what leaves a domain goes through as many network cards as it has members there."""
        inner = self._within(found.axes, mesh)
        if inner == found.group_size:
            return found.wire_bytes_per_call / self.nvlink_bandwidth + ARRIVAL
        leaves = network_bytes(found.kind, found.array_bytes_per_call, inner, found.group_size // inner)
        return max(found.wire_bytes_per_call / self.nvlink_bandwidth, leaves / self.network_bandwidth) + FAR_ARRIVAL

    def _within(self, axes: tuple[str, ...], mesh: Mapping[str, int]) -> int:
        """Members of a group that the link joins. Devices stand in the order of the mesh, the last axis inside."""
        inner, stride = 1, 1
        for axis, size in reversed(list(mesh.items())):
            inner *= min(size, max(self.nvlink_domain_size // stride, 1)) if axis in axes else 1
            stride *= size
        return inner


def instruction_costs_us(program: HloModule, mesh: Mapping[str, int], roofline: Roofline) -> dict[str, float]:
    """Microseconds of every launch, by its name. Raises HloParseError for a program that cannot be read."""
    found = _transfer_seconds(program, find_collectives(program, mesh), mesh, roofline)
    for launch in execution_counts(program):
        each = launch.instruction
        if not collective_kind(each) and not each.opcode.endswith("-done"):
            found.setdefault(each.name, max(_instruction_seconds(program, each, roofline), LAUNCH))
    return {name: round(1e6 * seconds, 3) for name, seconds in found.items()}


def _transfer_seconds(
    program: HloModule, sent: list[Collective], mesh: Mapping[str, int], roofline: Roofline
) -> dict[str, float]:
    """Seconds of every collective, on a link that XLA does not know of. A layer waits for what is made of its tokens,
    and weights that are under way have the link when that is through: XLA would else put all of them where a layer
    stands still, beside what it stands still for. Not so in turns in which gradients travel over `data` as well:
    weights that are thought late leave them no room.

    Gradients that are scattered in the turn of a layer that makes them have the rest of it, and the link to themselves:
    those of an MLP's three linears travel together, and weights that are gathered for the next turn are told to be
    there when all are, so that they leave before. A loop over microbatches is no turn of a layer, whether its layers
    are a loop inside it or one after the other.
    """
    alone = {each.instruction.name: roofline.collective_seconds(each, mesh) for each in sent}
    found = dict(alone)
    copies = [each for each in sent if COPIES in each.axes and WEIGHT_AXES not in each.axes]  # of gradients
    crowded = {each.instruction.computation for each in copies}
    weights = [each for each in sent if WEIGHT_AXES in each.axes and COPIES not in each.axes]  # over both: maxima
    first, together = collections.defaultdict[str, float](float), collections.defaultdict[str, float](float)
    for each in sent:
        if set(each.axes) & set(TOKEN_AXES) and each not in copies:
            first[each.instruction.computation] += alone[each.instruction.name]
    for each in weights:
        together[each.instruction.computation] += alone[each.instruction.name]
    here = [
        each.instruction for each in weights if each.kind == SCATTER and not _is_loop_carried(program, each.instruction)
    ]
    scattered = collections.Counter(each.computation for each in here)
    own_turn = {
        place
        for place, count in scattered.items()
        if count <= LINEARS_PER_LAYER and _is_innermost_loop_body(program, place)
    }
    for each in weights:
        name, place = each.instruction.name, each.instruction.computation
        shared = {GATHER: together[place], SCATTER: LINEARS_PER_MLP * alone[name]} if place in own_turn else {}
        if place not in crowded:
            found[name] = first[place] + shared.get(each.kind, alone[name])
    return found


def _is_innermost_loop_body(program: HloModule, place: str) -> bool:
    """Whether a computation is a loop's that has no loop inside."""
    return place != program.entry and all(each.opcode != "while" for each in program.computations[place])


def _is_loop_carried(program: HloModule, sent: HloInstruction) -> bool:
    """Whether a collective sends what an earlier turn has handed to this one, be it a copy that is out of the way of
    what this one hands on."""

    def handed(found: HloInstruction) -> bool:
        views = found.opcode in (*VALUE_PRESERVING_OPCODES, "get-tuple-element")
        return handed(program.operand(found, 0)) if views else found.opcode == "parameter"

    return all(handed(program.operand(sent, at)) for at in range(len(sent.operands)))


def to_profile_proto(found: Mapping[str, float]) -> str:
    """Returns `instruction_costs_us` as the text of XLA's ProfiledInstructionsProto."""
    return "".join(f'costs {{ name: "{name}" cost_us: {microseconds} }}\n' for name, microseconds in found.items())


def _instruction_seconds(program: HloModule, found: HloInstruction, roofline: Roofline) -> float:
    launch = WeightedInstruction(found, 1)
    for each in attention_call_of(program, launch):
        return each.flops_per_call / roofline.attention[each.num_gemms == BACKWARD_GEMMS]
    products = [
        gemm.flops_per_call / roofline.gemm.get(gemm.format, roofline.gemm["bf16"])
        for gemm in gemms_of_instruction(program, launch)
    ]
    return math.fsum(products) if products else sum(instruction_bytes(program, found)) / roofline.memory
