"""The device table: capability, SMs, clock, caches, memory, links and dense peaks, each with its source.

Peaks are the vendor's dense figures (no 2:4 sparsity) in FLOP/s, never derived from clocks. A format that tensor cores
do not support has no peak: it is emulated, and utilization is relative to the unit that runs it. Geometry (SMs, clock,
L2, memory, bandwidth) comes from the target descriptions that the OpenXLA project publishes and the compiler uses.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class TensorCoreFormat:
    """What an MMA instruction multiplies: bf16, FP8 with one scale per tensor, or block-scaled operands.

    min_capability: the lowest compute capability that has it; None: every device.
    training_capabilities: those on which all three GEMMs of a training step run on it; None: all that have it.
    """

    name: str
    min_capability: tuple[int, int] | None = None
    training_capabilities: tuple[tuple[int, int], ...] | None = None


_BLACKWELL = (10, 0)
SELFTESTED_CAPABILITIES = ((12, 0), (12, 1))
"""Capabilities on which the program is untested: `auto` uses their units only after a self-test on the card."""
# 4-bit gradients need stochastic rounding. Only SM 10.0 and 10.3 have the convert instruction for it, but the kernels
# round with integer instructions, so SM 12.0 and 12.1 (RTX 50, RTX PRO Blackwell, DGX Spark) train too.
_TRAINING = ((10, 0), (10, 3), *SELFTESTED_CAPABILITIES)

# bf16 counts as native everywhere: nothing is emulated.
_FORMAT_TABLE = (
    TensorCoreFormat("bf16"),
    TensorCoreFormat("fp8", min_capability=(8, 9)),
    TensorCoreFormat("mxfp8", min_capability=_BLACKWELL, training_capabilities=_TRAINING),
    TensorCoreFormat("mxfp4", min_capability=_BLACKWELL, training_capabilities=_TRAINING),
    TensorCoreFormat("nvfp4", min_capability=_BLACKWELL, training_capabilities=_TRAINING),
)

TENSOR_CORE_FORMATS: Mapping[str, TensorCoreFormat] = MappingProxyType({entry.name: entry for entry in _FORMAT_TABLE})


def tensor_core_format(name: str) -> TensorCoreFormat:
    """Returns the tensor-core format `name`."""
    if name not in TENSOR_CORE_FORMATS:
        raise ValueError(f"unknown unit {name!r}; known: {', '.join(TENSOR_CORE_FORMATS)}")
    return TENSOR_CORE_FORMATS[name]


@dataclass(frozen=True)
class Device:
    """One kind of accelerator. None, or a missing peak, means not known: nothing may be computed from it.

    kind is what CUDA calls the board. bandwidth and nvlink_bandwidth are bytes/s of one device; nvlink_bandwidth counts
    both directions together. nvlink_domain is how many devices reach each other over NVLink as it is sold.
    """

    name: str
    description: str
    platform: str = "cuda"
    kind: str = ""
    capability: tuple[int, int] | None = None
    sms: int | None = None
    clock_ghz: float | None = None
    l2_bytes: int | None = None
    memory_bytes: int | None = None
    bandwidth: float | None = None
    nvlink_bandwidth: float | None = None
    nvlink_domain: int | None = None
    peak: Mapping[str, float] = field(default_factory=dict, hash=False)
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        unknown = self.peak.keys() - set(TENSOR_CORE_FORMATS)
        if unknown:
            raise ValueError(
                f"device {self.name}: peak of unknown units {sorted(unknown)}; known: {', '.join(TENSOR_CORE_FORMATS)}"
            )
        unsourced = self.peak.keys() - self.sources.keys()
        if unsourced:
            raise ValueError(f"device {self.name}: no source for the peak of {sorted(unsourced)}; cite the datasheet")
        object.__setattr__(self, "peak", MappingProxyType(dict(self.peak)))
        object.__setattr__(self, "sources", MappingProxyType(dict(self.sources)))

    @property
    def gemm_peaks(self) -> dict[str, float]:
        """Returns FLOP/s of GEMMs by the format names of compiled programs; a format without a unit runs in bf16."""
        units = {"bf16": "bf16", "fp8": "fp8", "fp4": "nvfp4"}
        return {name: self.peak.get(unit, self.peak["bf16"]) for name, unit in units.items()}


def _peaks(bf16: float, fp8: float, fp4: float | None = None) -> dict[str, float]:
    """Returns dense peaks by format from TFLOP/s; block-scaled ones only with FP4.

    mxfp4 and nvfp4 share the FP4 multipliers, mxfp8 and fp8 the FP8 multipliers.
    """
    if fp4 is None:
        return {"bf16": bf16 * 1e12, "fp8": fp8 * 1e12}
    fp8_flops, fp4_flops = fp8 * 1e12, fp4 * 1e12
    return {"bf16": bf16 * 1e12, "fp8": fp8_flops, "mxfp8": fp8_flops, "mxfp4": fp4_flops, "nvfp4": fp4_flops}


def _sources(spec: str, links: str, *, bf16: str, fp8: str, fp4: str | None = None) -> dict[str, str]:
    """Returns a source for every field; `spec` names the OpenXLA target description of the geometry."""
    peaks = {"bf16": bf16, "fp8": fp8, **({"mxfp8": fp8, "mxfp4": fp4, "nvfp4": fp4} if fp4 else {})}
    geometry = dict.fromkeys(_GEOMETRY, f"{_OPENXLA}/{spec}.txtpb")
    return {**geometry, "nvlink_bandwidth": links, "nvlink_domain": links, **peaks}


_GEOMETRY = ("capability", "sms", "clock_ghz", "l2_bytes", "memory_bytes", "bandwidth")
_OPENXLA = "openxla/xla xla/backends/gpu/target_config/specs"
_HOPPER_LINKS = "NVIDIA H100 and H200 datasheets: NVLink 4, 900 GB/s; 8 GPUs in an HGX board"
_HGX_LINKS = "NVIDIA HGX page: NVLink 5, 1.8 TB/s a GPU; 8 GPUs in an HGX board"
_RACK_LINKS = "NVIDIA GB200 and GB300 NVL72 pages: NVLink 5, 1.8 TB/s a GPU, 130 TB/s a rack; 72 GPUs in a domain"

NETWORK_BANDWIDTH = {"h100": 50e9, "h200": 50e9, "b200": 50e9, "gb200": 50e9, "b300": 100e9, "gb300": 100e9}
"""Bytes/s of a GPU's network card one way, as sold: 400 Gbit/s (ConnectX-7), 800 Gbit/s (ConnectX-8)."""
TDP_WATTS = {"h100": 700, "h200": 700, "b200": 1000, "gb200": 1200, "b300": 1100, "gb300": 1400}
"""The limit of one GPU, without host and cooling, as sold (NVIDIA's datasheets); of B300 the cap that the driver has
for it (nvidia-smi of NVIDIA B300 SXM6 AC in public listings, a Dell XE9780 and others). The 1,400 W that some print for
it are those of the part in GB300 (NVIDIA blog, Inside Blackwell Ultra: up to 1,400 W)."""

_TABLE = (
    Device(
        name="h100",
        description="NVIDIA H100 SXM 80 GB",
        kind="NVIDIA H100 80GB HBM3",
        capability=(9, 0),
        sms=132,
        clock_ghz=1.98,
        l2_bytes=52_428_800,
        memory_bytes=84_942_979_072,
        bandwidth=3.35232e12,
        nvlink_bandwidth=900e9,
        nvlink_domain=8,
        peak=_peaks(bf16=989.5, fp8=1979.0),
        sources=_sources(
            "h100_sxm",
            _HOPPER_LINKS,
            bf16="NVIDIA H100 datasheet, SXM: 1,979 TFLOP/s with sparsity, half of it dense",
            fp8="NVIDIA H100 datasheet, SXM: 3,958 TFLOP/s with sparsity, half of it dense",
        ),
    ),
    Device(
        name="h200",
        description="NVIDIA H200 SXM 141 GB",
        kind="NVIDIA H200",
        capability=(9, 0),
        sms=132,
        clock_ghz=1.98,
        l2_bytes=52_428_800,
        memory_bytes=151_397_597_184,
        bandwidth=4.8e12,
        nvlink_bandwidth=900e9,
        nvlink_domain=8,
        peak=_peaks(bf16=989.5, fp8=1979.0),
        sources=_sources(
            "h200",
            _HOPPER_LINKS,
            bf16="NVIDIA H200 datasheet, SXM: 1,979 TFLOP/s with sparsity, half of it dense",
            fp8="NVIDIA H200 datasheet, SXM: 3,958 TFLOP/s with sparsity, half of it dense",
        ),
    ),
    Device(
        name="b200",
        description="NVIDIA B200 (HGX, 1,000 W) 180 GB",
        kind="NVIDIA B200",
        capability=(10, 0),
        sms=148,
        clock_ghz=1.965,
        l2_bytes=132_644_864,
        memory_bytes=191_514_411_008,
        bandwidth=7.67232e12,
        nvlink_bandwidth=1.8e12,
        nvlink_domain=8,
        peak=_peaks(bf16=2250.0, fp8=4500.0, fp4=9000.0),
        sources=_sources(
            "b200",
            _HGX_LINKS,
            bf16="NVIDIA HGX B200: 36 PFLOP/s sparse over 8 GPUs, half of it dense; Blackwell brief: 2,250",
            fp8="NVIDIA HGX B200: 72 PFLOP/s sparse over 8 GPUs, half of it dense; Blackwell brief: 4,500",
            fp4="NVIDIA HGX B200: 72 PFLOP/s dense over 8 GPUs; Blackwell architecture brief: 9,000. Some tables print"
            " 10,000, the figure of the 1,200 W part in GB200",
        ),
    ),
    Device(
        name="gb200",
        description="NVIDIA GB200 (one Blackwell GPU of an NVL72 rack, 1,200 W) 186 GB",
        kind="NVIDIA GB200",
        capability=(10, 0),
        sms=152,
        clock_ghz=2.062,
        l2_bytes=135_528_448,
        memory_bytes=197_897_748_480,
        bandwidth=7.928064e12,
        nvlink_bandwidth=1.8e12,
        nvlink_domain=72,
        peak=_peaks(bf16=2500.0, fp8=5000.0, fp4=10000.0),
        sources=_sources(
            "gb200",
            _RACK_LINKS,
            bf16="NVIDIA GB200 NVL72: 360 PFLOP/s sparse over 72 GPUs, half of it dense. Some vendors print 2,250",
            fp8="NVIDIA GB200 NVL72: 720 PFLOP/s sparse over 72 GPUs, half of it dense. Some vendors print 4,500",
            fp4="NVIDIA GB200 NVL72: 1,440 PFLOP/s sparse over 72 GPUs, half of it dense; Blackwell architecture"
            " brief: 10,000. Some vendors print 9,000",
        ),
    ),
    Device(
        name="b300",
        description="NVIDIA B300 (HGX, Blackwell Ultra) 288 GB",
        kind="NVIDIA B300 SXM6 AC",
        capability=(10, 3),
        sms=158,
        clock_ghz=1.965,
        l2_bytes=135_528_448,
        memory_bytes=297_021_865_984,
        bandwidth=7.936e12,
        nvlink_bandwidth=1.8e12,
        nvlink_domain=8,
        peak=_peaks(bf16=2250.0, fp8=4500.0, fp4=13125.0),
        sources=_sources(
            "b300",
            _HGX_LINKS,
            bf16="NVIDIA HGX B300: 36 PFLOP/s sparse over 8 GPUs, half of it dense",
            fp8="NVIDIA HGX B300: 72 PFLOP/s sparse over 8 GPUs, half of it dense",
            fp4="NVIDIA HGX B300: 105 PFLOP/s dense over 8 GPUs. Sources disagree: 13,500 and 14,000 are printed for"
            " the same board, 15,000 for the chip (NVIDIA blog, Inside Blackwell Ultra); the lowest is used",
        ),
    ),
    Device(
        name="gb300",
        description="NVIDIA GB300 (one Blackwell Ultra GPU of an NVL72 rack, 1,400 W) 288 GB",
        kind="NVIDIA GB300",
        capability=(10, 3),
        sms=152,
        clock_ghz=2.07,
        l2_bytes=135_528_448,
        memory_bytes=297_021_079_552,
        bandwidth=7.928064e12,
        nvlink_bandwidth=1.8e12,
        nvlink_domain=72,
        peak=_peaks(bf16=2500.0, fp8=5000.0, fp4=15000.0),
        sources=_sources(
            "gb300",
            _RACK_LINKS,
            bf16="NVIDIA GB300 NVL72: 360 PFLOP/s sparse over 72 GPUs, half of it dense",
            fp8="NVIDIA GB300 NVL72: 720 PFLOP/s sparse over 72 GPUs, half of it dense",
            fp4="NVIDIA GB300 NVL72: 1,080 PFLOP/s dense over 72 GPUs; NVIDIA blog, Inside Blackwell Ultra: 15 PFLOP/s"
            " dense NVFP4 a GPU. The blog states it for NVFP4; mxfp4 is taken to run on the same units",
        ),
    ),
    Device(
        name="rtx-5090",
        description="NVIDIA GeForce RTX 5090 32 GB",
        kind="NVIDIA GeForce RTX 5090",
        capability=(12, 0),
        sms=170,
        clock_ghz=2.407,
        l2_bytes=96 << 20,
        memory_bytes=32 << 30,
        bandwidth=1.792e12,
        sources=dict.fromkeys(
            _GEOMETRY,
            "public listings of the GeForce RTX 5090, not NVIDIA's own whitepaper; its peaks are left out, because they"
            " depend on the accumulator",
        ),
    ),
    Device(
        name="rtx-pro-6000",
        description="NVIDIA RTX PRO 6000 Blackwell 96 GB",
        kind="NVIDIA RTX PRO 6000 Blackwell",
        capability=(12, 0),
        sms=188,
        clock_ghz=2.6,
        l2_bytes=134_217_728,
        memory_bytes=103_079_215_104,
        bandwidth=1.792e12,
        sources=dict.fromkeys(_GEOMETRY, f"{_OPENXLA}/rtx6000pro.txtpb"),
    ),
    Device(
        name="spark",
        description="NVIDIA DGX Spark (GB10) 128 GB, shared with the CPU",
        kind="NVIDIA GB10",
        capability=(12, 1),
        sms=48,
        clock_ghz=2.418,
        l2_bytes=24 << 20,
        memory_bytes=128 << 30,
        bandwidth=273e9,
        sources=dict.fromkeys(
            _GEOMETRY,
            "NVIDIA DGX Spark page: 6,144 CUDA cores (48 SMs), 128 GB, 273 GB/s; clock and L2 are assumed, confirmed"
            " by no source, and used to compile without the card alone",
        ),
    ),
    Device(name="cpu", description="CPU through XLA", platform="cpu"),
)

DEVICES: Mapping[str, Device] = MappingProxyType({entry.name: entry for entry in _TABLE})


def device_by_name(name: str) -> Device:
    """Returns the table's entry for `name`, in upper or lower case."""
    if name.lower() in DEVICES:
        return DEVICES[name.lower()]
    near = difflib.get_close_matches(name.lower(), DEVICES, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(DEVICES)}"
    raise ValueError(f"unknown device {name!r}; {hint}")


# CUDA's name of each board. Only boards of the table: PCIe and NVL boards of the same chip have other peaks, and a
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
    """Returns the table's entry for a JAX device.

    A device that is not in the table gets a `Device` with what JAX reports and no peaks, so that utilization is n/a.
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
    """Returns the platform; the board's name distinguishes CUDA from ROCm, which JAX both calls `gpu`."""
    if jax_device.platform != "gpu":
        return str(jax_device.platform)
    return "cuda" if str(jax_device.device_kind).startswith(("NVIDIA", "Tesla", "GeForce", "Quadro")) else "rocm"


def _capability(jax_device: Any) -> tuple[int, int] | None:
    """Returns (major, minor) of an NVIDIA device; None for other vendors' strings (gfx942)."""
    match = re.fullmatch(r"(\d+)\.(\d+)\w?", str(getattr(jax_device, "compute_capability", "")))
    return (int(match[1]), int(match[2])) if match else None
