"""Bytes that a step moves to make the operands of the MLP's 4-bit GEMMs, against those that it must.

Compulsory, for one device: each source tensor is read once for its maxima and once for its codes, and each code and
scale that a GEMM or the backward pass reads is written once. Sources are x and dy of the MLP in bfloat16, g and u for
h, g, u and dh for their gradients, and the float32 master of a weight where it rests. What the stated remat repeats
counts again. A program moves more: the bytes of everything that quantizes or belongs to the MLP, as `program.traffic`
finds them, with the sums and casts around it that the compiler made part of the same kernels.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from halfbyte.program import Gemm, Program, gemms, traffic
from halfbyte.recipe import Recipe
from halfbyte.train import TrainConfig, phases

from .placement import AGAIN

MAKING = ("quantize", "mlp")  # categories of program.traffic
BF16, FLOAT32 = 2, 4


@dataclass(frozen=True)
class OperandTraffic:
    """Bytes of one device and step."""

    moved: int
    compulsory: float

    @property
    def excess(self) -> float:
        """Bytes moved for each that must be; 1.0 is perfect."""
        return self.moved / self.compulsory


def operand_traffic(program: Program, config: TrainConfig, mesh: Mapping[str, int]) -> OperandTraffic:
    """What `program`, the compiled step of `config` on `mesh` (axis -> size), moves for its operands."""
    found = traffic(program)
    return OperandTraffic(sum(found[name].total for name in MAKING if name in found), compulsory_bytes(config, mesh))


def compulsory_bytes(config: TrainConfig, mesh: Mapping[str, int]) -> float:
    """The compulsory bytes of a step of `config`. Raises ValueError where other linears than the MLP's are quantized,
    or microbatches are accumulated: their passes are not counted here.
    """
    layers = [_recipe(found) for found in _layers(config)]
    if config.accumulate > 1:
        raise ValueError("compulsory bytes are those of a step without accumulation; use --accumulate 1")
    return sum(_layer(config, mesh, recipe) for recipe in layers if recipe is not None)


def _layers(config: TrainConfig) -> list[Mapping[str, Recipe]]:
    """Path -> recipe, of each layer."""
    resolved = phases(config)[0].resolved(config)
    return [segment.recipes for segment in resolved.segments for _ in range(segment.start, segment.stop)]


def _recipe(found: Mapping[str, Recipe]) -> Recipe | None:
    """The recipe of a layer's MLP, None if it quantizes nothing."""
    inside = {recipe for path, recipe in found.items() if "/mlp/" in path}
    outside = [path for path, recipe in found.items() if "/mlp/" not in path and recipe.quantized]
    if len(inside) > 1 or outside:
        raise ValueError(f"compulsory bytes are counted where the MLP alone has one recipe; this policy has {found}")
    (recipe,) = inside
    return recipe if recipe.quantized else None


def _layer(config: TrainConfig, mesh: Mapping[str, int], recipe: Recipe) -> float:
    parts = {axis: mesh.get(axis, 1) for axis in ("data", "fsdp", "context", "tensor")}
    tokens = config.batch * config.seq // (parts["data"] * parts["fsdp"] * parts["context"])
    embed, hidden = config.model.embed, config.model.mlp // parts["tensor"]
    again = "layers/mlp/gate" in AGAIN[config.remat]  # then the operands of x, g and u are made again
    x, h = tokens * embed, tokens * hidden
    code = operand_bytes(recipe)
    read = 2 * BF16  # for maxima and for codes
    forward = read * x + code * x * (1 if again else 2) + 2 * read * h + code * h
    backward = (read + 2 * code) * x * (2 if again else 1) + 3 * read * h + 5 * code * h
    return forward + backward + _weights(embed * hidden, parts["fsdp"], code, again)


def _weights(elements: int, shards: int, code: float, again: bool) -> float:
    """Of gate, up and down: quantized where they rest, then written as fprop and dgrad read them."""
    rests = (2 * FLOAT32 + code) * elements / shards
    orders = 3 + 3 + (2 if again else 0)  # fprop, dgrad, and fprop of gate and up again
    return 3 * rests * (2 if again else 1) + orders * code * elements


def operand_bytes(recipe: Recipe) -> float:
    """Bytes of an element of an operand: its code and its part of a scale."""
    fmt = recipe.fprop_x.format
    assert fmt.element is not None and fmt.block is not None, "an MLP with block-scaled operands"
    return fmt.element.bits / 8 + 1 / fmt.block


def native_calls(program: Program, config: TrainConfig) -> tuple[list[Gemm], int]:
    """(the block-scaled GEMMs of a program, how many a step of `config` should call: three a linear and layer, and one
    more where its remat repeats fprop).
    """
    quantized = [path for found in _layers(config) for path, recipe in found.items() if recipe.quantized]
    again = [path for path in quantized if path in AGAIN[config.remat]]
    return [g for g in gemms(program) if g.kind == "block-scaled"], 3 * len(quantized) + len(again)
