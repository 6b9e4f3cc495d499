"""GPU kernels for the quantize passes and the GEMM epilogue. Each module says what it cannot take."""

from halfbyte.ops.kernels import f8
from halfbyte.ops.kernels.gated import activation, backward_maxima, forward_maxima, quantize_backward, quantize_forward
from halfbyte.ops.kernels.layout import Tiling, unsupported
from halfbyte.ops.kernels.matmul import GemmTiling, matmul
from halfbyte.ops.kernels.nvfp4 import Columnwise, Rowwise, Window, maxima, quantize, unpack
from halfbyte.ops.kernels.scale import amax_bits, scale_and_factor, tensor_scale, tensor_scales
from halfbyte.ops.kernels.weights import pack_weight, quantize_weight, weight_maxima

__all__ = [
    "Columnwise",
    "GemmTiling",
    "Rowwise",
    "Tiling",
    "Window",
    "activation",
    "amax_bits",
    "backward_maxima",
    "f8",
    "forward_maxima",
    "matmul",
    "maxima",
    "pack_weight",
    "quantize",
    "quantize_backward",
    "quantize_forward",
    "quantize_weight",
    "scale_and_factor",
    "tensor_scale",
    "tensor_scales",
    "unpack",
    "unsupported",
    "weight_maxima",
]
