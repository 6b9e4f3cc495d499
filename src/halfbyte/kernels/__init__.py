"""GPU kernels for the quantize passes and the GEMM epilogue. `unsupported_*` functions return why a kernel does not
support a shape or device.

An operand is block-dequantized (`code * block_scale` in bf16, for the emulated GEMM), or with `code_scale_layout=` as a
block-scaled GEMM reads it: E2M1 codes, two per byte with the even index in the low nibble (`lax.bitcast_convert_type`
of uint8 [..., n] to float4_e2m1fn [..., n, 2] unpacks them), and E4M3 bytes, one per 16 codes. All are uint8:

| call (layout o: `code_scale_layout=o`) | returns |
|---|---|
| `quantize_tiled(x, rows=RowwiseOperand(s, ...))` | codes [tokens, features / 2], scales [tokens, features / 16] |
| `quantize_tiled(x, columns=ColumnwiseOperand(s, ...))` | [features, tokens / 2], [features, tokens / 16] |
| `quantize_tiled(x, rows=..., columns=...)` | those of rows, then those of columns, from one read of x |
| `swiglu_quantize_forward(g, u, ...)` | the same of h = silu(g) u |
| `swiglu_quantize_backward(g, u, dh, dg=, du=, h=)` | rowwise and columnwise dg and du, columnwise h: ten arrays |

`quantize_mxfp8`, `quantize_swiglu_mxfp8` and `quantize_swiglu_backward_mxfp8` of `mxfp8_quantize` return the same for
MXFP8, from one read and without an amax pass: one byte per code, an E8M0 byte per 32 codes.

`ms_eden.eden_quantize` transforms runs of 128 and returns a block-dequantized operand, or packed codes, under MS-EDEN.

`RowwiseOperand` and `ColumnwiseOperand` take the scale rule of a format (`rule`, by default NVFP4's) and a `rounding`
for operands with a key; `quantize_weight_kernel` takes a rule and an axis.

`o` is `ScaleLayout.PLAIN`, or `ScaleLayout.TILED` for scales in the 128x4 tiles of `formats.swizzle_scales`, flat.
Codes and block-dequantized operands have the same amaxes and `compute_tensor_scales`. Every width is supported: if it
is not a multiple of 16, the last block is padded with zeros, so that rows have ceil(features / 16) * 8 bytes.
"""

from typing import TYPE_CHECKING

from halfbyte.kernels import fp8_cast, ms_eden, mxfp8_quantize
from halfbyte.kernels.hopper_gemm import GemmTiling, matmul
from halfbyte.kernels.mosaic_launch import interpret_kernels
from halfbyte.kernels.nvfp4_tiled import (
    ColumnwiseOperand,
    GlobalWindow,
    RowwiseOperand,
    partial_amax,
    quantize_tiled,
    unpack_tiled,
)
from halfbyte.kernels.nvfp4_weight import WEIGHT_DTYPES, pack_weight_kernel, quantize_weight_kernel, weight_partial_amax
from halfbyte.kernels.packed_codes import ScaleLayout
from halfbyte.kernels.swiglu_quantize import (
    swiglu_backward_amax,
    swiglu_forward_amax,
    swiglu_quantize_backward,
    swiglu_quantize_forward,
)
from halfbyte.kernels.tensor_scale_kernel import (
    amax_target,
    amax_to_bits,
    compute_scales_and_alphas,
    compute_tensor_scale,
    compute_tensor_scales,
)
from halfbyte.kernels.triton_launch import PassTiling, unsupported_tiled
from halfbyte.renamed import old_names

if not TYPE_CHECKING:
    __getattr__ = old_names(__name__)
