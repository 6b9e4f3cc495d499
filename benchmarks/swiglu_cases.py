"""Timings of the SwiGLU passes."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from kernel_cases import KEY, scale_of
from kernel_timing import Case, random_array, tiling_name

from halfbyte import kernels as K
from halfbyte.kernels import Columnwise, Rowwise, Tiling

SHAPES = ((16384, 8192), (8192, 14336))


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
