"""A linear and its gradients under a recipe, in NumPy, written for these tests alone: no code of the library runs here.

Quantization follows the definition in float32, one operation at a time, as IEEE float32 in NumPy gives it. The GEMMs
multiply the dequantized operands in float64, where every product of two carriers is exact and sums lose nothing that a
float32 result could show. Of the library only the *fields* of an operand policy are read.
"""

import dataclasses
import zlib

import jax
import league_oracle
import ml_dtypes
import numpy as np

F = np.float32
FLT_MAX = np.finfo(np.float32).max
SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1])


def _grid(exponent_bits: int, mantissa_bits: int, largest: float) -> np.ndarray:
    """Every non-negative value of a small float, in the order of its codes."""
    bias = 2 ** (exponent_bits - 1) - 1
    codes = np.arange(2 ** (exponent_bits + mantissa_bits))
    exponent, fraction = codes >> mantissa_bits, (codes % 2**mantissa_bits) / 2**mantissa_bits
    values = np.where(exponent == 0, 2.0 ** (1 - bias) * fraction, 2.0 ** (exponent - bias) * (1 + fraction))
    return values[values <= largest].astype(np.float64)


E2M1, E4M3, E5M2 = _grid(2, 1, 6), _grid(4, 3, 448), _grid(5, 2, 57344)
# format -> (values, numbers that share a scale, rule of the scale)
FORMATS = {
    "nvfp4": (E2M1, 16, "two-level"),
    "mxfp4": (E2M1, 32, "power"),
    "mxfp8": (E4M3, 32, "power"),
    "mxfp8_e5m2": (E5M2, 32, "power"),
    "fp8": (E4M3, None, "tensor"),
    "fp8_e5m2": (E5M2, None, "tensor"),
}


def bfloat16(x: np.ndarray) -> np.ndarray:
    """x rounded to bfloat16 values, in x's own dtype."""
    return x.astype(ml_dtypes.bfloat16).astype(x.dtype)


def nearest(magnitude: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The value nearest to each magnitude; of two equally near, the one with the even code; the last one saturates."""
    upper = np.clip(np.searchsorted(values, magnitude), 1, len(values) - 1)
    below, above = values[upper - 1], values[upper]
    middle = (below + above) / 2
    take_upper = (magnitude > middle) | ((magnitude == middle) & (upper % 2 == 0))
    return np.where(take_upper, above, below)


def stochastic(magnitude: np.ndarray, byte: np.ndarray) -> np.ndarray:
    """E2M1: |x| + byte/256 of a step, cut down to the grid at the step of the sum."""

    def step(a):
        return np.where(a < 2, F(0.5), np.where(a < 4, F(1), F(2)))

    magnitude = np.minimum(magnitude.astype(F), F(6))
    moved = magnitude + step(magnitude) * (byte.astype(F) / F(256))
    return np.minimum(np.floor(moved / step(moved)) * step(moved), 6).astype(np.float64)


def hash_words(number: np.ndarray, k0: np.uint64, k1: np.uint64) -> np.ndarray:
    """The counter hash, in 64-bit integers cut to 32."""
    mask = np.uint64(0xFFFF_FFFF)
    h = (number.astype(np.uint64) * np.uint64(0x9E3779B9) + k0) & mask
    h ^= h >> np.uint64(16)
    h = (h * np.uint64(0x7FEB352D) + k1) & mask
    h ^= h >> np.uint64(15)
    h = (h * np.uint64(0x846CA68B)) & mask
    return h ^ (h >> np.uint64(16))


def mixed_words(key: jax.Array) -> tuple[np.uint64, np.uint64]:
    """The two words of a key, mixed."""
    k0, k1 = np.asarray(jax.random.key_data(key)).astype(np.uint64)
    for constant in np.array([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], np.uint64):
        k0, k1 = k1, k0 ^ hash_words(k1, constant, constant)
    return k0, k1


def random_bytes(key: jax.Array, rows: int, columns: int) -> np.ndarray:
    """Byte row % 4 of word (row // 4) * columns + column of the counter hash, under the mixed words of the key."""
    k0, k1 = mixed_words(key)
    row, column = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    h = hash_words(row // 4 * columns + column, k0, k1)
    return (h >> (row % 4 * 8).astype(np.uint64)).astype(np.uint8)


def role_key(key: jax.Array, role: str) -> jax.Array:
    return jax.random.fold_in(key, zlib.crc32(role.encode()))


def _sylvester(size: int) -> np.ndarray:
    return np.array([[(-1) ** bin(i & j).count("1") for j in range(size)] for i in range(size)], np.float64)


def hadamard(x: np.ndarray, size: int = 16, signs: np.ndarray = SIGNS) -> np.ndarray:
    """diag(signs) * Sylvester16 / 4 on runs of 16 along the last axis: bfloat16 in, one rounding to bfloat16 out."""
    if size != 16:
        return league_oracle.hadamard(x, size, np.tile(signs, size // len(signs)))
    runs = bfloat16(x.astype(F)).astype(np.float64).reshape(-1, 16)
    return bfloat16((runs @ (signs[:, None] * _sylvester(16) / 4)).astype(F)).reshape(x.shape)


def fresh_signs(key: jax.Array, size: int) -> np.ndarray:
    """-1 where the top bit of the hash of a place is set."""
    words = hash_words(np.arange(size), *mixed_words(key))
    return np.where(words >> np.uint64(31), -1, 1)


def _tensor_scales(amax: np.float32, top: float) -> tuple[np.float32, np.float32]:
    """(S, 1/S)."""
    s = np.minimum(F(top) / amax, FLT_MAX) if amax > 0 else F(1)
    return s, F(1) / s


@dataclasses.dataclass(frozen=True)
class Operand:
    """A matrix as numbers: `carrier` float64 (element x block scale) times `decode`."""

    carrier: np.ndarray
    decode: float | np.ndarray
    value: np.ndarray | None = None  # float32, where the recipe quantizes it again


def _blocks(x: np.ndarray, policy, block: int | None, axis: int) -> np.ndarray:
    """The largest magnitude of each number's block, of x's shape."""
    if block is None:
        return np.full(x.shape, np.abs(x).max())
    down = block if policy.block == "2d" or axis == 0 else 1
    across = block if policy.block == "2d" or axis == 1 else 1
    tiles = np.abs(x).reshape(x.shape[0] // down, down, x.shape[1] // across, across)
    return np.broadcast_to(tiles.max((1, 3), keepdims=True), tiles.shape).reshape(x.shape)


def operand(x: np.ndarray, policy, *, axis: int, key: jax.Array | None = None, signs: np.ndarray = SIGNS) -> Operand:
    """Matrix x under `policy`, blocked and transformed along `axis`, with the random bytes of `key`."""
    x = x.astype(F)
    if policy.hadamard:
        size = policy.hadamard_size
        x = hadamard(x.T, size, signs).T if axis == 0 else hadamard(x, size, signs)
    if policy.format.name == "bf16":
        return Operand(bfloat16(x).astype(np.float64), 1.0)
    if policy.format.name in league_oracle.RULES:
        drawn = policy.rounding in ("stochastic", "midpoint") or policy.format.name == "nvfp4_eden"
        noise = random_bytes(key, *x.shape) if drawn else None
        turned = (lambda a: None if a is None else np.ascontiguousarray(a.T)) if axis == 0 else (lambda a: a)
        given = turned(x), policy.format.name, policy.rounding, turned(noise)
        carrier, decode, value = league_oracle.quantized(*given, square=policy.block == "2d")
        return Operand(turned(carrier), turned(decode) if np.ndim(decode) else decode, turned(value))
    values, block, rule = FORMATS[policy.format.name]
    top = _blocks(x, policy, block, axis)
    if rule == "two-level":
        s, decode = _tensor_scales(np.abs(x).max(), 2688)
        scale = nearest(np.minimum(top * F(s * F(1 / 6)), FLT_MAX).astype(np.float64), E4M3)
        with np.errstate(divide="ignore"):
            encode = np.minimum(F(1) / (scale.astype(F) * decode), FLT_MAX)
    elif rule == "power":
        # The least power of two under which nothing is larger than the largest element.
        exponent = np.ceil(np.log2(np.maximum(top, 2.0**-126).astype(np.float64) / values[-1]))
        scale, encode, decode = 2.0**exponent, (2.0**-exponent).astype(F), F(1)
    else:
        encode, decode = _tensor_scales(np.abs(x).max(), values[-1])
        scale = np.ones(x.shape)
    scaled = np.abs(x) * encode
    assert scaled.dtype == F
    if policy.rounding == "stochastic":
        magnitude = stochastic(scaled, random_bytes(key, *x.shape))
    else:
        magnitude = nearest(scaled.astype(np.float64), values)
    return Operand(np.copysign(magnitude, x) * scale, float(decode))


@dataclasses.dataclass(frozen=True)
class Gemm:
    """`result` float64; `bound` the same sum over magnitudes, to which accumulation errors are relative."""

    left: Operand
    right: Operand
    result: np.ndarray
    bound: np.ndarray


def _multiply(left: Operand, right: Operand, subscripts: str) -> Gemm:
    def product(a, b):
        return np.einsum(subscripts, a * left.decode, b * right.decode)

    return Gemm(left, right, product(left.carrier, right.carrier), product(np.abs(left.carrier), np.abs(right.carrier)))


def linear(x: np.ndarray, w: np.ndarray, dy: np.ndarray, recipe, key: jax.Array) -> dict[str, Gemm]:
    """fprop, dgrad and wgrad of x [tokens, inputs] with w [inputs, outputs] and the cotangent dy [tokens, outputs]."""

    def make(tensor, role, axis):
        policy = getattr(recipe, role)
        if policy.source == "requantize_forward":  # the forward operand of the same tensor, dequantized, in float32
            tensor = make(tensor, f"fprop_{role[-1]}", 1 if role[-1] == "x" else 0).value
        gemm = role_key(key, f"{role.partition('_')[0]} signs")
        signs = fresh_signs(gemm, policy.hadamard_size) if policy.signs == "fresh" else SIGNS
        return operand(tensor, policy, axis=axis, key=role_key(key, role), signs=signs)

    return {
        "fprop": _multiply(make(x, "fprop_x", 1), make(w, "fprop_w", 0), "tk,kn->tn"),
        "dgrad": _multiply(make(dy, "dgrad_dy", 1), make(w, "dgrad_w", 1), "tn,kn->tk"),
        "wgrad": _multiply(make(x, "wgrad_x", 0), make(dy, "wgrad_dy", 0), "tk,tn->kn"),
    }


def remainder(x: np.ndarray, w: np.ndarray, recipe, key: jax.Array, *, dtype) -> Gemm:
    """What the second piece of x adds to fprop: x - Q(x) in x's own `dtype`, of a Q(x) that is rounded to bfloat16."""
    first = operand(x, recipe.fprop_x, axis=1, key=role_key(key, "fprop_x"))
    rest = x.astype(np.float64) - bfloat16((first.carrier * F(first.decode)).astype(F))
    tensors = (("fprop_x", rest.astype(F).astype(dtype), 1), ("fprop_w", w, 0))
    made = [operand(a, getattr(recipe, role), axis=axis, key=role_key(key, role)) for role, a, axis in tensors]
    return _multiply(*made, "tk,kn->tn")
