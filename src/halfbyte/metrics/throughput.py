"""Speed of a step from its wall time: tokens/s, TFLOP/s and MFU a device; and tokens a joule from its energy.

FLOPs are counted from the model's shapes (`models.flops`); they say what the model needs, not what the machine did, so
recomputation does not flatter. MFU divides by the dense peak of the formats that the GEMMs really run in. Where a
device's peak is not in the table it is None, never a guess.
"""

from collections.abc import Mapping
from dataclasses import dataclass


def mixed_peak(shares: Mapping[str, float], peaks: Mapping[str, float]) -> float | None:
    """Dense peak in FLOP/s of a mix of GEMM formats: `1 / sum(share / peak)`. None if a format's peak is unknown.

    `shares` maps the format a GEMM runs in to its part of all FLOPs, which add up to 1.
    """
    if any(share > 0 and not peaks.get(name) for name, share in shares.items()):
        return None
    seconds = sum(share / peaks[name] for name, share in shares.items() if share > 0)
    return 1 / seconds if seconds else None


@dataclass(frozen=True)
class Throughput:
    """Turns step times into rates; `tokens` are those of one global step."""

    tokens: int
    flops_per_token: float
    devices: int
    peak: float | None = None

    def rates(self, step_time_s: float, joules: float | None = None) -> dict[str, float | None]:
        """`tokens_per_s_per_device`, `tflops_per_device`, `mfu` (None without a peak); `joules_per_device` and
        `tokens_per_joule` (None where nobody counts, the latter also where the counter has not moved).
        """
        tokens_per_s = self.tokens / step_time_s / self.devices
        flops = tokens_per_s * self.flops_per_token
        return {
            "tokens_per_s_per_device": tokens_per_s,
            "tflops_per_device": flops / 1e12,
            "mfu": flops / self.peak if self.peak else None,
            "joules_per_device": joules,
            "tokens_per_joule": self.tokens / self.devices / joules if joules else None,
        }
