"""The passes of `native` for MXFP8: one read of a tensor writes every operand of it as cuDNN reads them.

A block's scale needs nothing but its block, so there is no pass for maxima and no factor to apply to a GEMM's sums. One
thing is left of a tensor's amax: a NaN or an infinity anywhere makes the whole result NaN. The kernels give a block
with an infinity the E8M0 code 254 and one with a NaN 255, which no finite block has (the largest number has 247), so
that the largest scale tells; the factor is 1 or NaN.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from halfbyte import kernels
from halfbyte.formats import MXFP8, MXFP8_E5M2, Packed, tile_scales
from halfbyte.kernels import ScaleOrder
from halfbyte.kernels.mxfp8 import BLOCK, MxOperand
from halfbyte.kernels.mxfp8 import unsupported as kernels_unsupported
from halfbyte.kernels.stacks import Layer, array_of
from halfbyte.ops.activation import SILU, Activation
from halfbyte.ops.backends.block_scaled import uncalled
from halfbyte.ops.operand import BlockScaled, Operand, gemm_factor, name_saved
from halfbyte.ops.passes import ROWS, GatedPasses, Made, Maxima, QuantizedWeight, Read, Request
from halfbyte.ops.problem import Problem
from halfbyte.ops.shards import Cut, Shards, gather, largest
from halfbyte.recipe import WEIGHTS, OperandPolicy, Recipe

ELEMENTS = {MXFP8.element: "e4m3", MXFP8_E5M2.element: "e5m2"}  # as the kernels name them
NOT_FINITE = 254  # the least scale of a block that is not finite
Run = Callable[..., tuple[jax.Array, ...]]


@dataclasses.dataclass(frozen=True)
class MxPasses(GatedPasses):
    """The MXFP8 kernels."""

    name = "native"
    one_weight = False

    def foreign(self, recipe: Recipe) -> str | None:
        """Needs x and dy in MXFP8 under Transformer Engine's rule for scales."""
        for role, policy in recipe.operands().items():
            if role not in WEIGHTS and not _made(policy):
                return f"{role} is {policy}; its kernels make MXFP8 blocks of {BLOCK}, scales rounded up"
        return None

    def unsupported(self, problem: Problem) -> str | None:
        """Needs what our own call needs, bfloat16 tensors, and whole blocks of tokens."""
        reason = self.foreign(problem.recipe) or uncalled(problem) or problem.without_kernels()
        return reason or kernels_unsupported(problem.tokens, problem.inputs, capability=problem.device.capability)

    def weight_unsupported(self, problem: Problem, policy: OperandPolicy) -> str | None:
        if not _made(policy) or policy != OperandPolicy(policy.format):
            return f"its kernel makes mxfp8 1d rne, scales rounded up, this is {policy}"
        if problem.weight_dtype != "float32":
            return f"its kernel reads float32 weights, got {problem.weight_dtype}"
        odd = [n for n in problem.weight_part if n % BLOCK]
        return f"its kernel needs whole blocks of {BLOCK} where the weight rests, got {odd[0]}" if odd else None

    def unfused(self, activation: Activation, recipes: Sequence[Recipe]) -> str | None:
        return None if activation == SILU else f"its kernels compute {SILU.name}, not {activation.name}"

    def quantize_by(self, x: jax.Array, requests: Sequence[Request], maxima: Maxima) -> list[Made]:
        return self._make(kernels.mxfp8.quantize, [x], [requests])[0]

    def activate(self, g: Read, u: Read, requests: Sequence[Request]) -> list[Made]:
        return self._make(kernels.mxfp8.quantize_forward, [g, u], [requests])[0]

    def activate_backward(self, g, u, dh, dg, du, h):
        return tuple(self._make(kernels.mxfp8.quantize_backward, [g, u, dh], [dg, du, h]))

    def _make(self, kernel: Run, arrays: Sequence[jax.Array], wanted: Sequence[Sequence[Request]]) -> list[list[Made]]:
        """What is wanted of each tensor that the kernel makes of `arrays`."""
        shape = arrays[0].shape
        flat = [a.reshape(-1, shape[-1]) for a in arrays]  # [tokens..., features] -> [tokens, features]
        asked = [(r, _asked(r, tensor)) for tensor, requests in enumerate(wanted) for r in requests]
        made = kernel(*flat, operands=tuple(operand for _, operand in asked))
        written = iter(zip(made[::2], made[1::2], strict=True))
        pairs = [[next(written) for _ in requests] for requests in wanted]
        factors = _factors([of_tensor[0][1] for of_tensor in pairs], wanted[0][0].cut)
        return [
            [_operand(*pair, factor, r, shape) for pair, r in zip(of_tensor, requests, strict=True)]
            for of_tensor, factor, requests in zip(pairs, factors, wanted, strict=True)
        ]

    def weight(self, w: jax.Array | Layer, wanted: Request, *, packed: bool = True) -> QuantizedWeight:
        """Packed codes, blocked along an axis. One read makes those of fprop and of dgrad: asked for either, both are
        made, and XLA finds that the two calls are one.
        """
        policy = wanted.policy
        both = tuple(MxOperand(along, element=_element(policy)) for along in (True, False))
        made = kernels.mxfp8.quantize(array_of(w), operands=both)
        codes, scales = [a.T for a in made[:2]] if wanted.axis == -2 else made[2:]
        (factor,) = _factors([made[1]], wanted.cut)  # what is left of its amax
        return Packed(codes, scales, factor, jnp.float32(1), policy.format, policy.block, wanted.axis)

    def gather_weight(self, codes: Packed, policy: OperandPolicy, *, axis: int, shards: Shards) -> Operand:
        """With the contraction last, as the kernel wrote it, whether it travels or not."""
        assert codes.scales is not None
        turn = axis == -2
        cut = shards.stored[::-1] if turn else shards.stored
        ordered, scales = (gather(a.T if turn else a, cut) for a in (codes.packed, codes.scales))
        shape = ordered.shape[::-1] if turn else ordered.shape
        return BlockScaled(ordered, tile_scales(scales), gemm_factor(codes), policy, shape, axis)


def _made(policy: OperandPolicy) -> bool:
    """Whether the kernels make such operands."""
    fmt = policy.format
    ours = fmt.element in ELEMENTS and (fmt.block, fmt.scale) == (MXFP8.block, MXFP8.scale)
    return ours and policy == OperandPolicy(fmt, source=policy.source) and policy.source != "forward"


def _element(policy: OperandPolicy) -> str:
    return ELEMENTS[policy.format.element]


def _asked(wanted: Request, tensor: int) -> MxOperand:
    """What the kernel is asked for."""
    return MxOperand(wanted.axis != ROWS, ScaleOrder.TILED, _element(wanted.policy), tensor)


def _operand(codes: jax.Array, scales: jax.Array, factor: jax.Array, wanted: Request, shape: tuple[int, ...]) -> Made:
    made = BlockScaled(codes, scales, factor, wanted.policy, shape, wanted.axis)
    return name_saved(made) if wanted.kept else made


def _factors(scales: Sequence[jax.Array], cut: Cut) -> list[jax.Array]:
    """1 for each tensor, of which these are scales; NaN where the whole one is not finite."""
    tops = largest([jnp.max(each).astype(jnp.int32) for each in scales], cut)
    return [jnp.where(top < NOT_FINITE, jnp.float32(1), jnp.float32(jnp.nan)) for top in tops]


MX = MxPasses()
