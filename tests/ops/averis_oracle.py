"""Averis in NumPy, from the formulas that follow from its abstract (arXiv 2603.10444); no code of the library runs here
but what `oracle` takes as given.

X = 1 m^T + R with m a mean over tokens:  Y = Q(R) Q(W) + 1 (m^T W),  dW = Q(R)^T Q(dY) + m (1^T dY). With R = X - 1 m^T
and m = X^T 1 / T, straight through Q:  dX = dR + 1 (dm - dR^T 1)^T / T,  dR = Q(dY) Q(W)^T,  dm = W (dY^T 1).

m is the mean of fixed-point numbers, rounded to bfloat16: a feature whose largest magnitude is below 2^e is summed in
units of 2^(e - k), k = 30 - ceil(log2 T), so that 32 bits hold every sum.
"""

import dataclasses
import math

import numpy as np
import oracle


def mean(x):
    """float64 [features], bfloat16 values."""
    tokens = len(x)
    _, e = np.frexp(np.abs(x.astype(np.float64)).max(0))
    unit = 2.0 ** (np.maximum(e, -90) - (30 - math.ceil(math.log2(tokens))))
    total = np.rint(x.astype(np.float64) / unit).sum(0)
    return oracle.bfloat16((total.astype(np.float32) * unit.astype(np.float32)) * np.float32(1 / tokens))


def linear(x, w, dy, recipe, key, *, dtype):
    """(y, dx, dw) as oracle.Gemm, dx before any rounding; and dR."""
    m = mean(x).astype(np.float64)
    r = (x.astype(np.float64) - m).astype(np.float32).astype(dtype).astype(np.float32)
    made, wide, total = oracle.linear(r, w, dy, recipe, key), w.astype(np.float64), dy.astype(np.float64).sum(0)
    y, dr, dw = made["fprop"], made["dgrad"], made["wgrad"]
    back = (wide @ total - dr.result.sum(0)) / len(x)
    size = (np.abs(wide) @ np.abs(dy).sum(0) + dr.bound.sum(0)) / len(x)
    return (
        dataclasses.replace(y, result=y.result + m @ wide, bound=y.bound + np.abs(m) @ np.abs(wide)),
        dataclasses.replace(dr, result=dr.result + back, bound=dr.bound + size),
        dataclasses.replace(
            dw, result=dw.result + np.outer(m, total), bound=dw.bound + np.outer(np.abs(m), np.abs(dy).sum(0))
        ),
        dr.result,
    )
