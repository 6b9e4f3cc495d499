"""`fused`: the quantize passes as GPU kernels of our own, and bfloat16 GEMMs over their carriers.

On a Hopper GPU the GEMMs of `carrier` already run at the speed of bfloat16; what an emulated step owes on top are the
passes that quantize. Here each tensor is read once for its maxima and once for all the operands requested of it, with
the Hadamard transform, the random bits and SwiGLU inside (`kernels`). The operands are those of the definition, bit
for bit; for SwiGLU that holds on the numbers that the kernels compute with the GPU's own exp.

An operand whose source is the forward one is made of that one's carrier, in two further reads: kernels multiply it by
the tensor's decode scale, which gives the numbers of `QTensor.dequantize`. Under MS-EDEN it is made of the tensor
itself (`kernels/eden.py`), and is a pass of its own, like every operand that is transformed in runs of 128.

The GEMM kernel multiplies its float32 accumulator by the factors before it rounds; XLA would write the float32 sums to
memory and read them again. A GEMM whose sizes its tiles do not divide is `carrier`'s, over the same operands.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from halfbyte import kernels
from halfbyte.formats import Packed
from halfbyte.formats.hadamard import fresh_signs
from halfbyte.kernels import Columnwise, Rowwise, Window, eden, top_of
from halfbyte.kernels.layout import BLOCK
from halfbyte.kernels.matmul import unsupported as gemm_unsupported
from halfbyte.kernels.scale import AMAX, DECODE, GEMM, SIZE
from halfbyte.kernels.stacks import Layer
from halfbyte.ops.activation import SILU, Activation
from halfbyte.ops.backends.backend import Backend
from halfbyte.ops.backends.served import FORMATS, WEIGHT, WEIGHTS, apart, foreign, in_runs, rule_of, scaling
from halfbyte.ops.gemms import DGRAD, FPROP, WGRAD, Gemm, result_shape
from halfbyte.ops.operand import (
    SCALES,
    Carrier,
    Kept,
    Operand,
    Owed,
    WeightScales,
    check_keys,
    gemm_factor,
    key_pair,
    name_saved,
)
from halfbyte.ops.passes import ROWS, GatedPasses, KeptWeight, Made, Maxima, QuantizedWeight, Read, Request
from halfbyte.ops.problem import Problem
from halfbyte.ops.shards import axes_of, offsets, whole_maxima, whole_shape
from halfbyte.recipe import OperandPolicy, Recipe

LAYOUTS = {FPROP: "nn", DGRAD: "nt", WGRAD: "tn"}  # as the GEMM kernel names them


def unsupported(problem: Problem, gemm: Gemm) -> str | None:
    """Why the GEMM kernel cannot multiply, or None."""
    m, n, k = problem.sizes(gemm)
    dtype = problem.weight_dtype if gemm is WGRAD else problem.dtype
    return gemm_unsupported(
        m, n, k, layout=LAYOUTS[gemm], out_dtype=jnp.dtype(dtype), capability=problem.device.capability
    )


def multiply(gemm: Gemm, left: Operand, right: Operand, dtype: jnp.dtype) -> jax.Array:
    """Exact products, float32 sums, the operands' factors, one rounding to `dtype`."""
    a, b = left.values(), right.values()
    x, w = (t.reshape(-1, t.shape[-1]).astype(jnp.bfloat16) for t in (a, b))  # [tokens..., features] -> a matrix
    y = kernels.matmul(x, w, _factors(left), _factors(right), layout=LAYOUTS[gemm], out_dtype=dtype)
    return y.reshape(result_shape(a.shape, b.shape, gemm.axes(a.ndim)))


def _factors(operand: Operand) -> jax.Array:
    """The scale vector as the GEMM kernel reads it, also for operands of other passes: weights made once a step."""
    vector = getattr(operand, "vector", None)
    if vector is not None:
        return vector
    return jnp.full((SIZE,), jnp.float32(1) if operand.factor is None else operand.factor)


@dataclasses.dataclass(frozen=True)
class FusedPasses(GatedPasses):
    """The passes as kernels."""

    name = "fused"
    keeps_in_stacks = True
    reads_stacks = True
    packs_weights = False  # also those that do not travel

    def unsupported(self, problem: Problem) -> str | None:
        """Needs one Hopper or newer NVIDIA GPU, bfloat16 tensors, and sizes that the kernels' tiles divide."""
        reason = problem.without_kernels()
        for columns in (problem.inputs, problem.outputs):
            reason = reason or kernels.unsupported(problem.tokens, columns, capability=problem.device.capability)
        return reason

    def weight_unsupported(self, problem: Problem, policy: OperandPolicy) -> str | None:
        if policy not in WEIGHTS:
            return f"its kernels make nvfp4 2d rne, or 1d of {', '.join(fmt.name for fmt in FORMATS)}; this is {policy}"
        if policy != WEIGHT and (problem.gathered or self.packs_weights):
            return f"its kernels pack weights in square tiles, this is {policy}"
        if problem.weight_dtype not in kernels.WEIGHTS:
            return f"its kernel reads {' or '.join(kernels.WEIGHTS)} weights, got {problem.weight_dtype}"
        return kernels.unsupported(*problem.weight_part)

    def unfused(self, activation: Activation, recipes: Sequence[Recipe]) -> str | None:
        if activation != SILU:
            return f"its kernels compute {SILU.name}, not {activation.name}"
        gate, up, down = recipes
        if reason := apart(recipes):
            return reason
        if down.wgrad_x.source == "forward":
            return "its kernels make h's operands of h, not one of the other"
        transforms = {gate.wgrad_dy.hadamard, up.wgrad_dy.hadamard, down.wgrad_x.hadamard}
        return None if len(transforms) == 1 else "its kernels transform the columns of dg, du and h alike"

    def maxima(self, x: jax.Array, requests: Sequence[Request]) -> Maxima:
        """Of what is not transformed in runs."""
        beside = [r for r in requests if not in_runs(r.policy)]
        if not beside and all(r.forward is None for r in requests):
            return None
        flat = x.reshape(-1, x.shape[-1])  # [tokens..., features] -> [tokens, features]
        found = kernels.maxima(flat, hadamard=_transformed(_of_tensor(beside)))
        return _of_all(found, requests)

    def quantize_by(self, x: jax.Array, requests: Sequence[Request], maxima: Maxima) -> list[Made]:
        flat, tops = x.reshape(-1, x.shape[-1]), maxima or ()  # [tokens..., features] -> [tokens, features]
        beside = [r for r in requests if not in_runs(r.policy)]
        made = iter(self._made(functools.partial(kernels.quantize, flat), tops, beside, x.shape) if beside else ())

        def run(wanted: Request) -> Made:
            forward = None
            if wanted.axis != ROWS and x.shape[-2] % eden.POINTS:
                raise ValueError(
                    f"a Hadamard transform of {eden.POINTS} tokens does not divide the {x.shape[-2]} of a sequence "
                    "that this device has; take another mesh"
                )
            if wanted.forward is not None:
                policy = wanted.forward.policy
                scale = kernels.tensor_scale(tops[0], top=top_of(rule_of(policy)))
                forward = eden.Forward(scale, **scaling(policy))
            scale = _scale_of_runs(flat, wanted, forward)
            return self._operands(_runs(flat, wanted, scale, forward, x.shape), [wanted], [scale], x.shape)[0]

        return [run(r) if in_runs(r.policy) else next(made) for r in requests]

    def _made(self, run, tops: Sequence[jax.Array], requests: Sequence[Request], shape: tuple) -> list[Made]:
        """Of the tensor itself, and of forward operands that are made of it first, once each."""
        wanted = _of_tensor(requests)
        made = self._in_rounds(run, tops, wanted, shape)

        def answer(wish: Request) -> Made:
            return next(o for r, o in zip(wanted, made, strict=True) if r is wish or r.same(wish))

        return [answer(r) if r.forward is None else self._again(answer(r.forward), r) for r in requests]

    def _again(self, forward: Carrier, wanted: Request) -> Made:
        """The column of the numbers that a forward operand stands for."""
        shape, owed = forward.array.shape, _decode(forward)
        flat = forward.array.reshape(-1, shape[-1])  # [tokens..., features] -> [tokens, features]
        tops = _of_all(kernels.maxima(flat, owed=owed), [wanted])
        (_, column), scales = self._sides(tops, None, wanted, shape)
        made = kernels.quantize(flat, columns=dataclasses.replace(column, owed=owed))
        return self._operands(made, [wanted], scales, shape)[0]

    def activate_into(self, g, u, requests, into):
        flat, owed = _matrices(g, u)
        hadamard, places = _transformed(requests), [layer.reshape(-1, layer.shape[-1]) for layer in into]
        found = kernels.forward_maxima(*flat, owed=owed, hadamard=hadamard, into=places)
        tops, stacks = found[: len(found) - len(into)], found[len(found) - len(into) :]
        run = functools.partial(kernels.quantize_forward, *flat, owed=owed)
        made = self._in_rounds(run, _of_all(tops, requests), requests, g.shape)
        return made, tuple(s.reshape(layer.stack.shape) for s, layer in zip(stacks, into, strict=True))

    def _in_rounds(self, run, tops: Sequence[jax.Array], requests: Sequence[Request], shape: tuple) -> list[Made]:
        """A kernel makes one row and one column at most: linears that cannot share an operand take turns."""
        rows = [r for r in requests if r.axis == ROWS]
        columns = [r for r in requests if r.axis != ROWS]
        made: dict[int, Made] = {}
        for row, column in itertools.zip_longest(rows, columns):
            sides, scales = self._sides(tops, row, column, shape)
            wrote = run(rows=sides[0], columns=sides[1])
            wanted = [r for r in (row, column) if r is not None]
            for r, operand in zip(wanted, self._operands(wrote, wanted, scales, shape), strict=True):
                made[id(r)] = operand
        return [made[id(r)] for r in requests]

    def _sides(self, tops: Sequence[jax.Array], row: Request | None, column: Request | None, shape: tuple[int, ...]):
        """((row, column) as a kernel takes them, their scales), from the maxima of a tensor and of its transform."""
        wanted = [r for r in (row, column) if r is not None]
        own = [tops[-1 if r.policy.hadamard else 0] for r in wanted]
        scales = name_saved(kernels.tensor_scales(*own, tops=tuple(top_of(rule_of(r.policy)) for r in wanted)), SCALES)
        sides = (
            None if row is None else self._rowwise(row, scales[0], shape),
            None if column is None else self._columnwise(column, scales[-1], shape),
        )
        return sides, scales

    def activate_backward(self, g, u, dh, dg, du, h):
        flat, owed = _matrices(g, u, dh)
        found = kernels.backward_maxima(*flat, owed=owed, tensors=3, hadamard=_transformed(h))
        tops = _of_all(found, dg)
        each = len(tops) // 3
        (dg_sides, dg_scales), (du_sides, du_scales), (h_sides, h_scales) = (
            self._sides(tops[i * each : (i + 1) * each], *wanted, g.shape)
            for i, wanted in enumerate(((dg[0], dg[1]), (du[0], du[1]), (None, h[0])))
        )
        made = kernels.quantize_backward(*flat, owed=owed, dg=dg_sides, du=du_sides, h=h_sides[1])
        per = len(made) // 5  # arrays an operand
        return (
            self._operands(made[: 2 * per], dg, dg_scales, g.shape),
            self._operands(made[2 * per : 4 * per], du, du_scales, g.shape),
            self._operands(made[4 * per :], h, h_scales, g.shape),
        )

    def _rowwise(self, row: Request, scale: jax.Array, shape: tuple[int, ...]) -> Rowwise:
        """What a kernel is asked for a row."""
        return Rowwise(scale, key=key_pair(row.key), window=_window(row, shape), **scaling(row.policy))

    def _columnwise(self, column: Request, scale: jax.Array, shape: tuple[int, ...]) -> Columnwise:
        """What a kernel is asked for a column."""
        key, window, policy = key_pair(column.key), _window(column, shape), column.policy
        return Columnwise(scale, key, window, policy.hadamard, packed=column.kept, **scaling(policy))

    def _operands(
        self, made: Sequence[jax.Array], requests: Sequence[Request], scales: Sequence[jax.Array],
        shape: tuple[int, ...],
    ) -> list[Made]:  # fmt: skip
        """What a kernel wrote, row before column, as was requested: a carrier each, or packed codes and scales."""
        arrays, operands = list(made), list[Made]()
        for wanted, scale in zip(requests, scales, strict=True):
            if wanted.kept:
                # [tokens / 2, features] and [tokens / 16, features] -> with the leading dims of the tensor
                codes, blocks = (t.reshape(*shape[:-2], -1, shape[-1]) for t in (arrays.pop(0), arrays.pop(0)))
                packed = Packed(codes, blocks, scale[AMAX], scale[DECODE], wanted.policy.format, "1d", wanted.axis)
                operands.append(name_saved(packed))
            else:
                operands.append(Carrier(arrays.pop(0).reshape(shape), scale[GEMM], wanted.policy, scale))
        return operands

    def weight(self, w: jax.Array | Layer, wanted: Request, *, packed: bool = True) -> QuantizedWeight:
        policy = wanted.policy
        if packed and policy != WEIGHT:  # no kernel packs blocks along an axis
            return super().weight(w, wanted, packed=packed)
        (tops,) = whole_maxima([kernels.weight_maxima(w)], wanted.cut)
        scale = name_saved(kernels.tensor_scale(tops, top=top_of(rule_of(policy))), SCALES)
        if not packed:
            axis = None if policy.block == "2d" else wanted.axis
            made = kernels.quantize_weight(w, scale, axis=axis, **scaling(policy))
            return Carrier(made, scale[GEMM], policy, scale)
        codes, scales = kernels.pack_weight(w, scale)
        return Packed(codes, scales, scale[AMAX], scale[DECODE], policy.format, policy.block, wanted.axis)

    def weight_again(
        self, w: jax.Array | Layer, forward: QuantizedWeight, wanted: Request, *, packed: bool = True
    ) -> QuantizedWeight:
        if packed or not isinstance(forward, Carrier):
            return super().weight_again(w, forward, wanted, packed=packed)
        if in_runs(wanted.policy):
            scale = _scale_of_runs(w, wanted, _forward(forward))
        else:
            (tops,) = whole_maxima([kernels.weight_maxima(forward.array, owed=_decode(forward))], wanted.cut)
            scale = kernels.tensor_scale(tops, top=top_of(rule_of(wanted.policy)))
        return self.remake_weight(w, WeightScales(name_saved(scale, SCALES)), wanted, forward)

    def load_weight(self, codes: Packed, policy: OperandPolicy, *, axis: int) -> Operand:
        """The carrier of packed codes, by the kernel where it takes them."""
        rows, columns = codes.packed.shape
        if policy != WEIGHT or codes.axis != -2 or codes.scales is None or kernels.unsupported(2 * rows, columns):
            return super().load_weight(codes, policy, axis=axis)
        scales = jnp.repeat(codes.scales, BLOCK, axis=1)  # [inputs / 16, outputs / 16] -> [inputs / 16, outputs]
        return Carrier(kernels.unpack(codes.packed, scales), gemm_factor(codes), policy)

    def keep_weight(self, made: QuantizedWeight) -> KeptWeight:
        """A carrier is four times as large as its codes, and its master is there anyway: the tensor's scales stay."""
        return WeightScales(made.vector) if isinstance(made, Carrier) and made.vector is not None else made

    def remake_weight(
        self, w: jax.Array | Layer, scales: WeightScales, wanted: Request, forward: QuantizedWeight | None = None
    ) -> QuantizedWeight:
        vector, policy = scales.vector, wanted.policy
        axis, how = None if policy.block == "2d" else wanted.axis, scaling(policy)
        if policy.source != "forward":
            made = kernels.quantize_weight(w, vector, axis=axis, **how)
            return Carrier(made, vector[GEMM], policy, vector)
        assert isinstance(forward, Carrier), "what is quantized again is a carrier"
        if in_runs(policy):
            (made,) = _runs(w, wanted, vector, _forward(forward), w.shape)
        else:
            made = kernels.quantize_weight(forward.array, vector, axis=axis, owed=_decode(forward), **how)
        return Carrier(made, vector[GEMM], policy, vector)

    def load(self, kept: Kept, policy: OperandPolicy) -> Operand:
        assert isinstance(kept, Packed) and kept.scales is not None, "these passes keep packed columns"
        features = kept.packed.shape[-1]
        # [.., tokens / 2, features] and [.., tokens / 16, features] -> matrices
        flat = [t.reshape(-1, features) for t in (kept.packed, kept.scales)]
        shape = (*kept.packed.shape[:-2], 2 * kept.packed.shape[-2], features)
        return Carrier(kernels.unpack(*flat).reshape(shape), gemm_factor(kept), policy)


def _decode(operand: Carrier) -> jax.Array:
    """float32 [1]: what makes of a carrier's numbers those that it stands for; NaN if the tensor's amax is not finite,
    as `numbers_of` has it.
    """
    assert operand.vector is not None, "a kernel made it, with the tensor's scales"
    return operand.vector[GEMM][None]


def _forward(operand: Carrier) -> eden.Forward:
    """A forward operand as the kernels of runs make it again."""
    assert operand.vector is not None, "a kernel made it, with the tensor's scales"
    return eden.Forward(operand.vector, **scaling(operand.policy))


def _scale_of_runs(x: jax.Array | Layer, wanted: Request, forward: eden.Forward | None) -> jax.Array:
    """The scales of x's runs, transformed."""
    check_keys(wanted.policy, wanted.key, wanted.signs)
    found = eden.maxima(x, _signs(wanted), axis=wanted.axis, forward=forward)
    return name_saved(kernels.tensor_scale(*_of_all([found], [wanted]), top=top_of(rule_of(wanted.policy))), SCALES)


def _runs(
    x: jax.Array | Layer, wanted: Request, scale: jax.Array, forward: eden.Forward | None, shape: tuple[int, ...]
) -> tuple[jax.Array, ...]:
    """What a kernel makes of x's runs."""
    key, window, rule = key_pair(wanted.key), _window(wanted, shape), rule_of(wanted.policy)
    assert key is not None, "scales are rounded by chance"
    drawn = eden.Drawn(scale, key, rule, window)
    return eden.quantize(x, _signs(wanted), drawn, axis=wanted.axis, forward=forward, packed=wanted.kept)


def _signs(wanted: Request) -> jax.Array:
    assert wanted.signs is not None, "signs are drawn"
    return fresh_signs(wanted.signs, eden.POINTS)


def _matrices(*tensors: Read) -> tuple[list[jax.Array], jax.Array | None]:
    """([tokens, features] of each, the factors that are owed to them; None where nothing is)."""
    arrays = [t.array if isinstance(t, Owed) else t for t in tensors]
    flat = [a.reshape(-1, a.shape[-1]) for a in arrays]  # [tokens..., features] -> [tokens, features]
    if not any(isinstance(t, Owed) for t in tensors):
        return flat, None
    return flat, jnp.stack([t.factor if isinstance(t, Owed) else jnp.float32(1) for t in tensors])


def _of_tensor(requests: Sequence[Request]) -> list[Request]:
    """What is to be made of the tensor itself: operands, and those of which others are made."""
    wanted = [r for r in requests if r.forward is None]
    for forward in (r.forward for r in requests if r.forward is not None):
        wanted += [] if any(forward.same(r) for r in wanted) else [forward]
    return wanted


def _transformed(requests: Sequence[Request]) -> bool:
    return any(r.policy.hadamard for r in requests)


def _window(wanted: Request, shape: tuple[int, ...]) -> Window | None:
    """Where the tensor lies in the whole one, for random bits; None if it is whole, or none are drawn."""
    if wanted.key is None or not axes_of(wanted.cut):
        return None
    return Window.of(shape, offsets(shape, wanted.cut), whole_shape(shape, wanted.cut))


def _of_all(maxima: Sequence[jax.Array], requests: Sequence[Request]) -> tuple[jax.Array, ...]:
    return whole_maxima(maxima, requests[0].cut)


BACKEND = Backend("fused", unsupported, multiply, (FusedPasses(),), foreign=foreign, shares_gemms=True)
