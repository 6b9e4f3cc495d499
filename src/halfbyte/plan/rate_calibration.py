"""How much of a peak is reached: what was fitted to published steps, what was measured, and how far off it was.

Four numbers are free, all for Blackwell: the part of a dense peak that GEMMs reach on GB200 and on GB300, and how much
less of its peak FP4 reaches than FP8 on each (FP4's peak is 2x of FP8's on GB200 and 3x on GB300, and the same memory
feeds it). They are fitted to published rows by least squares of the logarithm (benchmarks/plan_fit.py). Memory is not
fitted: the rows do not depend on it enough.

Hopper has nothing fitted: its figures are of single kernels on an H200 (docs/evidence/plan_rates_h200.json; of our own
passes, gpu_kernels_h200.json).
"""

from dataclasses import dataclass

from halfbyte.devices import Device
from halfbyte.plan.cluster_model import GROUPED_PREFIX, DeviceRates

FORMS_TRIED = 29  # on the eight rows of MaxText 13; on all rows, which include these, 16 (docs/plan.md)
MEMORY_EFFICIENCY = (
    0.675  # of Blackwell's bandwidth: an XLA pass that reads and writes once, 3,239 of 4,800 GB/s on an H200
)
HOPPER_EFFICIENCY = {"bf16": 0.697, "fp8": 0.646}  # of the dense peak: XLA's and our GEMMs, work over time
# Our GEMMs of many experts, rows in whole tiles over time (docs/evidence/experts/speed_h200.json: 270,848 rows, of
# which 262,144 have tokens; fprop, dgrad and wgrad at 679, 626 and 641 TFLOP/s of these). Blackwell has none.
HOPPER_GROUPED = {"bf16": 0.676}
HOPPER_MEMORY = 0.859  # of the bandwidth: XLA's norms, sums and updates
HOPPER_KERNELS = 0.748  # of the bandwidth: our passes that quantize activations (maxima, to nearest, stochastic)
# How much faster kernels over zeros are, which do not reach the card's power limit; attention with heads of 128.
ZERO_OPERAND_SPEEDUP = {"bf16": 0.826 / 0.697, "fp8": 0.758 / 0.646, "attention": 566 / 501}


@dataclass(frozen=True)
class FittedRates:
    """The free numbers."""

    gb200: float
    gb300: float
    gb200_fp4: float
    gb300_fp4: float

    def rates(self, on: Device) -> DeviceRates:
        """What `on` reaches by them."""
        assert on.bandwidth is not None
        reached, memory, kernels = HOPPER_EFFICIENCY, HOPPER_MEMORY, HOPPER_KERNELS
        if is_blackwell(on):
            ultra = on.capability is not None and on.capability >= (10, 3)
            one, fp4 = (self.gb300, self.gb300_fp4) if ultra else (self.gb200, self.gb200_fp4)
            reached, memory = {"bf16": one, "fp8": one, "fp4": one * fp4}, MEMORY_EFFICIENCY
            kernels = memory
        peaks = {"bf16": on.peak["bf16"], "fp8": on.peak["fp8"], "fp4": on.peak.get("nvfp4", 0.0)}
        gemm = {name: part * peaks[name] for name, part in reached.items()}
        grouped = {} if is_blackwell(on) else HOPPER_GROUPED
        gemm |= {GROUPED_PREFIX + name: part * peaks[name] for name, part in grouped.items()} | {
            "f32": float32_flops(on)
        }
        return DeviceRates(on, gemm, memory * on.bandwidth, kernels * on.bandwidth)


def float32_flops(on: Device) -> float:
    """FLOP/s of float32 GEMMs, a router's: 128 multiply-adds a clock and multiprocessor."""
    assert on.sms is not None and on.clock_ghz is not None
    return 2.0 * 128 * on.sms * on.clock_ghz * 1e9


def is_blackwell(on: Device) -> bool:
    return on.capability is not None and on.capability >= (10, 0)


FITTED_RATES = FittedRates(gb200=0.501, gb300=0.671, gb200_fp4=0.8, gb300_fp4=0.64)
ASSUMPTIONS = (
    "of other software's published steps (docs/evidence/plan_rows.tsv); every linear of a layer quantized, full remat "
    "where none is published (MaxText's 405B), a quarter of tensor-parallel communication in the open"
)
# The worst errors of steps that were not used: of published rows, each left out of its own fit (Hopper's are in no
# fit). docs/plan.md has every one.
WORST_FIT_ERROR = {"blackwell": 0.222, "hopper": 0.149}
WORST_SPEEDUP_ERROR = 0.153  # of nvfp4 over fp8, each row left out of its own fit
ROW_DEVICES = ("h100", "h200", "b200", "gb200", "gb300")  # with published rows; an H200 has steps of our own
ERROR_BAND, KNOWN_LAYOUT_BAND = 0.25, 0.20
"""Cover every row that is left out of its fit: all, and those of whose layout nothing is assumed."""


def error_band(on: Device, *, known: bool) -> float:
    """Returns the band of a step on `on`, whose layout is `known` or assumed in part."""
    return KNOWN_LAYOUT_BAND if known and on.name in ROW_DEVICES else ERROR_BAND


def calibration_note(on: Device, band: float) -> str:
    """Returns how far off figures within `band` and speedups may be, and what they are calibrated on."""
    worst = f"the worst held-out step was {worst_fit_error(on):.0%} off"
    if not is_blackwell(on):
        return (
            f"figures are within +-{band:.0%}; {worst}. Rates are those of single kernels on one H200 (docs/plan.md)."
        )
    return (
        f"figures are within +-{band:.0%} and speedups of nvfp4 over fp8 within +-{WORST_SPEEDUP_ERROR:.0%}; {worst}. "
        f"{FORMS_TRIED} forms of the model were tried; {ASSUMPTIONS}."
    )


def worst_fit_error(on: Device) -> float:
    """The worst error that was seen on such a device."""
    return WORST_FIT_ERROR["blackwell" if is_blackwell(on) else "hopper"]
