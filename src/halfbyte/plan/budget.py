"""What a run to N tokens takes: days, money, energy, and whether a faster step that needs more tokens is a gain."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from halfbyte.inputs import read_json

from .outcome import Outcome

WATTS = {"h100": 700, "h200": 700, "b200": 1000, "gb200": 1200, "gb300": 1400}
"""The limit of one GPU, as sold (the device table's descriptions and NVIDIA's datasheets). Hosts and cooling are not in
it."""
UNITS = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
DAY = 86_400


def tokens_of(text: str) -> float:
    """`15T`, `300B` or a plain number."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMBT]?)", text.strip().upper())
    if found is None or float(found[1]) <= 0:
        raise ValueError(f"tokens: {text!r} is not a number of tokens; write 15T, 300B or 1000000")
    return float(found[1]) * UNITS[found[2]]


def budget(found: Outcome, *, tokens: float, price: float, overhead: float = 0.0) -> dict[str, Any]:
    """Days, cost and energy to `tokens`, and `overhead` (a part of them) more; None where a figure is missing."""
    seconds = tokens * (1 + overhead) / (found.tokens / found.shared.seconds) / found.on.count
    watts = WATTS.get(found.on.device.name)
    cost = seconds / 3600 * found.on.count * price if price else None
    return {
        "tokens": tokens * (1 + overhead),
        "token_overhead": overhead,
        "days": seconds / DAY,
        "cost": cost,
        "percent_of_step_time_is_worth": cost / 100 if cost else None,
        "megawatt_hours_at_most": seconds / 3600 * found.on.count * watts / 1e6 if watts else None,
    }


def overheads(report: Path) -> dict[str, float]:
    """Arm -> token overhead (a part) of a parity report. ValueError if the file has none."""
    found = read_json(report)
    arms = found.get("arms", []) if isinstance(found, Mapping) else []
    known = {arm["name"]: arm["token_overhead"]["mean"] / 100 for arm in arms if _has_overhead(arm)}
    if not known:
        raise ValueError(
            f"parity: {report} holds no arm with a token overhead; give the report.json of `halfbyte parity`"
        )
    return known


def _has_overhead(arm: Any) -> bool:
    found = arm.get("token_overhead") if isinstance(arm, Mapping) else None
    return isinstance(found, Mapping) and isinstance(found.get("mean"), int | float)


def overhead_of(recipe: str, policy: str, known: Mapping[str, float]) -> float | None:
    """That of the arm for this recipe and policy, by name; None if there is none."""
    names = (f"{recipe}_{policy}", recipe)
    return next((known[name] for name in names if name in known), None)


def break_even(found: Outcome, others: Sequence[Outcome], known: Mapping[str, float]) -> list[dict[str, Any]]:
    """Against each other recipe: how many more tokens the faster step may need, and whether it stays under that."""
    rows = []
    for other in others:
        if other is found:
            continue
        allowed = other.shared.seconds / found.shared.seconds - 1
        mine, theirs = (overhead_of(each.config.recipe, each.config.policy, known) for each in (found, other))
        needs = None if mine is None else (1 + mine) / (1 + (theirs or 0.0)) - 1
        rows.append({
            "against": other.config.recipe, "may_need_more_tokens": allowed, "needs_more_tokens": needs,
            "gain": None if needs is None else needs < allowed,
        })  # fmt: skip
    return rows
