"""Candidates against each other: a comparison that passes two recipes must say whether it can tell them apart."""

from collections.abc import Mapping, Sequence

from .statistics import over_seeds


def between(names: Sequence[str], gaps: Mapping[str, Mapping[int, float]], unit: str) -> list[str]:
    """A sentence for each candidate after the first: how its gaps differ from the first one's, paired by seed."""
    return [line for name in names[1:] if (line := _sentence(names[0], name, gaps, unit))]


def _sentence(first: str, name: str, gaps: Mapping[str, Mapping[int, float]], unit: str) -> str | None:
    seeds = sorted(set(gaps[first]) & set(gaps[name]))
    if not seeds:
        return None
    found = over_seeds([gaps[name][seed] - gaps[first][seed] for seed in seeds])
    digits, sign = (4, " nats") if unit == "nats" else (3, "%")
    mean = f"{found.mean:+.{digits}f}{sign}"
    if found.low is None or found.high is None:
        return f"{name} minus {first}: {mean} over {len(seeds)}; too few seeds to tell them apart"
    bounds = f"90% interval over {len(seeds)} seeds {found.low:+.{digits}f} to {found.high:+.{digits}f}{sign}"
    told = "told apart" if found.low > 0 or found.high < 0 else "these runs cannot tell them apart"
    return f"{name} minus {first}: {mean}, {bounds}: {told}"
