"""What can be said about a gap from a few paired runs.

In one seed both arms start from the same weights and read the same batches, so their difference d is free of most
noise. What is left (how training amplifies rounding) is drawn anew with each seed, so the population that a claim is
about is that of *seeds*, and the interval is Student's over the d of S seeds:

    mean(d) +- t(S - 1) * sd(d) / sqrt(S)

Steps or evaluations inside one run are no replicates: they share initialisation and data order, and an interval over
them says how well this one run is known, not where the next would fall.

Equivalence (TOST): to show |gap| < margin at level alpha is to reject gap <= -margin and gap >= margin, each at alpha;
that is the case exactly when the 1 - 2 alpha interval lies inside the margin. With alpha = 5% the interval is the 90%
one. A gap of exactly the margin passes with probability 5% at most, and fails with probability 5% at most.

That is for one look at one candidate. A study that looks K times, after n_1 < ... < n_K seeds, spends its alpha as

    alpha_k = alpha ((n_k / n_K)^2 - (n_{k-1} / n_K)^2)

(a power family of Kim and DeMets, Biometrika 74, 1987), and tests at level alpha_k at look k. The sum of what is spent
bounds the chance of a wrong PASS at any look, whatever the looks have in common: with Student's t it holds exactly for
three seeds as for thirty, and needs no table. (Looks have much in common: of the 5% three of them use 4.3, six 2.8.
Few looks lose little.) Of m candidates the first to pass needs alpha_k / m, the next alpha_k / (m - 1), ... (Holm,
Scand. J. Stat. 6, 1979), so that a wrong PASS among all of them has probability alpha at most.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from halfbyte.later import later

special = later("scipy.special")

ALPHA = 0.05
LEVEL = 1 - 2 * ALPHA
FEWEST_SEEDS = 3  # t has 6.3 standard errors with two: no interval that anybody would act on
POWER = 0.8
MOST_AT_ONCE = 2**22  # numbers that a bootstrap draws before it looks at them: a long run has a million steps


@dataclass(frozen=True)
class Interval:
    """Mean of `count` paired differences and Student's interval of `level` around it; no bounds below FEWEST_SEEDS."""

    mean: float
    low: float | None
    high: float | None
    sd: float | None
    count: int
    level: float = LEVEL


@functools.cache
def t_quantile(probability: float, freedom: int) -> float:
    """Student's t."""
    return float(special.stdtrit(freedom, probability))


def over_seeds(differences: Sequence[float] | np.ndarray, level: float = LEVEL) -> Interval:
    """The interval over paired differences, one a seed."""
    d = [float(value) for value in differences]
    if not d or not all(map(math.isfinite, d)):
        raise ValueError(f"an interval over seeds needs finite differences, one a seed, got {d}")
    mean = math.fsum(d) / len(d)
    sd = math.sqrt(math.fsum((value - mean) ** 2 for value in d) / (len(d) - 1)) if len(d) > 1 else None
    if len(d) < FEWEST_SEEDS or sd is None:
        return Interval(mean, None, None, sd, len(d), level)
    half = t_quantile(0.5 + level / 2, len(d) - 1) * sd / math.sqrt(len(d))
    return Interval(mean, mean - half, mean + half, sd, len(d), level)


def equivalence_p(found: Interval, margin: float) -> float | None:
    """The p value of 'the gap is as large as the margin': the larger of the two one-sided tests."""
    if found.sd is None or found.low is None:
        return None
    if found.sd == 0:
        return 0.0 if abs(found.mean) < margin else 1.0
    error = found.sd / math.sqrt(found.count)
    return float(special.stdtr(found.count - 1, (abs(found.mean) - margin) / error))


def spending(looks: Sequence[int]) -> tuple[float, ...]:
    """The level of each look after `looks` seeds; they sum to ALPHA."""
    spent = [ALPHA * (count / looks[-1]) ** 2 for count in looks]
    return tuple(after - before for before, after in itertools.pairwise((0.0, *spent)))


def reach(sd: float, count: int, *, alpha: float = ALPHA) -> float:
    """How far beyond the margin a gap must be for a test at `alpha` over `count` seeds of that spread to see it with
    probability POWER (noncentral t)."""
    bound = t_quantile(1 - alpha, count - 1)
    return float(special.nctdtrinc(count - 1, 1 - POWER, bound)) * sd / math.sqrt(count)


def seeds_needed(found: Interval, margin: float, *, alpha: float = ALPHA) -> int | None:
    """Seeds with which one look at `alpha` would probably (POWER) put the interval wholly on one side of the margin, if
    mean and spread are what they are now; None if that is more than 64 (the gap is about the margin itself)."""
    if not found.sd:
        return FEWEST_SEEDS
    room = abs(abs(found.mean) - margin)
    counts = range(FEWEST_SEEDS, 65)
    return next((count for count in counts if reach(found.sd, count, alpha=alpha) <= room), None)


def moving_block_bootstrap(values: Sequence[float] | np.ndarray, *, draws: int = 2000) -> tuple[float, float] | None:
    """An interval of the mean *within one run* of neighbouring values that move together. It says nothing about another
    seed. None for fewer than 4 values."""
    found = block_draws(values, draws=draws)
    return None if found is None else middle(found)


def middle(draws: np.ndarray) -> tuple[float, float]:
    """The range that holds LEVEL of them, as much below as above."""
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def block_draws(
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
    parts = np.array_split(starts, min(draws, 1 + draws * n // MOST_AT_ONCE))
    return np.concatenate([of(x[(part[..., None] + within).reshape(len(part), -1)[:, :n]], axis=1) for part in parts])
