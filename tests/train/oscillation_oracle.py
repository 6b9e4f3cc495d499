"""OsciReset in NumPy, from the authors' text (thu-ml/TetraJet-v2-NVFP4Training, olmo/quantization_real:
oscillation_reset.py and linear_mix.py, `distance_ratio`); no code of the library runs here.

An iteration n at or after the first: n % period == 0 takes a snapshot of the weights; the next `iters` iterations add
|Q(w) - Q(w')| and |w - w'| up, w' those of the iteration before; the one after them sets w := Q(w) where the ratio of
the two sums is at least the threshold, a ratio over a sum of zero being zero.
"""

import numpy as np

F = np.float32
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array([m * 2.0**-9 for m in range(8)] + [(8 + m) * 2.0 ** (e - 9) for e in range(15) for m in range(8)])[:-1]


def nearest(x, grid):
    """The nearest of the grid, ties to the even code."""
    upper = np.clip(np.searchsorted(grid, x), 1, len(grid) - 1)
    below, above = grid[upper - 1], grid[upper]
    take = (x > (below + above) / 2) | ((x == (below + above) / 2) & (upper % 2 == 0))
    return np.where(take, above, below)


def nvfp4(w, tile):
    """Q(w) of a matrix [inputs, outputs] in blocks of 16 inputs by `tile` outputs, with E4M3 scales."""
    w = w.astype(F)
    s = min(F(2688) / np.abs(w).max(), np.finfo(F).max)
    blocks = np.abs(w).reshape(w.shape[0] // 16, 16, w.shape[1] // tile, tile)
    top = blocks.max((1, 3), keepdims=True)
    scale = nearest((top * F(s * F(1 / 6))).astype(np.float64), E4M3).astype(F)
    with np.errstate(divide="ignore"):
        encode = np.minimum(F(1) / (scale * (F(1) / s)), np.finfo(F).max)
    magnitude = nearest((blocks * encode).astype(np.float64), E2M1).astype(F) * scale * (F(1) / s)
    return np.copysign(magnitude.reshape(w.shape), w)


def tetra(w):
    """Q(w) in blocks of 16 inputs under scales of 128: g = max128 / 448 / 6, s = e4m3(max16 / g / 6)."""
    blocks = np.abs(w.T.astype(F)).reshape(w.shape[1], -1, 8, 16)  # [outputs, inputs / 128, 8, 16]
    g = blocks.max((-1, -2), keepdims=True) / F(448) / F(6)
    scale = nearest((blocks.max(-1, keepdims=True) / g / F(6)).astype(np.float64), E4M3).astype(F)
    step = scale * g
    magnitude = nearest(np.minimum(blocks / step, F(6)).astype(np.float64), E2M1).astype(F) * step
    return np.copysign(magnitude.reshape(w.T.shape).T, w)


class OsciReset:
    """One weight, iteration by iteration."""

    def __init__(self, quantized, *, start, period, iters, threshold):
        self.quantized, self.start, self.period, self.iters, self.threshold = quantized, start, period, iters, threshold

    def after(self, n, w):
        """The weight after iteration n's update w."""
        if n < self.start:
            return w
        at = n % self.period
        if at == 0:
            self.last, self.of_w, self.of_q = w, np.zeros_like(w), np.zeros_like(w)
        elif at <= self.iters:
            self.of_q = self.of_q + np.abs(self.quantized(w) - self.quantized(self.last))
            self.of_w = self.of_w + np.abs(w - self.last)
            self.last = w
        elif at == self.iters + 1:
            ratio = np.divide(self.of_q, self.of_w, out=np.zeros_like(w), where=self.of_w != 0)
            return np.where(ratio >= self.threshold, self.quantized(w), w)
        return w
