"""The recipes after NVIDIA's in NumPy, from their equations (docs/league.md): no code of the library runs here.

float32 where a source computes in it, one operation at a time; blocks of 16 along the last axis. `quantized` gives what
a GEMM multiplies and what its sums owe.
"""

import numpy as np

F = np.float32
MAX = np.finfo(F).max
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
MIDDLES = (E2M1[1:] + E2M1[:-1]) / 2
STEPS = np.diff(E2M1)


def three_bits(least, binades):
    """The values of a scale with three bits of mantissa: subnormals in steps of `least`, then the binades."""
    return np.array(
        [m * least for m in range(8)] + [(8 + m) * least * 2.0**e for e in range(binades) for m in range(8)]
    )


E4M3, UE5M3 = three_bits(2.0**-9, 15)[:-1], three_bits(2.0**-17, 30)
V = F(6 / (17 / 16 * 0.93))


def nearest(x, grid):
    """The nearest value of a grid, ties to the even code, saturating."""
    x = np.asarray(x, np.float64)
    upper = np.clip(np.searchsorted(grid, x), 1, len(grid) - 1)
    below, above = grid[upper - 1], grid[upper]
    take = (x > (below + above) / 2) | ((x == (below + above) / 2) & (upper % 2 == 0))
    return np.where(take, above, below)


def rounded(z, rounding, noise):
    """Magnitudes z on the E2M1 grid."""
    z = np.minimum(z, F(6)).astype(np.float64)
    if rounding == "rne":
        return nearest(z, E2M1)
    if rounding == "away":
        return E2M1[np.searchsorted(MIDDLES, z, side="right")]
    code = np.searchsorted(E2M1, z, side="right") - 1
    step = np.append(STEPS, 1.0)[code]
    way = (z - E2M1[code]) / step
    up = way + (noise + 0.5) / 256 >= 1 if rounding == "midpoint" else way + noise / 256 >= 1
    return E2M1[np.minimum(code + up, 7)]


def in_order(values):
    total = values[..., 0]
    for i in range(1, values.shape[-1]):
        total = total + values[..., i]
    return total


def least(errors, options):
    """For each block the first option with the least error."""
    taken, best = options[0], errors[0]
    for option, error in zip(options[1:], errors[1:], strict=True):
        taken, best = np.where(error < best, option, taken), np.minimum(error, best)
    return taken


def multiplied(scale, decode):
    """Block encode scales."""
    with np.errstate(divide="ignore"):
        return np.minimum(F(1) / (scale.astype(F) * decode), MAX)


def over(top, amax):
    """S, one for each maximum; 1 for a maximum of zero."""
    with np.errstate(divide="ignore"):
        return np.where(amax > 0, np.minimum(F(top) / amax, MAX), F(1)).astype(F)


def four_over_six(x, blocks, amax, measure, rounding):
    s, b = over(1536, amax), blocks.max(-1)
    t = (b / F(6)) * s
    options = [nearest(np.minimum(t * F(f), F(448)), E4M3) for f in (1, 1.5)]
    errors = []
    for scale in options:
        q = rounded(blocks * multiplied(scale, F(1) / s)[..., None], rounding, None).astype(F)
        off = np.abs(((q * scale[..., None].astype(F)) * amax) / F(1536) - blocks)
        errors.append(in_order(off * off if measure == "squared" else off))
    scale = least(errors, options)
    return scale, blocks * multiplied(scale, F(1) / s)[..., None], F(1) / s


def expected(x, blocks, amax):
    s, b = over(1536, amax), blocks.max(-1)
    options = [nearest(np.minimum(b * (s * F(17 / k)), F(448)), E4M3) for k in (96, 64)]
    errors = []
    for scale in options:
        z = (blocks * multiplied(scale, F(1) / s)[..., None]).astype(np.float64)
        code = np.searchsorted(E2M1, np.minimum(z, 6), side="right") - 1
        inside = (z - E2M1[code]) * (E2M1[code] + np.append(STEPS, 1.0)[code] - z)
        errors.append(scale**2 * np.where(z > 6, (z - 6) ** 2, inside).sum(-1))
    scale = least(errors, options)
    return scale, blocks * multiplied(scale, F(1) / s)[..., None], F(1) / s


def two_level(x, blocks, amax, headroom=1.0, grid=E4M3, floor=0.0):
    s = over(2688, amax)
    scale = nearest(np.minimum(blocks.max(-1) * (s * F(headroom / 6)), F(grid[-1])), grid)
    scale = np.where(scale == 0, floor, scale)
    return scale, blocks * multiplied(scale, F(1) / s)[..., None], F(1) / s


def quartet(x, blocks, amax, rounding):
    d = amax / F(256) / F(6)
    part = blocks.max(-1) / F(6)
    options = [nearest(np.minimum(t / d, F(448)), E4M3) for t in (part, part * F(1.5))]
    options = [np.where(scale == 0, 1.0, scale) for scale in options]
    errors = []
    for scale in options:
        step = (scale.astype(F) * d)[..., None]
        errors.append(in_order((rounded(blocks / step, rounding, None).astype(F) * step - blocks) ** 2))
    scale = least(errors, options)
    return scale, blocks / (scale.astype(F) * d)[..., None], d


def eden(x, blocks, amax):
    d = amax / F(255.99) / V
    scale = nearest((blocks.max(-1) / V) / d, E4M3)
    scale = np.where(scale == 0, 1.0, scale)
    return scale, blocks / (scale.astype(F) * d)[..., None], d


def tetra(x, blocks, floor):
    groups = blocks.reshape(*blocks.shape[:-2], -1, 8, 16)
    g = np.repeat(groups.max((-1, -2)) / F(448) / F(6), 8, axis=-1)
    g = np.where(g == 0, F(1), g)
    scale = nearest(np.minimum(blocks.max(-1) / g / F(6), F(448)), E4M3)
    scale = np.where(scale == 0, floor, scale)
    step = (scale.astype(F) * g)[..., None]
    return scale, np.where(step == 0, F(0), blocks / np.where(step == 0, F(1), step)), g


RULES = {
    "nvfp4_46_mse": lambda x, b, a, how: four_over_six(x, b, a, "squared", how),
    "nvfp4_46_mae": lambda x, b, a, how: four_over_six(x, b, a, "absolute", how),
    "nvfp4_46_sr": lambda x, b, a, how: expected(x, b, a),
    "nvfp4_1716": lambda x, b, a, how: two_level(x, b, a, 17 / 16),
    "nvfp4_row": lambda x, b, a, how: two_level(x, b, np.abs(x).max(-1, keepdims=True)),
    "nvfp4_ue5m3": lambda x, b, a, how: two_level(x, b, a, grid=UE5M3, floor=1.0),
    "nvfp4_quartet": lambda x, b, a, how: quartet(x, b, a, how),
    "nvfp4_eden": lambda x, b, a, how: eden(x, b, a),
    "nvfp4_tetra": lambda x, b, a, how: tetra(x, b, 0.0),
    "nvfp4_tetra_sr": lambda x, b, a, how: tetra(x, b, 2.0**-9),
}


def corrected(scale, z, q, noise):
    """MS-EDEN: s c, by chance one of its neighbours, with the first three bytes of a block as a uniform number."""
    groups = [t.reshape(*t.shape[:-2], -1, 128).astype(np.float64) for t in (z, q)]
    square, cross = (groups[0] ** 2).sum(-1), (groups[0] * groups[1]).sum(-1)
    c = np.repeat(np.where(cross == 0, 1.0, square / np.where(cross == 0, 1.0, cross)), 8, axis=-1)
    wanted = np.minimum(scale * c, 448)
    below = np.searchsorted(E4M3, wanted, side="right") - 1
    step = np.append(np.diff(E4M3), 1.0)[below]
    uniform = (noise[..., 0] * 65536.0 + noise[..., 1] * 256.0 + noise[..., 2]) / 2**24
    return E4M3[below + (uniform * step < wanted - E4M3[below])]


def quantized(x, name, rounding, noise, square=False):
    """(what is multiplied, what sums owe it: a number, or [rows, 1], what both stand for) of x with blocks along its
    last axis; `square` blocks are tiles of 16 x 16."""
    x = x.astype(F)
    rows, columns = x.shape
    blocks = np.abs(x).reshape(rows, columns // 16, 16)
    if square:  # every row of a tile sees all of it
        tiles = np.abs(x).reshape(rows // 16, 16, columns // 16, 16)
        blocks = np.repeat(tiles.transpose(0, 2, 1, 3).reshape(rows // 16, columns // 16, 256), 16, axis=0)
    scale, z, outer = RULES[name](x, blocks, np.abs(x).max(), rounding)
    if square:
        place = np.arange(rows)[:, None, None] % 16 * 16 + np.arange(16)
        z = np.take_along_axis(z, np.broadcast_to(place, (rows, columns // 16, 16)), -1)
    random = None if noise is None else noise.reshape(rows, columns // 16, 16).astype(np.float64)
    q = rounded(z, rounding, random)
    if name == "nvfp4_eden":
        scale = corrected(scale, z, q, random)
    carrier = np.copysign((q * scale[..., None]).reshape(x.shape), x)
    step = (scale.astype(F) * outer)[..., None]
    value = np.copysign((q.astype(F) * step).reshape(x.shape), x)
    if name.startswith("nvfp4_tetra"):  # inside the sum: part of what is multiplied
        return value.astype(np.float64), 1.0, value
    return carrier, outer.astype(np.float64) if np.ndim(outer) else float(outer), value


def hadamard(x, size, signs):
    """Larger transforms: float32, butterflies of growing distance, a power of two first and 1/sqrt(2) last."""
    steps = size.bit_length() - 1
    v = x.astype(F).reshape(-1, size) * (signs * 0.5 ** (steps // 2)).astype(F)
    for step in range(steps):
        pairs = v.reshape(-1, size >> (step + 1), 2, 2**step)
        v = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2).reshape(-1, size)
    return (v * F(0.5**0.5) if steps % 2 else v).reshape(x.shape)
