"""Number formats, exact to the bit: elements, block formats, and the quantization of a tensor.

Read in this order: `elements` (one number), `scales` (rules for what a block is multiplied by), `blocks` (formats as
values), `quantize` (a tensor), `qtensor` (how it is kept). `exact` and `bits` hold the arithmetic that survives a
compiler, `noise` the random bytes, `shared_bits` a warning about them, `hadamard` the transform.
"""

from .blocks import (
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
    BlockFormat,
    floor_scales,
)
from .catalogue import (
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
)
from .divided import ByDivision, DividedFirst, Eden, OuterFirst
from .elements import E1M2, E2M1, E4M3, E5M2, UE5M3, Element
from .hadamard import hadamard16, transform_runs
from .noise import Key, MixedKey, key_words, mixed_words, random_bytes
from .qtensor import Packed, QTensor, pack, unpack
from .quantize import BY_CHANCE, ROUNDINGS, OnGrid, all_finite, amax_of, outer_amax, quantize, store, to_grid, unrounded
from .scales import ScaleRule, TensorScales, TwoLevel
from .shared_bits import SharedBitsWarning, warn_if_shared, warn_shared
from .tiling import tile_scales, untile_scales
