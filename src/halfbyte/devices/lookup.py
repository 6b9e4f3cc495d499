"""From a JAX device to its entry in the table. An unknown device gets no peaks, never a neighbour's."""

import re
from typing import Any

from halfbyte.devices.table import DEVICES, Device

# What CUDA calls each board. Only the parts of the table: PCIe and NVL boards of the same chip have other peaks, and a
# MIG slice has a fraction of them, so these must not match.
_KINDS = {
    "h100": r"NVIDIA H100 80GB HBM3|NVIDIA H100 SXM\d?.*",
    "h200": r"NVIDIA H200( 141GB HBM3e| SXM\d?.*)?",
    "b200": r"NVIDIA B200( SXM\d?.*)?",
    "gb200": r"NVIDIA GB200",
    "b300": r"NVIDIA B300( SXM\d?.*)?",
    "gb300": r"NVIDIA GB300",
    "rtx-5090": r"NVIDIA GeForce RTX 5090",
    "rtx-pro-6000": r"NVIDIA RTX PRO 6000 Blackwell( Workstation Edition| Server Edition)?",
    "spark": r"NVIDIA GB10",
}


def lookup(jax_device: Any) -> Device:
    """The table's entry for a JAX device; for one that is not in the table, a Device that knows only what JAX says.

    Such a Device has no peaks, so that utilisation reads n/a.
    """
    if jax_device.platform == "cpu":
        return DEVICES["cpu"]
    kind = str(jax_device.device_kind).strip()
    for name, pattern in _KINDS.items():
        if re.fullmatch(pattern, kind) and "MIG" not in kind:
            return DEVICES[name]
    return Device(
        name=kind.lower() or jax_device.platform,
        description=f"{kind or jax_device.platform} (not in the device table)",
        platform=_platform(jax_device),
        kind=kind,
        capability=_capability(jax_device),
        sms=getattr(jax_device, "core_count", None) or None,
        sources={"capability": "reported by JAX", "sms": "reported by JAX"},
    )


def _platform(jax_device: Any) -> str:
    """JAX says `gpu` for CUDA and ROCm alike; the board's name tells them apart."""
    if jax_device.platform != "gpu":
        return str(jax_device.platform)
    return "cuda" if str(jax_device.device_kind).startswith(("NVIDIA", "Tesla", "GeForce", "Quadro")) else "rocm"


def _capability(jax_device: Any) -> tuple[int, int] | None:
    """(major, minor) of an NVIDIA device; other vendors' strings (gfx942) are not capabilities."""
    found = re.fullmatch(r"(\d+)\.(\d+)\w?", str(getattr(jax_device, "compute_capability", "")))
    return (int(found[1]), int(found[2])) if found else None
