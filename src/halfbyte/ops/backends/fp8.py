"""`fp8`: real 8-bit GEMMs in all three directions, and no transpose between them.

A GPU's 8-bit GEMM wants the contraction last on both sides: x and W^T for fprop, dy and W for dgrad, x^T and dy^T for
wgrad. With one scale a tensor the codes of a tensor and of its transpose are the same numbers, so each pass reads a
tensor once for its maximum and once to write its codes in the orders that are asked, with SwiGLU inside
(`ops.kernels.f8`).

XLA has an 8-bit GEMM that takes both decode scales as float32 device scalars, applies them to its float32 sums and
rounds once. It only writes it for products of dequantized bfloat16 operands, and only if its Triton GEMMs are off:
otherwise the same lines would round the scales. `one_call` is for programs that are compiled with `COMPILER_OPTIONS`
and then read with `stray_gemms`: the trainer's. Elsewhere the sums come back as float32 and a second pass multiplies.
"""

import contextlib
import dataclasses
import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from halfbyte.formats import FP8, FP8_E5M2, BlockFormat
from halfbyte.ops import kernels
from halfbyte.ops.backends.gemm import Contraction, alpha, dot, f8_matrix, finish
from halfbyte.ops.kernels import f8
from halfbyte.ops.operand import Operand
from halfbyte.ops.passes import Ask, XlaPasses
from halfbyte.ops.problem import Problem
from halfbyte.recipe import ROLES, OperandPolicy, Recipe

NAME = "fp8"
ELEMENTS = {FP8: "e4m3", FP8_E5M2: "e5m2"}
COMPILER_OPTIONS = {"xla_gpu_enable_triton_gemm": False, "xla_allow_excess_precision": True}
SCOPE = "f8_call"  # the name that GEMMs with scales carry in a compiled program
LAST: Contraction = ((1,), (1,))
_one_call = jax.make_user_context(False)  # JAX traces a function anew where it differs


def unsupported(problem: Problem) -> str | None:
    """Needs one NVIDIA GPU with 8-bit units, bfloat16 activations, FP8 on both sides of every GEMM, and sizes that the
    kernels' tiles divide.
    """
    reason = problem.without_kernels()
    if reason is not None:
        return reason
    if not serves(problem.recipe):
        return f"recipe {problem.recipe.name} is not FP8 with one scale a tensor on both sides of every GEMM"
    for rows, columns in (
        (problem.tokens, problem.inputs),
        (problem.tokens, problem.outputs),
        (problem.inputs, problem.outputs),
    ):
        for kernel in (kernels.unsupported, f8.unsupported):
            reason = kernel(rows, columns, capability=problem.device.capability)
            if reason is not None:
                return reason
    return None


def serves(recipe: Recipe) -> bool:
    """Whether all six operands are FP8 as it lies: one scale, no transform, nearest rounding."""
    return all(_plain(getattr(recipe, role)) for role in ROLES)


def _plain(policy: OperandPolicy) -> bool:
    return policy.format in ELEMENTS and not (policy.hadamard or policy.stochastic)


def one_call() -> contextlib.AbstractContextManager[None]:
    """What is traced inside will be compiled with `COMPILER_OPTIONS`, so its GEMMs may take the scales themselves.

    A function that was traced outside is traced again inside, and the other way round: neither gets the other's GEMMs.
    """
    context: contextlib.AbstractContextManager[None] = _one_call(True)
    return context


def stray_gemms(program: str) -> list[str]:
    """Lines of a compiled program where a GEMM that was given its scales is something else than an 8-bit call, or where
    such a scale is rounded.
    """
    other = re.compile(
        r'custom_call_target="__cublas\$(?!lt\$matmul\$f8)|"kind":"__(?:triton\w*gemm|cudnn|custom)|(?<!%)\bdot\('
    )
    rounded = re.compile(r"= bf16\[1?\]\S* convert\(")
    lines = [line for line in program.splitlines() if SCOPE in line]
    return [line.strip() for line in lines if other.search(line) or rounded.search(line)]


def gemm(left: Operand, right: Operand, axes: Contraction, dtype: jnp.dtype) -> jax.Array:
    """Exact products, the factors on their sums, one rounding to `dtype`.

    Hopper's 8-bit units keep about 14 bits of a running sum. fprop takes them as they are; the gradients' sums are
    split and added up in float32, an eighth slower: the choice of Transformer Engine.
    """
    precision = None if _is_fprop(axes) else lax.Precision.HIGHEST
    (a, a_free), (b, b_free) = (_matrix(o, summed) for o, summed in zip((left, right), axes, strict=True))
    if _one_call.value and left.decode_scale is not None and right.decode_scale is not None:
        y = _scaled_dot(a, b, left.decode_scale, right.decode_scale, precision, dtype)
    else:
        y = finish(dot(a, b, LAST, precision=precision), alpha(left, right), dtype)
    return y.reshape(*a_free, *b_free)


@jax.named_scope(SCOPE)
def _scaled_dot(
    a: jax.Array, b: jax.Array, s: jax.Array, t: jax.Array, precision: lax.Precision | None, dtype: jnp.dtype
) -> jax.Array:
    """(a * s) . (b * t) in the words of XLA's rewriter, which makes one call of it and hands it s and t as float32."""
    s, t = lax.optimization_barrier((s, t))  # bare scalars: then the casts to bfloat16 cancel
    left, right = (codes.astype(jnp.bfloat16) * scale.astype(jnp.bfloat16) for codes, scale in ((a, s), (b, t)))
    y = lax.dot_general(left, right, (LAST, ((), ())), precision=precision, preferred_element_type=dtype)
    return lax.optimization_barrier(y)  # a reader in float32 would otherwise get sums that were never rounded


def _is_fprop(axes: Contraction) -> bool:
    """x over its last axis with W over its first; dgrad sums over W's last, wgrad over the first axes of both."""
    return 0 not in axes[0] and 0 in axes[1]


def _matrix(operand: Operand, summed: tuple[int, ...]) -> tuple[jax.Array, tuple[int, ...]]:
    """(the codes as float8 [rows, contraction], the shape of the rows)."""
    if operand.quantized is not None:
        tensor = operand.codes()
        return f8_matrix(tensor, summed), tuple(n for i, n in enumerate(tensor.shape) if i not in summed)
    turned = 0 in summed
    if turned and operand.turned is not None:
        return operand.turned, operand.turned.shape[:1]
    codes = operand.values()
    if turned:  # only one order was kept
        return codes.reshape(-1, codes.shape[-1]).T, codes.shape[-1:]
    return codes.reshape(-1, codes.shape[-1]), codes.shape[:-1]


@dataclasses.dataclass(frozen=True)
class F8Passes(XlaPasses):
    """The passes as kernels. `interpret` runs them on any machine, slowly, for tests.

    A row to be kept is the operand of wgrad too, so it comes in both orders.
    """

    interpret: bool = False

    def quantize(self, x: jax.Array, asks: Sequence[Ask]) -> list[Operand]:
        if not _one_tensor(asks):
            return super().quantize(x, asks)
        flat = x.reshape(-1, x.shape[-1])
        top = kernels.maxima(flat, hadamard=False, interpret=self.interpret)[0]
        scale, factor = self._scale(top, asks[0].policy.format)
        made = f8.cast(flat, scale, interpret=self.interpret, **_orders(asks))
        return _operands(made, asks, factor, x.shape)

    def swiglu(self, g: jax.Array, u: jax.Array, asks: Sequence[Ask]) -> list[Operand]:
        if not _one_tensor(asks):
            return super().swiglu(g, u, asks)
        flat = [t.reshape(-1, t.shape[-1]) for t in (g, u)]
        top = kernels.forward_maxima(*flat, hadamard=False, interpret=self.interpret)[0]
        scale, factor = self._scale(top, asks[0].policy.format)
        made = f8.cast_forward(flat[0], flat[1], scale, interpret=self.interpret, **_orders(asks))
        return _operands(made, asks, factor, g.shape)

    def swiglu_backward(self, g, u, dh, dg_asks, du_asks, h_asks):
        gradients = {a.policy.format for a in (*dg_asks, *du_asks)}
        pairs = all([a.axis for a in asks] == [-1, -2] for asks in (dg_asks, du_asks))
        if len(gradients) > 1 or not pairs or [a.axis for a in h_asks] != [-2]:
            return super().swiglu_backward(g, u, dh, dg_asks, du_asks, h_asks)
        flat = [t.reshape(-1, t.shape[-1]) for t in (g, u, dh)]
        tops = kernels.backward_maxima(*flat, hadamard=False, tensors=3, interpret=self.interpret)
        formats = (dg_asks[0].policy.format, du_asks[0].policy.format, h_asks[0].policy.format)
        scales, factors = zip(*(self._scale(top, fmt) for top, fmt in zip(tops, formats, strict=True)), strict=True)
        made = f8.cast_backward(
            flat[0],
            flat[1],
            flat[2],
            scales,
            gradient=ELEMENTS[formats[0]],
            element=ELEMENTS[formats[2]],
            interpret=self.interpret,
        )
        return (
            _operands(made[:2], dg_asks, factors[0], g.shape),
            _operands(made[2:4], du_asks, factors[1], g.shape),
            _operands(made[4:], h_asks, factors[2], g.shape),
        )

    def weight(self, w: jax.Array, policy: OperandPolicy, *, axis: int, key: jax.Array | None):
        """Both orders: W^T is what fprop reads, W what dgrad reads."""
        if not _plain(policy) or w.dtype != jnp.float32 or f8.unsupported(*w.shape) is not None:
            return super().weight(w, policy, axis=axis, key=key)
        scale, factor = self._scale(kernels.weight_maxima(w, interpret=self.interpret), policy.format)
        plain, turned = f8.cast(w, scale, element=ELEMENTS[policy.format], interpret=self.interpret)
        return Operand(plain, factor, None, policy, turned=turned)

    def _scale(self, maxima: jax.Array, fmt: BlockFormat) -> tuple[jax.Array, jax.Array]:
        return kernels.scale_and_factor(maxima, top=f8.TOPS[ELEMENTS[fmt]], interpret=self.interpret)


def _one_tensor(asks: Sequence[Ask]) -> bool:
    """Whether one cast answers: the same plain policy for all, each order at most once."""
    axes = [a.axis for a in asks]
    return len({a.policy for a in asks}) == 1 and _plain(asks[0].policy) and len(set(axes)) == len(axes)


def _orders(asks: Sequence[Ask]) -> dict:
    return {
        "element": ELEMENTS[asks[0].policy.format],
        "plain": any(a.axis == -1 for a in asks),
        "turned": any(a.axis == -2 or a.kept for a in asks),
    }


def _operands(
    made: Sequence[jax.Array], asks: Sequence[Ask], factor: jax.Array, shape: tuple[int, ...]
) -> list[Operand]:
    """What a cast wrote, plain codes first, as operands in the order asked."""
    codes = list(made)
    plain = codes.pop(0).reshape(shape) if any(a.axis == -1 for a in asks) else None
    turned = codes[0] if codes else None
    lone = len(asks) == 1
    return [
        Operand(
            plain if a.axis == -1 else None,
            factor,
            None,
            a.policy,
            turned=turned if lone or a.axis == -2 else None,
        )
        for a in asks
    ]
