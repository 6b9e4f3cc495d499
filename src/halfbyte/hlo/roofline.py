"""Estimate the duration of each launch of a program by a roofline, as a profile for XLA's scheduler.

XLA's scheduler gives every GEMM and every collective the same constant. In a layer of a 405B model it then waits for a
reduce-scatter of 18 ms behind 4 ms of GEMMs. It also accepts the profile of an earlier run (PGLE). No run is needed for
that: FLOPs and bytes over the achieved rates of a device are accurate enough for an ordering.
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

LAUNCH, ARRIVAL, FAR_ARRIVAL = 2e-6, 15e-6, 40e-6  # latency in s: kernel, collective on NVLink, over the network
WEIGHT_AXES, COPIES = "fsdp", "data"  # mesh axes: weights are sharded over the first, replicated over the second
TOKEN_AXES = ("tensor", "context", "expert")  # mesh axes of collectives of activations
GATHER, SCATTER = "all-gather", "reduce-scatter"  # of weights, of their gradients
LINEARS_PER_MLP, LINEARS_PER_LAYER = 3, 7


@dataclass(frozen=True)
class Roofline:
    """Achieved rates of a device.

    `gemm` is FLOP/s by GEMM format, `attention` FLOP/s forward and backward. `memory`, `nvlink_bandwidth` (one
    direction) and `network_bandwidth` (of its network card) are bytes/s. `nvlink_domain_size` counts devices.
    """

    gemm: Mapping[str, float]
    attention: tuple[float, float]
    memory: float
    nvlink_bandwidth: float
    network_bandwidth: float
    nvlink_domain_size: int

    def collective_seconds(self, collective: Collective, mesh: Mapping[str, int]) -> float:
        """Returns the seconds of one call. Bytes that leave an NVLink domain use the cards of all members in it."""
        inner = self._within(collective.axes, mesh)
        if inner == collective.group_size:
            return collective.wire_bytes_per_call / self.nvlink_bandwidth + ARRIVAL
        network_sent = network_bytes(
            collective.kind, collective.array_bytes_per_call, inner, collective.group_size // inner
        )
        return (
            max(collective.wire_bytes_per_call / self.nvlink_bandwidth, network_sent / self.network_bandwidth)
            + FAR_ARRIVAL
        )

    def _within(self, axes: tuple[str, ...], mesh: Mapping[str, int]) -> int:
        """Returns the group members within one NVLink domain, for devices in mesh order with the last axis fastest."""
        inner, stride = 1, 1
        for axis, size in reversed(list(mesh.items())):
            inner *= min(size, max(self.nvlink_domain_size // stride, 1)) if axis in axes else 1
            stride *= size
        return inner


def instruction_costs_us(program: HloModule, mesh: Mapping[str, int], roofline: Roofline) -> dict[str, float]:
    """Returns instruction name -> microseconds for every launch. Raises HloParseError for an unreadable program."""
    seconds_by_name = _transfer_seconds(program, find_collectives(program, mesh), mesh, roofline)
    for launch in execution_counts(program):
        instruction = launch.instruction
        if not collective_kind(instruction) and not instruction.opcode.endswith("-done"):
            seconds_by_name.setdefault(
                instruction.name, max(_instruction_seconds(program, instruction, roofline), LAUNCH)
            )
    return {name: round(1e6 * duration, 3) for name, duration in seconds_by_name.items()}


def _transfer_seconds(
    program: HloModule, collectives: list[Collective], mesh: Mapping[str, int], roofline: Roofline
) -> dict[str, float]:
    """Returns the seconds of every collective for XLA's profile, which allow for a link that XLA does not model.

    A layer waits for the collectives over its token axes. XLA would start all-gathers and reduce-scatters of weights
    during that wait, as if the link were free. So the profile adds the time of the token collectives in the same loop
    body to each collective of weights. Bodies that also reduce gradients over `data` are left as they are, because the
    modelled step got longer otherwise (docs/LOG.md, "Weights that travel while a layer stands still").

    If a loop body reduce-scatters the gradients that it computes itself, those of the three linears of an MLP share the
    link: each takes three times as long. All-gathers for the next iteration take as long as all collectives of weights
    together, so that XLA starts them earlier. This applies to the body of a loop over layers. A loop over microbatches
    is recognized by a loop inside or by the scatters of more than one layer.
    """
    link_seconds = {
        collective.instruction.name: roofline.collective_seconds(collective, mesh) for collective in collectives
    }
    profile_seconds = dict(link_seconds)
    over_replicas = [
        collective for collective in collectives if COPIES in collective.axes and WEIGHT_AXES not in collective.axes
    ]
    crowded = {collective.instruction.computation for collective in over_replicas}
    weights = [  # without collectives over both axes, which reduce amaxes
        collective for collective in collectives if WEIGHT_AXES in collective.axes and COPIES not in collective.axes
    ]
    token_seconds = collections.defaultdict[str, float](float)
    weight_seconds = collections.defaultdict[str, float](float)
    for collective in collectives:
        if set(collective.axes) & set(TOKEN_AXES) and collective not in over_replicas:
            token_seconds[collective.instruction.computation] += link_seconds[collective.instruction.name]
    for collective in weights:
        weight_seconds[collective.instruction.computation] += link_seconds[collective.instruction.name]
    own_iteration_scatters = [
        collective.instruction
        for collective in weights
        if collective.kind == SCATTER and not _is_loop_carried(program, collective.instruction)
    ]
    scatters_per_computation = collections.Counter(scatter.computation for scatter in own_iteration_scatters)
    outer = {name for name, body in program.computations.items() if any(each.opcode == "while" for each in body)}
    inner = scatters_per_computation.keys() - outer - {program.entry}  # bodies of loops that contain no loop
    own_iteration_bodies = {body for body in inner if scatters_per_computation[body] <= LINEARS_PER_LAYER}
    for collective in weights:
        name, computation = collective.instruction.name, collective.instruction.computation
        shared = (
            {GATHER: weight_seconds[computation], SCATTER: LINEARS_PER_MLP * link_seconds[name]}
            if computation in own_iteration_bodies
            else {}
        )
        if computation not in crowded:
            profile_seconds[name] = token_seconds[computation] + shared.get(collective.kind, link_seconds[name])
    return profile_seconds


def _is_loop_carried(program: HloModule, collective: HloInstruction) -> bool:
    """Returns True if a collective sends values of an earlier iteration: parameters of the body, or copies.

    XLA copies a carried value if its buffer in the loop carry is written for the next iteration meanwhile.
    """

    def is_parameter(value: HloInstruction) -> bool:
        is_view = value.opcode in (*VALUE_PRESERVING_OPCODES, "get-tuple-element")
        return is_parameter(program.operand(value, 0)) if is_view else value.opcode == "parameter"

    return all(is_parameter(program.operand(collective, index)) for index in range(len(collective.operands)))


def to_profile_proto(costs_us: Mapping[str, float]) -> str:
    """Returns `instruction_costs_us` as the text of XLA's ProfiledInstructionsProto."""
    return "".join(
        f'costs {{ name: "{instruction}" cost_us: {microseconds} }}\n' for instruction, microseconds in costs_us.items()
    )


def _instruction_seconds(program: HloModule, instruction: HloInstruction, roofline: Roofline) -> float:
    launch = WeightedInstruction(instruction, 1)
    for call in attention_call_of(program, launch):
        return call.flops_per_call / roofline.attention[call.num_gemms == BACKWARD_GEMMS]
    gemm_seconds = [
        gemm.flops_per_call / roofline.gemm.get(gemm.format, roofline.gemm["bf16"])
        for gemm in gemms_of_instruction(program, launch)
    ]
    return math.fsum(gemm_seconds) if gemm_seconds else sum(instruction_bytes(program, instruction)) / roofline.memory
