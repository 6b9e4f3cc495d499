"""`native`: block-scaled FP4 and FP8 tensor cores, through cuDNN's block-scaled GEMM.

XLA calls it `__cudnn$blockScaledDot`: codes with the contraction last, block scales in tiles of 128x4, and one more
operand that multiplies the result, all in one kernel. There are two ways to it:

- **our own call**, over `BlockScaled` operands: what our passes wrote is what cuDNN reads, nothing in between.
- **`jax.nn.scaled_matmul`**, over `Quantized` ones, where the compiler lays the program out over several devices (it
  knows how to cut that one), where cuDNN is older than 9.13, and on GPUs without such units, where XLA dequantizes.
  XLA tiles the scales, writes float32 sums, and a second pass multiplies and rounds them.

The factor. With a bfloat16 result cuDNN's global scale is a bfloat16 number, and so is what it multiplies: a float32
alpha would be rounded to 8 bits, and the sums twice. So the call is given alpha's power of two, which is exact
wherever it is applied, and the rest of alpha, in [1, 2), multiplies the rounded result in float32:

    y = bf16(bf16(sums * 2^e) * m),   alpha = 2^e * m

No bit of alpha is lost; y is rounded twice. Whoever reads y multiplies by m as it loads: XLA where it can fuse it, and
the gated kernels, which are handed g, u and dh as `Owed`; so y is written once. With a float32 result (wgrad) alpha
goes in whole, and nothing is rounded. MXFP8 has no scale of the tensor: alpha is 1 (or NaN), and y is rounded once.
"""

import dataclasses
import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.stages import Compiled, Lowered

from halfbyte.devices import native_training
from halfbyte.formats import E5M2, BlockFormat, Packed, QTensor, pack, tile_scales
from halfbyte.kernels import Columnwise, Rowwise, ScaleOrder
from halfbyte.kernels.scale import GEMM
from halfbyte.kernels.stacks import Layer
from halfbyte.ops.backends import served
from halfbyte.ops.backends.backend import Backend, strays_of
from halfbyte.ops.backends.block_scaled import SCOPE, block_scaled_dot, pays, uncalled
from halfbyte.ops.backends.fused import FusedPasses
from halfbyte.ops.backends.mx_passes import MX
from halfbyte.ops.gemms import Gemm, alpha, contraction_last, finish, result_shape
from halfbyte.ops.operand import BlockScaled, Kept, Operand, Owed, Quantized, gemm_factor, keep, load, name_saved
from halfbyte.ops.passes import XLA, Made, Maxima, Passes, QuantizedWeight, Request
from halfbyte.ops.problem import Problem, target
from halfbyte.ops.shards import Shards, axes_of, gather
from halfbyte.recipe import OperandPolicy, Recipe

MULTIPLE = 32  # compilation does not check it; execution needs it
KNOWN = (  # (element, scale, block) that XLA's call takes; it dequantizes others
    ("float4_e2m1fn", "float8_e4m3fn", 16),
    ("float8_e4m3fn", "float8_e8m0fnu", 32),
    ("float8_e5m2", "float8_e8m0fnu", 32),
)


def foreign(recipe: Recipe) -> str | None:
    """Needs something quantized."""
    return None if recipe.quantized else f"recipe {recipe.name} quantizes nothing"


def unsupported(problem: Problem, gemm: Gemm) -> str | None:
    """Needs an NVIDIA GPU, formats that cuDNN's call knows, and a contraction that is a multiple of 32."""
    if problem.device.capability is None:
        name = problem.device.name
        return f"jax.nn.scaled_matmul has no implementation for {name}; it needs an NVIDIA GPU (use carrier)"
    left, right = (getattr(problem.recipe, role).format for role in gemm.roles)
    if left.unit is None or left.block is None or left.unit != right.unit:
        return f"{gemm} multiplies {left} by {right}; block-scaled units take one block-scaled format on both sides"
    unknown = [fmt for fmt in (left, right) if not _known(fmt)]
    if unknown:
        return f"{gemm} multiplies {unknown[0]}, which cuDNN's block-scaled call does not take: XLA would dequantize it"
    if left.element == right.element == E5M2:
        return f"{gemm} multiplies {left} by {right}; cuDNN's block-scaled call takes E5M2 on one side only"
    size = problem.contraction(gemm)
    return f"{gemm} sums over {size}, and block-scaled units need a multiple of {MULTIPLE}" if size % MULTIPLE else None


def _known(fmt: BlockFormat) -> bool:
    assert fmt.element is not None and fmt.scale_dtype is not None
    return (jnp.dtype(fmt.element.dtype).name, jnp.dtype(fmt.scale_dtype).name, fmt.block) in KNOWN


def multiply(gemm: Gemm, left: Operand, right: Operand, dtype: jnp.dtype) -> jax.Array:
    """Exact products, float32 sums, the operands' factors."""
    y = owing(gemm, left, right, dtype)
    return finish(y.array.astype(jnp.float32), y.factor, dtype) if isinstance(y, Owed) else y


def owing(gemm: Gemm, left: Operand, right: Operand, dtype: jnp.dtype) -> jax.Array | Owed:
    """The same, with the rest of a factor left to the reader."""
    if isinstance(left, BlockScaled) and isinstance(right, BlockScaled):
        return _scaled(left, right, dtype)
    assert isinstance(left, Quantized) and isinstance(right, Quantized), "block-scaled units read codes"
    axes = gemm.axes(left.codes.codes.ndim)
    (a, a_scales), (b, b_scales) = (_elements(o.codes, summed) for o, summed in zip((left, right), axes, strict=True))
    with jax.named_scope(SCOPE):
        y = jax.nn.scaled_matmul(a, b, a_scales, b_scales, preferred_element_type=jnp.float32)
    y = y.reshape(result_shape(left.codes.shape, right.codes.shape, axes))  # [1, rows, columns] -> [free dims of both]
    return finish(y, alpha(left, right), dtype)


def _scaled(left: BlockScaled, right: BlockScaled, dtype: jnp.dtype) -> jax.Array | Owed:
    """The product of two operands with their factors, as the module says."""
    factor = alpha(left, right)
    exact = dtype == jnp.float32 or not any(o.policy.format.tensor_scale for o in (left, right))
    if factor is None or exact:
        return block_scaled_dot(left, right, factor, dtype)
    power, rest = power_and_rest(factor)
    return Owed(block_scaled_dot(left, right, power, dtype), rest)


def power_and_rest(factor: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(2^e, m) with factor = 2^e * m and m in [1, 2), float32, by integers; (1, factor) for zero, subnormal and
    non-finite ones.
    """
    bits = lax.bitcast_convert_type(factor, jnp.uint32)
    exponent = bits & jnp.uint32(0x7F80_0000)
    normal = (exponent != 0) & (exponent != jnp.uint32(0x7F80_0000))
    power = lax.bitcast_convert_type(exponent, jnp.float32)
    rest = lax.bitcast_convert_type((bits & jnp.uint32(0x807F_FFFF)) | jnp.uint32(0x3F80_0000), jnp.float32)
    return jnp.where(normal, power, jnp.float32(1)), jnp.where(normal, rest, factor)


def _elements(tensor: QTensor, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """([1, rows, contraction] elements, [1, rows, contraction / block] scales)."""
    codes, scales = _rows(tensor, axes)
    assert tensor.format.element is not None and tensor.scales is not None
    narrow = codes.astype(jnp.uint4) if tensor.format.element.bits == 4 else codes
    elements = lax.bitcast_convert_type(narrow, tensor.format.element.dtype)
    return elements[None], lax.bitcast_convert_type(scales, tensor.scales.dtype)[None]


def _rows(tensor: QTensor, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """(uint8 codes [rows, contraction], uint8 scales [rows, contraction / block])."""
    assert tensor.scales is not None and tensor.format.block is not None
    scales = lax.bitcast_convert_type(tensor.scales, jnp.uint8)
    if tensor.block == "2d":  # one scale a tile: repeat it on each of the tile's rows
        scales = jnp.repeat(scales, tensor.format.block, axis=1 - axes[0])
    return contraction_last(tensor.codes, axes), contraction_last(scales, axes)


class PackedWeights(Passes):
    """Weights kept as packed codes: GEMMs read them in two orders, made where they are read."""

    one_weight = False

    @jax.named_scope("quantize")
    def load_weight(self, codes: Packed, policy: OperandPolicy, *, axis: int) -> Operand:
        if codes.block == "2d" and codes.axis == -2:
            return _of_squares(ordered(codes.packed, axis), codes, policy, axis)
        tensor = codes.unpack()
        return block_scaled(Quantized(tensor.carrier(), gemm_factor(codes), policy, tensor), axis)

    @jax.named_scope("quantize")
    def gather_weight(self, codes: Packed, policy: OperandPolicy, *, axis: int, shards: Shards) -> Operand | None:
        """Of a weight whose outputs are gathered, None where it is another: its parts are put in order first. A gather
        along outputs turns the whole anyway; regrouping nibbles after it would be a second pass.
        """
        if codes.block != "2d" or codes.axis != -2 or axes_of(shards.stored[:1]) or not axes_of(shards.stored):
            return None
        cut = shards.stored[::-1] if axis == -2 else shards.stored
        whole_codes = gather(ordered(codes.packed, axis), cut)
        whole = dataclasses.replace(codes, scales=None if codes.scales is None else gather(codes.scales, shards.stored))
        return _of_squares(whole_codes, whole, policy, axis)


class TiledPasses(PackedWeights):
    """The definition's operands, laid out by XLA as our own call reads them."""

    def unsupported(self, problem: Problem) -> str | None:
        """Needs what our own call needs."""
        return uncalled(problem)

    def quantize_by(self, x: jax.Array, requests: Sequence[Request], maxima: Maxima) -> list[Made]:
        defined = XLA.quantize(x, [dataclasses.replace(r, kept=False) for r in requests])
        made = [block_scaled(o, r.axis) for o, r in zip(defined, requests, strict=True)]
        return [_kept(o) if r.kept else o for o, r in zip(made, requests, strict=True)]


def _kept(operand: Operand) -> Kept:
    return name_saved(operand) if isinstance(operand, BlockScaled) else keep(operand)


def block_scaled(operand: Operand, axis: int) -> Operand:
    """A `Quantized` operand that is contracted along `axis`, as a `BlockScaled` one; others as they are."""
    if not isinstance(operand, Quantized):
        return operand
    shape = operand.codes.shape
    summed = (len(shape) - 1,) if axis == -1 else tuple(range(len(shape) - 1))
    codes, scales = _rows(operand.codes, summed)
    element = operand.policy.format.element
    assert element is not None
    narrow = pack(codes) if element.bits == 4 else codes
    return BlockScaled(narrow, tile_scales(scales), operand.factor, operand.policy, shape, axis)


def ordered(packed: jax.Array, axis: int) -> jax.Array:
    """Codes uint8 [inputs / 2, outputs] as rows with the contraction last."""
    return packed.T if axis == -2 else _paired_along_rows(packed)


def of_squares(scales: jax.Array, block: int, axis: int) -> jax.Array:
    """Scales [inputs / block, outputs / block], one a square, on each row of their squares, tiled."""
    return tile_scales(jnp.repeat(scales.T if axis == -2 else scales, block, axis=0))


def _of_squares(rows: jax.Array, codes: Packed, policy: OperandPolicy, axis: int) -> BlockScaled:
    """The operand of ordered codes and of the scales [inputs / 16, outputs / 16] of `codes`."""
    assert codes.scales is not None and policy.format.block is not None
    scales = of_squares(codes.scales, policy.format.block, axis)
    shape = tuple(n * policy.format.block for n in codes.scales.shape)
    return BlockScaled(rows, scales, gemm_factor(codes), policy, shape, axis)


def _paired_along_rows(packed: jax.Array) -> jax.Array:
    """4-bit codes uint8 [inputs / 2, outputs], two inputs a byte -> [inputs, outputs / 2], two outputs a byte; word by
    word, so that XLA makes one pass of it.
    """
    rows, columns = packed.shape
    # [inputs / 2, outputs] -> [inputs / 2, outputs / 2]: a word has two inputs of two outputs
    words = lax.bitcast_convert_type(packed.reshape(rows, columns // 2, 2), jnp.uint16)
    shifts = jnp.array([0, 4], jnp.uint16)[None, :, None]  # of the even and of the odd input
    ours = words[:, None, :] >> shifts
    pairs = (ours & jnp.uint16(0xF)) | ((ours >> jnp.uint16(4)) & jnp.uint16(0xF0))
    return pairs.astype(jnp.uint8).reshape(2 * rows, columns // 2)  # [inputs / 2, 2, ...] -> [inputs, ...]


@dataclasses.dataclass(frozen=True)
class NativePasses(PackedWeights, FusedPasses):
    """The kernels of `fused`, asked for codes and tiles instead of carriers: what cuDNN reads, and what is kept."""

    name = "native"
    takes_owed = True
    packs_weights = True

    def foreign(self, recipe: Recipe) -> str | None:
        if recipe.wgrad_x.source == "forward":
            return f"wgrad_x is {recipe.wgrad_x}, which kernels make of a carrier, and these write codes"
        return served.foreign(recipe) or served.apart([recipe])

    def unsupported(self, problem: Problem) -> str | None:
        """Needs what our own call needs, and what the kernels need."""
        return uncalled(problem) or self.foreign(problem.recipe) or super().unsupported(problem)

    def _rowwise(self, row: Request, scale: jax.Array, shape: tuple[int, ...]) -> Rowwise:
        return dataclasses.replace(super()._rowwise(row, scale, shape), codes=ScaleOrder.TILED)

    def _columnwise(self, column: Request, scale: jax.Array, shape: tuple[int, ...]) -> Columnwise:
        return dataclasses.replace(super()._columnwise(column, scale, shape), packed=False, codes=ScaleOrder.TILED)

    def _operands(
        self, made: Sequence[jax.Array], requests: Sequence[Request], scales: Sequence[jax.Array],
        shape: tuple[int, ...],
    ) -> list[Made]:  # fmt: skip
        """What a kernel wrote: codes and scales of each operand, row before column."""
        pairs = zip(made[::2], made[1::2], strict=True)
        found = [
            BlockScaled(codes, tiles, scale[GEMM], r.policy, shape, r.axis)
            for (codes, tiles), scale, r in zip(pairs, scales, requests, strict=True)
        ]
        return [name_saved(o) if r.kept else o for o, r in zip(found, requests, strict=True)]

    def weight(self, w: jax.Array | Layer, wanted: Request, *, packed: bool = True) -> QuantizedWeight:
        """Packed codes, whether the weight travels or not."""
        return super().weight(w, wanted, packed=True)

    def load(self, kept: Kept, policy: OperandPolicy) -> Operand:
        return load(kept, policy)


def strays(lowered: Lowered, compiled: Compiled) -> list[str]:
    """`strays_of` a program for a device that has the units; elsewhere XLA dequantizes, which was asked for by name."""
    return strays_of(SCOPE, stray_gemms, lowered, compiled) if native_training(target(), "nvfp4") else []


def stray_gemms(program: str) -> list[str]:
    """Lines of a compiled program where a GEMM of this backend is something else than cuDNN's block-scaled call."""
    other = re.compile(r'custom_call_target="__cublas|"kind":"__(?:triton\w*gemm|cudnn\$fusion)|(?<!%)\bdot\(')
    return [line.strip() for line in program.splitlines() if SCOPE in line and other.search(line)]


TILED = TiledPasses()
NATIVE = NativePasses()
BACKEND = Backend(
    "native",
    unsupported,
    multiply,
    (NATIVE, MX, TILED, XLA),
    owing=owing,
    foreign=foreign,
    pays=pays,
    strays=strays,
)
