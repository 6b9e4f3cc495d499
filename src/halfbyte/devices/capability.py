"""What a device can run: tensor-core formats, the cuDNN version that programs run with, and energy counters.

A format without tensor-core support (None) is emulated everywhere. A local card of a capability in
`SELFTESTED_CAPABILITIES` is trusted only after the self-test has compared its GEMMs with emulated ones and recorded the
verdict here (`record_device_verdict`). A device that programs are only compiled for is trusted.
"""

import contextlib
import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from halfbyte.devices.compile_target import CUDNN_VERSION
from halfbyte.devices.device_table import SELFTESTED_CAPABILITIES, Device, lookup, tensor_core_format
from halfbyte.io.install_command import install_command

if TYPE_CHECKING:
    import jax


NOT_ASKED = "this card was not asked yet whether its 4-bit GEMMs are right; `halfbyte train`, `bench` and `doctor` do"


NVML_PACKAGE = "pynvml"
_device_verdicts: dict[str, str] = {}  # board -> why it is distrusted; "" if it is trusted


@dataclass(frozen=True)
class EnergyMeter:
    """Energy counters of this process's GPUs (NVML through `nvidia-ml-py`, extra `energy`).

    `missing` is the reason if there are none. NVML counts a whole GPU, whichever process uses it.
    """

    nvml: Any = None
    handles: tuple[Any, ...] = ()
    missing: str = ""

    def joules(self) -> float | None:
        """Returns the mean joules per GPU since the driver was loaded; None if the driver does not report them."""
        if not self.handles:
            return None
        try:  # a driver that stops responding must not end the run
            millijoules = map(self.nvml.nvmlDeviceGetTotalEnergyConsumption, self.handles)
            return sum(count / 1e3 for count in millijoules) / len(self.handles)
        except self.nvml.NVMLError:
            return None


def native_training(device: Device, unit_name: str | None) -> bool:
    """Returns True if all three GEMMs of a training step run on this unit of the device; False means emulated."""
    if unit_name is None:
        return False
    training = tensor_core_format(unit_name).training_capabilities
    return native_inference(device, unit_name) and (training is None or device.capability in training)


def native_inference(device: Device, unit_name: str | None) -> bool:
    """Returns True if a GEMM with operands quantized ahead of time runs on this unit of the device."""
    if unit_name is None:
        return False
    minimum = tensor_core_format(unit_name).min_capability
    return minimum is None or (device.capability is not None and device.capability >= minimum)


def distrust_reason(device: Device) -> str | None:
    """Returns why the native units of `device` are not used, or None if they are."""
    if device.capability not in SELFTESTED_CAPABILITIES or not is_local_device(device):
        return None
    return _device_verdicts.get(device.kind, NOT_ASKED) or None


def record_device_verdict(device: Device, refusal: str) -> None:
    """Records the self-test's verdict on the local card for this process: why it is refused, or ""."""
    _device_verdicts[device.kind] = refusal


def is_local_device(device: Device) -> bool:
    """Returns True if `device` is this machine's GPU, and not one that programs are only compiled for.

    The board's name is compared as well: an entry of the device table can describe boards of several names.
    """
    import jax

    if jax.default_backend() != "gpu":
        return False
    here = lookup(jax.devices()[0])
    return (here.name, here.kind) == (device.name, device.kind)


def cudnn_version(device: Device) -> tuple[int, int, int]:
    """Returns the version of the cuDNN that JAX loads for the local GPU; for any other device, that of the target."""
    if not is_local_device(device):
        return CUDNN_VERSION
    from jax._src.lib import cuda_versions  # where JAX reads it; there is no public API

    if cuda_versions is None:
        return (0, 0, 0)
    number = cuda_versions.cudnn_get_version()
    return number // 10000, number // 100 % 100, number % 100


@contextlib.contextmanager
def target_cudnn() -> Iterator[None]:
    """Context in which JAX sees the target's cuDNN version: for compiling without a GPU.

    JAX reads the version of the installed library while it traces cuDNN attention; a machine without a GPU has none.
    """
    from jax._src.cudnn import fused_attention_stablehlo  # there is no public API

    original = fused_attention_stablehlo.check_cudnn_version
    major, minor, patch = CUDNN_VERSION
    fused_attention_stablehlo.check_cudnn_version = lambda: 10000 * major + 100 * minor + patch
    try:
        yield
    finally:
        fused_attention_stablehlo.check_cudnn_version = original


def open_energy_meter(devices: "Sequence[jax.Device]", environ: Mapping[str, str] = os.environ) -> EnergyMeter:
    """Opens the energy counters of these devices of this process."""
    if not devices or devices[0].platform not in ("gpu", "cuda"):
        return EnergyMeter(missing="no GPU")
    try:
        nvml = importlib.import_module(NVML_PACKAGE)
    except ImportError:
        return EnergyMeter(missing=f"nvidia-ml-py is not installed: {install_command('energy')}")
    try:
        nvml.nvmlInit()
        handles = tuple(_handle(nvml, device.local_hardware_id or 0, environ) for device in devices)
        nvml.nvmlDeviceGetTotalEnergyConsumption(handles[0])
    except (nvml.NVMLError, LookupError) as error:
        return EnergyMeter(missing=f"the driver does not count it ({error})")
    return EnergyMeter(nvml, handles)


def _handle(nvml: Any, index: int, environ: Mapping[str, str]) -> Any:
    """Returns the NVML handle of CUDA device `index` of this process.

    NVML ignores CUDA_VISIBLE_DEVICES, whose entries are indices in the machine or UUIDs.
    """
    visible = [name.strip() for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    name = visible[index] if visible else str(index)
    return nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID(name)
