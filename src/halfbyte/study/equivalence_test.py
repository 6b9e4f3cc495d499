"""Equivalence test of a study: gaps over seeds, intervals, margins and verdicts.

In one seed both arms start from the same weights and read the same batches. The remaining noise of their gap d (how
training amplifies rounding) is drawn anew with each seed. The population of a claim is therefore *seeds*, and the
interval over S seeds is Student's: mean(d) +- t(S - 1) * sd(d) / sqrt(S). Steps or evaluations inside one run are no
replicates: an interval over them measures how well one run is known, not the result of another seed.

TOST: |gap| < margin at level alpha rejects gap <= -margin and gap >= margin, each at alpha. This is the case exactly if
the 1 - 2 alpha interval is inside the margin; for alpha = 5% the 90% interval. A gap of exactly the margin passes with
probability 5% at most. `alpha_spending` shares alpha among looks, and `judge_all_arms` among candidates.

FAIL: the 1 - 2 alpha FAIL_SHARE interval is beyond the margin. Student's interval assumes symmetric noise. If rare
seeds have much smaller gaps than the others, a small sample misses them and overestimates the gap. With FAIL_SHARE the
probability of a wrong FAIL stays at 5% up to the skewness of log-normal noise of sigma 0.5. For more skewed noise no
interval of usable width over 3 to 8 seeds achieves that: `skewed_error_rate` is the error rate that remains, for a PASS
as well.
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
MIN_SEEDS = 3  # with two seeds t is 6.3 standard errors, too wide for a decision
FAIL_SHARE = 0.25  # of the significance level; docs/parity.md has the measured error rates
POWER = 0.8
MAX_EXCESS = 1e6  # standard deviations beyond the margin, where every test has power
POWER_NODES = (np.arange(256) + 0.5) / 256  # probabilities at which power is integrated over estimates of a variance
MAX_BOOTSTRAP_ELEMENTS = 2**22  # bounds the memory of a bootstrap: a long run has a million steps

MARGIN_PATTERN = re.compile(r"\s*([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*(%|nats?)\s*")
SINGLE_RUN_REASON = "single run: no interval over seeds"
GapsByArmSeed = Mapping[int, float]
"""Seed -> gap in the margin's unit, of finished seeds: inf if only the candidate diverged, NaN if the baseline did and
there is no pair."""


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
    """Returns the quantile of Student's t distribution with `freedom` degrees of freedom."""
    return float(special.stdtrit(freedom, probability))


def paired_t_interval(differences: Sequence[float] | np.ndarray, level: float = CONFIDENCE_LEVEL) -> ConfidenceInterval:
    """Returns Student's interval over paired differences, one per seed."""
    d = [float(value) for value in differences]
    if not d or not all(map(math.isfinite, d)):
        raise ValueError(f"an interval over seeds needs finite differences, one a seed, got {d}")
    mean = math.fsum(d) / len(d)
    sd = math.sqrt(math.fsum((value - mean) ** 2 for value in d) / (len(d) - 1)) if len(d) > 1 else None
    if len(d) < MIN_SEEDS or sd is None:
        return ConfidenceInterval(mean, None, None, sd, len(d), level)
    half = student_t_quantile(0.5 + level / 2, len(d) - 1) * sd / math.sqrt(len(d))
    return ConfidenceInterval(mean, mean - half, mean + half, sd, len(d), level)


def tost_p_value(interval: ConfidenceInterval, margin: float) -> float | None:
    """Returns the p value of the hypothesis that the gap is at least the margin: the larger of the two one-sided tests.
    None without an interval."""
    if interval.sd is None or interval.low is None:
        return None
    if interval.sd == 0:
        return 0.0 if abs(interval.mean) < margin else 1.0
    error = interval.sd / math.sqrt(interval.count)
    return float(special.stdtr(interval.count - 1, (abs(interval.mean) - margin) / error))


def alpha_spending(looks: Sequence[int]) -> tuple[float, ...]:
    """Returns the significance level of each interim look, after `looks` seeds. The levels sum to
    SIGNIFICANCE_LEVEL."""
    spent = [SIGNIFICANCE_LEVEL * (count / looks[-1]) ** 2 for count in looks]
    return tuple(after - before for before, after in itertools.pairwise((0.0, *spent)))


@functools.cache
def skewed_error_rate(count: int, alpha: float) -> float:
    """Returns the probability that a one-sided test at `alpha` over `count` seeds is wrong at the margin if the noise
    is log-normal of sigma 1 with its long tail on the other side: worse seeds for a PASS, better ones for a FAIL.
    Estimated from 20,000 draws."""
    noise = math.exp(0.5) - np.random.default_rng(0).lognormal(size=(20_000, count))
    errors = noise.std(axis=1, ddof=1) / math.sqrt(count)
    return float(np.mean(noise.mean(axis=1) > student_t_quantile(1 - alpha, count - 1) * errors))


def power_at(excess: float, count: int, *, alpha: float, freedom: int) -> float:
    """Returns the probability that a test at `alpha` over `count` seeds detects a gap `excess` standard deviations
    beyond the margin. The standard deviation is an estimate with `freedom` degrees of freedom: the noncentral t,
    averaged over estimates."""
    # Ratio of estimated to true standard deviation at equally probable values: of the earlier study, and of this test.
    earlier, current = (np.sqrt(special.chdtri(degrees, 1 - POWER_NODES) / degrees) for degrees in (freedom, count - 1))
    bound = student_t_quantile(1 - alpha, count - 1) * current
    return float(np.mean(special.ndtr(excess * math.sqrt(count) * earlier[:, None] - bound)))


def detectable_excess(sd: float, count: int, *, freedom: int, alpha: float = SIGNIFICANCE_LEVEL) -> float:
    """Returns how far beyond the margin a gap must be for a test at `alpha` over `count` seeds to detect it with
    probability POWER (`power_at`). `sd` is the standard deviation over seeds, estimated with `freedom` degrees of
    freedom."""
    power_deficit = lambda excess: power_at(excess, count, alpha=alpha, freedom=freedom) - POWER  # noqa: E731
    return float(optimize.brentq(power_deficit, 0.0, MAX_EXCESS)) * sd


def seeds_needed(interval: ConfidenceInterval, margin: float, *, alpha: float = SIGNIFICANCE_LEVEL) -> int | None:
    """Returns the number of seeds with which one look would put the interval entirely on one side of the margin with
    probability POWER: for a PASS at `alpha`, for a FAIL at its own level. It assumes the mean and the standard
    deviation of `interval`. Returns None above 64 seeds, when the gap is about the margin itself."""
    if not interval.sd:
        return MIN_SEEDS
    excess = (abs(interval.mean) - margin) / interval.sd
    level = SIGNIFICANCE_LEVEL * FAIL_SHARE if excess > 0 else alpha
    counts = range(MIN_SEEDS, 65)
    enough = (n for n in counts if power_at(abs(excess), n, alpha=level, freedom=interval.count - 1) >= POWER)
    return next(enough, None)


def moving_block_bootstrap(values: Sequence[float] | np.ndarray, *, draws: int = 2000) -> tuple[float, float] | None:
    """Returns an interval of the mean *within one run* of autocorrelated values. It does not cover the variation
    between seeds. Returns None for fewer than 4 values."""
    statistics = block_bootstrap(values, draws=draws)
    return None if statistics is None else percentile_interval(statistics)


def percentile_interval(draws: np.ndarray) -> tuple[float, float]:
    """Returns the central range that contains CONFIDENCE_LEVEL of the draws."""
    low, high = np.quantile(draws, [(1 - CONFIDENCE_LEVEL) / 2, (1 + CONFIDENCE_LEVEL) / 2])
    return float(low), float(high)


def block_bootstrap(
    values: Sequence[float] | np.ndarray, *, draws: int = 2000, of: Callable[..., np.ndarray] = np.mean, seed: int = 0
) -> np.ndarray | None:
    """Returns `draws` bootstrap replicates of the statistic `of`, from blocks of neighbouring values drawn with
    replacement. Returns None for fewer than 4 values."""
    x = np.asarray(values, np.float64)
    n = len(x)
    if n < 4:
        return None
    block_size = min(max(2, round(n ** (1 / 3) * 1.5)), n)
    random = np.random.default_rng(seed)
    starts = random.integers(0, n - block_size + 1, size=(draws, -(-n // block_size)))
    offsets = np.arange(block_size)
    chunks = np.array_split(starts, min(draws, 1 + draws * n // MAX_BOOTSTRAP_ELEMENTS))
    return np.concatenate(
        [of(x[(chunk[..., None] + offsets).reshape(len(chunk), -1)[:, :n]], axis=1) for chunk in chunks]
    )


@dataclass(frozen=True)
class EquivalenceMargin:
    """Equivalence bound: `value` in percent of the baseline's loss (`relative`) or in nats per token."""

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
        """Returns the gap in the margin's unit. In percent it is NaN if the baseline's loss is not positive."""
        gap = candidate - baseline
        if not self.relative:
            return gap
        return 100 * gap / baseline if baseline > 0 else math.nan

    def format_gap(self, value: float, sign: str = "+") -> str:
        """Returns a gap with its unit as text."""
        return f"{value:{sign}.3f}%" if self.relative else f"{value:{sign}.4f} nats"


MAX_MARGIN = {"%": 50.0, "nats": 5.0}


def parse_margin(text: str) -> EquivalenceMargin:
    """Parse `0.5%` or `0.02nats`. A number without unit is refused, because it could be either."""
    match = MARGIN_PATTERN.fullmatch(text)
    if not match:
        raise ValueError(f"margin must be a number with its unit, such as 0.5% or 0.02nats, got {text!r}")
    margin = EquivalenceMargin(float(match[1]), match[2] == "%")
    if margin.value > (limit := MAX_MARGIN[margin.unit]):
        raise ValueError(
            f"margin must be at most {limit:g}{margin.unit}, got {text!r}: every recipe would pass; give the largest "
            "gap that would not matter, such as 0.5% or 0.02nats"
        )
    return margin


class VerdictKind(enum.Enum):
    PASS = "PASS"
    FAIL = "FAIL"
    CANNOT_TELL = "CANNOT TELL"


def no_interval_reason(count: int) -> str:
    """Returns the reason why a gap over `count` seeds has no interval."""
    return SINGLE_RUN_REASON if count == 1 else f"{count} seeds: no interval over fewer than {MIN_SEEDS}"


@dataclass(frozen=True)
class Verdict:
    """Verdict on one arm. `interval` is in the margin's unit, at the level that decided; `seeds` is the plan's next
    look if the word is CANNOT TELL and there is one."""

    arm: str
    word: VerdictKind
    reason: str
    interval: ConfidenceInterval | None
    p: float | None = None
    seeds: int | None = None

    def line(self) -> str:
        """Returns the entry of the verdict line."""
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
    """Returns the verdict of one candidate at one interim look.

    Args:
        gaps: gap by seed in the margin's unit, of the seeds in which both arms finished.
        diverged: number of seeds in which the candidate diverged and the baseline did not.
        alpha: significance level of this look. A FAIL uses FAIL_SHARE of it for each candidate.
        share: number of candidates that share `alpha` for a PASS.
    """
    if diverged:
        total = diverged + len(gaps)
        interval = paired_t_interval(list(gaps.values())) if gaps else None
        return Verdict(
            arm, VerdictKind.FAIL, f"diverged in {diverged} of {total} seeds; the baseline did not", interval
        )
    if not gaps:
        return Verdict(arm, VerdictKind.CANNOT_TELL, "no seed has both arms finished yet", None)
    values = list(gaps.values())
    fail_interval = paired_t_interval(values, 1 - 2 * alpha * FAIL_SHARE)
    pass_interval = paired_t_interval(values, 1 - 2 * alpha / share)
    if (
        pass_interval.low is None
        or pass_interval.high is None
        or fail_interval.low is None
        or fail_interval.high is None
    ):
        shown = (
            f"{no_interval_reason(fail_interval.count)} "
            f"({margin.format_gap(fail_interval.mean)} over {fail_interval.count})"
        )
        return Verdict(arm, VerdictKind.CANNOT_TELL, shown, paired_t_interval(values, 1 - 2 * alpha))
    p = tost_p_value(pass_interval, margin.value)
    if -margin.value < pass_interval.low and pass_interval.high < margin.value:
        return Verdict(
            arm, VerdictKind.PASS, f"{where_text(pass_interval, margin)}, inside ±{margin}", pass_interval, p
        )
    if fail_interval.low > margin.value:
        return Verdict(
            arm, VerdictKind.FAIL, f"{where_text(fail_interval, margin)}, beyond +{margin}", fail_interval, p
        )
    if fail_interval.high < -margin.value:
        better = "better than the baseline by more than the margin, so not its equal"
        return Verdict(
            arm, VerdictKind.FAIL, f"{where_text(fail_interval, margin)}, beyond -{margin}: {better}", fail_interval, p
        )
    decisive = (
        fail_interval if pass_interval.low > margin.value or pass_interval.high < -margin.value else pass_interval
    )  # beyond the margin, but not at the level of a FAIL
    return Verdict(arm, VerdictKind.CANNOT_TELL, f"{where_text(decisive, margin)}, across ±{margin}", decisive, p)


def where_text(interval: ConfidenceInterval, margin: EquivalenceMargin) -> str:
    """Returns mean, level, number of seeds and bounds of an interval as text."""
    level = f"{100 * interval.level:.4g}% interval over {interval.count} seeds"
    low, high = margin.format_gap(interval.low or 0.0), margin.format_gap(interval.high or 0.0)
    return f"{margin.format_gap(interval.mean)}, {level} {low} to {high}"


def judge_all_arms(
    results: Mapping[str, GapsByArmSeed], margin: EquivalenceMargin, *, seeds: Sequence[int], looks: Sequence[int]
) -> dict[str, Verdict]:
    """Returns the verdicts of all candidates of a study. Each number in `looks` is an interim look after that many of
    the `seeds`, taken once all of them have finished. Seeds after the last look are not judged."""
    final: dict[str, Verdict] = {}
    planned = seeds[: looks[-1]]
    for arm, gaps in results.items():
        if num_diverged := sum(gaps.get(seed) == math.inf for seed in planned):
            final[arm] = judge_arm(arm, _pairs(gaps, planned), margin, diverged=num_diverged)
    latest = {arm: _before_the_first_look(arm, results[arm], margin, seeds[: looks[0]], of=looks[0]) for arm in results}
    for index, (count, alpha) in enumerate(zip(looks, alpha_spending(looks), strict=True)):
        ready = {
            arm: _pairs(gaps, seeds[:count])
            for arm, gaps in results.items()
            if arm not in final and set(seeds[:count]) <= gaps.keys()
        }
        latest |= _judge_look(
            ready,
            margin,
            alpha=alpha,
            passed=sum(v.word is VerdictKind.PASS for v in final.values()),
            of=len(results),
            after=looks[index + 1] if index + 1 < len(looks) else None,
        )
        final |= {arm: latest[arm] for arm in ready if latest[arm].word is not VerdictKind.CANNOT_TELL}
    return {arm: final.get(arm, latest[arm]) for arm in results}


def noise_floor(twins: GapsByArmSeed) -> float | None:
    """Returns the root mean square of the gaps between a baseline and its twin, the difference of two equal runs. None
    without a twin."""
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
    """Judge one interim look at some of the `of` candidates, of which `passed` have passed at earlier looks. Each PASS
    divides alpha among fewer candidates (Holm), so that the others are judged again."""
    verdicts: dict[str, Verdict] = {}
    while True:
        share = max(1, of - passed)
        undecided = [arm for arm in gaps if arm not in verdicts or verdicts[arm].word is not VerdictKind.PASS]
        verdicts |= {arm: judge_arm(arm, gaps[arm], margin, alpha=alpha, share=share) for arm in undecided}
        newly_passed = sum(verdicts[arm].word is VerdictKind.PASS for arm in undecided)
        passed += newly_passed
        if not newly_passed:
            return {
                name: replace(verdict, seeds=after) if verdict.word is VerdictKind.CANNOT_TELL else verdict
                for name, verdict in verdicts.items()
            }


def _pairs(gaps: GapsByArmSeed, seeds: Sequence[int]) -> dict[int, float]:
    return {seed: gaps[seed] for seed in seeds if seed in gaps and math.isfinite(gaps[seed])}


def _before_the_first_look(
    arm: str, gaps: GapsByArmSeed, margin: EquivalenceMargin, seeds: Sequence[int], *, of: int
) -> Verdict:
    """Returns the verdict before the first look, which is after `of` seeds: CANNOT TELL, with the gap so far."""
    pairs = _pairs(gaps, seeds)
    verdict = judge_arm(arm, pairs, margin)
    num_finished = sum(seed in gaps for seed in seeds)
    if len(pairs) >= MIN_SEEDS:
        gap_text = margin.format_gap(sum(pairs.values()) / len(pairs))
        verdict = Verdict(arm, VerdictKind.CANNOT_TELL, f"{gap_text} over {len(pairs)}", verdict.interval)
    progress = f"; {num_finished} of the {of} seeds of the first look are there" if num_finished < len(seeds) else ""
    return replace(verdict, reason=f"{verdict.reason}{progress}", seeds=of if progress else None)
