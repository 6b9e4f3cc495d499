"""*Golden*: recipes after NVIDIA's, bit for bit inside jit, against vectors made with their authors' own code.

tests/league holds a part of the vectors; `HALFBYTE_LEAGUE=DIR` names a folder with all of them. Random numbers are
those that the vectors were made with. A zero's sign is not compared: the authors differ in it.
"""

import functools
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from halfbyte import formats
from halfbyte.formats import BlockFormat, FourOverSixScale, TwoLevelScale
from halfbyte.formats.exact_float32 import bitcast_to_uint32
from halfbyte.formats.qtensor import quantize_to_grid
from halfbyte.formats.scale_rules import BlockMagnitudes

LEAGUE = Path(os.environ.get("HALFBYTE_LEAGUE", Path(__file__).parents[1] / "league"))
SIX_FOUR = (6.0, 4.0)


def te46(measure, top, **more):
    return BlockFormat(
        "te46",
        formats.E2M1,
        16,
        FourOverSixScale(scale_top=top, candidate_targets=SIX_FOUR, error_metric=measure, **more),
    )


# family -> mode of its files -> (format, how it is asked)
MODES = {
    "fos": {
        "mse_1d": (formats.NVFP4_46_MSE, {}),
        "mse_2d": (formats.NVFP4_46_MSE, {"block": "2d"}),
        "mae_1d": (formats.NVFP4_46_MAE, {}),
        "mae_2d": (formats.NVFP4_46_MAE, {"block": "2d"}),
        "rht_mse_1d": (formats.NVFP4_46_MSE, {"side": "col", "given": "col_input_rht"}),
    },
    "te46": {
        "mae_256_1d": (formats.NVFP4_46_MAE, {}),
        "mae_256_2d": (formats.NVFP4_46_MAE, {"block": "2d"}),
        "mse_256_1d": (formats.NVFP4_46_MSE, {}),
        "mse_256_2d": (formats.NVFP4_46_MSE, {"block": "2d"}),
        "mae_448_1d": (te46("absolute", 448.0), {}),
        "mse_448_2d": (te46("squared", 448.0), {"block": "2d"}),
    },
    "te_row": {
        "row_1d": (formats.NVFP4_ROW, {}),
        "row_mae_256_1d": (te46("absolute", 256.0, outer_granularity="row"), {}),
    },
    "ue5m3": {
        "t448_1d": (formats.NVFP4_UE5M3, {}),
        "t448_2d": (formats.NVFP4_UE5M3, {"block": "2d"}),
        "stale_1d": (formats.NVFP4_UE5M3, {"amax": "row_amax"}),
        "sr448_1d": (formats.NVFP4_UE5M3, {"rounding": "midpoint", "noise": "bytes"}),
        "sr2048_1d": (
            BlockFormat("2048", formats.E2M1, 16, TwoLevelScale(formats.UE5M3, 2048.0, floor=1.0)),
            {"rounding": "midpoint", "noise": "bytes"},
        ),
    },
    "ours46sr": {
        "sr_expected_1d": (formats.NVFP4_46_SR, {"rounding": "stochastic", "noise": "bytes_row"}),
        "sr_expected_mid_1d": (formats.NVFP4_46_SR, {"rounding": "midpoint", "noise": "bytes_row"}),
        "rht_sr_expected_1d": (
            formats.NVFP4_46_SR,
            {"side": "col", "given": "col_input_rht", "rounding": "stochastic", "noise": "bytes_col"},
        ),
    },
    "quartet2": {"fwd46": (formats.NVFP4_QUARTET, {"rounding": "away"})},
    "tetrajet2": {
        "rn": (formats.NVFP4_TETRA, {}),
        "sr": (formats.NVFP4_TETRA_SR, {"rounding": "midpoint", "noise": "sr__bytes"}),
    },
}
# Compiled with default flags: a mode of each kind of arithmetic. The others without LLVM's optimizer, for time's sake.
AS_USERS_DO = {("te46", "mse_256_1d"), ("ours46sr", "sr_expected_mid_1d"), ("quartet2", "fwd46"), ("tetrajet2", "sr")}
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
FILES = [(family, path.stem) for family in MODES for path in sorted((LEAGUE / family).glob("*.npz"))]


def stored(family, case):
    with np.load(LEAGUE / family / f"{case}.npz") as archive:
        return {field: archive[field] for field in archive.files}


def plain_zero(codes):
    return np.where(codes == 8, 0, codes)


def settings(family, mode):
    """Format, rounding and blocks of one mode, which may be those of another family's."""
    fmt, how = MODES[family][mode]
    return fmt, how.get("rounding", "rne"), how.get("block", "1d")


@functools.cache
def program(fmt, rounding, block):
    """Bits of x, random bytes, a maximum -> codes and scale bytes; compiled once for each shape."""

    def run(bits, noise, amax):
        x = lax.bitcast_convert_type(bits, jnp.bfloat16 if bits.dtype == jnp.uint16 else jnp.float32)
        grid = quantize_to_grid(x, fmt, block=block, noise=noise, amax=amax, rounding=rounding)
        return grid.codes, grid.scales.codes

    as_users_do = (fmt, rounding, block) in {settings(*each) for each in AS_USERS_DO}
    return jax.jit(run, compiler_options=None if as_users_do else QUICK)


def asked(fields, family, mode):
    """(codes, scale bytes) of one mode of a file."""
    how = MODES[family][mode][1]
    x = fields[f"{mode}__{how['given']}"] if "given" in how else fields["x"]
    dtype = ml_dtypes.bfloat16 if str(fields["in_dtype"]) == "bfloat16" else np.float32
    bits = np.ascontiguousarray(x.astype(dtype)).view(np.uint16 if dtype != np.float32 else np.uint32)
    noise = jnp.asarray(fields[how["noise"]]) if "noise" in how else None
    amax = jnp.asarray(fields[f"{mode}__{how['amax']}"]) if "amax" in how else None
    return [np.asarray(a) for a in program(*settings(family, mode))(jnp.asarray(bits), noise, amax)]


@pytest.mark.slow(fast_cases=["te46-edge_32x128_bf16", "te_row-edge_32x128_bf16"])
@pytest.mark.parametrize(("family", "case"), FILES)
def test_codes_and_scales_are_the_authors(family, case, golden_count):
    fields = stored(family, case)
    compared = 0
    for mode, (_, how) in MODES[family].items():
        side = how.get("side", "row")
        if f"{mode}__{side}_codes_hw" not in fields:
            continue
        codes, scales = asked(fields, family, mode)
        want = fields[f"{mode}__{side}_codes_hw"]
        sure = np.ones(scales.shape, bool)
        if family == "ours46sr":  # where two sums differ by their order alone, either may win
            base = mode.replace("_mid", "")
            margin = fields[f"{base}__{side}_margin"].astype(float)
            sure = (np.abs(margin) >= 1e-5) | (margin == 0)
        wide = np.repeat(sure, 16, axis=-1)
        if how.get("block") == "2d":
            wide = np.repeat(wide, 16, axis=0)
        dead = np.repeat(scales, want.shape[-1] // scales.shape[-1], -1)
        dead = np.repeat(dead, want.shape[0] // dead.shape[0], 0) == 0
        if family in ("fos", "te46"):  # they differ in codes that decode to 0
            wide = wide & ~dead
        different = (plain_zero(codes) != plain_zero(want)) & wide
        assert not different.any(), (mode, different.sum(), np.argwhere(different)[:4])
        if f"{mode}__{side}_scale_u8" in fields:
            theirs = fields[f"{mode}__{side}_scale_u8"]
            theirs = theirs[:: theirs.shape[0] // scales.shape[0]]
            assert (scales == theirs)[sure].all(), (mode, (scales != theirs).sum())
        compared += 2
    golden_count(f"{family}/{case}", compared)


@jax.jit
def eden_steps(x, uniform):
    """Scales before the correction, z, codes of q, the outer scale, and corrected scales."""
    fmt = formats.NVFP4_EDEN
    view = fmt.view(x.shape, block="1d")
    bits = bitcast_to_uint32(x).reshape(view.shape)
    magnitude = bits & jnp.uint32(0x7FFF_FFFF)
    largest = jnp.max(magnitude, view.reduce_axes)
    rule = fmt.scale
    found = rule.compute_scales(
        BlockMagnitudes(magnitude, largest, rule.amax_bits(largest, view), view, "away"), fmt.element
    )
    z = rule.scaled(magnitude, found, view)
    q = formats.elements.round_half_away(fmt.element, z)
    made = rule.corrected(found, z, q.value, view, uniform)
    return found.codes, z.reshape(x.shape), q.code.reshape(x.shape), found.tensor_decode, made.codes


@pytest.mark.slow
@pytest.mark.parametrize("case", sorted(p.stem for p in (LEAGUE / "quartet2").glob("*.npz")))
def test_ms_eden_from_the_transformed_tensor_on(case):
    fields = stored("quartet2", case)
    s, z, q, outer, made = eden_steps(jnp.asarray(fields["eden__x_had"]), jnp.asarray(fields["eden__uniforms"]))
    np.testing.assert_array_equal(s, fields["eden__s_u8"])
    np.testing.assert_array_equal(outer, fields["eden__outer"])
    np.testing.assert_array_equal(np.abs(z), np.abs(fields["eden__z"]))
    np.testing.assert_array_equal(np.asarray(q), fields["eden__codes_hw"] & 7)
    np.testing.assert_array_equal(made, fields["eden__scale_u8"])
