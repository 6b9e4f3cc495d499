"""How much of a peak is reached: what was fitted to published steps, what was measured, and how far off it was.

Three numbers are free, all for Blackwell: the part of a dense peak that GEMMs reach on GB200 and on GB300 (one for each
chip, because at equal peaks the published FP8 steps of the second are 17% to 35% faster: it may draw 1,400 W instead of
1,200 W), and how much less of its peak FP4 reaches than FP8 (its multiplier outruns what feeds it). They are fitted
to published rows by least squares of the logarithm (benchmarks/plan_fit.py). Memory is not fitted: the rows do not
depend on it enough.

Hopper has nothing fitted: its figures are of single kernels on an H200 (docs/evidence/plan_rates_h200.json; of our own
passes, gpu_kernels_h200.json).
"""

from dataclasses import dataclass

from halfbyte.devices import Device

from .rates import GROUPED, Rates

FORMS_TRIED = 13  # this one, the same with one remat for all rows, and eleven of a study before it, on the same rows
MEMORY = 0.675  # of Blackwell's bandwidth: an XLA pass that reads and writes once, 3,239 of 4,800 GB/s on an H200
HOPPER = {"bf16": 0.697, "fp8": 0.646}  # of the dense peak: XLA's and our GEMMs, work over time
# Our GEMMs of many experts, rows in whole tiles over time (docs/evidence/experts/speed_h200.json: 270,848 rows, of
# which 262,144 have tokens; fprop, dgrad and wgrad at 679, 626 and 641 TFLOP/s of these). Blackwell has none.
HOPPER_GROUPED = {"bf16": 0.676}
HOPPER_MEMORY = 0.859  # of the bandwidth: XLA's norms, sums and updates
HOPPER_KERNELS = 0.748  # of the bandwidth: our passes that quantize activations (maxima, to nearest, stochastic)
# How much faster kernels over zeros are, which do not reach the card's power limit; attention with heads of 128.
ZEROS = {"bf16": 0.826 / 0.697, "fp8": 0.758 / 0.646, "attention": 566 / 501}


@dataclass(frozen=True)
class Fitted:
    """The free numbers."""

    gb200: float
    gb300: float
    fp4: float

    def rates(self, on: Device) -> Rates:
        """What `on` reaches by them."""
        assert on.bandwidth is not None
        reached, memory, kernels = HOPPER, HOPPER_MEMORY, HOPPER_KERNELS
        if is_blackwell(on):
            one = self.gb300 if on.capability is not None and on.capability >= (10, 3) else self.gb200
            reached, memory, kernels = {"bf16": one, "fp8": one, "fp4": one * self.fp4}, MEMORY, MEMORY
        peaks = {"bf16": on.peak["bf16"], "fp8": on.peak["fp8"], "fp4": on.peak.get("nvfp4", 0.0)}
        gemm = {name: part * peaks[name] for name, part in reached.items()}
        grouped = {} if is_blackwell(on) else HOPPER_GROUPED
        gemm |= {GROUPED + name: part * peaks[name] for name, part in grouped.items()} | {"f32": float32_flops(on)}
        return Rates(on, gemm, memory * on.bandwidth, kernels * on.bandwidth)


def float32_flops(on: Device) -> float:
    """FLOP/s of float32 GEMMs, a router's: 128 multiply-adds a clock and multiprocessor."""
    assert on.sms is not None and on.clock_ghz is not None
    return 2.0 * 128 * on.sms * on.clock_ghz * 1e9


def is_blackwell(on: Device) -> bool:
    return on.capability is not None and on.capability >= (10, 0)


FITTED = Fitted(gb200=0.508, gb300=0.609, fp4=0.722)
ASSUMED = (
    "of the published rows only model, system, sequence and, for 8B, layout are public; assumed: every linear of a "
    "layer quantized, remat that keeps context and quantized tensors (full for 405B on GB200, where those do not fit), "
    "FSDP over all GPUs, 4 sequences a GPU for 8B and 1 for 405B, communication hidden as far as it fits"
)
# The worst errors of steps that were not used: of published rows, each left out of its own fit; and of the steps on an
# H200 in docs/evidence, whole and mocked. docs/plan.md has every one.
RESIDUAL = {"blackwell": 0.242, "hopper": 0.072}
BAND = 0.25


def residual(on: Device) -> float:
    """The worst error that was seen on such a device."""
    return RESIDUAL["blackwell" if is_blackwell(on) else "hopper"]
