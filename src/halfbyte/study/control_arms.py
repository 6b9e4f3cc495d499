"""Judge the controls of a study, and compare its candidates with each other.

The three controls: a twin of the baseline (no gap, only noise), a recipe that is broken on purpose (a large gap), and
between them the shifted twin, whose gap is increased by twice the margin in every seed. No recipe has such a gap at
every model size, so the shift is added to the noise of real runs. If the shifted twin is not judged FAIL, the study
could not detect a candidate that is twice the margin worse, and a PASS is withheld.

A study that passes two recipes must report whether their difference is significant. With many recipes it must report
which ranks are known.
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
    """Returns the verdicts of the controls. `sensitive` and `near_seen` are True if the broken recipe and the shifted
    twin failed, None if not judged."""
    checks: dict[str, Any] = {"noise_floor": None, "twin": None, "near": None, "near_seen": None}
    checks |= {"broken": None, "sensitive": None}
    for arm in plan.of_kind(TWIN):
        checks["twin"] = verdicts[arm.name]
        checks["noise_floor"] = noise_floor(gaps[arm.name])
        checks["twin_failed"] = verdicts[arm.name].word is VerdictKind.FAIL
        checks["near"] = verdicts[shifted_twin_name(arm.name)]
        checks["near_seen"] = _control_failed(checks["near"])
    for arm in plan.of_kind(CONTROL):
        checks["broken"] = verdicts[arm.name]
        checks["sensitive"] = _control_failed(verdicts[arm.name])
    return checks


def shifted_twin_name(twin: str) -> str:
    return f"{twin} displaced"


def shifted_twin(twin: GapsByArmSeed, margin: EquivalenceMargin) -> dict[int, float]:
    """Returns the gaps of the twin, each increased by twice the margin."""
    return {seed: gap + SHIFT_IN_MARGINS * margin.value for seed, gap in twin.items()}


def withhold_pass(verdict: Verdict, checks: Mapping[str, Any]) -> Verdict:
    """Returns CANNOT TELL instead of PASS if a control was not judged, the broken recipe or the shifted twin did not
    fail, or the twin itself failed. Other verdicts are returned unchanged."""
    if verdict.word is not VerdictKind.PASS:
        return verdict
    reason = None
    if checks["sensitive"] is False:
        reason = "the recipe that is broken on purpose did not fail: this comparison is blind"
    elif checks["sensitive"] is None:
        reason = "no recipe that is broken on purpose was judged beside it: nothing shows that this comparison sees one"
    elif checks.get("twin_failed"):
        reason = "the baseline's twin failed: the margin is smaller than what equal runs differ by"
    elif checks["near_seen"] is None:
        reason = "no twin of the baseline was judged beside it: nothing shows what equal runs differ by"
    elif not checks["near_seen"]:
        reason = "a twin with a gap of twice the margin did not fail: equal runs differ too much to see that"
    if reason is None:
        return verdict
    return Verdict(verdict.arm, VerdictKind.CANNOT_TELL, f"{verdict.reason}, but {reason}", verdict.interval, verdict.p)


def detectable_gap(plan: StudyPlan, verdict: Verdict) -> str | None:
    """Returns a sentence on the power of the study: the gap that it detects in 80% of cases, the error rate of the
    verdict, and for CANNOT TELL the number of seeds of a new study that would probably decide. Returns None without an
    interval."""
    interval, margin = verdict.interval, plan.margin
    if interval is None or interval.low is None or interval.sd is None or interval.count < 2:
        return None
    alpha, freedom = FAIL_SHARE * alpha_spending(plan.looks)[-1], interval.count - 1
    gap = margin.value + detectable_excess(interval.sd, plan.looks[-1], alpha=alpha, freedom=freedom)
    text = (
        f"{verdict.arm}: a gap of {margin.format_gap(gap)} would be called FAIL in 80% of such studies, as far as "
        f"{interval.count} seeds know the spread"
    )
    if verdict.word is not VerdictKind.CANNOT_TELL:
        level, tail = (1 - interval.level) / 2, "worse" if verdict.word is VerdictKind.PASS else "better"
        return (
            f"{text}; at the margin this {verdict.word.value} is wrong in {level:.2g} of studies, in "
            f"{skewed_error_rate(interval.count, level):.2g} if a few seeds are much {tail} than the rest"
        )
    needed = seeds_needed(interval, margin.value, alpha=SIGNIFICANCE_LEVEL / len(plan.of_kind(CANDIDATE)))
    needed_text = "more than 64" if needed is None else str(needed)
    return f"{text}; the gap found would be decided in 80% of studies that are planned with {needed_text} seeds"


def finished_seeds(gaps: Mapping[int, float]) -> dict[int, float]:
    """Returns the gaps of the seeds in which both arms finished, which are the finite ones."""
    return {seed: gap for seed, gap in gaps.items() if math.isfinite(gap)}


def ranking(results: GapsBySeed, *, of: int, costs: Mapping[str, float]) -> list[dict[str, Any]]:
    """Returns the candidates sorted by mean gap, smallest first and diverged ones last.

    The intervals hold simultaneously in 90% of studies: each has the level 1 - 10% / `of`, where `of` is the number of
    candidates in the plan. `places` is the best and the worst rank of a candidate, from the paired differences to all
    others at a level that all pairs share likewise. `results` as `GapsByArmSeed`.
    """
    level = 1 - 2 * SIGNIFICANCE_LEVEL / max(1, of)
    gaps = {name: finished_seeds(by_seed) for name, by_seed in results.items()}
    num_diverged = {name: sum(gap == math.inf for gap in by_seed.values()) for name, by_seed in results.items()}
    empty = {**dict.fromkeys(("mean", "low", "high", "sd")), "count": 0, "level": level}
    rows = {name: asdict(paired_t_interval(list(gap.values()), level)) if gap else empty for name, gap in gaps.items()}
    started = [name for name in rows if gaps[name] or num_diverged[name]]
    order = sorted(started, key=lambda name: (num_diverged[name], rows[name]["mean"] if gaps[name] else math.inf))
    better = {
        name: {other for other in order if _is_significantly_smaller(gaps[other], gaps[name], of * (of - 1) // 2)}
        for name in order
    }
    worse = {name: sum(name in better[other] for other in order) for name in order}
    places = {name: [1 + len(better[name]), len(order) - worse[name]] for name in order}
    return [
        {"arm": name, "places": places[name], "diverged": num_diverged[name], "cost": costs.get(name), **rows[name]}
        for name in order
    ]


def pairwise_comparison(names: Sequence[str], gaps: GapsBySeed, unit: str) -> list[str]:
    """Returns a sentence for each candidate after the first: its gap minus the first one's, paired by seed. The
    comparisons share the 5% of each side."""
    level = 1 - 2 * SIGNIFICANCE_LEVEL / max(1, len(names) - 1)
    return [line for name in names[1:] if (line := _sentence(names[0], name, gaps, unit, level))]


def _control_failed(verdict: Verdict) -> bool | None:
    """Returns True if the control was judged worse than the baseline, None if it was not judged. A control that is
    better by the margin does not count as failed, because that indicates an error of the study."""
    interval = verdict.interval
    if interval is None or interval.low is None or verdict.p is None:  # too few seeds, or diverged
        return True if verdict.word is VerdictKind.FAIL else None
    return verdict.word is VerdictKind.FAIL and interval.mean > 0


def _is_significantly_smaller(first: Mapping[int, float], second: Mapping[int, float], pairs: int) -> bool:
    """Returns True if the first gaps are smaller than the second, at a level that `pairs` comparisons share."""
    seeds = sorted(set(first) & set(second))
    if not seeds or not pairs:
        return False
    high = paired_t_interval([first[seed] - second[seed] for seed in seeds], 1 - 2 * SIGNIFICANCE_LEVEL / pairs).high
    return high is not None and high < 0


def _sentence(first: str, name: str, gaps: GapsBySeed, unit: str, level: float) -> str | None:
    seeds = sorted(set(gaps[first]) & set(gaps[name]))
    if not seeds:
        return None
    interval = paired_t_interval([gaps[name][seed] - gaps[first][seed] for seed in seeds], level)
    digits, sign = (4, " nats") if unit == "nats" else (3, "%")
    mean = f"{interval.mean:+.{digits}f}{sign}"
    if interval.low is None or interval.high is None:
        return f"{name} minus {first}: {mean} over {len(seeds)}; too few seeds to tell them apart"
    ends = f"{interval.low:+.{digits}f} to {interval.high:+.{digits}f}{sign}"
    bounds = f"{100 * level:.4g}% interval over {len(seeds)} seeds {ends}"
    conclusion = "told apart" if interval.low > 0 or interval.high < 0 else "these runs cannot tell them apart"
    return f"{name} minus {first}: {mean}, {bounds}: {conclusion}"
