"""One word for one candidate: PASS, FAIL or CANNOT TELL.

PASS: the interval over seeds lies inside the margin (equivalence). FAIL: it lies wholly beyond it, or the candidate
diverged where the baseline did not. CANNOT TELL: everything else, fewer than three seeds included.

How wide the interval is, is the plan's matter: one candidate that is looked at once has the 90% interval; every
further look takes its part of the 5%, and so does every candidate of the PASSes (statistics.py). A word that a look has
given stays, whatever later gaps are; only a divergence in a later seed of the plan turns it into FAIL.
"""

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .margin import Margin
from .statistics import ALPHA, FEWEST_SEEDS, Interval, equivalence_p, over_seeds, spending

Results = Mapping[int, float]
"""Seed -> gap in the margin's unit, of the seeds that are over: inf where the candidate alone diverged, NaN where the
baseline did and there is no pair."""


class Word(enum.Enum):
    PASS = "PASS"
    FAIL = "FAIL"
    CANNOT_TELL = "CANNOT TELL"


SINGLE = "single run: no interval over seeds"


def no_interval(count: int) -> str:
    """Why a gap over so many seeds has no interval."""
    return SINGLE if count == 1 else f"{count} seeds: no interval over fewer than {FEWEST_SEEDS}"


@dataclass(frozen=True)
class Verdict:
    """`interval` is in the margin's unit, at the level that decided; `seeds`: the plan's next look, where the word is
    CANNOT TELL and there is one."""

    arm: str
    word: Word
    reason: str
    interval: Interval | None
    p: float | None = None
    seeds: int | None = None

    def line(self) -> str:
        """For the verdict line."""
        return f"{self.word.value} {self.arm}: {self.reason}"


def judge(
    arm: str, gaps: Results, margin: Margin, *, diverged: int = 0, alpha: float = ALPHA, share: int = 1
) -> Verdict:
    """The verdict of one candidate from its gaps by seed (both arms finished), in the margin's unit, at one look of
    level `alpha`, of which a PASS has one part in `share`; a FAIL is each candidate's own. `diverged`: seeds in which
    the candidate's loss went away and the baseline's did not."""
    if diverged:
        many = diverged + len(gaps)
        interval = over_seeds(list(gaps.values())) if gaps else None
        return Verdict(arm, Word.FAIL, f"diverged in {diverged} of {many} seeds; the baseline did not", interval)
    if not gaps:
        return Verdict(arm, Word.CANNOT_TELL, "no seed has both arms finished yet", None)
    values = list(gaps.values())
    own = over_seeds(values, 1 - 2 * alpha)
    wide = over_seeds(values, 1 - 2 * alpha / share) if share > 1 else own
    if wide.low is None or wide.high is None or own.low is None or own.high is None:
        shown = f"{margin.show(own.mean)} over {own.count}"
        return Verdict(arm, Word.CANNOT_TELL, f"{no_interval(own.count)} ({shown})", own)
    p = equivalence_p(wide, margin.value)
    if -margin.value < wide.low and wide.high < margin.value:
        return Verdict(arm, Word.PASS, f"{where_text(wide, margin)}, inside ±{margin}", wide, p)
    if own.low > margin.value:
        return Verdict(arm, Word.FAIL, f"{where_text(own, margin)}, beyond +{margin}", own, p)
    if own.high < -margin.value:
        better = "better than the baseline by more than the margin, so not its equal"
        return Verdict(arm, Word.FAIL, f"{where_text(own, margin)}, beyond -{margin}: {better}", own, p)
    return Verdict(arm, Word.CANNOT_TELL, f"{where_text(wide, margin)}, across ±{margin}", wide, p)


def where_text(found: Interval, margin: Margin) -> str:
    """Returns mean, level, seeds and bounds of an interval."""
    level = f"{100 * found.level:.4g}% interval over {found.count} seeds"
    return f"{margin.show(found.mean)}, {level} {margin.show(found.low or 0.0)} to {margin.show(found.high or 0.0)}"


def judge_study(
    results: Mapping[str, Results], margin: Margin, *, seeds: Sequence[int], looks: Sequence[int]
) -> dict[str, Verdict]:
    """The verdicts of all candidates of a study that was planned with these looks, each after its number of the
    `seeds`. A look is taken when every seed before it is over; seeds after the last look are not judged."""
    final: dict[str, Verdict] = {}
    planned = seeds[: looks[-1]]
    for arm, found in results.items():
        if lost := sum(found.get(seed) == math.inf for seed in planned):
            final[arm] = judge(arm, _pairs(found, planned), margin, diverged=lost)
    latest = {arm: _before_the_first_look(arm, results[arm], margin, seeds[: looks[0]], of=looks[0]) for arm in results}
    for place, (count, alpha) in enumerate(zip(looks, spending(looks), strict=True)):
        here = {
            arm: _pairs(found, seeds[:count])
            for arm, found in results.items()
            if arm not in final and set(seeds[:count]) <= found.keys()
        }
        latest |= _look(here, margin, alpha=alpha, passed=sum(v.word is Word.PASS for v in final.values()),
                        of=len(results), after=looks[place + 1] if place + 1 < len(looks) else None)  # fmt: skip
        final |= {arm: latest[arm] for arm in here if latest[arm].word is not Word.CANNOT_TELL}
    return {arm: final.get(arm, latest[arm]) for arm in results}


def _look(
    gaps: Mapping[str, Results], margin: Margin, *, alpha: float, passed: int, of: int, after: int | None
) -> dict[str, Verdict]:
    """One look at some of the `of` candidates, of which `passed` have passed before: each PASS makes the next
    easier."""
    found: dict[str, Verdict] = {}
    while True:
        share = max(1, of - passed)
        waiting = [arm for arm in gaps if arm not in found or found[arm].word is not Word.PASS]
        found |= {arm: judge(arm, gaps[arm], margin, alpha=alpha, share=share) for arm in waiting}
        more = sum(found[arm].word is Word.PASS for arm in waiting)
        passed += more
        if not more:
            return {a: replace(v, seeds=after) if v.word is Word.CANNOT_TELL else v for a, v in found.items()}


def _pairs(found: Results, seeds: Sequence[int]) -> dict[int, float]:
    return {seed: found[seed] for seed in seeds if seed in found and math.isfinite(found[seed])}


def _before_the_first_look(arm: str, found: Results, margin: Margin, seeds: Sequence[int], *, of: int) -> Verdict:
    """What can be said while runs of the first look, after `of` seeds, are missing: the gap, and no word."""
    pairs = _pairs(found, seeds)
    verdict = judge(arm, pairs, margin)
    over = sum(seed in found for seed in seeds)
    if len(pairs) >= FEWEST_SEEDS:
        shown = margin.show(sum(pairs.values()) / len(pairs))
        verdict = Verdict(arm, Word.CANNOT_TELL, f"{shown} over {len(pairs)}", verdict.interval)
    waits = f"; {over} of the {of} seeds of the first look are there" if over < len(seeds) else ""
    return replace(verdict, reason=f"{verdict.reason}{waits}", seeds=of if waits else None)


def noise_floor(twins: Results) -> float | None:
    """Root mean square of the gaps between a baseline and its twin: what two equal runs differ by."""
    return float(np.sqrt(np.mean(np.square(list(twins.values()))))) if twins else None
