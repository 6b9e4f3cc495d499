"""What `gpu_kernels.py` checks and times: the cases of each group of kernels."""

import concurrent.futures
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import kernel_oracle as oracle
import ml_dtypes
import numpy as np
from kernel_timing import Case, random_array, tiling_name

from halfbyte import kernels as K
from halfbyte.kernels import Columnwise, Rowwise, Tiling

KEY, KEY2 = np.array([0x12345678, 0x9ABCDEF0], np.uint32), np.array([7, 11], np.uint32)
KINDS = ("normal", "wide", "zero_scales", "ties", "negative_zero", "subnormal", "zeros", "huge")
CHECK_SHAPE = (256, 1024)


def special(kind: str, shape: tuple[int, int] = CHECK_SHAPE) -> np.ndarray:
    """bf16 values that reach the corners of the definition."""
    rng = np.random.default_rng(KINDS.index(kind))
    x = rng.standard_normal(shape).astype(np.float32)
    if kind == "wide":
        x *= np.exp2(rng.integers(-24, 12, shape)).astype(np.float32)
    elif kind == "zero_scales":
        x *= np.float32(1e-6)
        x[5, 7], x[3, :16] = 50.0, 0
    elif kind == "ties":
        x = rng.integers(-24, 25, shape).astype(np.float32) * np.float32(0.25)
        x[:, ::16] = 6
    elif kind == "negative_zero":
        x[::2] = -0.0
    elif kind == "subnormal":
        x *= np.float32(1e-39)
    elif kind == "zeros":
        x[:] = 0
    elif kind == "huge":
        x *= np.float32(3e37)
    return x.astype(ml_dtypes.bfloat16)


def top(x: np.ndarray) -> np.float32:
    return np.abs(x.astype(np.float32)).max()


def difference(got: Any, want: np.ndarray) -> str:
    got = np.asarray(got)
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"got {got.dtype}{got.shape}, want {want.dtype}{want.shape}"
    wide = {1: np.uint8, 2: np.uint16, 4: np.uint32}[want.dtype.itemsize]
    wrong = got.view(wide) != want.view(wide)
    if not wrong.any():
        return "equal"
    first = tuple(int(i) for i in np.argwhere(wrong)[0])
    values = got[first] == want[first]
    return f"{wrong.mean():.2%} differ, first {first}: {got[first]} for {want[first]} (value equal: {values})"


def all_equal(pairs: list[tuple[Any, np.ndarray]]) -> str:
    verdicts = [difference(got, want) for got, want in pairs]
    return next((f"output {i}: {v}" for i, v in enumerate(verdicts) if v != "equal"), "equal")


def checks(wanted: dict[str, tuple[Callable[..., Any], Callable[[np.ndarray], tuple[Any, Any]]]], threads: int):
    """{name:kind: verdict}: each function jitted once, compared on every kind of data."""

    def check(item):
        name, (fn, prepare) = item
        results = {}
        try:
            jitted = jax.jit(fn)
            for kind in KINDS:
                with np.errstate(all="ignore"):
                    args, want = prepare(special(kind))
                got = jax.tree.leaves(jitted(*args))
                results[f"{name}:{kind}"] = all_equal(list(zip(got, want, strict=True)))
        except Exception as error:  # reported as a failed check
            results[f"{name}:error"] = f"{type(error).__name__}: {str(error)[:400]}"
        return results

    merged: dict[str, str] = {}
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for results in pool.map(check, wanted.items()):
            bad = {k: v for k, v in results.items() if v != "equal"}
            merged.update(bad or {f"{next(iter(results)).split(':')[0]}:all {len(results)} kinds": "equal"})
    return merged


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


def quantize_check(
    rows: bool, columns: str | None, stochastic: bool, tiling: Tiling | None = None, packed: bool = False
):
    inner = quantize_fn(rows, columns, stochastic, tiling, packed)

    def fn(x, row_amax, column_amax, k0, k1):
        return inner(x, scale_of(row_amax), scale_of(column_amax), k0, k1)

    def prepare(x):
        source = oracle.hadamard_tokens(x) if columns == "hadamard" else x.astype(np.float32)
        noise = [oracle.random_bytes(*x.shape, k) if stochastic else None for k in (KEY, KEY2)]
        want = []
        if rows:
            want.append(oracle.quantize(x, top(x), axis=1, noise=noise[0])[2])
        if columns:
            codes, scales, carrier = oracle.quantize(source, top(source), axis=0, noise=noise[1])
            want += [oracle.pack_tokens(codes), scales] if packed else [carrier]
        return (jnp.asarray(x), top(x), top(source), jnp.asarray(KEY), jnp.asarray(KEY2)), want

    return fn, prepare


QUANTIZERS: dict[str, tuple[bool, str | None, bool, bool]] = {
    "rows": (True, None, False, False),
    "rows_sr": (True, None, True, False),
    "columns": (False, "hadamard", False, False),
    "both": (True, "hadamard", False, False),
    "both_plain": (True, "plain", False, False),
    "both_sr": (True, "hadamard", True, False),
    "both_packed": (True, "hadamard", False, True),
}


def _scale_vector(amax: np.float32) -> np.ndarray:
    s, decode, mult = oracle.tensor_scales(amax)
    gemm = decode if np.isfinite(amax) else np.nan
    return np.array([amax, s, decode, mult, gemm, 0, 0, 0], np.float32)


def pass_checks(threads: int) -> dict[str, str]:
    def maxima(x):
        plain, transformed = K.maxima(x)
        return jnp.max(plain), jnp.max(transformed)

    def maxima_want(x):
        return (jnp.asarray(x),), [top(x).view(np.int32), top(oracle.hadamard_tokens(x)).view(np.int32)]

    def unpack_want(x):
        codes, scales, carrier = oracle.quantize(x, top(x), axis=0)
        return (jnp.asarray(oracle.pack_tokens(codes)), jnp.asarray(scales)), [carrier]

    def scale_want(x):
        return (top(x),), [_scale_vector(top(x))]

    wanted = {
        "maxima": (maxima, maxima_want),
        "unpack": (K.unpack, unpack_want),
        "tensor_scale": (scale_of, scale_want),
    }
    for name, (rows, columns, stochastic, packed) in QUANTIZERS.items():
        wanted[name] = quantize_check(rows, columns, stochastic, None, packed)
    return checks(wanted, threads)


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


def weight_checks(threads: int) -> dict[str, str]:
    def want(x):
        w = x.astype(np.float32) * (1 + np.random.default_rng(1).random(x.shape, np.float32) * np.float32(1e-3))
        amax = np.abs(w).max()
        return (jnp.asarray(w),), [amax.view(np.int32), oracle.quantize(w, amax, axis=1, block2d=True)[2]]

    def fn(w):
        parts = K.weight_maxima(w)
        return jnp.max(parts), K.quantize_weight(w, K.tensor_scale(parts))

    return checks({"weight": (fn, want)}, threads)


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
