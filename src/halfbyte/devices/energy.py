"""What the GPUs of this process draw, as the driver counts it (NVML through `nvidia-ml-py`, extra `energy`).

NVML counts whole GPUs, whoever uses them, and knows nothing of CUDA_VISIBLE_DEVICES: that list says here which of the
machine's GPUs are ours.
"""

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax

PACKAGE = "pynvml"


@dataclass(frozen=True)
class Energy:
    """Counters of GPUs; `missing` says why there are none."""

    nvml: Any = None
    handles: tuple[Any, ...] = ()
    missing: str = ""

    def joules(self) -> float | None:
        """Of one GPU, the mean, since its driver was loaded; None where the driver does not say."""
        if not self.handles:
            return None
        try:  # a driver that stops to answer costs a number, not the run
            millijoules = map(self.nvml.nvmlDeviceGetTotalEnergyConsumption, self.handles)
            return sum(each / 1e3 for each in millijoules) / len(self.handles)
        except self.nvml.NVMLError:
            return None


def energy(devices: "Sequence[jax.Device]", environ: Mapping[str, str] = os.environ) -> Energy:
    """The counters of these devices of this process."""
    if not devices or devices[0].platform not in ("gpu", "cuda"):
        return Energy(missing="no GPU")
    try:
        nvml = importlib.import_module(PACKAGE)
    except ImportError:
        return Energy(missing="nvidia-ml-py is not installed: pip install 'halfbyte[energy]'")
    try:
        nvml.nvmlInit()
        handles = tuple(_handle(nvml, device.local_hardware_id or 0, environ) for device in devices)
        nvml.nvmlDeviceGetTotalEnergyConsumption(handles[0])
    except (nvml.NVMLError, LookupError) as error:
        return Energy(missing=f"the driver does not count it ({error})")
    return Energy(nvml, handles)


def _handle(nvml: Any, at: int, environ: Mapping[str, str]) -> Any:
    """The GPU that CUDA calls `at` in this process: by its place in the machine, or by its UUID."""
    visible = [name.strip() for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    name = visible[at] if visible else str(at)
    return nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID(name)
