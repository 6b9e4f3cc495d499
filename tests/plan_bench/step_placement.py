"""How a compiled step is placed on its mesh: FLOPs, bytes and memory of one device, and bytes of making operands.

A misplaced program computes the right numbers with the right calls: the partitioner gathers arrays that should stay
sharded, and each device multiplies for its neighbours. So FLOPs are compared with those that the model needs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh
from step_traffic import traffic

from halfbyte import ops
from halfbyte.hlo import Collective, HloGemm, HloModule, find_collectives, find_gemms, parse_hlo
from halfbyte.plan import needed_flops, peak_bytes
from halfbyte.plan.operand_traffic import compulsory_bytes
from halfbyte.plan.step_placement import REMAT_LINEARS, balanced_expert_load, compiled_linear_gemms
from halfbyte.train import TrainConfig, phases

WEIGHT_AXIS = "fsdp"  # the mesh axis that weights are all-gathered and gradients reduce-scattered over
MAKING = ("quantize", "mlp")  # the categories of traffic that make operands


@dataclass(frozen=True)
class Placement:
    """One device's part of a step. FLOPs are of the linears, without attention's kernels."""

    needed_flops: float
    multiplied_flops: int
    bytes_needed: int
    gathered: dict[str, int]
    """Bytes of weights all-gathered over fsdp, by element type."""
    unquantized_gathers: tuple[Collective, ...]
    """All-gathers of a whole weight of the MLP in 16 or more bits per element."""
    unsharded_reduces: tuple[Collective, ...]
    """All-reduces of a whole weight's gradient in float32, which should be reduce-scattered."""

    @property
    def excess(self) -> float:
        """FLOPs multiplied per FLOP needed; 1.0 is perfect."""
        return self.multiplied_flops / self.needed_flops


def placement(compiled: Any, config: TrainConfig, mesh: Mesh) -> Placement:
    """Returns the placement of the compiled step of `config` on `mesh`; experts in tiles of the current target."""
    program, sizes = parse_hlo(compiled.as_text()), dict(mesh.shape)
    sent, load = find_collectives(program, sizes), balanced_expert_load(config, mesh.size, ops.target_device())
    weight = config.model.embed * config.model.mlp // sizes.get("tensor", 1)
    return Placement(
        needed_flops=sum(needed_flops(config).values()) / mesh.size,
        multiplied_flops=sum(map(load.flops, compiled_linear_gemms(program, load))),
        bytes_needed=peak_bytes(compiled),
        gathered=gathered_bytes(sent),
        unquantized_gathers=tuple(each for each in sent if _gathers_wide(each, weight)),
        unsharded_reduces=tuple(each for each in sent if reduces_whole(each, weight)),
    )


def gathered_bytes(sent: list[Collective]) -> dict[str, int]:
    """Returns the bytes all-gathered over fsdp in a step, by element type."""
    total: dict[str, int] = {}
    for each in sent:
        if each.kind == "all-gather" and WEIGHT_AXIS in each.axes:
            for array in each.arrays:
                total[array.dtype] = total.get(array.dtype, 0) + array.bytes * each.group_size * each.execution_count
    return total


def _gathers_wide(each: Collective, elements: int) -> bool:
    if each.kind != "all-gather" or WEIGHT_AXIS not in each.axes:
        return False
    wide = (array for array in each.arrays if array.bytes >= 2 * array.elements)
    return any(array.elements * each.group_size == elements for array in wide)


def reduces_whole(each: Collective, elements: int) -> bool:
    """Returns True if this sums as many float32 elements as a weight has over the axes that gradients are summed over.
    Sums over `tensor` of the loss and of the layers may be as large and are no gradients.
    """
    floats = (array for array in each.arrays if array.dtype == "f32")
    gradient = each.kind == "all-reduce" and bool({"data", WEIGHT_AXIS} & set(each.axes))
    return gradient and any(array.elements >= elements for array in floats)


@dataclass(frozen=True)
class OperandTraffic:
    """Bytes that one device moves per step to make operands."""

    moved: int
    compulsory: float

    @property
    def excess(self) -> float:
        """Bytes moved per compulsory byte; 1.0 is perfect."""
        return self.moved / self.compulsory


def operand_traffic(program: HloModule, config: TrainConfig, mesh: Mapping[str, int]) -> OperandTraffic:
    """Returns what `program`, the compiled step of `config` on `mesh` (axis -> size), moves for its operands."""
    by_category = traffic(program)
    total = sum(by_category[name].total for name in MAKING if name in by_category)
    return OperandTraffic(total, compulsory_bytes(config, mesh))


def native_calls(program: HloModule, config: TrainConfig) -> tuple[list[HloGemm], int]:
    """Returns the block-scaled GEMMs of a program and how many a step of `config` should call: three per linear and
    layer, and one more where its remat repeats fprop.
    """
    segments = phases(config)[0].resolved(config).segments
    layers = [segment.recipes for segment in segments for _ in range(segment.start, segment.stop)]
    quantized = [path for recipes in layers for path, recipe in recipes.items() if recipe.quantized]
    repeated = [path for path in quantized if path in REMAT_LINEARS[config.remat]]
    return [gemm for gemm in find_gemms(program) if gemm.kind == "block-scaled"], 3 * len(quantized) + len(repeated)
