"""How large a study the budget allows, and what a study of that size can tell, before it begins.

A verdict needs three seeds, and a run must be long enough to have learned something: seeds come first, then length up
to that of the run itself, then more seeds. Where not even three short ones fit, one seed is run, which has a gap and no
verdict; where that does not fit either, none.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from halfbyte.parity.margin import Margin
from halfbyte.parity.statistics import ALPHA, FEWEST_SEEDS, reach

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
FEWEST_STEPS, MOST_SEEDS = 30, 12
LEAST = 60.0  # seconds: no machine is done with a stage that compiles much before
RESERVE = 0.08  # of the budget, for what comes after the study and for what nobody foresaw
ROUND = 5  # steps
# Of what compiling an arm takes: its radar, in a candidate's first run; reading the program back, in later ones. The
# demo's nvfp4 on two cores: 60 s and 4.9 s beside 33 s.
RADAR, CACHED = 2.0, 0.2


def seconds_of(text: str, what: str = "budget") -> float:
    """`30m`, `2h`, `90s`."""
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([smhd])\s*", text)
    seconds = float(found[1]) * UNITS[found[2]] if found else 0.0
    if not 0 < seconds < 1e9:
        raise ValueError(f"{what} must be a time such as 30m or 2h, got {text!r}")
    return seconds


def check_budget(text: str) -> None:
    """ValueError if no stage could end in this budget."""
    if seconds_of(text) < LEAST:
        raise ValueError(
            f"--budget {text} has no room for a single stage: what comes before the study takes minutes, most of it "
            "compiling. The least is --budget 1m: what comes before the study is run whatever it takes, and the page "
            "says what budget a study would need here. A study of a size that you name is run whatever the budget: "
            "--seeds 1 --steps 30"
        )


@dataclass(frozen=True)
class Size:
    """Seeds (0: no study) and steps of each run; `seconds`: what the study is expected to take; `needs`: what three
    seeds of the fewest steps would."""

    seeds: int
    steps: int
    seconds: float
    needs: float


def study_seconds(seeds: int, steps: int, *, step_s: float, first_s: float, again_s: float) -> float:
    """Of `seeds` passes over all arms, whose steps take `step_s` together; `first_s`: what is compiled in the first
    seed, `again_s`: what every seed has beside its steps."""
    return first_s + seeds * (again_s + steps * step_s)


def size_of(left: float, costs: Mapping[str, float], *, steps: int, seeds: int = 0, fixed: bool = False) -> Size:
    """The study for `left` seconds: of `steps` at most, and of `seeds` if given; `fixed`: of so many steps, whatever
    they take."""
    shortest = min(steps, FEWEST_STEPS)
    needs = study_seconds(FEWEST_SEEDS, shortest, **costs)

    def longest(count: int) -> int:
        room = (left - costs["first_s"]) / count - costs["again_s"]
        return min(steps, int(room / costs["step_s"]) // ROUND * ROUND)

    if fixed:
        count = seeds or max(FEWEST_SEEDS, min(MOST_SEEDS, _seeds_in(left, costs, steps)))
        return Size(count, steps, study_seconds(count, steps, **costs), needs)
    for count in [seeds] if seeds else [FEWEST_SEEDS, 1]:
        if longest(count) >= shortest:
            whole = longest(count) == steps and not seeds and count > 1
            count = max(count, min(MOST_SEEDS, _seeds_in(left, costs, steps))) if whole else count
            return Size(count, longest(count), study_seconds(count, longest(count), **costs), needs)
    return Size(0, 0, 0.0, needs)


def _seeds_in(left: float, costs: Mapping[str, float], steps: int) -> int:
    return int((left - costs["first_s"]) / (costs["again_s"] + steps * costs["step_s"]))


def costs_of(records: Mapping[str, Any], arms: Mapping[str, str], *, radar: bool = True) -> dict[str, float]:
    """What a pass over all arms costs, from `bench` (each arm's step and its compiling; `arms`: arm -> the measured arm
    that it costs as much as) and the short run (what every run has beside compiling and steps: it validates and saves
    as often as one of the study, which has no telemetry)."""
    rows = {row["arm"]: row for row in records["bench"]["rows"]}
    chosen = [rows.get(like) or next(iter(rows.values())) for like in arms.values()]
    short = records["trace"]
    own = rows[short["arm"]]
    slower = max(1.0, short["step_time_s"] / (1e-3 * own["milliseconds"]))  # than the bare step
    besides = max(0.0, short["seconds"] - short["stepping_s"] - own["compile_s"] - short.get("watching_s", 0.0))
    compiling = sum(row["compile_s"] for row in chosen)
    probed = [row for arm, row in rows.items() if radar and arm in arms and arm != records["bench"]["baseline"]]
    probing = sum(row["compile_s"] for row in probed)
    return {
        "step_s": sum(1e-3 * row["milliseconds"] for row in chosen) * slower,
        "first_s": (1 - CACHED) * compiling + RADAR * probing, "again_s": len(arms) * besides + CACHED * compiling,
    }  # fmt: skip


def could_tell(size: Size, margin: Margin, candidates: int) -> str:
    """What a study of this size can say, whatever comes out."""
    if not size.seeds:
        return "no study fits the budget: nothing can be told about the loss"
    if size.seeds < FEWEST_SEEDS:
        seeds = "1 seed" if size.seeds == 1 else f"{size.seeds} seeds"
        return (
            f"{seeds} of {size.steps} steps: a gap and its curve, and no verdict, because fewer than {FEWEST_SEEDS} "
            "seeds have no interval; a recipe that is plainly broken will be seen"
        )
    spread = margin.value / reach(1.0, size.seeds, alpha=ALPHA / candidates)
    return (
        f"{size.seeds} seeds of {size.steps} steps: a candidate without a gap passes in 80% of such studies if its "
        f"gaps spread by {margin.show(spread, '')} over seeds, or less; one whose gap is the margin passes in 5% at "
        "most, however many candidates"
    )
