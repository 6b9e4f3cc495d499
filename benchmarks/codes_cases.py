"""Checks and timings of the kernels that write what a block-scaled GEMM reads: packed codes and scales.

Checked: the stored vectors of `halfbyte.formats`, corners of the definition, and random tensors of a dozen shapes, half
of them no multiple of 128 wide; rows, columns and weights, plain and tiled scales, both roundings, with and without
the transform, SwiGLU forward and backward. Timed: whole passes, maxima to codes, by compulsory bytes: one read for the
maxima, one for the codes, one write of each code and scale; and the writing of codes alone.
"""

import concurrent.futures
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import gemm_cases
import jax
import jax.numpy as jnp
import kernel_oracle as oracle
import ml_dtypes
import numpy as np
from kernel_cases import KEY, KEY2, KINDS, all_equal, scale_of, special, top
from kernel_timing import Case, random_array

from halfbyte import kernels as K
from halfbyte.formats import MXFP8, quantize, tile_scales
from halfbyte.formats.noise import key_words
from halfbyte.formats.selftest import VECTORS, load
from halfbyte.kernels import Columnwise, Rowwise, ScaleOrder, arithmetic, codes, mxfp8
from halfbyte.kernels.mxfp8 import MxOperand

CHECKED = ((128, 128), (256, 1024), (64, 2048), (256, 1376), (64, 2731), (64, 10944), (48, 144), (16, 43), (80, 62),
           (512, 272), (1024, 512), (192, 640))  # fmt: skip
# Enough tokens that kernels are timed, and not their launches.
ODD = ((65536, 1376), (65536, 1408), (65536, 2731), (65536, 2816), (16384, 10944), (16384, 11008))
PASS, CODES = 2.0 + 2.0, 0.5 + 1 / 16  # bytes an element: two reads of bf16; a code and its share of the scale
PLAIN, TILED = ScaleOrder.PLAIN, ScaleOrder.TILED
MX_CODES = 1 + 1 / 32
MX_BOTH = MxOperand(False, TILED), MxOperand(True, TILED)
MX_GRADIENTS = tuple(MxOperand(bool(along), TILED, tensor=i) for i, along in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 1)))


def _in_order(scales: np.ndarray, order: ScaleOrder) -> np.ndarray:
    return scales if order is PLAIN else np.asarray(tile_scales(jnp.asarray(scales)))


def _padded(x: np.ndarray) -> np.ndarray:
    return np.pad(x, ((0, 0), (0, -x.shape[1] % 16)))


def want_rows(x: np.ndarray, order: ScaleOrder, key: np.ndarray | None = None) -> list[np.ndarray]:
    noise = None if key is None else _padded(oracle.random_bytes(*x.shape, key))
    codes, scales, _ = oracle.quantize(_padded(x), top(x), axis=1, noise=noise)
    return [np.ascontiguousarray(oracle.pack_tokens(codes.T).T), _in_order(scales, order)]


def want_columns(x: np.ndarray, order: ScaleOrder, key: np.ndarray | None = None, hadamard: bool = True):
    source = oracle.hadamard_tokens(x) if hadamard else x.astype(np.float32)
    noise = None if key is None else oracle.random_bytes(*x.shape, key)
    codes, scales, _ = oracle.quantize(source, top(source), axis=0, noise=noise)
    return [np.ascontiguousarray(oracle.pack_tokens(codes).T), _in_order(scales.T, order)]


def _both(order: ScaleOrder, stochastic: bool, hadamard: bool = True) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(rows and columns in one read, what the oracle wants of x)."""
    keys = (KEY, KEY2) if stochastic else (None, None)

    def fn(x, row_amax, column_amax, k0, k1):
        row = Rowwise(scale_of(row_amax), k0 if stochastic else None, codes=order)
        column = Columnwise(scale_of(column_amax), k1 if stochastic else None, hadamard=hadamard, codes=order)
        return K.quantize(x, rows=row, columns=column)

    def prepare(x):
        source = oracle.hadamard_tokens(x) if hadamard else x
        given = jnp.asarray(x), top(x), top(source), jnp.asarray(KEY), jnp.asarray(KEY2)
        return given, [*want_rows(x, order, keys[0]), *want_columns(x, order, keys[1], hadamard)]

    return fn, prepare


def _weight(order: ScaleOrder) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def fn(w, amax):
        return K.weight_codes(w, scale_of(amax), inputs_last=order, outputs_last=order)

    def prepare(x):
        w = x.astype(np.float32) * (1 + np.random.default_rng(1).random(x.shape, np.float32) * np.float32(1e-3))
        codes, scales, _ = oracle.quantize(w, top(w), axis=1, block2d=True)
        turned = [oracle.pack_tokens(codes).T, _in_order(np.repeat(scales.T, 16, 0), order)]
        return (jnp.asarray(w), top(w)), [
            *map(np.ascontiguousarray, turned),
            np.ascontiguousarray(oracle.pack_tokens(codes.T).T),
            _in_order(np.repeat(scales, 16, 0), order),
        ]

    return fn, prepare


def _swiglu(g, u, d, tops, k):
    """Forward and backward operands under given maxima: h, its transform, dg, its transform, du, its transform."""
    h_row, h_column, dg_row, dg_column, du_row, du_column = (scale_of(t) for t in tops)
    forward = K.quantize_forward(g, u, rows=Rowwise(h_row, codes=PLAIN), columns=Columnwise(h_column, codes=TILED))
    backward = K.quantize_backward(
        g,
        u,
        d,
        dg=(Rowwise(dg_row, k, codes=TILED), Columnwise(dg_column, k, codes=PLAIN)),
        du=(Rowwise(du_row, k, codes=PLAIN), Columnwise(du_column, k, codes=TILED)),
        h=Columnwise(h_column, codes=PLAIN),
    )
    return *forward, *backward


def _check_swiglu(shape: tuple[int, int]) -> str:
    """Against the oracle's quantization of what the kernels themselves compute."""
    rng = np.random.default_rng(0)
    g, u, d = ((rng.standard_normal(shape) * s).astype(ml_dtypes.bfloat16) for s in (3.0, 1.0, 1e-3))
    dg, du, h = (np.asarray(a) for a in jax.jit(K.activation)(*map(jnp.asarray, (g, u, d))))
    tops = [t for x in (h, dg, du) for t in (top(x), top(oracle.hadamard_tokens(x)))]
    got = jax.jit(_swiglu)(*map(jnp.asarray, (g, u, d)), tops, jnp.asarray(KEY))
    want = [*want_rows(h, PLAIN), *want_columns(h, TILED), *want_rows(dg, TILED, KEY), *want_columns(dg, PLAIN, KEY)]
    want += [*want_rows(du, PLAIN, KEY), *want_columns(du, TILED, KEY), *want_columns(h, PLAIN)]
    return all_equal(list(zip(got, want, strict=True)))


def _check_carriers(shape: tuple[int, int]) -> str:
    """Maxima, the row carrier, packed columns and their carrier, and the weight carrier."""
    x = np.random.default_rng(1).standard_normal(shape).astype(ml_dtypes.bfloat16)
    w, turned = x.astype(np.float32) * np.float32(1.001), oracle.hadamard_tokens(x)

    @jax.jit
    def run(x, w, key):
        tops, heaviest = K.maxima(x), K.weight_maxima(w)
        row, column = K.tensor_scales(*tops)
        made = K.quantize(x, rows=Rowwise(row, key), columns=Columnwise(column, packed=True))
        weight = K.quantize_weight(w, K.tensor_scale(heaviest))
        return *(jnp.max(t) for t in (*tops, heaviest)), *made, K.unpack(*made[1:]), weight

    got = run(jnp.asarray(x), jnp.asarray(w), jnp.asarray(KEY))
    noise, width = _padded(oracle.random_bytes(*shape, KEY)), shape[1]
    codes, scales, column = oracle.quantize(turned, top(turned), axis=0)
    want = [top(x).view(np.int32), top(turned).view(np.int32), top(w).view(np.int32)]
    want += [oracle.quantize(_padded(x), top(x), axis=1, noise=noise)[2][:, :width], oracle.pack_tokens(codes), scales]
    want += [column, oracle.quantize(_padded(w), top(w), axis=1, block2d=True)[2][:, :width]]
    return all_equal([(a, np.array(b, order="C")) for a, b in zip(got, want, strict=True)])


def _check_vectors(group: dict[str, np.ndarray]) -> str:
    """The stored answers of `halfbyte.formats`, tensor by tensor."""
    hadamard, square = bool(group["hadamard"]), str(group["block"]) == "2d"
    key = None
    if str(group["rounding"]) == "stochastic":
        key = jnp.stack(key_words(jnp.asarray(group["key"])))

    @jax.jit
    def run(x, amax, key):
        scale = scale_of(amax)
        if square:
            return K.weight_codes(x.astype(jnp.float32), scale, inputs_last=None)
        if hadamard:  # the transform runs along tokens: quantize the transpose by columns
            return K.quantize(x.T, columns=Columnwise(scale, key, codes=PLAIN))
        return K.quantize(x, rows=Rowwise(scale, key, codes=PLAIN))

    pairs = []
    for x, wanted, scales, amax in zip(*(group[f] for f in ("x", "codes", "scales", "amax")), strict=True):
        values = x.view(ml_dtypes.bfloat16 if x.dtype == np.uint16 else np.float32)
        got = run(jnp.asarray(values), jnp.asarray(amax.view(np.float32)), key)
        repeated = np.repeat(scales, 16, 0) if square else scales
        pairs += list(zip(got, (np.ascontiguousarray(oracle.pack_tokens(wanted.T).T), repeated), strict=True))
    return all_equal(pairs)


def _want_mx(x: np.ndarray, operand: MxOperand) -> list[np.ndarray]:
    """The codes and scales that `formats` gives, of x filled up to whole blocks."""
    turned = x.T if operand.along_tokens else x
    filled = np.pad(turned, ((0, 0), (0, -turned.shape[1] % 32)))
    made = jax.jit(lambda x: quantize(x, MXFP8))(jnp.asarray(filled))
    return [np.asarray(made.codes), _in_order(np.asarray(made.scales).view(np.uint8), operand.order)]


def _check_mx(shape: tuple[int, int], dtype: Any) -> str:
    rng = np.random.default_rng(shape[1])
    x = (rng.standard_normal(shape) * np.exp2(rng.integers(-20, 12, (shape[0], 1)))).astype(dtype)
    operands = MxOperand(False, TILED), MxOperand(True, PLAIN)
    got = jax.jit(lambda x: mxfp8.quantize(x, operands=operands))(jnp.asarray(x))
    return all_equal(list(zip(got, [a for o in operands for a in _want_mx(x, o)], strict=True)))


def _check_mx_swiglu(shape: tuple[int, int]) -> str:
    rng = np.random.default_rng(0)
    g, u, d = (jnp.asarray((rng.standard_normal(shape) * s).astype(ml_dtypes.bfloat16)) for s in (3.0, 1.0, 1e-3))
    dg, du, h = (np.asarray(a) for a in jax.jit(K.activation)(g, u, d))
    got = jax.jit(lambda g, u, d: mxfp8.quantize_backward(g, u, d, operands=MX_GRADIENTS))(g, u, d)
    want = [a for o in MX_GRADIENTS for a in _want_mx((dg, du, h)[o.tensor], o)]
    got += jax.jit(lambda g, u: mxfp8.quantize_forward(g, u, operands=(mxfp8.ROW, mxfp8.COLUMN)))(g, u)
    return all_equal(list(zip(got, want + _want_mx(h, mxfp8.ROW) + _want_mx(h, mxfp8.COLUMN), strict=True)))


def _check_mx_vectors(group: dict[str, np.ndarray]) -> str:
    run = jax.jit(lambda x: mxfp8.quantize(x, operands=(mxfp8.ROW,)))
    pairs = []
    for x, wanted, scales in zip(*(group[f] for f in ("x", "codes", "scales")), strict=True):
        pairs += list(zip(run(jnp.asarray(x.view(ml_dtypes.bfloat16))), (wanted, scales), strict=True))
    return all_equal(pairs)


def _jobs() -> dict[str, Callable[[], str]]:
    jobs: dict[str, Callable[[], str]] = {}

    def add(name: str, pair: Any, x: np.ndarray) -> None:
        def run() -> str:
            with np.errstate(all="ignore"):
                given, want = pair[1](x)
            return all_equal(list(zip(jax.jit(pair[0])(*given), want, strict=True)))

        jobs[name] = run

    for name, group in load(VECTORS).items():
        usable = str(group["format"]) == "nvfp4" and (str(group["block"]) == "2d" or group["x"].dtype == np.uint16)
        if usable and not (str(group["rounding"]) == "stochastic" and bool(group["hadamard"])):
            jobs[f"codes:vectors {name}"] = lambda group=group: _check_vectors(group)
        if name == "mxfp8":
            jobs["mxfp8:vectors"] = lambda group=group: _check_mx_vectors(group)
    nearest, stochastic, weight = _both(TILED, False), _both(PLAIN, True), _weight(TILED)
    for kind in KINDS:
        add(f"codes:{kind}", nearest, special(kind))
        add(f"codes_sr:{kind}", stochastic, special(kind))
        add(f"weight_codes:{kind}", weight, special(kind))
    for i, shape in enumerate(CHECKED):
        if shape[0] % 32 == 0:
            dtype = (ml_dtypes.bfloat16, np.float32)[i % 3 == 2]
            jobs[f"mxfp8:{shape}"] = lambda shape=shape, dtype=dtype: _check_mx(shape, dtype)
        if shape[1] % 128:
            jobs[f"carriers:{shape}"] = lambda shape=shape: _check_carriers(shape)
        x = np.random.default_rng(i).standard_normal(shape).astype(ml_dtypes.bfloat16)
        add(f"codes:{shape}", _both((PLAIN, TILED)[i % 2], False), x)
        add(f"codes_sr:{shape}", _both((TILED, PLAIN)[i % 2], True, hadamard=i % 3 != 0), x)
        if shape[1] % 16 == 0:
            add(f"weight_codes:{shape}", _weight((PLAIN, TILED)[i % 2]), x)
            jobs[f"swiglu_codes:{shape}"] = lambda shape=shape: _check_swiglu(shape)
            if i < 4:
                jobs[f"mxfp8_swiglu:{shape}"] = lambda shape=shape: _check_mx_swiglu(shape)
    return jobs


def checks(threads: int) -> dict[str, str]:
    """{name:what: verdict}; those of one kernel that are all equal in one line."""

    def run(item: tuple[str, Callable[[], str]]) -> tuple[str, str]:
        try:
            return item[0], item[1]()
        except Exception as error:  # reported as a failed check
            return item[0], f"{type(error).__name__}: {str(error)[:400]}"

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        found = dict(pool.map(run, _jobs().items()))
    merged = {name: verdict for name, verdict in found.items() if verdict != "equal"}
    for kernel in dict.fromkeys(name.split(":")[0] for name in found):
        good = sum(v == "equal" for n, v in found.items() if n.split(":")[0] == kernel)
        merged[f"{kernel}:{good} tensors"] = "equal"
    return merged | gemm_cases.check_sizes("gemm_odd", 528, 1376, 336)


def _passes() -> dict[str, tuple[Callable[..., Any], float]]:
    """Name -> (pass over x and keys, compulsory bytes an element)."""

    def both(x, k0, k1, *, stochastic, order=TILED, hadamard=True):
        scales = K.tensor_scales(*K.maxima(x, hadamard=hadamard))
        row = Rowwise(scales[0], k0 if stochastic else None, codes=order)
        column = Columnwise(scales[-1], k1 if stochastic else None, hadamard=hadamard, codes=order)
        return K.quantize(x, rows=row, columns=column)

    def rows(x, k0, k1):
        return K.quantize(x, rows=Rowwise(K.tensor_scale(K.maxima(x, hadamard=False)[0]), codes=TILED))

    return {
        "codes pass": (lambda *a: both(*a, stochastic=False), PASS + 2 * CODES),
        "codes pass, plain scales": (lambda *a: both(*a, stochastic=False, order=PLAIN), PASS + 2 * CODES),
        "codes pass, no hadamard": (lambda *a: both(*a, stochastic=False, hadamard=False), PASS + 2 * CODES),
        "codes_sr pass": (lambda *a: both(*a, stochastic=True), PASS + 2 * CODES),
        "codes pass, rows": (rows, PASS + CODES),
    }


UNIT = np.array([5, 537.6, 1 / 537.6, 89.6, 1 / 537.6, 0, 0, 0], np.float32)  # the scales of a tensor of amax 5


def _made(x: jax.Array, sides: Sequence[Any], columns: int, name: str) -> tuple[jax.Array, ...]:
    run = functools.partial(codes.quantize_made, [x], lambda m, rows: [rows], [(side, 0) for side in sides])
    return run(columns=columns, groups=16 // columns, name=name)


def _quantize_only(stochastic: bool, columns: int = 4) -> Callable[..., Any]:
    def fn(x, k0, k1):
        keys = (k0, k1) if stochastic else (None, None)
        sides = Rowwise(UNIT, keys[0], codes=TILED), Columnwise(UNIT, keys[1], codes=TILED)
        return _made(x, sides, columns, "codes_alone")

    return fn


def _gated(g, u, d, k):
    scales = K.tensor_scales(*K.backward_maxima(g, u, d, tensors=3))
    sides = [(Rowwise(scales[i], k, codes=TILED), Columnwise(scales[i + 1], k, codes=TILED)) for i in (0, 2)]
    return K.quantize_backward(g, u, d, dg=sides[0], du=sides[1], h=Columnwise(scales[5], codes=TILED))


def _forward(g, u, d, k):
    row, column = K.tensor_scales(*K.forward_maxima(g, u))
    return K.quantize_forward(g, u, rows=Rowwise(row, codes=TILED), columns=Columnwise(column, codes=TILED))


def cases(shapes: list[tuple[int, int]]) -> list[Case]:
    out = []
    for shape in [s for s in shapes if s in ((16384, 8192), (8192, 14336), (16384, 2048))]:
        elements, keys = float(np.prod(shape)), (jnp.asarray(KEY), jnp.asarray(KEY2))
        sets = [(random_array(shape, i), *keys) for i in range(3)]
        out.append(Case("copy", shape, "negate", lambda: lambda x, k0, k1: -x, sets, 4 * elements))
        for name, (fn, bytes_of) in (_passes() | (_without_tiles() if shape == (16384, 8192) else {})).items():
            out.append(Case(name, shape, "", lambda fn=fn: fn, sets, bytes_of * elements))
        make = lambda: lambda x, k0, k1: mxfp8.quantize(x, operands=MX_BOTH)  # noqa: E731
        out.append(Case("mxfp8", shape, "", make, sets, (2 + 2 * MX_CODES) * elements))
        for (name, stochastic), columns in itertools.product((("codes", False), ("codes_sr", True)), (4, 2)):
            make = functools.partial(_quantize_only, stochastic, columns)
            out.append(Case(f"{name} alone", shape, f"c{columns}", make, sets, (2 + 2 * CODES) * elements))
        if shape != (16384, 2048):
            triples = [(*(random_array(shape, 3 * i + j) for j in range(3)), keys[0]) for i in range(2)]
            out.append(Case("swiglu_codes forward", shape, "", lambda: _forward, triples, (8 + 2 * CODES) * elements))
            make = lambda: lambda g, u, d, k: mxfp8.quantize_backward(g, u, d, operands=MX_GRADIENTS)  # noqa: E731
            out.append(Case("mxfp8_swiglu backward", shape, "", make, triples, (6 + 5 * MX_CODES) * elements))
            out.append(Case("swiglu_codes backward", shape, "", lambda: _gated, triples, (12 + 5 * CODES) * elements))
    return out + _weight_cases() + _odd_cases()


def _without_tiles() -> dict[str, tuple[Callable[..., Any], float]]:
    """The carriers' passes by the kernels that find their own addresses, as `passes` times them with tiles."""

    def both(x, k0, k1, *, stochastic=False, packed=False):
        keys = (k0, k1) if stochastic else (None, None)
        return _made(x, [Rowwise(UNIT, keys[0]), Columnwise(UNIT, keys[1], packed=packed)], 4, "both_without_tiles")

    def maxima(x, k0, k1):
        def tops(m, rows):
            word = arithmetic.magnitudes(m, [w for row in rows for w in row])
            plain = m.and_(m.max_u16x2(word, m.shl(word, 16)), 0xFFFF0000)
            turned = [arithmetic.hadamard_amax(m, [row[k] for row in rows]) for k in range(len(rows[0]))]
            return [plain, functools.reduce(m.fmax_nan, turned)]

        return codes.find_maxima([x], tops, 2, name="maxima_without_tiles")

    return {
        "maxima without tiles": (maxima, 2.0),
        "rows without tiles": (lambda x, k0, k1: _made(x, [Rowwise(UNIT)], 4, "rows_without_tiles"), 4.0),
        "both without tiles": (both, 6.0),
        "both_sr without tiles": (functools.partial(both, stochastic=True), 6.0),
        "both_packed without tiles": (functools.partial(both, packed=True), 4 + CODES),
    }


def _weight_pass(w):
    return K.weight_codes(w, K.tensor_scale(K.weight_maxima(w)), inputs_last=TILED, outputs_last=TILED)


def _weight_cases() -> list[Case]:
    shape = (4096, 14336)
    sets = [(random_array(shape, i, jnp.float32, 0.02),) for i in range(3)]
    elements = float(np.prod(shape))
    return [
        Case("weight_codes pass", shape, "", lambda: _weight_pass, sets, (8 + 2 * CODES) * elements),
        Case("copy", shape, "float32", lambda: lambda w: -w, sets, 8 * elements),
    ]


def _carriers(x, k0, k1):
    row, column = K.tensor_scales(*K.maxima(x))
    return K.quantize(x, rows=Rowwise(row), columns=Columnwise(column, packed=True))


def _product(x, w, scale):
    return K.matmul(x, w, scale, scale)


def _odd_cases() -> list[Case]:
    """Widths that no tile divides, and the next multiple of 128 of each: codes, carriers and the GEMM over them."""
    out = []
    for shape in ODD:
        sets = [(random_array(shape, i), jnp.asarray(KEY), jnp.asarray(KEY2)) for i in range(3)]
        elements = float(np.prod(shape))
        out.append(Case("codes alone", shape, "", lambda: _quantize_only(False), sets, (2 + 2 * CODES) * elements))
        out.append(Case("carriers pass", shape, "", lambda: _carriers, sets, (PASS + 2 + CODES) * elements))
        if shape[1] % 8 == 0:
            scale, w = jnp.ones((8,), jnp.float32), random_array((shape[1], 2048), 9)
            products = [(s[0], w, scale) for s in sets]
            work = 2.0 * shape[0] * shape[1] * 2048
            out.append(Case("gemm", shape, "nn, 2048 outputs", lambda: _product, products, work, "TFLOP/s"))
    return out
