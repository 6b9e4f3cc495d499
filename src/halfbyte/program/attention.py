"""Calls of fused attention kernels and the FLOPs they multiply.

Forward is two products of [queries, keys] by head_dim (scores, context), backward five (scores again, and the gradients
of values, probabilities, queries and keys). A causal kernel does half of each.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from .gemms import is_attention
from .schedule import Launch, launches
from .text import Instruction, Program, Unreadable

FORWARD, BACKWARD = 2, 5


@dataclass(frozen=True)
class Attention:
    """One call of a fused attention kernel; scores are [batch, heads, queries, keys]."""

    instruction: Instruction
    scores: tuple[int, int, int, int]
    head_dim: int
    causal: bool
    products: int
    times: int

    @property
    def each(self) -> int:
        """FLOPs of one call."""
        batch, heads, queries, keys = self.scores
        whole = self.products * 2 * batch * heads * queries * keys * self.head_dim
        return whole // 2 if self.causal else whole

    @property
    def flops(self) -> int:
        """FLOPs of a step, loops counted."""
        return self.each * self.times


def attention(program: Program) -> list[Attention]:
    """Every fused attention of a step."""
    return [found for launch in launches(program) for found in attention_of(program, launch)]


def attention_of(program: Program, launch: Launch) -> Iterator[Attention]:
    """The fused attention that an instruction is; nothing for others. Unreadable if its shapes are not written."""
    found = launch.instruction
    if not is_attention(found):
        return
    config = found.config.get("cudnn_fmha_backend_config", {})
    dims = config.get("intermediate_tensor_shape", {}).get("dimensions", ())
    if len(dims) != 4 or "mask_type" not in config:
        raise Unreadable(f"{found.name} ({found.target}) does not say the shape of its scores or its mask")
    batch, heads, queries, keys = (int(size) for size in dims)
    causal = "CAUSAL" in config["mask_type"]
    products = BACKWARD if "Backward" in found.target else FORWARD
    head_dim = program.operand(found, 0).results[0].dims[-1]
    yield Attention(found, (batch, heads, queries, keys), head_dim, causal, products, launch.times)
