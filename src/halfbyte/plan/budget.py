"""What a run to N tokens takes: days, money, energy, and whether a faster step that needs more tokens is a gain."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from halfbyte.devices.table import WATTS
from halfbyte.inputs import read_json
from halfbyte.parity.arms import BASELINE
from halfbyte.recipe import recipe
from halfbyte.train import TrainConfig

from .outcome import Outcome

UNITS = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
DAY = 86_400


def tokens_of(text: str) -> float:
    """`15T`, `300B` or a plain number."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMBT]?)", text.strip().upper())
    if found is None or float(found[1]) <= 0:
        raise ValueError(f"tokens: {text!r} is not a number of tokens; write 15T, 300B or 1000000")
    return float(found[1]) * UNITS[found[2]]


def budget(found: Outcome, *, tokens: float, price: float, overhead: float | None = None) -> dict[str, Any]:
    """Days, cost (None without a price) and energy to `tokens`, and `overhead` (a part of them, where it is known)
    more."""
    tokens *= 1 + (overhead or 0.0)
    seconds = tokens / (found.tokens / found.shared.seconds) / found.on.count
    cost = seconds / 3600 * found.on.count * price if price else None
    return {
        "tokens": tokens,
        "token_overhead": overhead,
        "days": seconds / DAY,
        "cost": cost,
        "percent_of_step_time_is_worth": cost / 100 if cost else None,
        "megawatt_hours_at_most": seconds / 3600 * found.on.count * WATTS[found.on.device.name] / 1e6,
    }


def overheads(report: Path) -> dict[tuple[str, str], float]:
    """(recipe, policy) -> token overhead (a part) over the baseline of a parity report, which itself has none. Left out
    is an arm that changes more than these two, and one of which a seed ended above the baseline's whole curve: it needs
    more than any figure says. ValueError if nothing is left."""
    found = read_json(report)
    try:
        base = found["plan"]["base"]
        arms = [arm for arm in found["arms"] if arm["changes"].keys() <= {"recipe", "policy"}]
        places = [
            (a["changes"].get("recipe", base["recipe"]), a["changes"].get("policy", base["policy"])) for a in arms
        ]
        known = {place: _overhead(arm) for place, arm in zip(places, arms, strict=True)}
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f"parity: {report} is no report.json of `halfbyte parity`") from None
    if not any(known.values()):
        raise ValueError(
            f"parity: {report} holds no arm with a token overhead: that takes three validations in a run, and a loss "
            "that the baseline had before its end"
        )
    return {place: value for place, value in known.items() if value is not None}


def _overhead(arm: Mapping[str, Any]) -> float | None:
    if arm["kind"] == BASELINE:
        return 0.0
    found = arm["token_overhead"]
    return None if found is None or found["mean"] is None or found["above"] else found["mean"] / 100


def overhead_of(config: TrainConfig, known: Mapping[tuple[str, str], float]) -> float | None:
    """That of the arm with this recipe and policy; None if there is none."""
    return known.get((recipe(config.recipe).name, config.policy))


def break_even(
    found: Outcome, others: Sequence[Outcome], known: Mapping[tuple[str, str], float]
) -> list[dict[str, Any]]:
    """Against each other recipe: how many more tokens the faster step may need, and whether it stays under that, if
    the study had both."""
    rows = []
    for other in others:
        if other is found:
            continue
        allowed = other.shared.seconds / found.shared.seconds - 1
        mine, theirs = (overhead_of(each.config, known) for each in (found, other))
        needs = None if mine is None or theirs is None else (1 + mine) / (1 + theirs) - 1
        rows.append({
            "against": other.config.recipe, "may_need_more_tokens": allowed, "needs_more_tokens": needs,
            "gain": None if needs is None else needs < allowed,
        })  # fmt: skip
    return rows
