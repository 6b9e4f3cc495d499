"""Checks and timings of the SwiGLU passes: operands against the oracle's quantization of what the kernels computed."""

from typing import Any

import jax
import jax.numpy as jnp
import kernel_oracle as oracle
import ml_dtypes
import numpy as np
from kernel_cases import KEY, KEY2, all_equal, scale_of, top
from kernel_timing import Case, random_array, tiling_name

from halfbyte import kernels as K
from halfbyte.kernels import Columnwise, Rowwise, Tiling

SHAPES = ((16384, 8192), (8192, 14336))


def activation_numpy(g: np.ndarray, u: np.ndarray, d: np.ndarray) -> list[np.ndarray]:
    """dg, du and h with the stated roundings, sigmoid in float64."""

    def cut(x: np.ndarray) -> np.ndarray:
        return x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)

    g, u, d = (x.astype(np.float32) for x in (g, u, d))
    s = (1 / (1 + np.exp(-g.astype(np.float64)))).astype(np.float32)
    a = cut(g * s)
    return [cut(cut(d * u) * (s * (1 + g * (1 - s)))), cut(d * a), cut(a * u)]


def _close(got: Any, want: np.ndarray) -> str:
    """ "equal" if all values agree to two units of bf16 and 98 in 100 exactly: sigmoid is approximate on both sides."""
    got = np.asarray(got).astype(np.float32)
    far = np.abs(got - want) > np.maximum(np.abs(want) * 2.0**-6, 1e-30)
    same = (got == want).mean()
    return "equal" if not far.any() and same > 0.98 else f"{same:.3%} same, {far.mean():.3%} far"


def _operands(g, u, d, tiling: Tiling | None = None):
    """The seven operands of the MLP's hidden layer from maxima that the kernels find themselves."""
    more = {} if tiling is None else {"tiling": tiling}
    k0, k1 = jnp.asarray(KEY), jnp.asarray(KEY2)
    h_row, h_col = (K.tensor_scale(p) for p in K.forward_maxima(g, u))
    dg_row, dg_col, du_row, du_col = (K.tensor_scale(p) for p in K.backward_maxima(g, u, d))
    forward = K.quantize_forward(g, u, rows=Rowwise(h_row), columns=Columnwise(h_col))
    backward = K.quantize_backward(
        g,
        u,
        d,
        dg=(Rowwise(dg_row, k0), Columnwise(dg_col, k1)),
        du=(Rowwise(du_row, k1), Columnwise(du_col, k0)),
        h=Columnwise(h_col),
        **more,
    )
    return K.activation(g, u), K.activation(g, u, d), forward, backward


def checks(threads: int) -> dict[str, str]:
    rng = np.random.default_rng(0)
    results = {}
    try:
        for name, size in (("normal", 1.0), ("large", 12.0)):
            g, u, d = ((rng.standard_normal((128, 1024)) * s).astype(ml_dtypes.bfloat16) for s in (size, 1.0, 1e-3))
            got = jax.jit(_operands)(g, u, d)
            (h,), (dg, du, h_again), forward, backward = jax.tree.map(np.asarray, got)
            results[f"activation:{name} against float64"] = next(
                (v for v in map(_close, (dg, du, h_again), activation_numpy(g, u, d)) if v != "equal"), "equal"
            )
            results[f"activation:{name} both kernels"] = all_equal([(h, h_again)])
            noise = [oracle.random_bytes(*g.shape, k) for k in (KEY, KEY2)]
            rows = {n: oracle.quantize(x, top(x), axis=1, noise=b)[2] for n, x, b in
                    (("h", h, None), ("dg", dg, noise[0]), ("du", du, noise[1]))}  # fmt: skip
            turned = {n: oracle.hadamard_tokens(x) for n, x in (("h", h), ("dg", dg), ("du", du))}
            columns = {n: oracle.quantize(turned[n], top(turned[n]), axis=0, noise=b)[2] for n, b in
                       (("h", None), ("dg", noise[1]), ("du", noise[0]))}  # fmt: skip
            results[f"swiglu_forward:{name}"] = all_equal([(forward[0], rows["h"]), (forward[1], columns["h"])])
            want = [rows["dg"], columns["dg"], rows["du"], columns["du"], columns["h"]]
            results[f"swiglu_backward:{name}"] = all_equal(list(zip(backward, want, strict=True)))
    except Exception as error:  # reported as a failed check
        results["swiglu:error"] = f"{type(error).__name__}: {str(error)[:400]}"
    return results


def cases(shapes: list[tuple[int, int]]) -> list[Case]:
    out = []
    for shape in [s for s in SHAPES if s in shapes]:
        elements, unit, key = float(np.prod(shape)), scale_of(5.0), jnp.asarray(KEY)
        sets = [tuple(random_array(shape, 3 * i + j) for j in range(3)) + (unit, key) for i in range(2)]
        for tiling in (Tiling(4, 4), Tiling(2, 4), Tiling(4, 2), Tiling(4, 8)):
            make = _makers(tiling)
            name = tiling_name(tiling)
            out.append(Case("swiglu_forward_maxima", shape, name, make["forward_maxima"], sets, 4 * elements))
            out.append(Case("swiglu_forward", shape, name, make["forward"], sets, 6 * elements))
            out.append(Case("swiglu_backward_maxima", shape, name, make["backward_maxima"], sets, 6 * elements))
            out.append(Case("swiglu_backward", shape, name, make["backward"], sets, 16 * elements))
        for tiling in (Tiling(2, 8), Tiling(2, 2), Tiling(4, 4, False), Tiling(2, 4, False)):
            out.append(
                Case("swiglu_backward", shape, tiling_name(tiling), _makers(tiling)["backward"], sets, 16 * elements)
            )
    return out


def _makers(t: Tiling) -> dict[str, Any]:
    def backward(g, u, d, s, k):
        sides = Rowwise(s, k), Columnwise(s, k)
        return K.quantize_backward(g, u, d, dg=sides, du=sides, h=Columnwise(s))

    return {
        "forward_maxima": lambda: lambda g, u, d, s, k: K.forward_maxima(g, u, tiling=t),
        "forward": lambda: lambda g, u, d, s, k: K.quantize_forward(g, u, rows=Rowwise(s), tiling=t),
        "backward_maxima": lambda: lambda g, u, d, s, k: K.backward_maxima(g, u, d, tiling=t),
        "backward": lambda: backward,
    }
