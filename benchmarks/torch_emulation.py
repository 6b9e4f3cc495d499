"""The NVFP4 linear as one would emulate it in PyTorch: quantize, dequantize to bfloat16, multiply.

Written from docs/numerics.md, in operations that `torch.compile` can fuse, without a kernel of its own. Three things
cost a day each if they are not known:

- `2688.0 / amax` is `amax.reciprocal() * 2688.0` in PyTorch, and a division by a Python number is a product with its
  inverse on a GPU. The kernels that `torch.compile` makes divide approximately. A float64 quotient of float32 numbers,
  rounded to float32, is the true float32 quotient on all of them; one is due a block, not an element.
- `to(float8_e4m3fn)` gives NaN beyond its range: clamp first.
- The Hadamard transform is a product with a 16 x 16 matrix in bfloat16. Its result is rounded to bfloat16 by the GEMM
  itself, where no compiler pass removes the rounding.

Values are decoded into bfloat16, as emulations do, which rounds `code * block scale * tensor scale` once more; codes
and scales are those of the definition (`emulations.py` counts the ones that differ).
"""

from typing import Any, NamedTuple

import torch

BLOCK = 16
FLT_MAX = torch.finfo(torch.float32).max
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


class Quantized(NamedTuple):
    """`values` on the E2M1 grid and `scales` in E4M3, one a block, both as float32 by block; `decode` of the tensor."""

    values: torch.Tensor
    scales: torch.Tensor
    decode: torch.Tensor
    shape: tuple[int, ...]

    def dequantize(self) -> torch.Tensor:
        return (self.values * self.scales * self.decode).reshape(self.shape).to(torch.bfloat16)

    def codes(self) -> torch.Tensor:
        """uint8 E2M1 codes, sign in bit 3."""
        a = self.values.abs()
        code = torch.where(a < 2, 2 * a, torch.where(a < 4, a + 2, a / 2 + 4))
        return (code + 8 * torch.signbit(self.values)).to(torch.uint8).reshape(self.shape)

    def scale_bytes(self) -> torch.Tensor:
        return self.scales.to(torch.float8_e4m3fn).view(torch.uint8)


def divide(top: float, x: torch.Tensor) -> torch.Tensor:
    """top / x, rounded to float32 once, at most FLT_MAX."""
    quotient = torch.full_like(x, top, dtype=torch.float64) / x.double()
    return quotient.clamp(max=FLT_MAX).float()


def step_of(a: torch.Tensor) -> torch.Tensor:
    """Spacing of the E2M1 grid at magnitude a."""
    return torch.where(a < 2, 0.5, torch.where(a < 4, 1.0, 2.0))


def steps_of(a: torch.Tensor) -> torch.Tensor:
    """a in units of its step: a product with a power of two, so exact."""
    return a * torch.where(a < 2, 2.0, torch.where(a < 4, 1.0, 0.5))


def round_nearest(a: torch.Tensor) -> torch.Tensor:
    """Magnitudes on the E2M1 grid, ties to even."""
    a = a.clamp(max=6.0)
    return torch.round(steps_of(a)) * step_of(a)


def round_stochastic(a: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Magnitudes on the E2M1 grid, up with the probability of nearness, by uint8 noise."""
    a = a.clamp(max=6.0)
    t = a + noise.float() * (1 / 256) * step_of(a)
    return (torch.floor(steps_of(t)) * step_of(t)).clamp(max=6.0)


def quantize(x: torch.Tensor, *, square: bool = False, noise: torch.Tensor | None = None) -> Quantized:
    """x [rows, columns] in blocks of 16 along its columns, or in tiles of 16 x 16; stochastic if noise is given."""
    rows, columns = x.shape
    height = BLOCK if square else 1
    shape = (rows // height, height, columns // BLOCK, BLOCK)
    blocks = x.float().reshape(shape)
    block_amax = blocks.abs().amax((1, 3), keepdim=True)
    amax = block_amax.amax()
    encode = torch.where(amax == 0, 1.0, divide(6 * 448.0, amax))
    decode = divide(1.0, encode)
    scales = (block_amax * (encode * (1 / 6))).clamp(max=448.0).to(torch.float8_e4m3fn).float()
    scaled = blocks * divide(1.0, scales * decode)
    magnitude = scaled.abs()
    rounded = round_nearest(magnitude) if noise is None else round_stochastic(magnitude, noise.reshape(shape))
    return Quantized(torch.copysign(rounded, scaled), scales, decode, (rows, columns))


def hadamard_matrix(device: Any) -> torch.Tensor:
    """diag(signs) * Sylvester16 / 4 in bfloat16."""
    h = torch.ones(1, 1)
    for _ in range(4):
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return (torch.tensor(SIGNS)[:, None] * h / 4).to(torch.bfloat16).to(device)


def transform(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """x H on each run of 16 along the last dim."""
    return (x.reshape(-1, BLOCK) @ matrix).reshape(x.shape)


def random_bytes(like: torch.Tensor) -> torch.Tensor:
    return torch.randint(0, 256, like.shape, dtype=torch.uint8, device=like.device)


class Linear(torch.autograd.Function):
    """y = x w under the whole recipe: x [tokens, inputs] bfloat16, w [inputs, outputs] float32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        weight = quantize(w, square=True).dequantize()
        ctx.save_for_backward(x, weight, matrix)
        return quantize(x).dequantize() @ weight

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # type: ignore[override]
        x, weight, matrix = ctx.saved_tensors
        dx = quantize(dy, noise=random_bytes(dy)).dequantize() @ weight.t()
        left = quantize(transform(x.t(), matrix)).dequantize()
        turned = transform(dy.t(), matrix)
        right = quantize(turned, noise=random_bytes(turned)).dequantize()
        return dx, (left @ right.t()).float(), None


def linear(x: torch.Tensor, w: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    return Linear.apply(x, w, matrix)


def operands(
    x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, matrix: torch.Tensor, noise: torch.Tensor
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Codes and scale bytes of the five operands of a linear; `noise` [tokens, outputs] serves both gradients."""
    made = {
        "fprop_x": quantize(x),
        "fprop_w": quantize(w, square=True),
        "dgrad_dy": quantize(dy, noise=noise),
        "wgrad_x": quantize(transform(x.t(), matrix)),
        "wgrad_dy": quantize(transform(dy.t(), matrix), noise=noise.t()),
    }
    return {name: (q.codes(), q.scale_bytes()) for name, q in made.items()}
