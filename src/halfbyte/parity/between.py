"""Candidates against each other: a comparison that passes two recipes must say whether it can tell them apart."""

from collections.abc import Mapping, Sequence

from .statistics import ALPHA, over_seeds


def between(names: Sequence[str], gaps: Mapping[str, Mapping[int, float]], unit: str) -> list[str]:
    """A sentence for each candidate after the first: how its gaps differ from the first one's, paired by seed. The
    comparisons share the 5% of each side."""
    level = 1 - 2 * ALPHA / max(1, len(names) - 1)
    return [line for name in names[1:] if (line := _sentence(names[0], name, gaps, unit, level))]


def _sentence(first: str, name: str, gaps: Mapping[str, Mapping[int, float]], unit: str, level: float) -> str | None:
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
