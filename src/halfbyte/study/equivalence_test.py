"""Equivalence test of a study: gaps over seeds, intervals, margins and verdicts.

In one seed both arms start from the same weights and read the same batches. The remaining noise of their gap d (how
training amplifies rounding) is drawn anew with each seed. The population of a claim is therefore *seeds*, and the
interval over S seeds is Student's: mean(d) +- t(S - 1) * sd(d) / sqrt(S). Steps or evaluations inside one run are no
replicates: an interval over them says how well one run is known, not where the next one would fall.

TOST: |gap| < margin at level alpha rejects gap <= -margin and gap >= margin, each at alpha. This is the case exactly if
the 1 - 2 alpha interval is inside the margin; for alpha = 5% the 90% interval. A gap of exactly the margin passes with
probability 5% at most. `alpha_spending` shares alpha among looks, and `judge_all_arms` among candidates.

FAIL: the 1 - 2 alpha FAIL_SHARE interval is beyond the margin. Student's interval is that of symmetric noise. If a few
seeds have much smaller gaps than the rest, few seeds miss them and the gap appears too large. At FAIL_SHARE a wrong
FAIL keeps 5% up to the skewness of log-normal noise of sigma 0.5. Beyond that no interval of 3 to 8 seeds does at a
usable width: `skewed_error_rate` is what remains, of a PASS as well.
"""

import enum
import functools
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from halfbyte.io.lazy_import import lazy_module

optimize, special = lazy_module("scipy.optimize"), lazy_module("scipy.special")

SIGNIFICANCE_LEVEL = 0.05
CONFIDENCE_LEVEL = 1 - 2 * SIGNIFICANCE_LEVEL
MIN_SEEDS = 3  # with two seeds t is 6.3 standard errors: too wide to decide by
FAIL_SHARE = 0.25  # of the level: docs/parity.md has the measured error rates
POWER = 0.8
MAX_EXCESS = 1e6  # standard deviations beyond the margin, where every test has power
POWER_NODES = (np.arange(256) + 0.5) / 256  # probabilities at which power is integrated over estimates of a variance
MAX_BOOTSTRAP_ELEMENTS = 2**22  # bound of the memory of a bootstrap: a long run has a million steps


MARGIN_PATTERN = re.compile(r"\s*([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*(%|nats?)\s*")
SINGLE_RUN_REASON = "single run: no interval over seeds"
GapsByArmSeed = Mapping[int, float]
"""Seed -> gap in the margin's unit, of the seeds that are over: inf where the candidate alone diverged, NaN where the
baseline did and there is no pair."""


@dataclass(frozen=True)
class ConfidenceInterval:
    """Mean of `count` paired differences and Student's interval of `level` around it; no bounds below MIN_SEEDS."""

    mean: float
    low: float | None
    high: float | None
    sd: float | None
    count: int
    level: float = CONFIDENCE_LEVEL


@functools.cache
def student_t_quantile(probability: float, freedom: int) -> float:
    """Student's t."""
    return float(special.stdtrit(freedom, probability))


def paired_t_interval(differences: Sequence[float] | np.ndarray, level: float = CONFIDENCE_LEVEL) -> ConfidenceInterval:
    """The interval over paired differences, one a seed."""
    d = [float(value) for value in differences]
    if not d or not all(map(math.isfinite, d)):
        raise ValueError(f"an interval over seeds needs finite differences, one a seed, got {d}")
    mean = math.fsum(d) / len(d)
    sd = math.sqrt(math.fsum((value - mean) ** 2 for value in d) / (len(d) - 1)) if len(d) > 1 else None
    if len(d) < MIN_SEEDS or sd is None:
        return ConfidenceInterval(mean, None, None, sd, len(d), level)
    half = student_t_quantile(0.5 + level / 2, len(d) - 1) * sd / math.sqrt(len(d))
    return ConfidenceInterval(mean, mean - half, mean + half, sd, len(d), level)


def tost_p_value(found: ConfidenceInterval, margin: float) -> float | None:
    """The p value of 'the gap is as large as the margin': the larger of the two one-sided tests."""
    if found.sd is None or found.low is None:
        return None
    if found.sd == 0:
        return 0.0 if abs(found.mean) < margin else 1.0
    error = found.sd / math.sqrt(found.count)
    return float(special.stdtr(found.count - 1, (abs(found.mean) - margin) / error))


def alpha_spending(looks: Sequence[int]) -> tuple[float, ...]:
    """The level of each look after `looks` seeds; they sum to SIGNIFICANCE_LEVEL."""
    spent = [SIGNIFICANCE_LEVEL * (count / looks[-1]) ** 2 for count in looks]
    return tuple(after - before for before, after in itertools.pairwise((0.0, *spent)))


@functools.cache
def skewed_error_rate(count: int, alpha: float) -> float:
    """Returns how often a one-sided test at `alpha` over `count` seeds is wrong at the margin if noise is log-normal of
    sigma 1 with its long tail on the other side: worse seeds for a PASS, better ones for a FAIL. From 20,000 draws."""
    noise = math.exp(0.5) - np.random.default_rng(0).lognormal(size=(20_000, count))
    errors = noise.std(axis=1, ddof=1) / math.sqrt(count)
    return float(np.mean(noise.mean(axis=1) > student_t_quantile(1 - alpha, count - 1) * errors))


def power_at(excess: float, count: int, *, alpha: float, freedom: int) -> float:
    """Returns the probability that a test at `alpha` over `count` seeds sees a gap `excess` standard deviations beyond
    the margin, where that deviation is an estimate with `freedom` degrees of freedom: the noncentral t, averaged over
    estimates."""
    # Estimated over true standard deviation, at equally probable values: of the earlier study, and of the test's own.
    earlier, own = (np.sqrt(special.chdtri(degrees, 1 - POWER_NODES) / degrees) for degrees in (freedom, count - 1))
    bound = student_t_quantile(1 - alpha, count - 1) * own
    return float(np.mean(special.ndtr(excess * math.sqrt(count) * earlier[:, None] - bound)))


def detectable_excess(sd: float, count: int, *, freedom: int, alpha: float = SIGNIFICANCE_LEVEL) -> float:
    """Returns how far beyond the margin a gap must be for a test at `alpha` over `count` seeds of that spread to see it
    with probability POWER (`power_at`); `sd` is an estimate with `freedom` degrees of freedom."""
    missing = lambda excess: power_at(excess, count, alpha=alpha, freedom=freedom) - POWER  # noqa: E731
    return float(optimize.brentq(missing, 0.0, MAX_EXCESS)) * sd


def seeds_needed(found: ConfidenceInterval, margin: float, *, alpha: float = SIGNIFICANCE_LEVEL) -> int | None:
    """Seeds with which one look would probably (POWER) put the interval wholly on one side of the margin, if the mean
    is what it is now and the spread what these seeds let expect: a PASS at `alpha`, a FAIL at its own level. None if
    that is more than 64 (the gap is about the margin itself)."""
    if not found.sd:
        return MIN_SEEDS
    excess = (abs(found.mean) - margin) / found.sd
    level = SIGNIFICANCE_LEVEL * FAIL_SHARE if excess > 0 else alpha
    counts = range(MIN_SEEDS, 65)
    enough = (n for n in counts if power_at(abs(excess), n, alpha=level, freedom=found.count - 1) >= POWER)
    return next(enough, None)


def moving_block_bootstrap(values: Sequence[float] | np.ndarray, *, draws: int = 2000) -> tuple[float, float] | None:
    """An interval of the mean *within one run* of neighbouring values that move together. It says nothing about another
    seed. None for fewer than 4 values."""
    found = block_bootstrap(values, draws=draws)
    return None if found is None else percentile_interval(found)


def percentile_interval(draws: np.ndarray) -> tuple[float, float]:
    """The range that holds CONFIDENCE_LEVEL of them, as much below as above."""
    low, high = np.quantile(draws, [(1 - CONFIDENCE_LEVEL) / 2, (1 + CONFIDENCE_LEVEL) / 2])
    return float(low), float(high)


def block_bootstrap(
    values: Sequence[float] | np.ndarray, *, draws: int = 2000, of: Callable[..., np.ndarray] = np.mean, seed: int = 0
) -> np.ndarray | None:
    """A statistic of blocks of neighbouring values, drawn with replacement `draws` times; None for fewer than 4
    values."""
    x = np.asarray(values, np.float64)
    n = len(x)
    if n < 4:
        return None
    size = min(max(2, round(n ** (1 / 3) * 1.5)), n)
    random = np.random.default_rng(seed)
    starts = random.integers(0, n - size + 1, size=(draws, -(-n // size)))
    within = np.arange(size)
    parts = np.array_split(starts, min(draws, 1 + draws * n // MAX_BOOTSTRAP_ELEMENTS))
    return np.concatenate([of(x[(part[..., None] + within).reshape(len(part), -1)[:, :n]], axis=1) for part in parts])


@dataclass(frozen=True)
class EquivalenceMargin:
    """`value` in percent of the baseline's loss (`relative`) or in nats a token."""

    value: float
    relative: bool

    def __post_init__(self) -> None:
        if not math.isfinite(self.value) or self.value <= 0:
            raise ValueError(
                f"margin must be larger than 0, got {self.value:g}: no finite number of runs can show that two recipes "
                "are exactly equal; give the largest gap that would not matter, such as 0.5% or 0.02nats"
            )

    @property
    def unit(self) -> str:
        return "%" if self.relative else "nats"

    def __str__(self) -> str:
        return f"{self.value:g}{'%' if self.relative else 'nats'}"

    def measure(self, candidate: float, baseline: float) -> float:
        """The gap in the margin's unit; NaN of a baseline that is no loss, in percent."""
        apart = candidate - baseline
        if not self.relative:
            return apart
        return 100 * apart / baseline if baseline > 0 else math.nan

    def format_gap(self, value: float, sign: str = "+") -> str:
        """A gap as text."""
        return f"{value:{sign}.3f}%" if self.relative else f"{value:{sign}.4f} nats"


MAX_MARGIN = {"%": 50.0, "nats": 5.0}


def parse_margin(text: str) -> EquivalenceMargin:
    """`0.5%`, `0.02nats`; a plain number is refused, because it could be either."""
    found = MARGIN_PATTERN.fullmatch(text)
    if not found:
        raise ValueError(f"margin must be a number with its unit, such as 0.5% or 0.02nats, got {text!r}")
    margin = EquivalenceMargin(float(found[1]), found[2] == "%")
    if margin.value > (most := MAX_MARGIN[margin.unit]):
        raise ValueError(
            f"margin must be at most {most:g}{margin.unit}, got {text!r}: every recipe would pass; give the largest "
            "gap that would not matter, such as 0.5% or 0.02nats"
        )
    return margin


class VerdictKind(enum.Enum):
    PASS = "PASS"
    FAIL = "FAIL"
    CANNOT_TELL = "CANNOT TELL"


def no_interval_reason(count: int) -> str:
    """Why a gap over so many seeds has no interval."""
    return SINGLE_RUN_REASON if count == 1 else f"{count} seeds: no interval over fewer than {MIN_SEEDS}"


@dataclass(frozen=True)
class Verdict:
    """`interval` is in the margin's unit, at the level that decided; `seeds`: the plan's next look, where the word is
    CANNOT TELL and there is one."""

    arm: str
    word: VerdictKind
    reason: str
    interval: ConfidenceInterval | None
    p: float | None = None
    seeds: int | None = None

    def line(self) -> str:
        """For the verdict line."""
        return f"{self.word.value} {self.arm}: {self.reason}"


def judge_arm(
    arm: str,
    gaps: GapsByArmSeed,
    margin: EquivalenceMargin,
    *,
    diverged: int = 0,
    alpha: float = SIGNIFICANCE_LEVEL,
    share: int = 1,
) -> Verdict:
    """The verdict of one candidate from its gaps by seed (both arms finished), in the margin's unit, at one look of
    level `alpha`, of which a PASS has one part in `share`; a FAIL, each candidate's own, FAIL_SHARE. `diverged`: seeds
    in which the candidate's loss went away and the baseline's did not."""
    if diverged:
        many = diverged + len(gaps)
        interval = paired_t_interval(list(gaps.values())) if gaps else None
        return Verdict(arm, VerdictKind.FAIL, f"diverged in {diverged} of {many} seeds; the baseline did not", interval)
    if not gaps:
        return Verdict(arm, VerdictKind.CANNOT_TELL, "no seed has both arms finished yet", None)
    values = list(gaps.values())
    own = paired_t_interval(values, 1 - 2 * alpha * FAIL_SHARE)
    wide = paired_t_interval(values, 1 - 2 * alpha / share)
    if wide.low is None or wide.high is None or own.low is None or own.high is None:
        shown = f"{no_interval_reason(own.count)} ({margin.format_gap(own.mean)} over {own.count})"
        return Verdict(arm, VerdictKind.CANNOT_TELL, shown, paired_t_interval(values, 1 - 2 * alpha))
    p = tost_p_value(wide, margin.value)
    if -margin.value < wide.low and wide.high < margin.value:
        return Verdict(arm, VerdictKind.PASS, f"{where_text(wide, margin)}, inside ±{margin}", wide, p)
    if own.low > margin.value:
        return Verdict(arm, VerdictKind.FAIL, f"{where_text(own, margin)}, beyond +{margin}", own, p)
    if own.high < -margin.value:
        better = "better than the baseline by more than the margin, so not its equal"
        return Verdict(arm, VerdictKind.FAIL, f"{where_text(own, margin)}, beyond -{margin}: {better}", own, p)
    across = own if wide.low > margin.value or wide.high < -margin.value else wide  # beyond, but not at FAIL's level
    return Verdict(arm, VerdictKind.CANNOT_TELL, f"{where_text(across, margin)}, across ±{margin}", across, p)


def where_text(found: ConfidenceInterval, margin: EquivalenceMargin) -> str:
    """Returns mean, level, seeds and bounds of an interval."""
    level = f"{100 * found.level:.4g}% interval over {found.count} seeds"
    low, high = margin.format_gap(found.low or 0.0), margin.format_gap(found.high or 0.0)
    return f"{margin.format_gap(found.mean)}, {level} {low} to {high}"


def judge_all_arms(
    results: Mapping[str, GapsByArmSeed], margin: EquivalenceMargin, *, seeds: Sequence[int], looks: Sequence[int]
) -> dict[str, Verdict]:
    """The verdicts of all candidates of a study that was planned with these looks, each after its number of the
    `seeds`. A look is taken when every seed before it is over; seeds after the last look are not judged."""
    final: dict[str, Verdict] = {}
    planned = seeds[: looks[-1]]
    for arm, found in results.items():
        if lost := sum(found.get(seed) == math.inf for seed in planned):
            final[arm] = judge_arm(arm, _pairs(found, planned), margin, diverged=lost)
    latest = {arm: _before_the_first_look(arm, results[arm], margin, seeds[: looks[0]], of=looks[0]) for arm in results}
    for place, (count, alpha) in enumerate(zip(looks, alpha_spending(looks), strict=True)):
        here = {
            arm: _pairs(found, seeds[:count])
            for arm, found in results.items()
            if arm not in final and set(seeds[:count]) <= found.keys()
        }
        latest |= _judge_look(here, margin, alpha=alpha, passed=sum(v.word is VerdictKind.PASS for v in final.values()),
                        of=len(results), after=looks[place + 1] if place + 1 < len(looks) else None)  # fmt: skip
        final |= {arm: latest[arm] for arm in here if latest[arm].word is not VerdictKind.CANNOT_TELL}
    return {arm: final.get(arm, latest[arm]) for arm in results}


def noise_floor(twins: GapsByArmSeed) -> float | None:
    """Root mean square of the gaps between a baseline and its twin: what two equal runs differ by."""
    return float(np.sqrt(np.mean(np.square(list(twins.values()))))) if twins else None


def _judge_look(
    gaps: Mapping[str, GapsByArmSeed],
    margin: EquivalenceMargin,
    *,
    alpha: float,
    passed: int,
    of: int,
    after: int | None,
) -> dict[str, Verdict]:
    """One look at some of the `of` candidates, of which `passed` have passed before: each PASS makes the next
    easier."""
    found: dict[str, Verdict] = {}
    while True:
        share = max(1, of - passed)
        waiting = [arm for arm in gaps if arm not in found or found[arm].word is not VerdictKind.PASS]
        found |= {arm: judge_arm(arm, gaps[arm], margin, alpha=alpha, share=share) for arm in waiting}
        more = sum(found[arm].word is VerdictKind.PASS for arm in waiting)
        passed += more
        if not more:
            return {a: replace(v, seeds=after) if v.word is VerdictKind.CANNOT_TELL else v for a, v in found.items()}


def _pairs(found: GapsByArmSeed, seeds: Sequence[int]) -> dict[int, float]:
    return {seed: found[seed] for seed in seeds if seed in found and math.isfinite(found[seed])}


def _before_the_first_look(
    arm: str, found: GapsByArmSeed, margin: EquivalenceMargin, seeds: Sequence[int], *, of: int
) -> Verdict:
    """What can be said while runs of the first look, after `of` seeds, are missing: the gap, and no word."""
    pairs = _pairs(found, seeds)
    verdict = judge_arm(arm, pairs, margin)
    over = sum(seed in found for seed in seeds)
    if len(pairs) >= MIN_SEEDS:
        shown = margin.format_gap(sum(pairs.values()) / len(pairs))
        verdict = Verdict(arm, VerdictKind.CANNOT_TELL, f"{shown} over {len(pairs)}", verdict.interval)
    waits = f"; {over} of the {of} seeds of the first look are there" if over < len(seeds) else ""
    return replace(verdict, reason=f"{verdict.reason}{waits}", seeds=of if waits else None)
