"""The linears that tests and benchmarks run: one list, so that what is fast is also what was checked."""

import math
from typing import NamedTuple


class Linear(NamedTuple):
    """x [*lead, inputs] times W [inputs, outputs]."""

    lead: tuple[int, ...]
    inputs: int
    outputs: int

    @property
    def tokens(self) -> int:
        return math.prod(self.lead)

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.lead))}.{self.inputs}.{self.outputs}"


# Small, and each odd in its own way. Blocks are of 16 numbers.
BLOCKS_OF_16 = (
    Linear((3, 16), 16, 48),  # one block wide, 48 tokens
    Linear((2, 48), 48, 80),  # nothing is a multiple of 32
    Linear((5, 16), 272, 32),  # 17 blocks, 80 tokens
    Linear((4, 8), 48, 32),  # blocks of tokens straddle the sequences
    Linear((2, 64), 64, 32),  # everything is a multiple of 32: native serves it
    Linear((2, 32), 128, 256),  # widths are multiples of 128: fused serves it
)
# MX formats share a scale between 32.
BLOCKS_OF_32 = (
    Linear((2, 48), 32, 96),  # blocks of tokens straddle the sequences
    Linear((8, 4), 288, 32),
    Linear((2, 64), 64, 32),
)
# One MLP weight of Llama 3 8B, and of the 405B model sharded over 8.
LARGE = (
    Linear((1, 8192), 4096, 14336),
    Linear((1, 8192), 16384, 6656),
)
