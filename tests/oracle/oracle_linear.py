"""A linear and its gradients under a recipe, in NumPy: operands by `oracle_table`, GEMMs in float64.

Every product of two block-dequantized operands is exact in float64, and sums lose nothing that a float32 result could
show. No code of the package runs here; of a recipe only the fields are read. Delayed scaling is that of Transformer
Engine's update kernel (common/recipe/delayed_scaling.cu): step n is scaled by what was seen in the steps before it.
"""

import dataclasses
import zlib

import jax
import numpy as np
import oracle_table as table

F = np.float32
SUBSCRIPTS = {"fprop": "tk,kn->tn", "dgrad": "tn,kn->tk", "wgrad": "tk,tn->kn"}


@dataclasses.dataclass(frozen=True)
class Operand:
    """A matrix as numbers: `carrier` float64 (element times block scale) times `decode`; `value` is float32 of both."""

    carrier: np.ndarray
    decode: float | np.ndarray
    value: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Gemm:
    """`result` float64; `bound` the same sum over magnitudes, to which accumulation errors are relative."""

    left: Operand
    right: Operand
    result: np.ndarray
    bound: np.ndarray


def key_words(key: jax.Array) -> tuple[int, int]:
    return table.key_words(*np.asarray(jax.random.key_data(key)))


def role_key(key: jax.Array, role: str) -> jax.Array:
    return jax.random.fold_in(key, zlib.crc32(role.encode()))


def fresh_signs(key: jax.Array, size: int) -> np.ndarray:
    """-1 where the top bit of the hash of an index is set."""
    return np.where(table.hash_words(np.arange(size), *key_words(key)) >> 31, -1, 1)


def operand(x: np.ndarray, policy, *, axis: int, key: jax.Array | None = None, signs=table.FIXED_SIGNS) -> Operand:
    """Matrix x under `policy`, blocked and transformed along `axis`, with the random bytes of `key`."""
    x, name = x.astype(F), policy.format.name
    if policy.hadamard:
        signs = np.tile(signs, policy.hadamard_size // len(signs))
        x = table.hadamard(x.T, signs).T if axis == 0 else table.hadamard(x, signs)
    if name == "bf16":
        return Operand(x.astype("bfloat16").astype(np.float64), 1.0)
    drawn = policy.rounding in ("stochastic", "midpoint") or name == "nvfp4_eden"
    noise = table.random_bytes(x.shape, key_words(key)) if drawn else None
    made = table.quantize(x, name, axis=axis, square=policy.block == "2d", rounding=policy.rounding, noise=noise)
    if "tetra" in name:  # the outer scale is inside the sum
        return Operand(made.values.astype(np.float64), 1.0, made.values)
    outer = made.outer.astype(np.float64)
    return Operand(made.block_values.astype(np.float64), outer if outer.ndim else float(outer), made.values)


def multiply(left: Operand, right: Operand, gemm: str) -> Gemm:
    def product(a, b):
        return np.einsum(SUBSCRIPTS[gemm], a * left.decode, b * right.decode)

    return Gemm(left, right, product(left.carrier, right.carrier), product(np.abs(left.carrier), np.abs(right.carrier)))


def linear(x: np.ndarray, w: np.ndarray, dy: np.ndarray, recipe, key: jax.Array) -> dict[str, Gemm]:
    """fprop, dgrad and wgrad of x [tokens, inputs] with w [inputs, outputs] and the cotangent dy [tokens, outputs]."""

    def make(tensor, role, axis):
        policy = getattr(recipe, role)
        if policy.source == "requantize_forward":  # the forward operand of the same tensor, dequantized, in float32
            tensor = make(tensor, f"fprop_{role[-1]}", 1 if role[-1] == "x" else 0).value
        gemm = role_key(key, f"{role.partition('_')[0]} signs")
        signs = fresh_signs(gemm, policy.hadamard_size) if policy.signs == "fresh" else table.FIXED_SIGNS
        return operand(tensor, policy, axis=axis, key=role_key(key, role), signs=signs)

    return {
        "fprop": multiply(make(x, "fprop_x", 1), make(w, "fprop_w", 0), "fprop"),
        "dgrad": multiply(make(dy, "dgrad_dy", 1), make(w, "dgrad_w", 1), "dgrad"),
        "wgrad": multiply(make(x, "wgrad_x", 0), make(dy, "wgrad_dy", 0), "wgrad"),
    }


def remainder(x: np.ndarray, w: np.ndarray, recipe, key: jax.Array, *, dtype) -> Gemm:
    """What the second term of x adds to fprop: x - Q(x) in x's own `dtype`, of a Q(x) that is rounded to bfloat16."""
    first = operand(x, recipe.fprop_x, axis=1, key=role_key(key, "fprop_x"))
    rest = x.astype(np.float64) - (first.carrier * F(first.decode)).astype(F).astype("bfloat16").astype(np.float64)
    tensors = (("fprop_x", rest.astype(F).astype(dtype), 1), ("fprop_w", w, 0))
    return multiply(*(operand(a, getattr(recipe, r), axis=i, key=role_key(key, r)) for r, a, i in tensors), "fprop")


class DelayedTensor:
    """One of a linear's three tensors: amaxes of the last steps, entry 0 the present one's, and a scale."""

    def __init__(self, name: str, length: int):
        self.name, self.scale, self.history = name, F(1), np.zeros(length, F)

    def quantized(self, x: np.ndarray) -> Operand:
        """x under the scale that there is; what is too large saturates."""
        self.history[0] = max(self.history[0], np.abs(x).max())
        element = table.FORMATS[self.name].element
        codes = table.encode(x.astype(F) * self.scale, element)
        return Operand(table.decode(codes, element).astype(np.float64), float(F(1) / self.scale))

    def end_of_step(self) -> None:
        """The scale is that of the largest amax, the old one if that is 0 or not finite; the history moves by one."""
        amax = self.history.max()
        if np.isfinite(amax) and amax > 0:
            self.scale = F(table.FORMATS[self.name].top) / amax
        self.history = np.append(self.history[1:], self.history[:1])
        self.history[0] = 0


class DelayedLinear:
    """y = x W with its gradients, step by step."""

    def __init__(self, length: int):
        self.tensors = [DelayedTensor(name, length) for name in ("fp8", "fp8", "fp8_e5m2")]

    def step(self, *given: np.ndarray) -> dict[str, Gemm]:
        """The three GEMMs of one step of x, W and dy."""
        x, w, dy = (tensor.quantized(a) for tensor, a in zip(self.tensors, given, strict=True))
        for tensor in self.tensors:
            tensor.end_of_step()
        pairs = {"fprop": (x, w), "dgrad": (dy, w), "wgrad": (x, dy)}
        return {gemm: multiply(*pair, gemm) for gemm, pair in pairs.items()}
