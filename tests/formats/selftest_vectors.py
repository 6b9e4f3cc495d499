"""Makes src/halfbyte/formats/vectors/selftest.npz:  python tests/formats/selftest_vectors.py

NVFP4 round-to-nearest comes from tests/golden, made outside this project. Everything else is computed here, in NumPy
float32 and ml_dtypes, from the definitions of docs/numerics.md, and shares no code with the package.
"""

from pathlib import Path

import ml_dtypes
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
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


# The oracle: the definitions, one step a line.


def nearest_e2m1(x: np.ndarray) -> np.ndarray:
    return np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn)


def nearest_fp8(x: np.ndarray, dtype: type, top: float) -> np.ndarray:
    return np.clip(x, -top, top).astype(dtype)


def mx_scales(blocks: np.ndarray, top: float, rule: str) -> np.ndarray:
    """E8M0 codes of [..., 32] blocks: log2(amax / top) rounded up, or floor(log2(amax)) - emax; biased by 127."""
    amax = np.abs(blocks).max(-1).astype(np.float64)
    safe = np.where(amax == 0, 2.0**-126, amax)
    if rule == "up":
        exponent = np.ceil(np.log2(safe / top))
    else:
        exponent = np.floor(np.log2(safe)) - np.floor(np.log2(top))
    code = np.clip(exponent + 127, 0, 254)
    return np.where(amax == 0, 0, code).astype(np.uint8)


def mx_quantize(x: np.ndarray, element: str, rule: str = "up") -> tuple[np.ndarray, np.ndarray]:
    """(codes, scale codes) of an MX format along the last axis."""
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    scales = mx_scales(blocks, {"e2m1": 6.0, "e4m3": 448.0, "e5m2": 57344.0}[element], rule)
    scaled = np.ldexp(blocks.astype(np.float64), 127 - scales[..., None].astype(int)).astype(np.float32)
    if element == "e2m1":
        made = nearest_e2m1(scaled)
    elif element == "e4m3":
        made = nearest_fp8(scaled, ml_dtypes.float8_e4m3fn, 448.0)
    else:
        made = nearest_fp8(scaled, ml_dtypes.float8_e5m2, 57344.0)
    return made.view(np.uint8).reshape(x.shape), scales


def fp8_quantize(x: np.ndarray, dtype: type, top: float) -> np.ndarray:
    """Codes under one current scale: S = top / amax in float32, code = nearest(x * S)."""
    amax = np.abs(x).max().astype(np.float32)
    scale = np.float32(top) / amax if amax else np.float32(1)
    return nearest_fp8(x.astype(np.float32) * scale, dtype, top).view(np.uint8)


def hash_words(number: np.ndarray, k0: int, k1: int) -> np.ndarray:
    """The counter hash, in 64-bit integers cut to 32."""
    wrap = np.uint64(0xFFFF_FFFF)
    h = (number.astype(np.uint64) * np.uint64(0x9E37_79B9) + np.uint64(k0)) & wrap
    h ^= h >> np.uint64(16)
    h = (h * np.uint64(0x7FEB_352D) + np.uint64(k1)) & wrap
    h ^= h >> np.uint64(15)
    h = (h * np.uint64(0x846C_A68B)) & wrap
    return h ^ (h >> np.uint64(16))


def mixed(key: np.ndarray) -> tuple[int, int]:
    """The key's words after four Feistel rounds of the hash."""
    k0, k1 = map(int, key)
    for constant in (0x243F_6A88, 0x85A3_08D3, 0x1319_8A2E, 0x0370_7344):
        k0, k1 = k1, k0 ^ int(hash_words(np.array(k1), constant, constant))
    return k0, k1


def random_bytes(shape: tuple[int, int], key: np.ndarray) -> np.ndarray:
    """Byte t % 4 of the word numbered (t // 4) * N + n for element (t, n)."""
    tokens, features = shape
    h = hash_words(np.arange(tokens)[:, None] // 4 * features + np.arange(features), *mixed(key))
    return (h >> (8 * (np.arange(tokens)[:, None] % 4)).astype(np.uint64)).astype(np.uint8)


def stochastic_e2m1(x: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Codes: t = |x| + u * step(|x|), cut to the grid at the step of t, saturated at 6, the sign copied."""

    def step(a: np.ndarray) -> np.ndarray:
        return np.where(a < 2, 0.5, np.where(a < 4, 1.0, 2.0)).astype(np.float32)

    a = np.minimum(np.abs(x), np.float32(6))
    t = a + noise.astype(np.float32) / np.float32(256) * step(a)
    q = np.minimum(np.floor(t / step(t)) * step(t), np.float32(6))
    return np.copysign(q, x).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)


def nvfp4_stochastic(x: np.ndarray, key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(codes, scale codes) of NVFP4, 1D blocks, stochastic rounding."""
    one = np.float32(1)
    encode = np.float32(2688) / np.abs(x).max().astype(np.float32)
    decode = one / encode
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, 16)
    block_amax = np.abs(blocks).max(-1)
    scales = nearest_fp8(block_amax * (encode * np.float32(1 / 6)), ml_dtypes.float8_e4m3fn, 448.0)
    enc = one / (scales.astype(np.float32) * decode)
    noise = random_bytes(x.shape, key)
    return stochastic_e2m1((blocks * enc[..., None]).reshape(x.shape), noise), scales.view(np.uint8)


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
    makers = {
        "mxfp4": lambda x: mx_quantize(x, "e2m1"),
        "mxfp8": lambda x: mx_quantize(x, "e4m3"),
        "mxfp8_e5m2": lambda x: mx_quantize(x, "e5m2"),
        "mxfp4_floor": lambda x: mx_quantize(x, "e2m1", "floor"),
        "mxfp8_floor": lambda x: mx_quantize(x, "e4m3", "floor"),
        "fp8": lambda x: (fp8_quantize(x, ml_dtypes.float8_e4m3fn, 448.0), None),
        "fp8_e5m2": lambda x: (fp8_quantize(x, ml_dtypes.float8_e5m2, 57344.0), None),
        "nvfp4": lambda x: nvfp4_stochastic(x, key),
    }
    codes, scales = zip(*(makers[format](x) for x in tensors))
    group = {
        "format": np.array(format),
        "block": np.array("1d"),
        "rounding": np.array(rounding),
        "hadamard": np.array(False),
        "key": key,
        "names": np.array(names),
        "x": bits_of(tensors, "bfloat16"),
        "codes": np.stack(codes),
        "amax": np.abs(tensors).max((1, 2)).astype(np.float32).view(np.uint32),
    }
    if scales[0] is not None:
        group["scales"] = np.stack(scales)
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
