"""Whether a comparison sees what it must.

Three controls: a twin of the baseline (no gap: the noise), a recipe that is broken on purpose (a gap that nobody could
miss), and between them one near the margin: the twin's outcome in every seed, displaced by twice the margin. No recipe
has such a gap at every size, so it is put in, and the noise is that of real runs: where the rules do not call it FAIL,
this study could not have seen a candidate that is twice the margin worse, and a PASS is withheld.
"""

from collections.abc import Mapping
from typing import Any

from .arms import CANDIDATE, CONTROL, TWIN
from .margin import Margin
from .plan import Plan
from .statistics import ALPHA, reach, seeds_needed, spending
from .verdict import Results, Verdict, Word, noise_floor

DISPLACED = 2.0  # margins


def controls(plan: Plan, verdicts: Mapping[str, Verdict], gaps: Mapping[str, Results]) -> dict[str, Any]:
    """Verdicts of the controls. `sensitive` and `near_seen`: whether the broken recipe and the displaced twin were seen
    to fail, None where they were not judged."""
    found: dict[str, Any] = {"noise_floor": None, "twin": None, "near": None, "near_seen": None}
    found |= {"broken": None, "sensitive": None}
    for arm in plan.of_kind(TWIN):
        found["twin"] = verdicts[arm.name]
        found["noise_floor"] = noise_floor(gaps[arm.name])
        found["twin_failed"] = verdicts[arm.name].word is Word.FAIL
        found["near"] = verdicts[displaced_name(arm.name)]
        found["near_seen"] = _failed(found["near"])
    for arm in plan.of_kind(CONTROL):
        found["broken"] = verdicts[arm.name]
        found["sensitive"] = _failed(verdicts[arm.name])
    return found


def _failed(found: Verdict) -> bool | None:
    """Whether a control was seen to be worse; None where it was not judged. One that is *better* by the margin shows
    nothing but that the study is not what it should be."""
    interval = found.interval
    if interval is None or interval.low is None or found.p is None:  # too few seeds, or diverged
        return True if found.word is Word.FAIL else None
    return found.word is Word.FAIL and interval.mean > 0


def displaced_name(twin: str) -> str:
    return f"{twin} displaced"


def displaced(twin: Results, margin: Margin) -> dict[int, float]:
    """The twin's results with a gap of twice the margin put in."""
    return {seed: gap + DISPLACED * margin.value for seed, gap in twin.items()}


def withheld(found: Verdict, checks: Mapping[str, Any]) -> Verdict:
    """A PASS is worth nothing where a control was not judged, the broken recipe or the displaced twin was not seen to
    fail, or equal runs were told apart."""
    if found.word is not Word.PASS:
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
    return Verdict(found.arm, Word.CANNOT_TELL, f"{found.reason}, but {why}", found.interval, found.p)


def seen(plan: Plan, found: Verdict) -> str | None:
    """What a study of this spread can see: the gap that it calls FAIL in 80%, and how many seeds of a study of its own
    would probably have decided; None without an interval."""
    interval, margin = found.interval, plan.margin
    if interval is None or interval.low is None or interval.sd is None or interval.count < 2:
        return None
    gap = margin.value + reach(interval.sd, plan.looks[-1], alpha=spending(plan.looks)[-1])
    text = f"{found.arm}: with this spread a gap of {margin.show(gap)} would be called FAIL in 80% of such studies"
    if found.word is not Word.CANNOT_TELL:
        return text
    needed = seeds_needed(interval, margin.value, alpha=ALPHA / len(plan.of_kind(CANDIDATE)))
    many = "more than 64" if needed is None else str(needed)
    return f"{text}; the gap found would be decided in 80% of studies that are planned with {many} seeds"
