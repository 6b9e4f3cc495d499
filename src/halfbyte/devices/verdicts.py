"""Whether the native units of this machine's card are believed.

A card of a capability in `ASKED` is believed only after it was asked: `conformance.ask_card` compares its GEMMs with
emulated ones and settles the matter here. A card that is not here, which a program is only compiled for, is believed.
"""

from halfbyte.devices.cudnn import is_here
from halfbyte.devices.table import Device
from halfbyte.devices.units import ASKED

NOT_ASKED = "this card was not asked yet whether its 4-bit GEMMs are right; `halfbyte train`, `bench` and `doctor` do"
_answers: dict[str, str] = {}  # board -> why it is refused, or nothing


def doubt(device: Device) -> str | None:
    """Why the native units of `device` are not taken, or None if they are."""
    if device.capability not in ASKED or not is_here(device):
        return None
    return _answers.get(device.kind, NOT_ASKED) or None


def settle(device: Device, refusal: str) -> None:
    """The answer of this machine's card, for this process: why it is refused, or nothing."""
    _answers[device.kind] = refusal
