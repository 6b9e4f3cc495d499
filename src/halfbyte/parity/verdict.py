"""One word for one candidate: PASS, FAIL or CANNOT TELL, and what would decide.

PASS: the 90% interval over seeds lies inside the margin (equivalence at 5%). FAIL: it lies wholly beyond it, or the
candidate diverged where the baseline did not. CANNOT TELL: everything else, fewer than three seeds included.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .margin import Margin
from .statistics import FEWEST_SEEDS, Interval, equivalence_p, over_seeds, seeds_needed


class Word(enum.Enum):
    PASS = "PASS"
    FAIL = "FAIL"
    CANNOT_TELL = "CANNOT TELL"


SINGLE = "single run: no interval over seeds"


@dataclass(frozen=True)
class Verdict:
    """`interval` is in the margin's unit; `seeds` is how many would probably decide, where the word is CANNOT TELL."""

    arm: str
    word: Word
    reason: str
    interval: Interval | None
    p: float | None = None
    seeds: int | None = None

    def line(self) -> str:
        """For the verdict line."""
        return f"{self.word.value} {self.arm}: {self.reason}"


def judge(arm: str, gaps: Mapping[int, float], margin: Margin, *, diverged: int = 0) -> Verdict:
    """The verdict of one candidate from its gaps by seed (both arms finished), in the margin's unit. `diverged`: seeds
    in which the candidate's loss went away and the baseline's did not."""
    if diverged:
        many = diverged + len(gaps)
        interval = over_seeds(list(gaps.values())) if gaps else None
        return Verdict(arm, Word.FAIL, f"diverged in {diverged} of {many} seeds; the baseline did not", interval)
    if not gaps:
        return Verdict(arm, Word.CANNOT_TELL, "no seed has both arms finished yet", None, seeds=FEWEST_SEEDS)
    found = over_seeds(list(gaps.values()))
    if found.low is None or found.high is None:
        reason = f"{SINGLE} ({margin.show(found.mean)} over {found.count})"
        return Verdict(arm, Word.CANNOT_TELL, reason, found, seeds=FEWEST_SEEDS)
    where = (
        f"{margin.show(found.mean)}, 90% interval over {found.count} seeds "
        f"{margin.show(found.low)} to {margin.show(found.high)}"
    )
    p = equivalence_p(found, margin.value)
    if -margin.value < found.low and found.high < margin.value:
        return Verdict(arm, Word.PASS, f"{where}, inside ±{margin}", found, p)
    if found.low > margin.value:
        return Verdict(arm, Word.FAIL, f"{where}, beyond +{margin}", found, p)
    if found.high < -margin.value:
        reason = f"{where}, beyond -{margin}: better than the baseline by more than the margin, so not its equal"
        return Verdict(arm, Word.FAIL, reason, found, p)
    return Verdict(arm, Word.CANNOT_TELL, f"{where}, across ±{margin}", found, p, seeds_needed(found, margin.value))


def noise_floor(twins: Mapping[int, float]) -> float | None:
    """Root mean square of the gaps between a baseline and its twin: what two equal runs differ by."""
    return float(np.sqrt(np.mean(np.square(list(twins.values()))))) if twins else None
