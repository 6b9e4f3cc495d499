"""Delayed scaling in NumPy, from the rule of Transformer Engine's update kernel (common/recipe/delayed_scaling.cu); no
code of the library runs here.

A tensor has a history of amaxes whose entry 0 is the present step's, and a scale that begins at 1. After a step:
scale = (fp8_max / max(history)) / 2^margin, the old one where that maximum is 0 or not finite; then the history is
rolled by one towards its beginning, and entry 0 becomes 0. So step n is scaled by what was seen in steps before n.
"""

import numpy as np
from oracle import E4M3, E5M2, F, Gemm, Operand, nearest


class Tensor:
    """One of a linear's three: x, W (E4M3) or dy (E5M2)."""

    def __init__(self, values: np.ndarray, length: int, margin: int = 0):
        self.values, self.margin = values, margin
        self.scale, self.history = F(1), np.zeros(length, F)

    def quantized(self, x: np.ndarray) -> Operand:
        """x under the scale that there is; what is too large saturates."""
        self.history[0] = max(self.history[0], np.abs(x).max())
        scaled = np.abs(x).astype(F) * self.scale
        assert scaled.dtype == F
        return Operand(np.copysign(nearest(scaled.astype(np.float64), self.values), x), float(F(1) / self.scale))

    def end_of_step(self) -> None:
        amax = self.history.max()
        if np.isfinite(amax) and amax > 0:
            self.scale = F(self.values[-1] / 2.0**self.margin) / amax
        self.history = np.roll(self.history, -1)
        self.history[0] = 0


class Linear:
    """y = x W with its gradients, step by step."""

    def __init__(self, length: int):
        self.x, self.w, self.dy = (Tensor(values, length) for values in (E4M3, E4M3, E5M2))

    def step(self, x: np.ndarray, w: np.ndarray, dy: np.ndarray) -> dict[str, Gemm]:
        """The three GEMMs of one step, float64."""
        x, w, dy = self.x.quantized(x), self.w.quantized(w), self.dy.quantized(dy)
        for tensor in (self.x, self.w, self.dy):
            tensor.end_of_step()
        return {
            "fprop": _product(x, w, "tk,kn->tn"),
            "dgrad": _product(dy, w, "tn,kn->tk"),
            "wgrad": _product(x, dy, "tk,tn->kn"),
        }


def _product(a: Operand, b: Operand, subscripts: str) -> Gemm:
    def summed(left, right):
        return np.einsum(subscripts, left * a.decode, right * b.decode)

    return Gemm(a, b, summed(a.carrier, b.carrier), summed(np.abs(a.carrier), np.abs(b.carrier)))
