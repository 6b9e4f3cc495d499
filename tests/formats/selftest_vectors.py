"""Makes src/halfbyte/formats/vectors/selftest.npz:  python tests/formats/selftest_vectors.py

NVFP4 round-to-nearest comes from tests/golden, made outside this project. Everything else is computed by
tests/oracle/oracle_table.py, which shares no code with the package.
"""

import sys
from pathlib import Path

import ml_dtypes
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "oracle"))
import oracle_table as table  # noqa: E402

GOLDEN = ROOT / "tests" / "golden"
TARGET = ROOT / "src" / "halfbyte" / "formats" / "vectors" / "selftest.npz"

# Group -> (mode, golden cases). All cases of a group have one dtype; repeated to one shape, they run in one program.
GOLDEN_GROUPS = {
    "nvfp4_1d": ("1d", ["randn_64x64_bf16", "all_equal_32x32", "negative_zero_32x32", "huge_32x32_bf16",
                        "subnormal_32x32_bf16", "tiny_normal_32x32_bf16", "amax_pow2_-20_32x32", "amax_pow2_20_32x32",
                        "ties_exact_32x64", "single_outlier_32x64", "scale_underflow_to_zero_32x64"]),
    "nvfp4_1d_f32": ("1d", ["randn_64x64_f32", "subnormal_min_f32_32x32", "ties_plus_ulp_32x64_f32"]),
    "nvfp4_2d": ("2d", ["randn_64x64_bf16", "all_equal_32x32", "huge_32x32_bf16", "subnormal_32x32_bf16",
                        "tiny_normal_32x32_bf16", "ties_exact_32x64", "single_outlier_32x64"]),
    "nvfp4_hadamard": ("rht1d", ["randn_64x64_bf16", "huge_32x32_bf16", "subnormal_32x32_bf16",
                                 "tiny_normal_32x32_bf16", "single_outlier_32x64"]),
}  # fmt: skip
SIDE = 64
KEY = np.array([0x0123_4567, 0x89AB_CDEF], np.uint32)
NO_KEY = np.zeros(2, np.uint32)


def bits_of(x: np.ndarray, dtype: str) -> np.ndarray:
    """Input bits in the dtype it is fed in; the float32 that golden files hold are values of that dtype."""
    return x.astype(ml_dtypes.bfloat16).view(np.uint16) if dtype == "bfloat16" else x.astype(np.float32).view(np.uint32)


def repeat(array: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """`array` laid out again and again until it is [rows, columns]: no amax changes, every block stays whole."""
    return np.tile(array, (rows // array.shape[0], columns // array.shape[1]))


def golden_group(mode: str, cases: list[str]) -> dict[str, np.ndarray]:
    side = "col" if mode == "rht1d" else "row"
    tall = 16 if mode == "2d" else 1
    files = [dict(np.load(GOLDEN / f"{case}__{mode}.npz")) for case in cases]

    def elements(arrays: list[np.ndarray]) -> np.ndarray:
        return np.stack([repeat(array, SIDE, SIDE) for array in arrays])

    group = {
        "format": np.array("nvfp4"),
        "block": np.array("2d" if mode == "2d" else "1d"),
        "rounding": np.array("rne"),
        "hadamard": np.array(mode == "rht1d"),
        "key": NO_KEY,
        "names": np.array(cases),
        "x": elements([bits_of(f["x"].T if side == "col" else f["x"], str(f["in_dtype"])) for f in files]),
        "codes": elements([f[f"{side}_codes_hw"] for f in files]),
        "scales": np.stack([repeat(f[f"{side}_scale_u8"][::tall], SIDE // tall, SIDE // 16) for f in files]),
        "amax": np.stack([f[f"{side}_amax"].view(np.uint32)[0] for f in files]),
    }
    if mode == "rht1d":
        group["rotated"] = elements([bits_of(f["col_input_rht"], "bfloat16") for f in files])
    return group


def oracle_inputs() -> tuple[list[str], np.ndarray]:
    """Four bf16 [32, 64] tensors: plain, wide in range, one outlier, and every tie of the E2M1 grid."""
    rng = np.random.default_rng(7)
    plain = rng.standard_normal((32, 64))
    wide = rng.standard_normal((32, 64)) * np.exp2(rng.integers(-12, 12, (32, 64)))
    outlier = rng.standard_normal((32, 64)) * 1e-3
    outlier[5, 17] = 300.0
    ties = rng.choice([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 0.0, -0.0], (32, 64)) * rng.choice([-1, 1], (32, 64))
    x = np.stack([plain, wide, outlier, ties]).astype(ml_dtypes.bfloat16).astype(np.float32)
    return ["plain", "wide", "outlier", "ties"], x


def oracle_group(format: str, rounding: str = "rne") -> dict[str, np.ndarray]:
    names, tensors = oracle_inputs()
    key = KEY if rounding == "stochastic" else NO_KEY
    noise = table.random_bytes(tensors[0].shape, table.key_words(*key)) if rounding == "stochastic" else None
    made = [table.quantize(x, format, rounding=rounding, noise=noise) for x in tensors]
    group = {
        "format": np.array(format),
        "block": np.array("1d"),
        "rounding": np.array(rounding),
        "hadamard": np.array(False),
        "key": key,
        "names": np.array(names),
        "x": bits_of(tensors, "bfloat16"),
        "codes": np.stack([q.codes for q in made]),
        "amax": np.abs(tensors).max((1, 2)).astype(np.float32).view(np.uint32),
    }
    if made[0].scales is not None:
        group["scales"] = np.stack([q.scales for q in made])
    return group


def make() -> dict[str, np.ndarray]:
    """Everything in the file, `group/field` -> array."""
    groups = {name: golden_group(mode, cases) for name, (mode, cases) in GOLDEN_GROUPS.items()}
    groups["nvfp4_stochastic"] = oracle_group("nvfp4", "stochastic")
    for format in ("mxfp4", "mxfp8", "mxfp8_e5m2", "mxfp4_floor", "mxfp8_floor", "fp8", "fp8_e5m2"):
        groups[format] = oracle_group(format)
    return {f"{group}/{field}": array for group, fields in groups.items() for field, array in fields.items()}


if __name__ == "__main__":
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(TARGET, **make())
    print(f"{TARGET.relative_to(ROOT)}: {TARGET.stat().st_size} bytes")
