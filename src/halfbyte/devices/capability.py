"""Which units a device has, for training and for inference, and whether those of this machine's card are believed.

A format without a unit (None) is emulated everywhere. A card of a capability in `ASKED` is believed only after it was
asked: `conformance.ask_card` compares its GEMMs with emulated ones and settles the matter here. A card that is not
here, which a program is only compiled for, is believed.
"""

from halfbyte.devices.cudnn import is_here
from halfbyte.devices.table import Device
from halfbyte.devices.units import ASKED, unit

NOT_ASKED = "this card was not asked yet whether its 4-bit GEMMs are right; `halfbyte train`, `bench` and `doctor` do"
_answers: dict[str, str] = {}  # board -> why it is refused, or nothing


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


def doubt(device: Device) -> str | None:
    """Why the native units of `device` are not taken, or None if they are."""
    if device.capability not in ASKED or not is_here(device):
        return None
    return _answers.get(device.kind, NOT_ASKED) or None


def settle(device: Device, refusal: str) -> None:
    """The answer of this machine's card, for this process: why it is refused, or nothing."""
    _answers[device.kind] = refusal
