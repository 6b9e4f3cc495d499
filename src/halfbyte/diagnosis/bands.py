"""The bands in which healthy gains lie, fixed once from healthy runs and committed.

Bands are by GEMM and the policies of its two operands, so that they hold for any recipe made of known operands. One
GEMM may lie 6 standard deviations from the mean of healthy ones; the mean over n GEMMs of one kind in a probe, in which
noise averages out, 6 / sqrt(n) of them, but 1% at least: models differ. `benchmarks/radar_bands.py` makes the file,
from seeds that no test uses.
"""

import functools
import json
import math
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any

import numpy as np

from halfbyte.recipe import GEMMS, Recipe

FILE = "bands.json"
WIDTH = 6.0  # standard deviations on each side
NARROWEST = 0.01  # half of a mean's band

Band = tuple[float, float]


def kind_of(gemm: str, chosen: Recipe) -> str:
    """GEMM and operands: `wgrad nvfp4 1d rne hadamard × nvfp4 1d stochastic hadamard`; a whole path by its recipe."""
    if gemm not in GEMMS:
        return f"{gemm} {chosen.name}"
    left, right = GEMMS[gemm]
    return f"{gemm} {getattr(chosen, left)} × {getattr(chosen, right)}"


@functools.cache
def bands() -> dict[str, Band]:
    """kind -> (low, high) of one GEMM's gain."""
    text = resources.files("halfbyte.diagnosis").joinpath(FILE).read_text(encoding="utf-8")
    return {kind: (low, high) for kind, (low, high) in json.loads(text)["bands"].items()}


def fit_bands(probes: Iterable[Iterable[Mapping[str, Any]]]) -> dict[str, Band]:
    """Bands from the GEMMs (`kind`, `gain`) of healthy probes."""
    gains: dict[str, list[float]] = {}
    for probe in probes:
        for gemm in probe:
            gains.setdefault(gemm["kind"], []).append(gemm["gain"])
    return {kind: _band(found) for kind, found in sorted(gains.items())}


def _band(values: list[float]) -> Band:
    middle, spread = float(np.mean(values)), float(np.std(values, ddof=1))
    return round(middle - WIDTH * spread, 5), round(middle + WIDTH * spread, 5)


def of_mean(band: Band | None, many: int) -> Band | None:
    """The band of the mean of `many` gains."""
    if band is None:
        return None
    middle, half = (band[0] + band[1]) / 2, (band[1] - band[0]) / 2
    half = max(half / math.sqrt(many), NARROWEST)
    return middle - half, middle + half


def outside(value: float, band: Band | None) -> bool:
    """Whether a gain has left its band; no band, no alarm; what is not finite is outside of any."""
    return band is not None and not band[0] <= value <= band[1]
