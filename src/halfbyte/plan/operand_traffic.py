"""Count the bytes that a step must move to quantize the operands of its GEMMs.

On one device each source tensor is read once for its amax, if its format has a per-tensor scale, and once for its
codes. Each code and scale that a GEMM or the backward pass reads is written once. Sources are x and dy of each linear
in bfloat16 (q, k and v share an x, gate and up another), and the float32 master of a weight, as it is sharded. If the
quantize passes fuse the MLP's activation, the sources are g and u for h, and g, u and dh for their gradients. What the
remat policy repeats counts once more. A program moves more bytes, because XLA fuses sums and casts into the same
kernels.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from halfbyte import models
from halfbyte.distributed.mesh import ALL_MESH_AXES
from halfbyte.models.config import EXPERT_SITES, SHARED_SITES
from halfbyte.ops.quantized_weight import shares_fprop_dgrad_codes
from halfbyte.plan.step_placement import REMAT_LINEARS
from halfbyte.recipes import OperandPolicy, Recipe
from halfbyte.train import TrainConfig, phases

BF16_BYTES, FLOAT32_BYTES = 2, 4
NO_REMAT_POLICIES = ("none", "dots")  # remat policies that save operands for the backward pass
GATE, UP, DOWN = MLP_PATHS = tuple(f"layers/mlp/{name}" for name in ("gate", "up", "down"))
OF_EXPERTS, OF_SHARED = (tuple(f"layers/mlp/{name}" for name in names) for names in (EXPERT_SITES, SHARED_SITES))
SHARED_INPUT_LINEARS = (
    ("layers/attention/q", "layers/attention/k", "layers/attention/v"),
    ("layers/attention/o",),
    (GATE, UP),
    *(group for names in (OF_EXPERTS, OF_SHARED) for group in (names[:2], names[2:])),
)


def compulsory_bytes(config: TrainConfig, mesh: Mapping[str, int]) -> float:
    """Returns the compulsory bytes of a step of `config` per device, on a mesh axis -> size.

    Raises ValueError if `config` accumulates microbatches, whose passes are not counted here.
    """
    if config.accumulate > 1:
        raise ValueError("compulsory bytes are those of a step without accumulation; use --accumulate 1")
    return sum(_of_layer(_linears(config, mesh, recipes), config.remat) for recipes in _layers(config))


@dataclass(frozen=True)
class _LinearTraffic:
    """One quantized linear of a layer, with its sizes on one device."""

    path: str
    recipe: Recipe
    tokens: int
    inputs: int
    outputs: int
    shards: int
    matrices: int = 1
    """Expert matrices per device; 1 for a dense linear."""

    def policies(self, *roles: str) -> list[OperandPolicy]:
        """Returns the policies of `roles` that quantize."""
        return [p for p in (getattr(self.recipe, role) for role in roles) if p.format.quantized]


def _layers(config: TrainConfig) -> list[Mapping[str, Recipe]]:
    """Returns path -> recipe for each layer."""
    resolved = phases(config)[0].resolved(config)
    return [segment.recipes for segment in resolved.segments for _ in range(segment.start, segment.stop)]


def _linears(config: TrainConfig, mesh: Mapping[str, int], recipes: Mapping[str, Recipe]) -> dict[str, _LinearTraffic]:
    size = {axis: mesh.get(axis, 1) for axis in ALL_MESH_AXES}
    token_shards = prod(size.values()) // size["tensor"]
    linears, devices = {}, prod(mesh.values())
    for site in models.linear_shapes(config.model, config.batch, config.seq):
        if site.path not in recipes or not recipes[site.path].quantized:
            continue
        if site.experts:  # whole matrices, distributed over all devices
            local_sizes = site.tokens // devices, site.k, site.n, 1, site.experts // devices
            linears[site.path] = _LinearTraffic(site.path, recipes[site.path], *local_sizes)
        else:
            dim_shards = [1 if axis == "embed" else size["tensor"] for axis in site.axes]
            sizes = site.tokens // token_shards, site.k // dim_shards[0], site.n // dim_shards[1]
            linears[site.path] = _LinearTraffic(site.path, recipes[site.path], *sizes, size["fsdp"])
    return linears


def _of_layer(linears: Mapping[str, _LinearTraffic], remat: str) -> float:
    fused_activation = _has_fused_activation(linears)
    total = sum(_of_weight(linear, remat) for linear in linears.values())
    for group in SHARED_INPUT_LINEARS:
        total += _of_x([linears[path] for path in group if path in linears], remat)
    for linear in linears.values():
        if not (fused_activation and linear.path in (GATE, UP)):
            total += _bytes_written(linear.policies("dgrad_dy", "wgrad_dy"), linear.tokens * linear.outputs)
    return total + (_of_h(linears, fused_activation) if DOWN in linears else 0.0)


def _has_fused_activation(linears: Mapping[str, _LinearTraffic]) -> bool:
    """Returns True if the quantize passes fuse the MLP's activation: all its operands have the same block size."""
    if not all(path in linears for path in MLP_PATHS):
        return False
    roles = "fprop_x", "dgrad_dy", "wgrad_x", "wgrad_dy"
    return len({getattr(linears[path].recipe, role).format.block for path in MLP_PATHS for role in roles}) == 1


def _of_x(group: Sequence[_LinearTraffic], remat: str) -> float:
    """Returns the bytes for the operands of an x that these linears share.

    The forward pass writes all of them if they are saved; otherwise each pass writes those that it reads.
    """
    if not group:
        return 0.0
    elements, repeats_fprop = group[0].tokens * group[0].inputs, group[0].path in REMAT_LINEARS[remat]
    rows, columns = (
        _distinct_policies(p for linear in group for p in linear.policies(role)) for role in ("fprop_x", "wgrad_x")
    )
    if remat in NO_REMAT_POLICIES:
        return _bytes_written(rows + columns, elements)
    return _bytes_written(rows, elements) + _bytes_written((rows if repeats_fprop else []) + columns, elements)


def _of_h(linears: Mapping[str, _LinearTraffic], fused_activation: bool) -> float:
    """Returns the bytes for the operands of h: fprop's, and wgrad's from a recomputed h.

    With a fused activation the latter pass also writes the operands of dg and du.
    """
    down = linears[DOWN]
    elements, row, column = down.tokens * down.inputs, down.policies("fprop_x"), down.policies("wgrad_x")
    if not fused_activation:
        return _bytes_written(row, elements) + _bytes_written(column, elements)
    gradients = [p for path in (GATE, UP) for p in linears[path].policies("dgrad_dy", "wgrad_dy")]
    return _bytes_written(row, elements, sources=2) + _bytes_written(gradients + column, elements, sources=3)


def _of_weight(linear: _LinearTraffic, remat: str) -> float:
    """Returns the bytes for a weight: quantized from its shard of the master, then written as fprop and dgrad read it.

    A weight that is all-gathered is quantized once per step, before the loop over layers.
    """
    bytes_per_code = next(map(operand_bytes, linear.policies("fprop_w", "dgrad_w")), 0.0)
    repeats_fprop = linear.path in REMAT_LINEARS[remat]
    elements = linear.inputs * linear.outputs * linear.matrices
    shares_codes, saved = shares_fprop_dgrad_codes(linear.recipe), remat in NO_REMAT_POLICIES or linear.shards > 1
    # Sets of codes that each quantize pass writes.
    code_sets = [1 if shares_codes else 2] if saved else [1, 1 if shares_codes else 1 + repeats_fprop]
    read = FLOAT32_BYTES * _reads(linear.policies("fprop_w", "dgrad_w"))
    quantize_bytes = sum(read + count * bytes_per_code for count in code_sets) * elements / linear.shards
    return quantize_bytes + (2 + repeats_fprop) * bytes_per_code * elements


def _bytes_written(policies: Sequence[OperandPolicy], elements: int, *, sources: int = 1) -> float:
    """Returns the bytes to write operands of `elements` elements, and to read `sources` bfloat16 arrays for them."""
    return (sources * BF16_BYTES * _reads(policies) + sum(map(operand_bytes, policies))) * elements


def _reads(policies: Sequence[OperandPolicy]) -> int:
    """Returns how often a source is read: for its codes, and for its amax if a format has per-tensor scales."""
    return 0 if not policies else 1 + any(p.format.tensor_scale for p in policies)


def _distinct_policies(policies: Iterable[OperandPolicy]) -> list[OperandPolicy]:
    """Returns the policies without repetitions, except stochastic ones: linears do not share random bits."""
    listed = list(policies)
    return [p for i, p in enumerate(listed) if p.stochastic or p not in listed[:i]]


def operand_bytes(policy: OperandPolicy) -> float:
    """Returns the bytes per element of an operand: its code and its share of a block scale."""
    return policy.format.bits_per_element / 8
