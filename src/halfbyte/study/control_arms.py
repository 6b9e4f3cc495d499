"""Judge the controls of a study, and compare its candidates with each other.

The three controls: a twin of the baseline (no gap, only noise), a recipe that is broken on purpose (a large gap), and
between them the shifted twin, whose outcome in every seed is moved by twice the margin. No recipe has such a gap at
every model size, so the shift is added to the noise of real runs. If the rules do not call it FAIL, the study could not
detect a candidate that is twice the margin worse, and a PASS is withheld.

A study that passes two recipes must report whether it can tell them apart, and one of many recipes which places of
the ranking are known.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from halfbyte.study.arms import CANDIDATE, CONTROL, TWIN
from halfbyte.study.equivalence_test import (
    FAIL_SHARE,
    SIGNIFICANCE_LEVEL,
    EquivalenceMargin,
    GapsByArmSeed,
    Verdict,
    VerdictKind,
    alpha_spending,
    detectable_excess,
    noise_floor,
    paired_t_interval,
    seeds_needed,
    skewed_error_rate,
)
from halfbyte.study.study_plan import StudyPlan

SHIFT_IN_MARGINS = 2.0


GapsBySeed = Mapping[str, Mapping[int, float]]


def judge_controls(
    plan: StudyPlan, verdicts: Mapping[str, Verdict], gaps: Mapping[str, GapsByArmSeed]
) -> dict[str, Any]:
    """Verdicts of the controls. `sensitive` and `near_seen`: whether the broken recipe and the shifted twin failed,
    None if not judged."""
    found: dict[str, Any] = {"noise_floor": None, "twin": None, "near": None, "near_seen": None}
    found |= {"broken": None, "sensitive": None}
    for arm in plan.of_kind(TWIN):
        found["twin"] = verdicts[arm.name]
        found["noise_floor"] = noise_floor(gaps[arm.name])
        found["twin_failed"] = verdicts[arm.name].word is VerdictKind.FAIL
        found["near"] = verdicts[shifted_twin_name(arm.name)]
        found["near_seen"] = _control_failed(found["near"])
    for arm in plan.of_kind(CONTROL):
        found["broken"] = verdicts[arm.name]
        found["sensitive"] = _control_failed(verdicts[arm.name])
    return found


def shifted_twin_name(twin: str) -> str:
    return f"{twin} displaced"


def shifted_twin(twin: GapsByArmSeed, margin: EquivalenceMargin) -> dict[int, float]:
    """Returns the gaps of the twin, each moved by twice the margin."""
    return {seed: gap + SHIFT_IN_MARGINS * margin.value for seed, gap in twin.items()}


def withhold_pass(found: Verdict, checks: Mapping[str, Any]) -> Verdict:
    """Turns PASS into CANNOT TELL if a control was not judged, the broken recipe or the shifted twin did not fail, or
    the twin itself failed."""
    if found.word is not VerdictKind.PASS:
        return found
    why = None
    if checks["sensitive"] is False:
        why = "the recipe that is broken on purpose did not fail: this comparison is blind"
    elif checks["sensitive"] is None:
        why = "no recipe that is broken on purpose was judged beside it: nothing shows that this comparison sees one"
    elif checks.get("twin_failed"):
        why = "the baseline's twin failed: the margin is smaller than what equal runs differ by"
    elif checks["near_seen"] is None:
        why = "no twin of the baseline was judged beside it: nothing shows what equal runs differ by"
    elif not checks["near_seen"]:
        why = "a twin with a gap of twice the margin did not fail: equal runs differ too much to see that"
    if why is None:
        return found
    return Verdict(found.arm, VerdictKind.CANNOT_TELL, f"{found.reason}, but {why}", found.interval, found.p)


def detectable_gap(plan: StudyPlan, found: Verdict) -> str | None:
    """Returns what a study of this spread can see: the gap that it calls FAIL in 80%, how often the verdict is wrong,
    and how many seeds of a study of its own would probably have decided; None without an interval."""
    interval, margin = found.interval, plan.margin
    if interval is None or interval.low is None or interval.sd is None or interval.count < 2:
        return None
    alpha, freedom = FAIL_SHARE * alpha_spending(plan.looks)[-1], interval.count - 1
    gap = margin.value + detectable_excess(interval.sd, plan.looks[-1], alpha=alpha, freedom=freedom)
    text = (
        f"{found.arm}: a gap of {margin.format_gap(gap)} would be called FAIL in 80% of such studies, as far as "
        f"{interval.count} seeds know the spread"
    )
    if found.word is not VerdictKind.CANNOT_TELL:
        level, tail = (1 - interval.level) / 2, "worse" if found.word is VerdictKind.PASS else "better"
        return (
            f"{text}; at the margin this {found.word.value} is wrong in {level:.2g} of studies, in "
            f"{skewed_error_rate(interval.count, level):.2g} if a few seeds are much {tail} than the rest"
        )
    needed = seeds_needed(interval, margin.value, alpha=SIGNIFICANCE_LEVEL / len(plan.of_kind(CANDIDATE)))
    many = "more than 64" if needed is None else str(needed)
    return f"{text}; the gap found would be decided in 80% of studies that are planned with {many} seeds"


def finished_seeds(found: Mapping[int, float]) -> dict[int, float]:
    """The seeds in which both arms ended."""
    return {seed: gap for seed, gap in found.items() if math.isfinite(gap)}


def ranking(results: GapsBySeed, *, of: int, costs: Mapping[str, float]) -> list[dict[str, Any]]:
    """Candidates by their mean gap, the smallest first and those that diverged last. All intervals hold at once in 90%
    of studies: each has one part in `of`, the candidates of the plan. `places`: the best and the worst that a candidate
    may have, by the paired differences to all others, which share 10% likewise. `results` as `GapsByArmSeed`."""
    level = 1 - 2 * SIGNIFICANCE_LEVEL / max(1, of)
    gaps = {name: finished_seeds(found) for name, found in results.items()}
    lost = {name: sum(gap == math.inf for gap in found.values()) for name, found in results.items()}
    empty = {**dict.fromkeys(("mean", "low", "high", "sd")), "count": 0, "level": level}
    rows = {name: asdict(paired_t_interval(list(gap.values()), level)) if gap else empty for name, gap in gaps.items()}
    begun = [name for name in rows if gaps[name] or lost[name]]
    order = sorted(begun, key=lambda name: (lost[name], rows[name]["mean"] if gaps[name] else math.inf))
    better = {
        name: {other for other in order if _is_significantly_smaller(gaps[other], gaps[name], of * (of - 1) // 2)}
        for name in order
    }
    worse = {name: sum(name in better[other] for other in order) for name in order}
    places = {name: [1 + len(better[name]), len(order) - worse[name]] for name in order}
    return [
        {"arm": name, "places": places[name], "diverged": lost[name], "cost": costs.get(name), **rows[name]}
        for name in order
    ]


def pairwise_comparison(names: Sequence[str], gaps: GapsBySeed, unit: str) -> list[str]:
    """A sentence for each candidate after the first: how its gaps differ from the first one's, paired by seed. The
    comparisons share the 5% of each side."""
    level = 1 - 2 * SIGNIFICANCE_LEVEL / max(1, len(names) - 1)
    return [line for name in names[1:] if (line := _sentence(names[0], name, gaps, unit, level))]


def _control_failed(found: Verdict) -> bool | None:
    """Returns True if a control is worse, None if it was not judged. A control that is better by the margin does not
    count as failed: it shows that the study itself is wrong."""
    interval = found.interval
    if interval is None or interval.low is None or found.p is None:  # too few seeds, or diverged
        return True if found.word is VerdictKind.FAIL else None
    return found.word is VerdictKind.FAIL and interval.mean > 0


def _is_significantly_smaller(first: Mapping[int, float], second: Mapping[int, float], pairs: int) -> bool:
    """Returns True if the first gaps are smaller, at a level that all pairs share."""
    seeds = sorted(set(first) & set(second))
    if not seeds or not pairs:
        return False
    high = paired_t_interval([first[seed] - second[seed] for seed in seeds], 1 - 2 * SIGNIFICANCE_LEVEL / pairs).high
    return high is not None and high < 0


def _sentence(first: str, name: str, gaps: GapsBySeed, unit: str, level: float) -> str | None:
    seeds = sorted(set(gaps[first]) & set(gaps[name]))
    if not seeds:
        return None
    found = paired_t_interval([gaps[name][seed] - gaps[first][seed] for seed in seeds], level)
    digits, sign = (4, " nats") if unit == "nats" else (3, "%")
    mean = f"{found.mean:+.{digits}f}{sign}"
    if found.low is None or found.high is None:
        return f"{name} minus {first}: {mean} over {len(seeds)}; too few seeds to tell them apart"
    ends = f"{found.low:+.{digits}f} to {found.high:+.{digits}f}{sign}"
    bounds = f"{100 * level:.4g}% interval over {len(seeds)} seeds {ends}"
    told = "told apart" if found.low > 0 or found.high < 0 else "these runs cannot tell them apart"
    return f"{name} minus {first}: {mean}, {bounds}: {told}"
