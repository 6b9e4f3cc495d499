"""How fast a device does what a program asks of it: peaks and links of the table, and how much of them is reached.

A GEMM runs at an efficiency of its format's dense peak, or as long as its bytes take if that is longer; a pass that
computes little, at a part of the memory's bandwidth, and never faster than a launch; a collective, at the rate that XLA
has measured for its kind and its number of GPUs, with a latency. What is fitted is in `calibration.py`; what is here is
not.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from halfbyte.devices import Device
from halfbyte.devices.table import NETWORK

LAUNCH = 2e-6  # seconds that a kernel takes at least
LATENCY = {"nvlink": 15e-6, "network": 40e-6}
REACHED = 0.78  # of a network card
# XLA's own measurements (openxla/xla, default_collective_perf_table), GB/s of the whole array on 8 and on 72 GPUs.
HOPPER = {"all-gather": (402, 402), "reduce-scatter": (376, 376), "all-to-all": (388, 388), "all-reduce": (230, 230)}
BLACKWELL = {
    "all-gather": (778, 674),
    "reduce-scatter": (798, 697),
    "all-to-all": (770, 641),
    "all-reduce": (480, 461),
}
ULTRA = {"all-gather": (784, 669), "reduce-scatter": (797, 686), "all-to-all": (769, 630), "all-reduce": (482, 452)}
NVLINK = {"h100": HOPPER, "h200": HOPPER, "b200": BLACKWELL, "gb200": BLACKWELL, "b300": ULTRA, "gb300": ULTRA}
# FLOP/s of causal cuDNN attention by the width of a head, forward and backward: narrow heads have twice as many
# exponentials for each FLOP. Measured on an H200 (docs/evidence/plan_rates_h200.json); for Blackwell vendor
# figures that nobody here has measured, one for both.
ATTENTION = {
    "h": {64: (409e12, 347e12), 128: (547e12, 485e12)},
    "b2": dict.fromkeys((64, 128), (1500e12, 1100e12)),
    "b3": dict.fromkeys((64, 128), (1750e12, 1250e12)),
}
GROUPED = "grouped "  # before the format of a GEMM over many experts
SMALL = 4e6  # bytes: collectives of less wait for latency, and take nothing of a link


@dataclass(frozen=True)
class Rates:
    """What one device of a cluster reaches."""

    device: Device
    gemm: Mapping[str, float]
    """FLOP/s by format: bf16, fp8, fp4."""
    memory: float
    """Bytes/s of a pass that the compiler makes."""
    kernels: float
    """Bytes/s of a pass of our own kernels."""
    gains: Mapping[str, float] = field(default_factory=dict)
    """How much faster than these figures GEMMs of a format, or attention, run where nothing holds the clock back."""

    def multiply(self, flops: float, moved: float, format: str) -> float:
        """Seconds of one GEMM."""
        rate = self.gains.get(format, 1.0) * self.reached(format)
        return max(flops / rate, moved / self.memory, LAUNCH)

    def reached(self, format: str) -> float:
        """FLOP/s of GEMMs of `format`. Those over many experts have a dense one's where nobody has timed them."""
        return self.gemm.get(format) or self.gemm.get(format.removeprefix(GROUPED), self.gemm["bf16"])

    def move(self, moved: float, *, ours: bool = False) -> float:
        """Seconds of one pass over memory."""
        return max(moved / (self.kernels if ours else self.memory), LAUNCH)

    def attend(self, flops: float, *, backward: bool, head_dim: int) -> float:
        """Seconds of one call of fused attention."""
        name = self.device.name.removeprefix("g")
        known = next(rates for start, rates in ATTENTION.items() if name.startswith(start))
        rate = self.gains.get("attention", 1.0) * known[64 if head_dim <= 64 else 128][backward]
        return max(flops / rate, LAUNCH)

    def send(self, kind: str, whole: float, inner: int, outer: int) -> tuple[float, str]:
        """(seconds, link) of one collective of `whole` bytes between `inner` devices in each of `outer` racks."""
        nvlink = whole / self._nvlink(kind, inner) if inner > 1 else 0.0
        if outer == 1:
            return nvlink + LATENCY["nvlink"], "nvlink"
        ways = 2 if kind == "all-reduce" else 1
        leaves = whole * ways * (outer - 1) / outer / max(inner, 1)  # each device's card takes its part
        hops = 1 + math.log2(outer) / 4
        return max(nvlink, leaves / (NETWORK[self.device.name] * REACHED)) + LATENCY["network"] * hops, "network"

    def _nvlink(self, kind: str, group: int) -> float:
        """Bytes/s of the whole array, between 8 and 72 GPUs by the logarithm of their number."""
        table = NVLINK[self.device.name]
        few, many = table.get(kind, table["all-to-all"])
        part = min(max(math.log(group / 8) / math.log(72 / 8), 0.0), 1.0)
        return 1e9 * (few + (many - few) * part)
