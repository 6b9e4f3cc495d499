"""`fused`: the quantize passes as GPU kernels of our own, and bfloat16 GEMMs over their carriers.

On a Hopper GPU the GEMMs of `carrier` already run at the speed of bfloat16; what an emulated step owes on top are the
passes that quantize. Here each tensor is read once for its maxima and once for all the operands asked of it, with the
Hadamard transform, the random bits and SwiGLU inside (`ops.kernels`). The operands are those of the definition, bit for
bit; for SwiGLU that holds on the numbers that the kernels compute with the GPU's own exp.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from halfbyte.formats import NVFP4, Packed
from halfbyte.ops import kernels
from halfbyte.ops.backends.carrier import narrow_gemm
from halfbyte.ops.backends.gemm import Contraction, alpha, result_shape
from halfbyte.ops.kernels import Columnwise, Rowwise
from halfbyte.ops.kernels.gemm import unsupported as gemm_unsupported
from halfbyte.ops.kernels.scale import AMAX, DECODE, GEMM, SIZE
from halfbyte.ops.operand import SCALES, Kept, Operand, gemm_scale, key_pair, name_saved
from halfbyte.ops.passes import Ask, XlaPasses
from halfbyte.ops.problem import Problem, target
from halfbyte.recipe import OperandPolicy

NAME = "fused"
ROWS = ("fprop_x", "dgrad_dy")
COLUMNS = ("wgrad_x", "wgrad_dy")


def unsupported(problem: Problem) -> str | None:
    """Needs one Hopper or newer NVIDIA GPU, bfloat16 tensors in NVFP4, and sizes that the kernels' tiles divide."""
    reason = problem.without_kernels()
    if reason is not None:
        return reason
    for role in ROWS + COLUMNS:
        policy = getattr(problem.recipe, role)
        if policy.format != NVFP4 or (role in ROWS and policy.hadamard):
            return (
                f"{role} is {policy}; its kernels make NVFP4 blocks of 16, with the Hadamard transform for wgrad only"
            )
    for columns in (problem.inputs, problem.outputs):
        reason = kernels.unsupported(problem.tokens, columns, capability=problem.device.capability)
        if reason is not None:
            return reason
    return None


def gemm(left: Operand, right: Operand, axes: Contraction, dtype: jnp.dtype) -> jax.Array:
    """Exact products, float32 sums, the operands' factors, one rounding to `dtype`.

    The kernel multiplies its float32 accumulator by the factors before it rounds; XLA would write the float32 sums to
    memory and read them again. Shapes that its tiles do not divide go through XLA, with equal results.
    """
    a, b, layout = left.values(), right.values(), _layout(axes)
    if _own_gemm_unsupported(a, b, axes, layout, dtype):
        return narrow_gemm(a, b, axes, alpha(left, right), dtype)
    x, w = (t.reshape(-1, t.shape[-1]).astype(jnp.bfloat16) for t in (a, b))
    y = kernels.matmul(x, w, _factors(left), _factors(right), layout=layout, out_dtype=dtype)
    return y.reshape(result_shape(a.shape, b.shape, axes))


def _factors(operand: Operand) -> jax.Array:
    """The scale vector as the GEMM kernel reads it, also for operands of other passes: weights made once a step."""
    if operand.vector is not None:
        return operand.vector
    return jnp.full((SIZE,), jnp.float32(1) if operand.decode_scale is None else operand.decode_scale)


def _layout(axes: Contraction) -> str:
    """How the kernel names this GEMM: nn (fprop), nt (dgrad) or tn (wgrad)."""
    if axes[0] == axes[1] and axes[0][0] == 0:
        return "tn"
    return "nn" if axes[1] == (0,) else "nt"


def _own_gemm_unsupported(a: jax.Array, b: jax.Array, axes: Contraction, layout: str, dtype: jnp.dtype) -> str | None:
    m, n = (math.prod(t.shape[i] for i in range(t.ndim) if i not in ax) for t, ax in zip((a, b), axes, strict=True))
    k = math.prod(a.shape[i] for i in axes[0])
    return gemm_unsupported(m, n, k, layout=layout, out_dtype=dtype, capability=target().capability)


@dataclasses.dataclass(frozen=True)
class FusedPasses(XlaPasses):
    """The passes as kernels. `interpret` runs them on any machine, slowly, for tests."""

    interpret: bool = False

    def quantize(self, x: jax.Array, asks: Sequence[Ask]) -> list[Operand]:
        row, column = _sides(asks)
        if len(asks) != (row is not None) + (column is not None):
            return super().quantize(x, asks)
        flat = x.reshape(-1, x.shape[-1])
        tops = kernels.maxima(flat, hadamard=_transformed(column), interpret=self.interpret)
        row_scale, column_scale = self._scales(tops, column)
        made = kernels.quantize(
            flat,
            rows=None if row is None else _rowwise(row, row_scale),
            columns=None if column is None else _columnwise(column, column_scale),
            interpret=self.interpret,
        )
        return _operands(made, asks, {-1: row_scale, -2: column_scale}, x.shape)

    def swiglu(self, g: jax.Array, u: jax.Array, asks: Sequence[Ask]) -> list[Operand]:
        row, column = _sides(asks)
        if len(asks) != (row is not None) + (column is not None):
            return super().swiglu(g, u, asks)
        flat = [t.reshape(-1, t.shape[-1]) for t in (g, u)]
        tops = kernels.forward_maxima(*flat, hadamard=_transformed(column), interpret=self.interpret)
        row_scale, column_scale = self._scales(tops, column)
        made = kernels.quantize_forward(
            *flat,
            rows=None if row is None else _rowwise(row, row_scale),
            columns=None if column is None else _columnwise(column, column_scale),
            interpret=self.interpret,
        )
        return _operands(made, asks, {-1: row_scale, -2: column_scale}, g.shape)

    def swiglu_backward(self, g, u, dh, dg_asks, du_asks, h_asks):
        (h_ask,) = h_asks
        flat = [t.reshape(-1, t.shape[-1]) for t in (g, u, dh)]
        hadamard = _transformed(dg_asks[1])
        tops = kernels.backward_maxima(*flat, hadamard=hadamard, tensors=3, interpret=self.interpret)
        each = len(tops) // 3
        dg_tops, du_tops, h_tops = (tops[i * each : (i + 1) * each] for i in range(3))
        scales = [self._scales(t, asks[1]) for t, asks in ((dg_tops, dg_asks), (du_tops, du_asks))]
        _, h_scale = self._scales(h_tops, h_ask)
        sides = [
            (_rowwise(a[0], s[0]), _columnwise(a[1], s[1])) for a, s in zip((dg_asks, du_asks), scales, strict=True)
        ]
        made = kernels.quantize_backward(
            *flat, dg=sides[0], du=sides[1], h=_columnwise(h_ask, h_scale), interpret=self.interpret
        )
        dg, du = (
            _operands(made[2 * i : 2 * i + 2], asks, {-1: scales[i][0], -2: scales[i][1]}, g.shape)
            for i, asks in enumerate((dg_asks, du_asks))
        )
        return dg, du, _operands(made[4:], [h_ask], {-2: h_scale}, g.shape)

    def weight(self, w: jax.Array, policy: OperandPolicy, *, axis: int, key: jax.Array | None) -> Packed | Operand:
        plain = policy.format == NVFP4 and policy.block == "2d" and not (policy.hadamard or policy.stochastic)
        if not plain or w.dtype != jnp.float32 or kernels.unsupported(*w.shape) is not None:
            return super().weight(w, policy, axis=axis, key=key)
        tops = kernels.weight_maxima(w, interpret=self.interpret)
        scale = name_saved(kernels.tensor_scale(tops, interpret=self.interpret), SCALES)
        carrier = kernels.quantize_weight(w, scale, interpret=self.interpret)
        return Operand(carrier, scale[GEMM], None, policy, scale)

    def keep_weight(self, made: Packed | Operand) -> Packed | Operand:
        """A carrier is four times as large as its codes, and its master is there anyway: the tensor's scales stay."""
        return dataclasses.replace(made, carrier=None) if isinstance(made, Operand) else made

    def weight_again(self, w: jax.Array, kept: Operand) -> Operand:
        assert kept.vector is not None, "a weight's carrier is made from its master and its scales"
        return dataclasses.replace(kept, carrier=kernels.quantize_weight(w, kept.vector, interpret=self.interpret))

    def load(self, kept: Kept, policy: OperandPolicy) -> Operand:
        if not isinstance(kept, Packed) or kept.axis != -2 or kept.format != NVFP4 or kept.scales is None:
            return super().load(kept, policy)
        features = kept.packed.shape[-1]
        flat = [t.reshape(-1, features) for t in (kept.packed, kept.scales)]
        carrier = kernels.unpack(*flat, interpret=self.interpret)
        shape = (*kept.packed.shape[:-2], 2 * kept.packed.shape[-2], features)
        factor = gemm_scale(kept)
        return Operand(carrier.reshape(shape), factor, None, policy)

    def _scales(self, tops: Sequence[jax.Array], column: Ask | None) -> tuple[jax.Array, jax.Array]:
        """(row scale, column scale) from the maxima of a tensor and, if the column is transformed, of its transform."""
        made = kernels.tensor_scales(*tops[: 1 + _transformed(column)], interpret=self.interpret)
        return made[0], made[-1]


def _sides(asks: Sequence[Ask]) -> tuple[Ask | None, Ask | None]:
    """(the row asked for, the column asked for). A row to be kept is packed by XLA: None here."""
    rows = [a for a in asks if a.axis == -1 and not a.kept]
    columns = [a for a in asks if a.axis == -2]
    return (rows[0] if rows else None), (columns[0] if columns else None)


def _transformed(column: Ask | None) -> bool:
    return column is not None and column.policy.hadamard


def _rowwise(a: Ask, scale: jax.Array) -> Rowwise:
    return Rowwise(scale, key=key_pair(a.key))


def _columnwise(a: Ask, scale: jax.Array) -> Columnwise:
    return Columnwise(scale, key=key_pair(a.key), hadamard=a.policy.hadamard, packed=a.kept)


def _operands(
    made: Sequence[jax.Array], asks: Sequence[Ask], scales: dict[int, jax.Array], shape: tuple[int, ...]
) -> list[Operand]:
    """What a kernel wrote, in the order of its sides (row, then column), as operands in the order asked."""
    arrays, by_axis = list(made), {}
    for a in sorted(asks, key=lambda a: -a.axis):
        scale = scales[a.axis]
        if a.kept:
            codes, blocks = (t.reshape(*shape[:-2], -1, shape[-1]) for t in (arrays.pop(0), arrays.pop(0)))
            packed = Packed(codes, blocks, scale[AMAX], scale[DECODE], NVFP4, "1d", -2)
            by_axis[a.axis] = Operand(None, scale[GEMM], packed, a.policy, scale)
        else:
            by_axis[a.axis] = Operand(arrays.pop(0).reshape(shape), scale[GEMM], None, a.policy, scale)
    return [by_axis[a.axis] for a in asks]
