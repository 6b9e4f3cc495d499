"""What `gpu_kernels.py` times: the cases of each group of kernels."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from kernel_timing import Case, random_array, tiling_name

from halfbyte import kernels as K
from halfbyte.kernels import Columnwise, Rowwise, Tiling

KEY, KEY2 = np.array([0x12345678, 0x9ABCDEF0], np.uint32), np.array([7, 11], np.uint32)


def scale_of(amax: Any) -> jax.Array:
    return K.tensor_scale(K.amax_bits(jnp.asarray(amax, jnp.float32)))


def quantize_fn(rows: bool, columns: str | None, stochastic: bool, tiling: Tiling | None = None, packed: bool = False):
    """A quantize of (x, row scale, column scale, key, key); `columns` is None, "plain" or "hadamard"."""

    def fn(x, row_scale, column_scale, k0, k1):
        return K.quantize(
            x,
            rows=Rowwise(row_scale, k0 if stochastic else None) if rows else None,
            columns=Columnwise(column_scale, k1 if stochastic else None, hadamard=columns == "hadamard", packed=packed)
            if columns
            else None,
            tiling=tiling,
        )

    return fn


QUANTIZERS: dict[str, tuple[bool, str | None, bool, bool]] = {
    "rows": (True, None, False, False),
    "rows_sr": (True, None, True, False),
    "columns": (False, "hadamard", False, False),
    "both": (True, "hadamard", False, False),
    "both_plain": (True, "plain", False, False),
    "both_sr": (True, "hadamard", True, False),
    "both_packed": (True, "hadamard", False, True),
}


def input_sets(shape: tuple[int, int], count: int = 4) -> list[tuple[jax.Array, ...]]:
    unit = scale_of(5.0)
    keys = jnp.asarray(KEY), jnp.asarray(KEY2)
    return [(random_array(shape, i), unit, unit, *keys) for i in range(count)]


def pass_cases(shapes: list[tuple[int, int]]) -> list[Case]:
    cases = []
    for shape in shapes:
        sets, elements = input_sets(shape), float(np.prod(shape))
        xs = [s[:1] for s in sets]
        cases.append(Case("copy", shape, "jnp.copy", lambda: lambda x: jnp.copy(x), xs, 4 * elements))
        cases.append(Case("copy", shape, "negate", lambda: lambda x: -x, xs, 4 * elements))
        main = shape == (16384, 8192)
        for tiling in [
            Tiling(4, 4),
            *([Tiling(4, 2), Tiling(4, 8), Tiling(8, 4), Tiling(4, 4, False)] if main else []),
        ]:
            make = _bind(lambda t: lambda x: K.maxima(x, tiling=t), tiling)
            cases.append(Case("maxima", shape, tiling_name(tiling), make, xs, 2 * elements))
        for name, (rows, columns, stochastic, packed) in QUANTIZERS.items():
            written = 2.0 * rows + (0 if columns is None else 0.5625 if packed else 2.0)
            options = [Tiling(4, 4)] if columns else [Tiling(8, 4)]
            if main:
                more = [Tiling(4, 2), Tiling(4, 8), Tiling(4, 4, False), Tiling(4, 1)]
                options += more if columns else [Tiling(8, 2), Tiling(8, 8), Tiling(4, 4), Tiling(8, 4, False)]
            for tiling in options:
                make = _bind(lambda a: quantize_fn(*a), (rows, columns, stochastic, tiling, packed))
                cases.append(Case(name, shape, tiling_name(tiling), make, sets, (2 + written) * elements))
        packed_sets = [_packed(s) for s in sets[:2]]
        cases.append(Case("unpack", shape, "c4 w4", lambda: K.unpack, packed_sets, 2.5625 * elements))
        partial_maxima = [(jnp.full((shape[0] // 16, shape[1] // 512), i, jnp.int32),) for i in range(32)]
        cases.append(
            Case("tensor_scale", shape, "", lambda: K.tensor_scale, partial_maxima, shape[0] * shape[1] / 2048)
        )
    return cases


def _bind(make: Callable[[Any], Any], value: Any) -> Callable[[], Any]:
    return lambda: make(value)


def _packed(arguments: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    fn = jax.jit(lambda x, s: K.quantize(x, columns=Columnwise(s, packed=True)))
    return tuple(fn(arguments[0], arguments[1]))


def weight_cases(shapes: list[tuple[int, int]]) -> list[Case]:
    cases = []
    for shape in ((2048, 8192), (4096, 14336)):
        sets = [(random_array(shape, i, jnp.float32, 0.02), scale_of(0.1)) for i in range(4)]
        elements = float(np.prod(shape))
        for tiling in (Tiling(4, 4), Tiling(4, 2), Tiling(4, 8)):
            name = tiling_name(tiling)
            make = _bind(lambda t: lambda w, s: K.quantize_weight(w, s, tiling=t), tiling)
            cases.append(Case("weight", shape, name, make, sets, 6 * elements))
            make = _bind(lambda t: lambda w, s: K.weight_maxima(w, tiling=t), tiling)
            cases.append(Case("weight_maxima", shape, name, make, sets, 4 * elements))
        cases.append(Case("copy", shape, "float32", lambda: lambda w, s: jnp.copy(w), sets, 8 * elements))
    return cases


def swiglu_cases(shapes: list[tuple[int, int]]) -> list[Case]:
    out = []
    for shape in [s for s in ((16384, 8192), (8192, 14336)) if s in shapes]:
        elements, unit, key = float(np.prod(shape)), scale_of(5.0), jnp.asarray(KEY)
        sets = [tuple(random_array(shape, 3 * i + j) for j in range(3)) + (unit, key) for i in range(2)]
        for tiling in (Tiling(4, 4), Tiling(2, 4), Tiling(4, 2), Tiling(4, 8)):
            make = _swiglu(tiling)
            name = tiling_name(tiling)
            out.append(Case("swiglu_forward_maxima", shape, name, make["forward_maxima"], sets, 4 * elements))
            out.append(Case("swiglu_forward", shape, name, make["forward"], sets, 6 * elements))
            out.append(Case("swiglu_backward_maxima", shape, name, make["backward_maxima"], sets, 6 * elements))
            out.append(Case("swiglu_backward", shape, name, make["backward"], sets, 16 * elements))
        for tiling in (Tiling(2, 8), Tiling(2, 2), Tiling(4, 4, False), Tiling(2, 4, False)):
            out.append(
                Case("swiglu_backward", shape, tiling_name(tiling), _swiglu(tiling)["backward"], sets, 16 * elements)
            )
    return out


def _swiglu(t: Tiling) -> dict[str, Any]:
    def backward(g, u, d, s, k):
        sides = Rowwise(s, k), Columnwise(s, k)
        return K.quantize_backward(g, u, d, dg=sides, du=sides, h=Columnwise(s))

    return {
        "forward_maxima": lambda: lambda g, u, d, s, k: K.forward_maxima(g, u, tiling=t),
        "forward": lambda: lambda g, u, d, s, k: K.quantize_forward(g, u, rows=Rowwise(s), tiling=t),
        "backward_maxima": lambda: lambda g, u, d, s, k: K.backward_maxima(g, u, d, tiling=t),
        "backward": lambda: backward,
    }
