"""How many rows the experts of a device multiply: a program has room for any routing, and passes over what is empty.

No program says it, so an even load is counted: every expert has as many rows as any other, and its last tile is half
full on average.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from halfbyte.devices import Device
from halfbyte.models.config import EXPERT_SITES
from halfbyte.ops.tiles import LARGEST, tile_rows
from halfbyte.program import Gemm, Instruction, Program, Unreadable
from halfbyte.program.schedule import trips
from halfbyte.train import TrainConfig, phases

ROOM = "models/experts"  # where a program for few rows and one for all are asked for
LOOPS = ("ops/grouped_linear", ROOM)  # where loops over the tiles that are used are written


@dataclass(frozen=True)
class Load:
    """Of one device and microbatch, all rows of its experts."""

    needed: float
    """That tokens have."""
    rows: float
    """In whole tiles."""
    tile: int = LARGEST
    """Rows of one."""

    @property
    def filled(self) -> float:
        """Rows in whole tiles for each that a token has."""
        return self.rows / self.needed if self.needed else 1.0

    @property
    def tiles(self) -> int:
        """That have rows."""
        return round(self.rows / self.tile)

    def share(self, gemm: Gemm) -> float:
        """Of a GEMM's FLOPs: 1 for one that is not of experts."""
        return min(self.rows / gemm.rows, 1.0) if gemm.rows else 1.0

    def flops(self, gemm: Gemm) -> int:
        """Of a GEMM in a step."""
        return round(self.share(gemm) * gemm.flops)

    def unread(self, gemm: Gemm) -> float:
        """Bytes of a GEMM's operands that lie in tiles without rows."""
        at = -1 if gemm.format == "fp4" and len(gemm.result.dims) == 3 else 0  # codes lie with what is summed last
        in_tiles = (a for a in (gemm.left, gemm.right) if len(a.dims) == 2 and a.dims[at] == gemm.rows)
        return (1.0 - self.share(gemm)) * sum(array.bytes for array in in_tiles)

    def turns(self, program: Program, loop: Instruction) -> int:
        """Of a loop; of one over tiles, those that have rows."""
        try:
            return trips(program, loop)
        except Unreadable:
            if not any(place in str(loop.source) for place in LOOPS):
                raise
            return self.tiles

    def branches(self, program: Program, found: Instruction) -> Sequence[str]:
        """The computations of a branch that may be taken; of one by the room that rows need, that with less."""
        if ROOM not in str(found.source):
            return found.calls
        size = lambda name: sum(array.bytes for each in program.computations[name] for array in each.results)  # noqa: E731
        return (min(found.calls, key=size),)


NONE = Load(0.0, 0.0)
"""Of a model without experts."""


def pairs_of(config: TrainConfig) -> int:
    """(token, expert) pairs of a microbatch, all devices together."""
    return config.batch // config.accumulate * config.seq * config.model.experts_per_token


def even_load(config: TrainConfig, devices: int, device: Device | None = None) -> Load:
    """That of `config` on so many devices, which share its experts: GPUs, or `device`, whose tiles may be smaller; the
    largest, where layers differ.
    """
    if not config.model.experts:
        return NONE
    pairs, experts, tile = pairs_of(config), config.model.experts, LARGEST
    if device is not None:
        recipes = (each.recipes for each in phases(config)[0].resolved(config).segments)
        all_of_them = [found[f"layers/mlp/{name}"] for found in recipes for name in EXPERT_SITES]
        tile = tile_rows(pairs, experts, all_of_them, device=device)
    return Load(pairs / devices, (pairs + experts * (tile - 1) / 2) / devices, tile)
