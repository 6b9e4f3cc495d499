"""Number formats, exact to the bit: elements, block formats, and the quantization of a tensor.

Read in this order: `elements` (one element), `scale_rules` (block and tensor scales), `block_formats` (formats as
values), `qtensor` (quantization of a tensor, and its storage). `exact_float32` holds arithmetic that no compiler
changes, `random_bits` the random bytes of stochastic rounding, `hadamard` the transform.
"""

from typing import TYPE_CHECKING

from halfbyte.formats.block_formats import (
    BF16,
    FORMATS,
    FP8,
    FP8_E5M2,
    MXFP4,
    MXFP4_FLOOR,
    MXFP8,
    MXFP8_E5M2,
    MXFP8_FLOOR,
    NVFP4,
    NVFP4_46_MAE,
    NVFP4_46_MSE,
    NVFP4_46_SR,
    NVFP4_1716,
    NVFP4_EDEN,
    NVFP4_QUARTET,
    NVFP4_ROW,
    NVFP4_TETRA,
    NVFP4_TETRA_SR,
    NVFP4_UE5M3,
    BlockFormat,
    floor_scales,
)
from halfbyte.formats.block_view import swizzle_scales, unswizzle_scales
from halfbyte.formats.division_scale_rules import FourOverSixScale, MsEdenScale, QuartetScale, TetraJetScale
from halfbyte.formats.elements import E1M2, E2M1, E4M3, E5M2, UE5M3, Element
from halfbyte.formats.hadamard import hadamard16, hadamard_transform
from halfbyte.formats.qtensor import (
    ROUNDINGS,
    STOCHASTIC_ROUNDINGS,
    GridTensor,
    PackedQTensor,
    QTensor,
    all_finite,
    amax_of,
    amax_per_outer_group,
    encode_qtensor,
    pack_nibbles,
    quantize,
    quantize_to_grid,
    unpack_nibbles,
    unsupported_rounding,
)
from halfbyte.formats.random_bits import (
    HashedKey,
    Key,
    SharedBitsWarning,
    hashed_key_words,
    key_words,
    random_bytes,
    warn_if_key_reused,
    warn_key_reuse,
)
from halfbyte.formats.scale_rules import ScaleRule, TensorScales, TwoLevelScale
from halfbyte.renamed import old_names

if not TYPE_CHECKING:
    __getattr__ = old_names(__name__)
