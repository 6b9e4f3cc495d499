"""What kernels write of an operand, from `oracle_table`: codes of tokens in pairs, scale bytes, bf16 carriers."""

import numpy as np
import oracle_table as table
from oracle_table import pack

F = np.float32
FORMATS = {
    "plain": "nvfp4", "1716": "nvfp4_1716", "squared": "nvfp4_46_mse", "absolute": "nvfp4_46_mae",
    "expected": "nvfp4_46_sr",
}  # fmt: skip
TOPS = {rule: table.FORMATS[name].top for rule, name in FORMATS.items()}


def scale_vector(amax, top=2688):
    """As kernels read it: amax, S, 1 / S, the lift of errors, alpha of a GEMM."""
    s = table.tensor_scale(F(amax), top)
    lift = F(2.0**64) if amax < 2.0**-60 else F(2.0**-64) if amax >= 2.0**60 else F(1)
    alpha = F(1) / s if np.isfinite(amax) else F(np.nan)
    return np.array([amax, s, F(1) / s, lift, alpha, 0, 0, 0], F)


def random_bytes(tokens, columns, key):
    return table.random_bytes((tokens, columns), key)


def hadamard_tokens(x):
    """float32 values of the bf16 transform along tokens."""
    return np.ascontiguousarray(table.hadamard(x.T).T)


def hadamard128(x, signs, *, axis):
    return table.hadamard(x, signs) if axis == 1 else np.ascontiguousarray(table.hadamard(x.T, signs).T)


def quantize(x, amax=None, *, axis=1, noise=None, block2d=False, rule="plain", rounding="stochastic"):
    """(codes with signs, scale bytes, carrier) of x with blocks of 16 along `axis`, or 16x16 tiles."""
    made = table.quantize(
        x, FORMATS.get(rule, rule), axis=axis, square=block2d, noise=noise, amax=amax,
        rounding="rne" if noise is None else rounding,
    )  # fmt: skip
    return made.codes, made.scales, made.carrier


def pack_tokens(codes):
    return pack(codes, 0)


def again(x, w, key):
    """What `kernel_programs.again` makes."""

    def forward(a, axis):
        return table.quantize(a, "nvfp4_46_mse", axis=axis)

    row, column = forward(x, 1), forward(w, 0)
    turned = hadamard_tokens(row.values)
    codes, scales, _ = quantize(turned, axis=0, rule="squared")
    drawn = quantize(turned, axis=0, rule="squared", noise=random_bytes(*x.shape, key), rounding="midpoint")[2]
    return row.carrier, pack_tokens(codes), scales, drawn, column.carrier, forward(column.values, 1).carrier


def quartet(x, *, axis):
    """Quartet II's forward operand; its values are NaN where an amax is not finite."""
    made = table.quantize(x, "nvfp4_quartet", axis=axis, rounding="away")
    return made if np.isfinite(made.amax) else made._replace(values=np.full_like(made.values, np.nan))


def eden(y, noise, *, axis):
    return table.quantize(y, "nvfp4_eden", axis=axis, noise=noise, rounding="away")


def quartet2(x, w, key, signs):
    """What `kernel_programs.quartet2` makes."""
    noise = random_bytes(*x.shape, key)

    def runs(numbers, axis):
        return eden(hadamard128(numbers, signs, axis=axis), noise, axis=axis)

    row, column = quartet(x, axis=1), quartet(w, axis=0)
    wgrad = runs(row.values, 0)
    backward = runs(x, 1).carrier, runs(x, 0).carrier, column.carrier, runs(column.values, 1).carrier
    return row.carrier, pack_tokens(wgrad.codes), wgrad.scales, *backward
