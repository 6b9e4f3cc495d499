"""Which formats a device's tensor cores take, in training and in inference.

Training in NVFP4 needs more than an FP4 multiplier: the gradients are rounded stochastically, and the convert
instruction that does so exists on SM 10.0 and 10.3 alone. Later consumer parts (SM 11, 12) multiply FP4 but cannot make
the operands of the recipe, so for them NVFP4 is a format of inference.
"""

from halfbyte.devices.table import FORMATS, Device

TRAINING_BLACKWELL = ((10, 0), (10, 3))
BLOCK_SCALED = ("mxfp8", "mxfp4", "nvfp4")
FIRST_FP8 = (8, 9)
FIRST_BLOCK_SCALED = (10, 0)


def base_format(name: str) -> str:
    """`name` as the device table spells it: lower case, element variants of one unit folded (mxfp8_e5m2 -> mxfp8)."""
    base = name.lower().removesuffix("_e5m2")
    if base not in FORMATS:
        raise ValueError(f"unknown format {name!r}; known: {', '.join(FORMATS)}")
    return base


def native_training(device: Device, format_name: str) -> bool:
    """True if all three GEMMs of a training step run in this format on the device's own units; False means emulated."""
    name = base_format(format_name)
    if name in BLOCK_SCALED:
        return device.capability in TRAINING_BLACKWELL
    return _has_plain_gemm(device, name)


def native_inference(device: Device, format_name: str) -> bool:
    """True if a GEMM of this format, made ahead of time, runs on the device's own units."""
    name = base_format(format_name)
    if name in BLOCK_SCALED:
        return device.capability is not None and device.capability >= FIRST_BLOCK_SCALED
    return _has_plain_gemm(device, name)


def _has_plain_gemm(device: Device, name: str) -> bool:
    """bf16 counts as native everywhere: nothing is emulated. FP8 needs SM 8.9."""
    return name == "bf16" or (device.capability is not None and device.capability >= FIRST_FP8)
