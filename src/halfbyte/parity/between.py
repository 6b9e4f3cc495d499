"""Candidates against each other: a comparison that passes two recipes must say whether it can tell them apart, and one
of many which places of its order are known."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from .statistics import ALPHA, over_seeds

Gaps = Mapping[str, Mapping[int, float]]


def finite(found: Mapping[int, float]) -> dict[int, float]:
    """The seeds in which both arms ended."""
    return {seed: gap for seed, gap in found.items() if math.isfinite(gap)}


def ranking(results: Gaps, *, of: int, costs: Mapping[str, float]) -> list[dict[str, Any]]:
    """Candidates by their mean gap, the smallest first and those that diverged last. All intervals hold at once in 90%
    of studies: each has one part in `of`, the candidates of the plan. `places`: the best and the worst that a candidate
    may have, by the paired differences to all others, which share 10% likewise. `results` as `verdict.Results`."""
    level = 1 - 2 * ALPHA / max(1, of)
    gaps = {name: finite(found) for name, found in results.items()}
    lost = {name: sum(gap == math.inf for gap in found.values()) for name, found in results.items()}
    empty = {**dict.fromkeys(("mean", "low", "high", "sd")), "count": 0, "level": level}
    rows = {name: asdict(over_seeds(list(gap.values()), level)) if gap else empty for name, gap in gaps.items()}
    begun = [name for name in rows if gaps[name] or lost[name]]
    order = sorted(begun, key=lambda name: (lost[name], rows[name]["mean"] if gaps[name] else math.inf))
    better = {name: {other for other in order if _ahead(gaps[other], gaps[name], of * (of - 1) // 2)} for name in order}
    worse = {name: sum(name in better[other] for other in order) for name in order}
    places = {name: [1 + len(better[name]), len(order) - worse[name]] for name in order}
    return [
        {"arm": name, "places": places[name], "diverged": lost[name], "cost": costs.get(name), **rows[name]}
        for name in order
    ]


def _ahead(first: Mapping[int, float], second: Mapping[int, float], pairs: int) -> bool:
    """Whether the first is told to be smaller, at a level that all pairs share."""
    seeds = sorted(set(first) & set(second))
    if not seeds or not pairs:
        return False
    high = over_seeds([first[seed] - second[seed] for seed in seeds], 1 - 2 * ALPHA / pairs).high
    return high is not None and high < 0


def between(names: Sequence[str], gaps: Gaps, unit: str) -> list[str]:
    """A sentence for each candidate after the first: how its gaps differ from the first one's, paired by seed. The
    comparisons share the 5% of each side."""
    level = 1 - 2 * ALPHA / max(1, len(names) - 1)
    return [line for name in names[1:] if (line := _sentence(names[0], name, gaps, unit, level))]


def _sentence(first: str, name: str, gaps: Gaps, unit: str, level: float) -> str | None:
    seeds = sorted(set(gaps[first]) & set(gaps[name]))
    if not seeds:
        return None
    found = over_seeds([gaps[name][seed] - gaps[first][seed] for seed in seeds], level)
    digits, sign = (4, " nats") if unit == "nats" else (3, "%")
    mean = f"{found.mean:+.{digits}f}{sign}"
    if found.low is None or found.high is None:
        return f"{name} minus {first}: {mean} over {len(seeds)}; too few seeds to tell them apart"
    ends = f"{found.low:+.{digits}f} to {found.high:+.{digits}f}{sign}"
    bounds = f"{100 * level:.4g}% interval over {len(seeds)} seeds {ends}"
    told = "told apart" if found.low > 0 or found.high < 0 else "these runs cannot tell them apart"
    return f"{name} minus {first}: {mean}, {bounds}: {told}"
