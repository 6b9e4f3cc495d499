"""Achieved fractions of the device peaks: fitted to published steps or measured, with the errors of the fit.

Four parameters are free, all for Blackwell: the fraction of the dense peak that GEMMs achieve on GB200 and on GB300,
and on each the ratio of that fraction between FP4 and FP8. (The FP4 peak is 2x of FP8's on GB200 and 3x on GB300, with
the same memory.) They are fitted to published rows by least squares of the logarithm (benchmarks/plan_fit.py). Memory
efficiency is not fitted, because the rows hardly depend on it.

Nothing is fitted for Hopper: its rates were measured with single kernels on an H200
(docs/evidence/plan_rates_h200.json; for this package's passes, gpu_kernels_h200.json).
"""

from dataclasses import dataclass

from halfbyte.devices import Device
from halfbyte.plan.cluster_model import GROUPED_PREFIX, DeviceRates

FORMS_TRIED = 29  # forms of the model: 13 on the eight rows of MaxText, 16 on all rows (docs/plan.md)
# Fraction of Blackwell's bandwidth: an XLA pass that reads and writes once, 3,239 of 4,800 GB/s on an H200.
MEMORY_EFFICIENCY = 0.675
HOPPER_EFFICIENCY = {"bf16": 0.697, "fp8": 0.646}  # of the dense peak: GEMMs of XLA and of this package
# This package's grouped GEMM, with all rows of whole tiles counted (docs/evidence/experts/speed_h200.json: 270,848
# rows, of which 262,144 have tokens; fprop, dgrad and wgrad at 679, 626 and 641 TFLOP/s of these). None for Blackwell.
HOPPER_GROUPED = {"bf16": 0.676}
HOPPER_MEMORY = 0.859  # of the bandwidth: XLA's norms, sums and updates
HOPPER_KERNELS = 0.748  # of the bandwidth: quantize passes over activations (amax, round to nearest, stochastic)
# Speedup of kernels over zeros, which stay below the card's power limit; attention with head_dim 128.
ZERO_OPERAND_SPEEDUP = {"bf16": 0.826 / 0.697, "fp8": 0.758 / 0.646, "attention": 566 / 501}


@dataclass(frozen=True)
class FittedRates:
    """Free parameters of the fit: the fraction of the dense peak, and the ratio of FP4's fraction to that."""

    gb200: float
    gb300: float
    gb200_fp4: float
    gb300_fp4: float

    def rates(self, device: Device) -> DeviceRates:
        """Returns the achieved rates of `device`."""
        assert device.bandwidth is not None
        efficiency, memory, kernels = HOPPER_EFFICIENCY, HOPPER_MEMORY, HOPPER_KERNELS
        if is_blackwell(device):
            is_ultra = device.capability is not None and device.capability >= (10, 3)
            bf16_efficiency, fp4_ratio = (self.gb300, self.gb300_fp4) if is_ultra else (self.gb200, self.gb200_fp4)
            efficiency, memory = (
                {"bf16": bf16_efficiency, "fp8": bf16_efficiency, "fp4": bf16_efficiency * fp4_ratio},
                MEMORY_EFFICIENCY,
            )
            kernels = memory
        peaks = {"bf16": device.peak["bf16"], "fp8": device.peak["fp8"], "fp4": device.peak.get("nvfp4", 0.0)}
        gemm = {name: fraction * peaks[name] for name, fraction in efficiency.items()}
        grouped = {} if is_blackwell(device) else HOPPER_GROUPED
        gemm |= {GROUPED_PREFIX + name: fraction * peaks[name] for name, fraction in grouped.items()} | {
            "f32": float32_flops(device)
        }
        return DeviceRates(device, gemm, memory * device.bandwidth, kernels * device.bandwidth)


def float32_flops(device: Device) -> float:
    """Returns the FLOP/s of float32 GEMMs (the router): 128 multiply-adds per clock and SM."""
    assert device.sms is not None and device.clock_ghz is not None
    return 2.0 * 128 * device.sms * device.clock_ghz * 1e9


def is_blackwell(device: Device) -> bool:
    return device.capability is not None and device.capability >= (10, 0)


FITTED_RATES = FittedRates(gb200=0.501, gb300=0.671, gb200_fp4=0.8, gb300_fp4=0.64)
ASSUMPTIONS = (
    "of other software's published steps (docs/evidence/plan_rows.tsv); every linear of a layer quantized, full remat "
    "where none is published (MaxText's 405B), a quarter of tensor-parallel communication in the open"
)
# Worst leave-one-out errors of published rows (Hopper's are in no fit). docs/plan.md lists all errors.
WORST_FIT_ERROR = {"blackwell": 0.222, "hopper": 0.149}
WORST_SPEEDUP_ERROR = 0.153  # leave-one-out, of the speedup of nvfp4 over fp8
ROW_DEVICES = ("h100", "h200", "b200", "gb200", "gb300")  # with published rows; those of the h200 are our own steps
ERROR_BAND, KNOWN_LAYOUT_BAND = 0.25, 0.20
"""Relative bands that cover the leave-one-out errors of all rows, and of the rows with a fully published layout."""


def error_band(device: Device, *, known: bool) -> float:
    """Returns the relative error band of a step on `device`, whose layout is `known` or partly assumed."""
    return KNOWN_LAYOUT_BAND if known and device.name in ROW_DEVICES else ERROR_BAND


def calibration_note(device: Device, band: float) -> str:
    """Returns a note on the errors of step times (`band`) and speedups, and on the rows they are calibrated on."""
    worst = f"the worst held-out step was {worst_fit_error(device):.0%} off"
    if not is_blackwell(device):
        return (
            f"figures are within +-{band:.0%}; {worst}. Rates are those of single kernels on one H200 (docs/plan.md)."
        )
    return (
        f"figures are within +-{band:.0%} and speedups of nvfp4 over fp8 within +-{WORST_SPEEDUP_ERROR:.0%}; {worst}. "
        f"{FORMS_TRIED} forms of the model were tried; {ASSUMPTIONS}."
    )


def worst_fit_error(device: Device) -> float:
    """Returns the worst leave-one-out error on devices of this generation."""
    return WORST_FIT_ERROR["blackwell" if is_blackwell(device) else "hopper"]
