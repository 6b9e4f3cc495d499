"""Whether a step is placed well on its mesh, read from the compiled program: FLOPs, bytes and memory of one device.

A misplaced program computes the right numbers and makes the right calls: the partitioner gathers what it should have
left apart, and every device multiplies for its neighbours. What tells is how many FLOPs are multiplied against how many
are needed, and what travels.
"""

from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from halfbyte import models, ops
from halfbyte.models.config import EXPERT_SITES, SHARED_SITES
from halfbyte.program import (
    Collective,
    Gemm,
    Program,
    category,
    collectives,
    gemms,
    read,
)
from halfbyte.train import TrainConfig

from .fitting import bytes_needed
from .load import NONE, Load, even_load

GATE_UP = tuple(f"layers/mlp/{name}" for name in ("gate", "up", *SHARED_SITES[:2]))
EXPERTS = tuple(f"layers/mlp/{name}" for name in EXPERT_SITES)  # down's result too: its weight's gradient reads it
ROUTER = "layers/mlp/router"
AGAIN = {
    "none": (),
    "dots": (),
    "quantized": GATE_UP,
    "full": (*(f"layers/attention/{name}" for name in "qkvo"), *GATE_UP, *EXPERTS),
}
"""Linears whose forward GEMM the backward pass runs again, by remat policy."""
WEIGHTS = "fsdp"  # the mesh axis that weights are gathered and gradients scattered over


@dataclass(frozen=True)
class Placement:
    """One device's part of a step. FLOPs are of the linears; attention's kernels are not in them."""

    needed_flops: float
    multiplied_flops: int
    bytes_needed: int
    gathered: dict[str, int]
    """Bytes of weights gathered over fsdp, by element type."""
    wide_gathers: tuple[Collective, ...]
    """Gathers of a whole weight of the MLP in 16 or more bits an element."""
    whole_reduces: tuple[Collective, ...]
    """All-reduces of a whole weight's gradient in float32, which should have been scattered."""

    @property
    def excess(self) -> float:
        """FLOPs multiplied for each that is needed; 1.0 is perfect."""
        return self.multiplied_flops / self.needed_flops


def placement(compiled: Any, config: TrainConfig, mesh: Mesh) -> Placement:
    """How the compiled step of `config` is placed on `mesh`; of experts, in tiles of the device that is the target now.
    Raises program.Unreadable where it cannot tell."""
    program, sizes = read(compiled.as_text()), dict(mesh.shape)
    found, load = collectives(program, sizes), even_load(config, mesh.size, ops.target())
    weight = config.model.embed * config.model.mlp // sizes.get("tensor", 1)
    return Placement(
        needed_flops=sum(needed_flops(config).values()) / mesh.size,
        multiplied_flops=sum(map(load.flops, linear_gemms(program, load))),
        bytes_needed=bytes_needed(compiled),
        gathered=gathered_bytes(found),
        wide_gathers=tuple(each for each in found if _gathers_wide(each, weight)),
        whole_reduces=tuple(each for each in found if reduces_whole(each, weight)),
    )


def needed_flops(config: TrainConfig) -> dict[str, int]:
    """GEMM FLOPs of a whole step by linear and router: forward, both gradients, and what its remat policy repeats."""
    again, model = AGAIN[config.remat], config.model
    sites = models.gemm_sites(model, config.batch, config.seq)
    needed = {site.path: site.flops // 3 * (4 if site.path in again else 3) for site in sites}
    if model.experts:
        each = 2 * model.layers * config.batch * config.seq * model.embed * model.experts
        needed[ROUTER] = each * (4 if config.remat == "full" else 3)
    return needed


def linear_gemms(program: Program, load: Load = NONE) -> list[Gemm]:
    """The GEMMs of a program that are not attention's, under the `load` of its experts."""
    found = gemms(program, turns=load.turns, branches=load.branches)
    return [gemm for gemm in found if category(program, gemm.instruction) == "gemm"]


def gathered_bytes(found: list[Collective]) -> dict[str, int]:
    """Bytes gathered over fsdp in a step, by element type."""
    total: dict[str, int] = {}
    for each in found:
        if each.kind == "all-gather" and WEIGHTS in each.axes:
            for array in each.arrays:
                total[array.dtype] = total.get(array.dtype, 0) + array.bytes * each.group * each.times
    return total


def _gathers_wide(each: Collective, elements: int) -> bool:
    if each.kind != "all-gather" or WEIGHTS not in each.axes:
        return False
    wide = (array for array in each.arrays if array.bytes >= 2 * array.elements)
    return any(array.elements * each.group == elements for array in wide)


def reduces_whole(each: Collective, elements: int) -> bool:
    """Whether this sums as many float32 elements as a weight has over the axes that gradients are summed over. What the
    loss and the layers sum over `tensor` may be as large, and is no gradient.
    """
    floats = (array for array in each.arrays if array.dtype == "f32")
    gradient = each.kind == "all-reduce" and bool({"data", WEIGHTS} & set(each.axes))
    return gradient and any(array.elements >= elements for array in floats)
