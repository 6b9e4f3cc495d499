"""Lane ops as PTX text (`PtxLaneOps`), and the primitive that runs the text in a Pallas Triton kernel (`inline_ptx`).

How it works: each method appends one line of PTX, most of them one machine instruction, and returns a `PtxRegister`. A
body that is run against `PtxLaneOps` thus writes its own straight-line program in virtual registers; ptxas schedules it
and allocates registers. `numpy_lanes.py` evaluates the same operations on arrays, for interpret mode and for tests on
any machine. `lane_ops.py` states why bodies are written in single instructions.

A *lane* is one GPU thread. It holds `columns` neighbouring elements of every token row of its tile, as words of two
bf16 (the even column in the low half); `16 // columns` consecutive lanes hold one block of 16 columns.

Rounding and NaN: every float32 operation names its rounding (`.rn`, `.rz`), so ptxas may not contract a product and a
sum. Bodies use `fma` where its product is exact; Markstein's division steps need its single rounding. `max.NaN` keeps
NaN, the plain `max` and `min` drop it. Conversions to E4M3 and E5M2 saturate (`.satfinite`).

Tricks that save instructions, each stated at its line:
- grid rounding: adding and subtracting 1.5 * 2**22 * e rounds to multiples of e / 2, ties to even (`round_grid`).
- divisions without a branch (`reciprocal`, `div_prepared`): `rcp.rn` and `div.rn` branch away for subnormal numbers,
  which cuts a kernel into pieces that ptxas schedules one by one. 2112 instructions became 1941 for a lane of 64
  elements of the rowwise and columnwise pass (docs/LOG.md, "Kernels without tiles").
- E2M1 codes by a bf16x2 product whose exponent field is the code (`grid_codes`).
"""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src.pallas.triton import lowering as triton_lowering
from jax._src.pallas.triton import primitives as triton_primitives
from jax.extend import core

# MLIR's bindings search for a dialect's module by name at each of its types until it is loaded. Triton's module has
# another path, and the kernels of a step have four thousand of its types: a second of failing searches. Without
# `tt_dialect` (another JAX version) tracing is only slower.
if (dialect := getattr(triton_lowering, "tt_dialect", None)) is not None:
    sys.modules.setdefault("jaxlib.mlir.dialects.tt", dialect)

FLT_MAX = float(np.finfo(np.float32).max)
inline_ptx_p = core.Primitive("inline_ptx")
inline_ptx_p.multiple_results = True


@dataclasses.dataclass(frozen=True)
class PtxRegister:
    """One PTX register: kind `r` holds 32 bits, `f` a float32."""

    name: str
    kind: str


def ptx_instruction(code: str, kinds: str) -> Callable[..., PtxRegister]:
    """Returns a method of `PtxLaneOps` that emits one instruction (`PtxLaneOps._op`)."""
    return lambda self, *args: self._op(code, kinds, *args)


class PtxLaneOps:
    """Emits PTX. Operands are registers, Python ints (bits) or Python floats (float32 constants)."""

    def __init__(self, columns: int, lanes: int | None = None):
        self.columns = columns
        self.lanes = lanes or 16 // columns  # per block
        self.lines: list[str] = []
        self.count = {"r": 0, "f": 0, "h": 0, "p": 0}

    def reg(self, kind: str) -> PtxRegister:
        self.count[kind] += 1
        return PtxRegister(f"{kind}{self.count[kind] - 1}", kind)

    def _text(self, x, kind):
        if isinstance(x, PtxRegister):
            return self.as_u32(x).name if kind == "r" else self.as_f32(x).name
        if kind == "f":
            return f"0f{int(np.float32(x).view(np.uint32)):08X}"
        return f"0x{int(x) & 0xFFFFFFFF:08x}"

    def _op(self, code: str, kinds: str, *args) -> PtxRegister:
        """Emits one instruction; `kinds` are the register kinds of the result and of each operand."""
        texts = [self._text(a, k) for a, k in zip(args, kinds[1:], strict=True)]
        out = self.reg(kinds[0])
        self.lines.append(f"{code} {', '.join([out.name, *texts])};")
        return out

    def as_u32(self, x):
        return x if x.kind == "r" else self._move(x, "r")

    def as_f32(self, x):
        return x if x.kind == "f" else self._move(x, "f")

    def word(self, value: int) -> PtxRegister:
        """Returns a register that holds constant bits, for instructions that take no immediate."""
        out = self.reg("r")
        self.lines.append(f"mov.b32 {out.name}, 0x{value:08x};")
        return out

    def _move(self, x, kind):
        out = self.reg(kind)
        self.lines.append(f"mov.b32 {out.name}, {x.name};")
        return out

    # integers
    and_ = ptx_instruction("and.b32", "rrr")
    or_ = ptx_instruction("or.b32", "rrr")
    xor = ptx_instruction("xor.b32", "rrr")
    shl = ptx_instruction("shl.b32", "rrr")
    shr = ptx_instruction("shr.b32", "rrr")
    iadd = ptx_instruction("add.u32", "rrr")
    imad = ptx_instruction("mad.lo.u32", "rrrr")

    def less(self, a, b):
        """Returns a < b, unsigned."""
        return self._compare("u32", "r", a, b)

    def fless(self, a, b):
        """Returns a < b, float32; false if either is NaN."""
        return self._compare("f32", "f", a, b)

    def _compare(self, dtype, kind, a, b):
        texts, out = [self._text(x, kind) for x in (a, b)], self.reg("p")
        self.lines.append(f"setp.lt.{dtype} {out.name}, {texts[0]}, {texts[1]};")
        return out

    def select_if(self, p, a, b):
        """Returns a where p is true, else b."""
        return self.select(p, a, b)

    # selects four bytes out of eight (a is 0..3, b is 4..7): nibble i of `selector` is the source of byte i
    prmt = ptx_instruction("prmt.b32", "rrrr")
    max_u16x2 = ptx_instruction("max.u16x2", "rrr")

    def min_u16x2(self, a, b):
        return self._op("min.u16x2", "rrr", a, self.word(b) if isinstance(b, int) else b)

    # the larger magnitudes of two bf16 pairs, NaN if either is; the sign bits of the result are arbitrary
    max_abs_bf16x2 = ptx_instruction("max.NaN.xorsign.abs.bf16x2", "rrr")

    def bit_select(self, a, b, mask):
        """Returns the bits of a where `mask` has ones, of b elsewhere."""
        return self._op("lop3.b32", "rrrrr", a, b, mask, 0xE4)  # truth table of (a & mask) | (b & ~mask)

    def with_sign(self, magnitude, sign):
        """Returns both halves of `magnitude` with the sign bits of `sign`."""
        return self.bit_select(magnitude, sign, 0x7FFF7FFF)

    # float32
    fmul = ptx_instruction("mul.rn.f32", "fff")
    fadd = ptx_instruction("add.rn.f32", "fff")
    fsub = ptx_instruction("sub.rn.f32", "fff")
    # a * b + c rounded once. Bodies use it only where a * b is exact, so that NumPy's two roundings agree
    ffma = ptx_instruction("fma.rn.f32", "ffff")
    # a * b + c rounded once, toward zero; for a >= 0 and powers of two b and c
    ffma_rz = ptx_instruction("fma.rz.f32", "ffff")
    fabs = ptx_instruction("abs.f32", "ff")
    fmin = ptx_instruction("min.f32", "fff")
    fmax = ptx_instruction("max.f32", "fff")
    # the larger one; NaN if either is
    fmax_nan = ptx_instruction("max.NaN.f32", "fff")

    sqrt = ptx_instruction("sqrt.rn.f32", "ff")
    fdiv = ptx_instruction("div.rn.f32", "fff")
    u32_to_f32 = ptx_instruction("cvt.rn.f32.u32", "fr")  # of an unsigned word

    def reciprocal(self, a):
        """Returns 1 / a, correctly rounded, for 0 <= a < 2**126; NaN for 0.

        The steps of `rcp.rn`, which branches away for subnormal numbers and so cuts a kernel into pieces that ptxas
        schedules one by one. Here subnormal numbers are scaled, and no lane branches.
        """
        is_subnormal, lift = self.reg("p"), self.reg("f")
        self.lines.append(f"setp.lt.f32 {is_subnormal.name}, {self._text(a, 'f')}, {self._text(2.0**-126, 'f')};")
        self.lines.append(
            f"selp.f32 {lift.name}, {self._text(2.0**24, 'f')}, {self._text(1.0, 'f')}, {is_subnormal.name};"
        )
        scaled = self.fmul(a, lift)
        estimate = self._op("rcp.approx.ftz.f32", "ff", scaled)
        error = self._op("neg.f32", "ff", self.ffma(scaled, estimate, -1.0))
        return self.fmul(self.ffma(estimate, error, estimate), lift)

    def div_by_pow2_multiple(self, a, number):
        """Returns a / number, correctly rounded, for finite a >= 0 and a number that is 6 * 2**n; NaN for infinity.

        Markstein's steps. The float32 reciprocal of such a number has half of the largest possible error, so that the
        estimate is a neighbour of the quotient. Exact ties, which only subnormal quotients have, may not go to even.
        """
        inverse = float(np.float32(1 / number))
        estimate = self.fmul(a, inverse)
        return self.ffma(self.ffma(estimate, -number, a), inverse, estimate)

    def prepare_divisor(self, b):
        """Returns b, 0 <= b < 2**127, as `div_prepared` takes it: (lift, -b * lift, 1 / (b * lift)).

        lift is the power of two with b * lift in [1, 2), or less for a subnormal b.
        """
        lift = self.as_f32(self.imad(self.and_(b, 0x7F800000), -1, 0x7F000000))
        scaled = self.fmul(b, lift)
        inverse = self.select_if(self.fless(0.0, scaled), self.reciprocal(scaled), 0)
        return lift, self.fmul(scaled, -1.0), self.as_f32(inverse)

    def div_prepared(self, a, divisor):
        """Returns a / b, correctly rounded if in [2**-60, 2**60]; small if it is smaller.

        0 for b = 0 and a < 2; NaN for an infinite a. The steps of `div.rn` without its branch (Markstein): the first
        estimate is at most two units off, the second is a neighbour of the quotient, and the exact remainder corrects
        it to the quotient.
        """
        lift, minus_b, inverse = divisor
        a = self.fmul(a, lift)
        estimate = self.fmul(a, inverse)
        for _ in range(2):
            estimate = self.ffma(self.ffma(estimate, minus_b, a), inverse, estimate)
        return estimate

    def sigmoid(self, a):
        """Returns 1 / (1 + exp(-a)) to a few units in the last place."""
        e = self._op("ex2.approx.ftz.f32", "ff", self.fmul(a, -1.4426950408889634))  # -log2(e)
        return self._op("rcp.approx.ftz.f32", "ff", self.fadd(e, 1.0))

    def round_grid(self, y, e):
        """Rounds y to the nearest multiple of e / 2, ties to even, for a power of two e and abs(y) < 2**20 e.

        6291456 = 1.5 * 2**22: one unit in the last place of 6291456 e is e / 2.
        """
        return self.ffma(e, -6291456.0, self.ffma(e, 6291456.0, y))

    def floor_grid(self, y, e):
        """Rounds y >= 0 down to a multiple of e / 2, as `round_grid`."""
        return self.ffma(e, -6291456.0, self._op("fma.rz.f32", "ffff", e, 6291456.0, y))

    # bf16 pairs in a word
    def low_bf16(self, w):
        return self.as_f32(self.shl(w, 16))

    def high_bf16(self, w):
        return self.as_f32(self.and_(w, 0xFFFF0000))

    def pack_exact(self, lo, hi):
        """Packs two float32 that are bf16 values into one word."""
        return self.prmt(lo, hi, 0x7632)

    def pack_round(self, lo, hi):
        """Packs two float32 into one word of bf16, rounded to nearest even."""
        return self._op("cvt.rn.bf16x2.f32", "rff", hi, lo)

    def pack_f16_rz(self, lo, hi):
        """Packs two float32 >= 0 into one word of float16, truncated; a value beyond its range is at least 65504."""
        return self._op("cvt.rz.f16x2.f32", "rff", hi, lo)

    def mul_bf16x2(self, a, b):
        return self._op("mul.rn.bf16x2", "rrr", a, self.word(b) if isinstance(b, int) else b)

    def clamp_e2m1_max(self, p):
        """Returns min(abs(p), 6) with the sign of p, in both halves; 6 for NaN."""
        return self._op("min.xorsign.abs.bf16x2", "rrr", p, self.word(0x40C040C0))  # bf16 6.0, twice

    def grid_codes(self, p):
        """Returns the E2M1 magnitude codes 0..7 of two grid values, one in each half."""
        scaled = self.mul_bf16x2(
            p, 0x00800080
        )  # times 2**-126: 1.0 is the smallest normal, so bits 6 to 8 are the code
        return self.and_(self.shr(scaled, 6), 0x00070007)

    def grid_nibbles(self, p):
        """Returns the codes of `grid_codes` in bits 12 to 14 of each half; a negative p may set other bits."""
        return self.shl(self.mul_bf16x2(p, 0x00800080), 6)

    def grid_values(self, codes, bit=0):
        """Inverse of `grid_codes`, for codes that begin at bit 0 or 9 of each half; all other bits are ignored."""
        exponents = self.shl(codes, 6 - bit) if bit < 6 else self.shr(codes, bit - 6)
        return self.mul_bf16x2(self.and_(exponents, 0x01C001C0), 0x7E807E80)

    # E4M3
    def e4m3_encode(self, lo, hi):
        """Returns the E4M3 codes of two float32 >= 0 in the two low bytes; nearest even, saturating at 448."""
        texts = [self._text(hi, "f"), self._text(lo, "f")]
        half, out = self.reg("h"), self.reg("r")
        self.lines.append(f"cvt.rn.satfinite.e4m3x2.f32 {half.name}, {texts[0]}, {texts[1]};")
        self.lines.append(f"cvt.u32.u16 {out.name}, {half.name};")
        return out

    def f8_word(self, values, element: str):
        """Packs four float32 as E4M3 or E5M2 bytes, the first lowest; nearest even, saturating, signed."""
        texts = [self._text(v, "f") for v in values]
        halves, out = [self.reg("h"), self.reg("h")], self.reg("r")
        for half, (lo, hi) in zip(halves, (texts[:2], texts[2:]), strict=True):
            self.lines.append(f"cvt.rn.satfinite.{element}x2.f32 {half.name}, {hi}, {lo};")
        self.lines.append(f"mov.b32 {out.name}, {{{halves[0].name}, {halves[1].name}}};")
        return out

    def e4m3_decode(self, codes):
        """Returns the two float32 values of a pair of E4M3 codes."""
        text = self._text(codes, "r")
        half, lo, hi, word = self.reg("h"), self.reg("h"), self.reg("h"), self.reg("r")
        self.lines.append(f"cvt.u16.u32 {half.name}, {text};")
        self.lines.append(f"cvt.rn.f16x2.e4m3x2 {word.name}, {half.name};")
        self.lines.append(f"mov.b32 {{{lo.name}, {hi.name}}}, {word.name};")
        values = self.reg("f"), self.reg("f")
        for value, source in zip(values, (lo, hi), strict=True):
            self.lines.append(f"cvt.f32.f16 {value.name}, {source.name};")
        return values

    # shuffles between the lanes of one block
    def lane_bit(self, bit):
        """Returns the predicate that this lane's index has `bit` set."""
        lane, masked, out = self.reg("r"), self.reg("r"), self.reg("p")
        self.lines.append(f"mov.u32 {lane.name}, %laneid;")
        self.lines.append(f"and.b32 {masked.name}, {lane.name}, {bit};")
        self.lines.append(f"setp.ne.u32 {out.name}, {masked.name}, 0;")
        return out

    def select(self, predicate, a, b):
        out, texts = self.reg("r"), (self._text(a, "r"), self._text(b, "r"))
        self.lines.append(f"selp.b32 {out.name}, {texts[0]}, {texts[1]}, {predicate.name};")
        return out

    def shuffle_xor(self, x, bit):
        """Returns the value of the lane whose index differs in `bit`."""
        return self._op("shfl.sync.bfly.b32", "rrrrr", x, bit, 31, 0xFFFFFFFF)

    def shuffle_index(self, x, lane):
        """Returns the value of lane `lane` of this block's lanes."""
        segment = ((32 - self.lanes) << 8) | 31
        return self._op("shfl.sync.idx.b32", "rrrrr", x, lane, segment, 0xFFFFFFFF)


def inline_ptx(
    asm: str, args: Sequence[jax.Array], *, constraints: str, pack: int, results: Sequence[jax.ShapeDtypeStruct]
) -> list[jax.Array]:
    """Returns the results of `asm`, run once per `pack` neighbouring elements of a lane.

    JAX's own `elementwise_inline_asm` takes a list of result types but lowers only one result: the dialect returns all
    of them in one list, which the rule wraps in another. This primitive lowers through the same rule and flattens it.
    """
    return inline_ptx_p.bind(*args, asm=asm, constraints=constraints, pack=pack, result_shape_dtypes=tuple(results))


@inline_ptx_p.def_abstract_eval
def _abstract_eval(*avals: Any, result_shape_dtypes: tuple[jax.ShapeDtypeStruct, ...], **_: Any) -> list[Any]:
    shapes = {aval.shape for aval in avals}
    if len(shapes) != 1:
        raise ValueError(f"inline PTX needs operands of one shape, got {sorted(shapes)}")
    return [avals[0].update(shape=s.shape, dtype=s.dtype) for s in result_shape_dtypes]


@triton_lowering.register_lowering(inline_ptx_p)
def _lower(ctx: Any, *args: Any, **params: Any) -> list[Any]:
    rule = triton_lowering.triton_lowering_rules[triton_primitives.elementwise_inline_asm_p]
    results: Any = rule(ctx, *args, **params)
    flat: list[Any] = []
    for result in results:
        flat += list(result) if hasattr(result, "__len__") else [result]
    return flat
