"""Bytes that a step must move to make the operands of its quantized GEMMs.

For one device each source tensor is read once for its maxima, if its format has a scale of the tensor, and
once for its codes, and each code and scale that a GEMM or the backward pass reads is written once. Sources are x and dy
of each linear in bfloat16 (one x for q, k and v, one for gate and up), and the float32 master of a weight where it
rests; where the passes hold the MLP's activation, g and u for h, and g, u and dh for their gradients. What the stated
remat repeats counts again. A program moves more: the compiler adds sums and casts to the same kernels.
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
NO_REMAT_POLICIES = ("none", "dots")  # remat that keeps operands for the backward pass
GATE, UP, DOWN = MLP_PATHS = tuple(f"layers/mlp/{name}" for name in ("gate", "up", "down"))
OF_EXPERTS, OF_SHARED = (tuple(f"layers/mlp/{name}" for name in names) for names in (EXPERT_SITES, SHARED_SITES))
SHARED_INPUT_LINEARS = (
    ("layers/attention/q", "layers/attention/k", "layers/attention/v"),
    ("layers/attention/o",),
    (GATE, UP),
    *(group for names in (OF_EXPERTS, OF_SHARED) for group in (names[:2], names[2:])),
)


def compulsory_bytes(config: TrainConfig, mesh: Mapping[str, int]) -> float:
    """The compulsory bytes of a step of `config`. Raises ValueError where microbatches are accumulated: their passes
    are not counted here.
    """
    if config.accumulate > 1:
        raise ValueError("compulsory bytes are those of a step without accumulation; use --accumulate 1")
    return sum(_of_layer(_linears(config, mesh, found), config.remat) for found in _layers(config))


@dataclass(frozen=True)
class _LinearTraffic:
    """One quantized linear of a layer, as one device has it."""

    path: str
    recipe: Recipe
    tokens: int
    inputs: int
    outputs: int
    shards: int
    matrices: int = 1
    """Of experts: how many a device multiplies."""

    def policies(self, *roles: str) -> list[OperandPolicy]:
        """Those of `roles` that are quantized."""
        return [p for p in (getattr(self.recipe, role) for role in roles) if p.format.quantized]


def _layers(config: TrainConfig) -> list[Mapping[str, Recipe]]:
    """Path -> recipe, of each layer."""
    resolved = phases(config)[0].resolved(config)
    return [segment.recipes for segment in resolved.segments for _ in range(segment.start, segment.stop)]


def _linears(config: TrainConfig, mesh: Mapping[str, int], recipes: Mapping[str, Recipe]) -> dict[str, _LinearTraffic]:
    size = {axis: mesh.get(axis, 1) for axis in ALL_MESH_AXES}
    parts = prod(size.values()) // size["tensor"]
    found, devices = {}, prod(mesh.values())
    for site in models.linear_shapes(config.model, config.batch, config.seq):
        if site.path not in recipes or not recipes[site.path].quantized:
            continue
        if site.experts:  # whole matrices, shared out over all devices
            own = site.tokens // devices, site.k, site.n, 1, site.experts // devices
            found[site.path] = _LinearTraffic(site.path, recipes[site.path], *own)
        else:
            cut = [1 if axis == "embed" else size["tensor"] for axis in site.axes]
            sizes = site.tokens // parts, site.k // cut[0], site.n // cut[1]
            found[site.path] = _LinearTraffic(site.path, recipes[site.path], *sizes, size["fsdp"])
    return found


def _of_layer(linears: Mapping[str, _LinearTraffic], remat: str) -> float:
    held = _holds_activation(linears)
    total = sum(_of_weight(linear, remat) for linear in linears.values())
    for group in SHARED_INPUT_LINEARS:
        total += _of_x([linears[path] for path in group if path in linears], remat)
    for linear in linears.values():
        if not (held and linear.path in (GATE, UP)):
            total += _bytes_written(linear.policies("dgrad_dy", "wgrad_dy"), linear.tokens * linear.outputs)
    return total + (_of_h(linears, held) if DOWN in linears else 0.0)


def _holds_activation(linears: Mapping[str, _LinearTraffic]) -> bool:
    """Whether passes hold the MLP's activation: all its operands in one kind of blocks."""
    if not all(path in linears for path in MLP_PATHS):
        return False
    roles = "fprop_x", "dgrad_dy", "wgrad_x", "wgrad_dy"
    return len({getattr(linears[path].recipe, role).format.block for path in MLP_PATHS for role in roles}) == 1


def _of_x(group: Sequence[_LinearTraffic], remat: str) -> float:
    """Operands of the x that these linears share: all in the forward pass where they are kept, else those that each
    pass reads.
    """
    if not group:
        return 0.0
    elements, again = group[0].tokens * group[0].inputs, group[0].path in REMAT_LINEARS[remat]
    rows, columns = (
        _distinct_policies(p for each in group for p in each.policies(role)) for role in ("fprop_x", "wgrad_x")
    )
    if remat in NO_REMAT_POLICIES:
        return _bytes_written(rows + columns, elements)
    return _bytes_written(rows, elements) + _bytes_written((rows if again else []) + columns, elements)


def _of_h(linears: Mapping[str, _LinearTraffic], held: bool) -> float:
    """Operands of h, for fprop and, made again, for wgrad; with those of dg and du where one pass makes all of them."""
    down = linears[DOWN]
    elements, row, column = down.tokens * down.inputs, down.policies("fprop_x"), down.policies("wgrad_x")
    if not held:
        return _bytes_written(row, elements) + _bytes_written(column, elements)
    gradients = [p for path in (GATE, UP) for p in linears[path].policies("dgrad_dy", "wgrad_dy")]
    return _bytes_written(row, elements, sources=2) + _bytes_written(gradients + column, elements, sources=3)


def _of_weight(linear: _LinearTraffic, remat: str) -> float:
    """Quantized where it rests, once if it is gathered (then before the layers' loop), then written as fprop and dgrad
    read it.
    """
    code = next(map(operand_bytes, linear.policies("fprop_w", "dgrad_w")), 0.0)
    again = linear.path in REMAT_LINEARS[remat]
    elements = linear.inputs * linear.outputs * linear.matrices
    shared, kept = shares_fprop_dgrad_codes(linear.recipe), remat in NO_REMAT_POLICIES or linear.shards > 1
    sets = [1 if shared else 2] if kept else [1, 1 if shared else 1 + again]  # of codes, in each pass that makes them
    read = FLOAT32_BYTES * _reads(linear.policies("fprop_w", "dgrad_w"))
    rests = sum(read + count * code for count in sets) * elements / linear.shards
    return rests + (2 + again) * code * elements


def _bytes_written(policies: Sequence[OperandPolicy], elements: int, *, sources: int = 1) -> float:
    """Operands under `policies` of as many elements, from one reading of `sources` in bfloat16."""
    return (sources * BF16_BYTES * _reads(policies) + sum(map(operand_bytes, policies))) * elements


def _reads(policies: Sequence[OperandPolicy]) -> int:
    """How often a source is read for such operands."""
    return 0 if not policies else 1 + any(p.format.tensor_scale for p in policies)


def _distinct_policies(policies: Iterable[OperandPolicy]) -> list[OperandPolicy]:
    """One of each that linears share; random bits are each linear's own."""
    listed = list(policies)
    return [p for i, p in enumerate(listed) if p.stochastic or p not in listed[:i]]


def operand_bytes(policy: OperandPolicy) -> float:
    """Bytes of an element of an operand: its code and its part of a scale."""
    return policy.format.bits_per_element / 8
