"""The bands in which healthy gains lie, fixed once from healthy runs and committed.

Bands are by GEMM and the policies of its two operands, so that they hold for any recipe made of known operands. Each
GEMM has a wide one; the mean over all GEMMs of one kind in a probe, which averages noise out, has a narrow one.
`benchmarks/radar_bands.py` makes the file, from seeds that no test uses.
"""

import functools
import json
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any

import numpy as np

from halfbyte.recipe import GEMMS, Recipe

FILE = "bands.json"
WIDTH = 6.0  # standard deviations on each side

Band = tuple[float, float]


def kind_of(gemm: str, chosen: Recipe) -> str:
    """GEMM and operands: `wgrad nvfp4 1d rne hadamard × nvfp4 1d stochastic hadamard`; a whole path by its recipe."""
    if gemm not in GEMMS:
        return f"{gemm} {chosen.name}"
    left, right = GEMMS[gemm]
    return f"{gemm} {getattr(chosen, left)} × {getattr(chosen, right)}"


@functools.cache
def bands() -> dict[str, dict[str, Band]]:
    """kind -> {"each": (low, high), "mean": (low, high)}."""
    text = resources.files("halfbyte.diagnosis").joinpath(FILE).read_text(encoding="utf-8")
    return {
        kind: {which: (low, high) for which, (low, high) in found.items()}
        for kind, found in json.loads(text)["bands"].items()
    }


def fit_bands(probes: Iterable[Iterable[Mapping[str, Any]]]) -> dict[str, dict[str, Band]]:
    """Bands from the GEMMs (`kind`, `gain`) of healthy probes."""
    each: dict[str, list[float]] = {}
    means: dict[str, list[float]] = {}
    for probe in probes:
        here: dict[str, list[float]] = {}
        for gemm in probe:
            here.setdefault(gemm["kind"], []).append(gemm["gain"])
        for kind, gains in here.items():
            each.setdefault(kind, []).extend(gains)
            means.setdefault(kind, []).append(float(np.mean(gains)))
    return {kind: {"each": _band(each[kind]), "mean": _band(means[kind])} for kind in sorted(each)}


def _band(values: list[float]) -> Band:
    middle, spread = float(np.mean(values)), max(float(np.std(values, ddof=1)), 1e-4)
    return round(middle - WIDTH * spread, 5), round(middle + WIDTH * spread, 5)


def outside(value: float, band: Band | None) -> bool:
    """Whether a gain has left its band; no band, no alarm; what is not finite is outside of any."""
    return band is not None and not band[0] <= value <= band[1]
