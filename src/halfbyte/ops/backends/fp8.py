"""`fp8`: real 8-bit GEMMs in all three directions, and no transpose between them.

A GPU's 8-bit GEMM wants the contraction last on both sides: x and W^T for fprop, dy and W for dgrad, x^T and dy^T for
wgrad. With one scale a tensor the codes of a tensor and of its transpose are the same numbers, so each pass reads a
tensor once for its maximum and once to write its codes in the orders that are requested, with SwiGLU inside
(`kernels.f8`).

XLA has an 8-bit GEMM that takes both decode scales as float32 device scalars, applies them to its float32 sums and
rounds once. It only writes it for products of dequantized bfloat16 operands, and only if its Triton GEMMs are off:
otherwise the same lines would round the scales. `one_call` is for programs that are compiled with `COMPILER_OPTIONS`
and then read with `stray_gemms`: the trainer's. Elsewhere the sums come back as float32 and a second pass multiplies.
"""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from halfbyte import kernels
from halfbyte.formats import FP8, FP8_E5M2, BlockFormat
from halfbyte.kernels import f8
from halfbyte.kernels.stacks import Layer
from halfbyte.ops.activation import SILU, Activation
from halfbyte.ops.backends.backend import Backend, strays_of
from halfbyte.ops.backends.carrier import f8_matrix, f8_precision
from halfbyte.ops.gemms import DGRAD, FPROP, WGRAD, Contraction, Gemm, alpha, dot, finish
from halfbyte.ops.operand import SCALES, EightBit, Operand, Quantized, name_saved
from halfbyte.ops.passes import COLUMNS, ROWS, GatedPasses, Made, Maxima, Request
from halfbyte.ops.problem import Problem
from halfbyte.ops.shards import whole_maxima
from halfbyte.recipe import ROLES, OperandPolicy, Recipe

ELEMENTS = {FP8: "e4m3", FP8_E5M2: "e5m2"}
COMPILER_OPTIONS = {"xla_gpu_enable_triton_gemm": False, "xla_allow_excess_precision": True}
SCOPE = "f8_call"  # the name that GEMMs with scales carry in a compiled program
LAST: Contraction = ((1,), (1,))
TRANSPOSED = {FPROP: (False, True), DGRAD: (False, False), WGRAD: (True, True)}  # the order that each side is read in
_one_call = jax.make_user_context(False)  # JAX traces a function anew where it differs


def foreign(recipe: Recipe) -> str | None:
    """Needs FP8 on all six sides, with one scale, no transform, nearest; one format for x and one for dy."""
    plain = all(_plain(getattr(recipe, role)) for role in ROLES)
    if plain and recipe.fprop_x == recipe.wgrad_x and recipe.dgrad_dy == recipe.wgrad_dy:
        return None
    return f"recipe {recipe.name} is not FP8 with one scale a tensor on both sides of every GEMM"


def _plain(policy: OperandPolicy) -> bool:
    return policy.format in ELEMENTS and policy == OperandPolicy(policy.format)


def unsupported(problem: Problem, gemm: Gemm) -> str | None:
    """What its passes can make it can multiply."""
    return None


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


def multiply(gemm: Gemm, left: Operand, right: Operand, dtype: jnp.dtype) -> jax.Array:
    """Exact products, the factors on their sums, one rounding to `dtype`."""
    precision = f8_precision(gemm)
    (a, a_free), (b, b_free) = (
        _matrix(o, transposed) for o, transposed in zip((left, right), TRANSPOSED[gemm], strict=True)
    )
    if _one_call.value and left.factor is not None and right.factor is not None:
        y = _scaled_dot(a, b, left.factor, right.factor, precision, dtype)
    else:
        y = finish(dot(a, b, LAST, precision=precision), alpha(left, right), dtype)
    return y.reshape(*a_free, *b_free)  # [rows, rows] -> [free dims of left, free dims of right]


@jax.named_scope(SCOPE)
def _scaled_dot(
    a: jax.Array, b: jax.Array, s: jax.Array, t: jax.Array, precision: lax.Precision | None, dtype: jnp.dtype
) -> jax.Array:
    """(a * s) . (b * t) in the words of XLA's rewriter, which makes one call of it and hands it s and t as float32."""
    s, t = lax.optimization_barrier((s, t))  # bare scalars: then the casts to bfloat16 cancel
    left, right = (codes.astype(jnp.bfloat16) * scale.astype(jnp.bfloat16) for codes, scale in ((a, s), (b, t)))
    y = lax.dot_general(left, right, (LAST, ((), ())), precision=precision, preferred_element_type=dtype)
    return lax.optimization_barrier(y)  # a reader in float32 would otherwise get sums that were never rounded


def _matrix(operand: Operand, transposed: bool) -> tuple[jax.Array, tuple[int, ...]]:
    """(the codes as float8 [rows, contraction], the shape of the rows)."""
    if isinstance(operand, Quantized):  # quantized ahead, by the definition
        tensor = operand.codes
        summed = tuple(range(len(tensor.shape) - 1)) if transposed else (len(tensor.shape) - 1,)
        return f8_matrix(tensor, summed), tuple(n for i, n in enumerate(tensor.shape) if i not in summed)
    assert isinstance(operand, EightBit), "an 8-bit GEMM reads 8-bit codes"
    if transposed and operand.transposed is not None:
        return operand.transposed, operand.transposed.shape[:1]
    codes = operand.values()
    flat = codes.reshape(-1, codes.shape[-1])  # [tokens..., features] -> [tokens, features]
    if transposed:  # only one order was kept
        return flat.T, codes.shape[-1:]
    return flat, codes.shape[:-1]


@dataclasses.dataclass(frozen=True)
class F8Passes(GatedPasses):
    """The passes as kernels."""

    name = "fp8"
    keeps_in_stacks = True
    reads_stacks = True
    batches_weights = True

    def unsupported(self, problem: Problem) -> str | None:
        """Needs one NVIDIA GPU with 8-bit units, bfloat16 activations, and sizes that the kernels' tiles divide."""
        reason = problem.without_kernels()
        if reason is None and problem.recipe.history:
            reason = "its kernels scale by a tensor's own maximum, not by a history of them"
        if reason is not None:
            return reason
        pairs = ((problem.tokens, problem.inputs), (problem.tokens, problem.outputs), (problem.inputs, problem.outputs))
        for rows, columns in pairs:
            for kernel in (kernels.unsupported, f8.unsupported):
                reason = kernel(rows, columns, capability=problem.device.capability)
                if reason is not None:
                    return reason
        return None

    def weight_unsupported(self, problem: Problem, policy: OperandPolicy) -> str | None:
        known, given = kernels.WEIGHTS, problem.weight_dtype
        return None if given in known else f"its kernels read {' or '.join(known)}, got {given}"

    def unfused(self, activation: Activation, recipes: Sequence[Recipe]) -> str | None:
        if activation != SILU:
            return f"its kernels compute {SILU.name}, not {activation.name}"
        gate, up, _ = recipes
        return None if gate.dgrad_dy == up.dgrad_dy else "its kernels cast the gradients of gate and up alike"

    def maxima(self, x: jax.Array, requests: Sequence[Request]) -> Maxima:
        flat = x.reshape(-1, x.shape[-1])  # [tokens..., features] -> [tokens, features]
        return whole_maxima(kernels.maxima(flat, hadamard=False), requests[0].cut)

    def quantize_by(self, x: jax.Array, requests: Sequence[Request], maxima: Maxima) -> list[Made]:
        assert maxima is not None, "one of x itself"
        flat, (top,) = x.reshape(-1, x.shape[-1]), maxima  # [tokens..., features] -> [tokens, features]
        made: dict[OperandPolicy, EightBit] = {}
        for policy in dict.fromkeys(r.policy for r in requests):
            scale, factor = self._scale(top, policy.format)
            orders = _orders([r for r in requests if r.policy == policy])
            codes = f8.cast(flat, scale, element=ELEMENTS[policy.format], **orders)
            made[policy] = _both(codes, orders, factor, policy, x.shape)
        return [_order(made[r.policy], r) for r in requests]

    def activate_into(self, g, u, requests, into):
        g2, u2, *places = (t.reshape(-1, t.shape[-1]) for t in (g, u, *into))  # [tokens..., features] -> a matrix
        found, *stacks = kernels.forward_maxima(g2, u2, hadamard=False, into=places)
        (top,) = whole_maxima([found], requests[0].cut)
        policy, orders = requests[0].policy, _orders(requests)
        scale, factor = self._scale(top, policy.format)
        codes = f8.cast_forward(g2, u2, scale, element=ELEMENTS[policy.format], **orders)
        made = _both(codes, orders, factor, policy, g.shape)
        kept = tuple(made.reshape(layer.stack.shape) for made, layer in zip(stacks, into, strict=True))
        return [_order(made, r) for r in requests], kept

    def activate_backward(self, g, u, dh, dg, du, h):
        g2, u2, dh2 = (t.reshape(-1, t.shape[-1]) for t in (g, u, dh))  # [tokens..., features] -> [tokens, features]
        found = kernels.backward_maxima(g2, u2, dh2, hadamard=False, tensors=3)
        tops = whole_maxima(found, dg[0].cut)
        policies = [requests[0].policy for requests in (dg, du, h)]
        scales, factors = zip(*self._scales(tops, [p.format for p in policies]), strict=True)
        elements = [ELEMENTS[p.format] for p in policies]
        made = f8.cast_backward(  # dg, dg^T, du, du^T, h^T
            g2, u2, dh2, scales, gradient=elements[0], element=elements[2]
        )
        pairs = [EightBit(made[2 * i].reshape(g.shape), made[2 * i + 1], factors[i], policies[i]) for i in (0, 1)]
        pairs.append(EightBit(None, made[4], factors[2], policies[2]))
        return tuple([_order(m, r) for r in requests] for m, requests in zip(pairs, (dg, du, h), strict=True))

    def weight(self, w: jax.Array | Layer, wanted: Request, *, packed: bool = True) -> EightBit:
        """Both orders: W^T is what fprop reads, W what dgrad reads."""
        (top,), policy = whole_maxima([kernels.weight_maxima(w)], wanted.cut), wanted.policy
        scale, factor = self._scale(top, policy.format)
        plain, transposed = f8.cast(w, scale, element=ELEMENTS[policy.format])
        return EightBit(plain, transposed, factor, policy)

    def _scale(self, maxima: jax.Array, fmt: BlockFormat) -> tuple[jax.Array, jax.Array]:
        return self._scales([maxima], [fmt])[0]

    def _scales(self, maxima: Sequence[jax.Array], formats: Sequence[BlockFormat]) -> list[tuple[jax.Array, jax.Array]]:
        tops = tuple(f8.TOPS[ELEMENTS[fmt]] for fmt in formats)
        return name_saved(kernels.scales_and_factors(*maxima, tops=tops), SCALES)


def _orders(requests: Sequence[Request]) -> dict[str, Any]:
    axes = {r.axis for r in requests}
    return {"plain": ROWS in axes, "turned": COLUMNS in axes}


def _both(
    codes: Sequence[jax.Array], orders: dict[str, Any], factor: jax.Array, policy: OperandPolicy, shape: tuple
) -> EightBit:
    """What a cast wrote, plain codes first."""
    rows = codes[0].reshape(shape) if orders["plain"] else None
    return EightBit(rows, codes[-1] if orders["turned"] else None, factor, policy)


def _order(made: EightBit, wanted: Request) -> EightBit:
    """The one order that is requested."""
    if wanted.axis == COLUMNS:
        return dataclasses.replace(made, rows=None)
    return dataclasses.replace(made, transposed=None)


BACKEND = Backend(
    "fp8",
    unsupported,
    multiply,
    (F8Passes(),),
    foreign=foreign,
    compiler_options=COMPILER_OPTIONS,
    tracing=one_call,
    strays=functools.partial(strays_of, SCOPE, stray_gemms),
)
