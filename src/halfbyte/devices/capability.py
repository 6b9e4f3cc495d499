"""Which units a device has, for training and for inference. A format without a unit (None) is emulated everywhere."""

from halfbyte.devices.table import Device
from halfbyte.devices.units import unit


def native_training(device: Device, unit_name: str | None) -> bool:
    """True if all three GEMMs of a training step run on this unit of the device; False means emulated."""
    if unit_name is None:
        return False
    training = unit(unit_name).training
    return native_inference(device, unit_name) and (training is None or device.capability in training)


def native_inference(device: Device, unit_name: str | None) -> bool:
    """True if a GEMM whose operands were made ahead of time runs on this unit of the device."""
    if unit_name is None:
        return False
    first = unit(unit_name).first
    return first is None or (device.capability is not None and device.capability >= first)
