"""GPU kernels for the quantize passes and the GEMM epilogue. Each module says what it cannot take.

An operand is asked for as a carrier (`code * block_scale` in bf16, for the emulated GEMM), or with `codes=` as a
block-scaled GEMM reads it: E2M1 codes, two a byte with the even index in the low nibble (`lax.bitcast_convert_type` of
uint8 [..., n] to float4_e2m1fn [..., n, 2] unpacks them), and E4M3 bytes, one for 16 codes. All are uint8:

| call | returns |
|---|---|
| `quantize(x, rows=Rowwise(s, codes=o))` | codes [tokens, features / 2], scales [tokens, features / 16] |
| `quantize(x, columns=Columnwise(s, codes=o))` | codes [features, tokens / 2], scales [features, tokens / 16] |
| `quantize(x, rows=..., columns=...)` | those of rows, then those of columns, in one read of x |
| `quantize_forward(g, u, ...)` | the same of h = silu(g) u |
| `quantize_backward(g, u, dh, dg=, du=, h=)` | row and column of dg, row and column of du, column of h: ten arrays |

`mxfp8.quantize`, `mxfp8.quantize_forward` and `mxfp8.quantize_backward` give the same for MXFP8, from one read and
without maxima: a byte a code, an E8M0 byte for 32 of them.

`eden.quantize` gives a carrier of what is transformed in runs of 128, or packed codes of it, under MS-EDEN.

`Rowwise` and `Columnwise` take the scale rule of a format (`rule`, NVFP4's unless given) and a `rounding` for operands
with a key; `quantize_weight` a rule and an axis.

`o` is `ScaleOrder.PLAIN`, or `ScaleOrder.TILED` for scales in the 128x4 tiles of `formats.tile_scales`, flat. The
maxima and `tensor_scales` are those of the carriers. Any width is taken; the last block of one that is no multiple of
16 is filled up with zeros, so that rows have ceil(features / 16) * 8 bytes.
"""

from halfbyte.kernels import eden, f8, mxfp8
from halfbyte.kernels.gated import backward_maxima, forward_maxima, quantize_backward, quantize_forward
from halfbyte.kernels.interpret import interpreted
from halfbyte.kernels.layout import Tiling, unsupported
from halfbyte.kernels.matmul import GemmTiling, matmul
from halfbyte.kernels.nvfp4 import Columnwise, Rowwise, Window, maxima, quantize, unpack
from halfbyte.kernels.scale import amax_bits, scales_and_factors, tensor_scale, tensor_scales, top_of
from halfbyte.kernels.scale_order import ScaleOrder
from halfbyte.kernels.weights import WEIGHTS, pack_weight, quantize_weight, weight_maxima
