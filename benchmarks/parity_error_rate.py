"""How often a parity passes a candidate that is exactly at the margin: simulated studies under the product's rules.

    python benchmarks/parity_error_rate.py                  # 10,000 studies a row through `judge_study`: the table
    python benchmarks/parity_error_rate.py --runner 200     # 200 studies a row through the whole runner
    python benchmarks/parity_error_rate.py --words 1000     # wrong PASS and wrong FAIL by the shape of the noise

`--json FILE` keeps what was counted.

All candidates of a study have a true gap of exactly the margin, so every PASS is wrong. A study is followed to its end:
from look to look, as its report says, until nothing is left to do. The noise of a seed has a standard deviation of a
fifth of the margin (`normal`, `t3`: Student's with three degrees of freedom, `skewed`: log-normal, the long tail on the
side of larger gaps, where it does most harm); candidates of a study share half of its variance, as those that are
subtracted from one baseline do. `before` are the rules without a plan: normal noise, judged at 5% after every look and
candidate. With `--words` one candidate per study is exactly at the margin, so that PASS and FAIL are both wrong;
`left` noise has its long tail on the side of smaller gaps, and `mild` noise is log-normal of sigma 0.5. The last rows
are studies whose gap is the one that an earlier study of as many seeds has printed as "called FAIL in 80%".

The row `chosen after 2` are studies that begin with two seeds, and whose owner then asks for the one look
that makes a PASS most likely; `before`, it was given.
"""

import contextlib
import io
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from json import dumps, loads
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import tyro

from halfbyte.study import equivalence_test
from halfbyte.study.equivalence_test import (
    FAIL_SHARE,
    SIGNIFICANCE_LEVEL,
    VerdictKind,
    detectable_excess,
    judge_all_arms,
    judge_arm,
    parse_margin,
    student_t_quantile,
)

MARGIN = parse_margin("0.5%")
SPREAD = 0.2 * MARGIN.value
KINDS = ("normal", "t3", "skewed")
SHAPES = (*KINDS, "skewed left", "mild", "mild left")  # of --words
PLANS = ((3,), (5,), (8,), (3, 5), (3, 5, 8), (3, 4, 5, 6, 7, 8))  # looks
CANDIDATES = (1, 8)
ASKED = tuple((count,) for count in range(3, 9))  # what a sly owner of two seeds may ask for
BEGUN = ((2,), *PLANS)  # studies through the runner, in turn; the report of one with two seeds says what to type next
NAMES = ("nvfp4", "mxfp4", "fp8", "nvfp4@all_linear", "mxfp4@all_linear", "fp8@all_linear", "nvfp4_no_sr",
         "nvfp4_no_rht")  # fmt: skip


def draw(random: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Noise of mean 0 and standard deviation 1."""
    if kind == "normal":
        return random.standard_normal(shape)
    if kind == "t3":
        return random.standard_t(3, shape) / np.sqrt(3)
    if kind.endswith(" left"):
        return -draw(random, kind.removesuffix(" left"), shape)
    variance = 0.25 if kind == "mild" else 1.0  # of the logarithm
    mean = np.exp(variance / 2)
    return (random.lognormal(0, np.sqrt(variance), shape) - mean) / (mean * np.sqrt(np.exp(variance) - 1))


def gaps(random: np.random.Generator, kind: str, *, studies: int, candidates: int, seeds: int) -> np.ndarray:
    """[studies, candidates, seeds], each with the margin for its mean."""
    if candidates == 1:
        return MARGIN.value + SPREAD * draw(random, kind, (studies, 1, seeds))
    own = draw(random, kind, (studies, candidates, seeds))
    shared = draw(random, kind, (studies, 1, seeds))
    return MARGIN.value + SPREAD * (own + shared) / np.sqrt(2)


def passes(study: np.ndarray, looks: tuple[int, ...]) -> bool:
    """Whether any candidate of one study, [candidates, seeds], passes by the plan's rules."""
    results = {str(name): dict(enumerate(row.tolist())) for name, row in enumerate(study)}
    found = judge_all_arms(results, MARGIN, seeds=range(looks[-1]), looks=looks)
    return any(verdict.word is VerdictKind.PASS for verdict in found.values())


def word_rates(kind: str, looks: tuple[int, ...], studies: int, fail_share: float = FAIL_SHARE) -> dict[str, float]:
    """Shares of studies whose candidate, exactly at the margin, has each word at the plan's end; a FAIL takes
    `fail_share` of the level."""
    random = np.random.default_rng([SHAPES.index(kind), *looks])
    found = gaps(random, kind, studies=studies, candidates=1, seeds=looks[-1])[:, 0]
    arms = [{"a": dict(enumerate(row.tolist()))} for row in found]
    with mock.patch.object(equivalence_test, "FAIL_SHARE", fail_share):
        words = [judge_all_arms(arm, MARGIN, seeds=range(looks[-1]), looks=looks)["a"].word for arm in arms]
    return {word.value: words.count(word) / studies for word in VerdictKind}


def stated_power(seeds: int, studies: int) -> float:
    """Share of FAIL among studies whose gap an earlier study, of as many seeds, has stated for 80%."""
    random = np.random.default_rng(seeds)
    earlier, later = SPREAD * random.standard_normal((2, studies, seeds))
    excess = detectable_excess(1.0, seeds, alpha=SIGNIFICANCE_LEVEL * FAIL_SHARE, freedom=seeds - 1)
    found = MARGIN.value + excess * earlier.std(axis=1, ddof=1, keepdims=True) + later
    return float(np.mean([judge_arm("", dict(enumerate(row)), MARGIN).word is VerdictKind.FAIL for row in found]))


def words_table(studies: int) -> Iterator[dict[str, Any]]:
    """Yields a row per plan and shape of the noise, then a row per number of seeds for the stated power."""
    for looks in ((3,), (5,), (8,), (3, 5, 8)):
        for kind in SHAPES:
            found, whole = word_rates(kind, looks, studies), word_rates(kind, looks, studies, fail_share=1.0)
            yield {"looks": looks, "noise": kind, **found, "FAIL at the whole level": whole["FAIL"]}
    for seeds in (3, 5, 8):
        yield {"seeds": seeds, "FAIL at the gap stated for 80%": stated_power(seeds, studies)}


def passed_before(study: np.ndarray, looks: tuple[int, ...]) -> bool:
    """The same without a plan: every candidate at 5%, at every look, until it is clear."""
    for row in study.tolist():
        for count in looks:
            word = judge_arm("", dict(enumerate(row[:count])), MARGIN).word
            if word is not VerdictKind.CANNOT_TELL:
                break
        if word is VerdictKind.PASS:
            return True
    return False


def rates(kind: str, looks: tuple[int, ...], candidates: int, studies: int) -> tuple[float, float]:
    """Shares of studies with a wrong PASS: by the plan's rules, and before, of normal noise and a tenth of them."""
    random = np.random.default_rng([KINDS.index(kind), candidates, *looks])
    found = gaps(random, kind, studies=studies, candidates=candidates, seeds=looks[-1])
    few = found[: max(1, studies // 10)] if kind == "normal" else ()
    before = float(np.mean([passed_before(s, looks) for s in few])) if len(few) else 0.0
    return float(np.mean([passes(s, looks) for s in found])), before


def granted(asked: tuple[int, ...]) -> tuple[int, ...]:
    """The looks of a study that was begun with two seeds and goes on as `asked`."""
    from halfbyte.study.arms import standard_arms
    from halfbyte.study.study_plan import StudyPlan, seed_range, write_or_check_plan
    from halfbyte.train.run_presets import run_config

    arms, base = tuple(standard_arms("bf16", ["nvfp4"])), run_config("demo")
    with tempfile.TemporaryDirectory() as folder:
        begun = write_or_check_plan(Path(folder), StudyPlan(base, arms, seed_range(2), MARGIN))
        try:
            return write_or_check_plan(
                Path(folder), StudyPlan(base, arms, seed_range(asked[-1]), MARGIN, looks=asked)
            ).looks
        except ValueError:  # refused: it goes on as it was planned
            return begun.looks


def sly_rates(kind: str, studies: int) -> tuple[float, float]:
    """Shares of wrong PASSes where a look is asked for after two seeds were seen, by a try of each on 200 invented ends
    of the study at the margin; and if it were given."""
    random = np.random.default_rng([KINDS.index(kind), 2])
    found = gaps(random, kind, studies=studies, candidates=1, seeds=8)
    ends = gaps(random, kind, studies=200, candidates=1, seeds=6)[:, 0]
    given = {asked: granted(asked) for asked in ASKED}
    now = before = 0
    for study in found:
        futures = np.concatenate([np.broadcast_to(study[0, :2], (len(ends), 2)), ends], axis=1)
        best = max(ASKED, key=lambda asked: inside(futures[:, : asked[0]]))
        now += passes(study, given[best])
        before += passes(study, best)
    return now / studies, before / studies


def inside(futures: np.ndarray) -> float:
    """The share of rows whose plain 90% interval is inside the margin."""
    count = futures.shape[1]
    half = student_t_quantile(0.95, count - 1) * futures.std(axis=1, ddof=1) / np.sqrt(count)
    return float(np.mean(np.abs(futures.mean(axis=1)) + half < MARGIN.value))


def table(studies: int) -> Iterator[dict[str, Any]]:
    """One row after another: looks, candidates, and the share of wrong PASSes by noise, now and before."""
    for looks in PLANS:
        for candidates in CANDIDATES:
            found = {kind: rates(kind, looks, candidates, studies) for kind in KINDS}
            shares = {kind: rate for kind, (rate, _) in found.items()}
            yield {"looks": looks, "candidates": candidates, **shares, "before": found["normal"][1]}
    sly = {kind: sly_rates(kind, studies) for kind in KINDS}
    shares = {kind: rate for kind, (rate, _) in sly.items()}
    yield {"looks": "chosen after 2", "candidates": 1, **shares, "before": sly["normal"][1]}


# Through the whole runner


def invented(losses: Callable[[str, int], float]) -> Callable[..., Any]:
    """In place of training: leaves what a run leaves, with the validation loss that `losses(arm, seed)` says."""
    from halfbyte.io import dataclass_json
    from halfbyte.train.loop import RunResult

    def train(config: Any, folder: Path, **_: Any) -> RunResult:
        folder.mkdir(parents=True, exist_ok=True)
        end = losses(folder.parent.name, config.seed)
        rows = [
            {"step": step, "tokens": 256 * step, "loss": end, "step_time_s": 0.1, "tokens_per_s_per_device": 1.0,
             "tflops_per_device": 1.0, "input_wait_s": 0.0, "validation_loss": end}
            for step in range(1, config.steps + 1)
        ]  # fmt: skip
        (folder / "metrics.jsonl").write_text("".join(dumps(row) + "\n" for row in rows))
        dataclass_json.save_config(config, folder / "config.json")
        return RunResult(folder, config.steps)

    return train


def one_study(folder: Path, study: np.ndarray, looks: tuple[int, ...], random: np.random.Generator) -> dict[str, Any]:
    """The command, typed again as long as its report has something to come, with the seeds that it names; what it said
    last."""
    from halfbyte.cli.main import main as halfbyte
    from halfbyte.study import runner

    names = NAMES[: len(study)]
    levels = 3 + 0.05 * random.standard_normal(study.shape[1])
    twins = 0.3 * SPREAD * random.standard_normal(study.shape[1])

    def loss(arm: str, seed: int) -> float:
        gap = study[names.index(arm), seed] if arm in names else twins[seed] if "twin" in arm else 90.0
        return float(levels[seed] * (1 + (gap if arm != "bf16" else 0.0) / 100))

    seeds, asked = looks[-1], ["--looks", ",".join(map(str, looks))] if len(looks) > 1 else []
    run = ["--data", "synthetic", "--steps", "6", "--radar", "-1", "--out", str(folder)]
    real, runner.train = runner.train, invented(loss)
    try:
        while True:
            command = ["parity", "demo", *run, "--candidates", ",".join(names), "--seeds", str(seeds), *asked]
            with contextlib.redirect_stdout(io.StringIO()):
                code = halfbyte(command)
            if code not in (0, 3):
                raise SystemExit(f"{' '.join(command)} ended with {code}")
            found: dict[str, Any] = loads((folder / "report.json").read_text())
            advice = [line for line in found["next"] if "the same command" in line]
            if not advice:
                return found
            named = re.search(r"--seeds (\d+)", advice[0])
            seeds = int(named[1]) if named else seeds
    finally:
        runner.train = real


def through_the_runner(studies: int, *, candidates: int, kind: str) -> dict[str, Any]:
    """How many of so many studies passed a candidate, in all and by the looks that they were begun with."""
    random = np.random.default_rng([KINDS.index(kind), candidates, studies])
    found = gaps(random, kind, studies=studies, candidates=candidates, seeds=8)
    by_plan: dict[str, list[bool]] = {}
    for number, study in enumerate(found):
        looks = BEGUN[number % len(BEGUN)]
        with tempfile.TemporaryDirectory() as folder:
            report = one_study(Path(folder) / "p", study, looks, random)
        words = [arm["verdict"]["word"] for arm in report["arms"] if arm["kind"] == "candidate"]
        by_plan.setdefault(", ".join(map(str, looks)), []).append("PASS" in words)
    wrong = sum(map(sum, by_plan.values()))
    low, high = exact(wrong, studies)
    parts = {name: f"{sum(passed)} of {len(passed)}" for name, passed in by_plan.items()}
    return {"candidates": candidates, "noise": kind, "wrong": wrong, "studies": studies, "low": low, "high": high,
            "by_looks": parts}  # fmt: skip


def exact(wrong: int, studies: int) -> tuple[float, float]:
    """The 95% interval of Clopper and Pearson (Biometrika 26, 1934)."""
    from scipy.stats import beta

    low = float(beta.ppf(0.025, wrong, studies - wrong + 1)) if wrong else 0.0
    return low, float(beta.ppf(0.975, wrong + 1, studies - wrong))


def main(
    studies: int = 10_000, runner: int = 0, words: int = 0, candidates: tuple[int, ...] = CANDIDATES,
    json: Path | None = None,
):  # fmt: skip
    """`runner` studies a row through the whole runner, or `words` a row by the shape of the noise, instead of the
    table; `json` keeps the rows."""
    rows, whole = [], (through_the_runner(runner, candidates=m, kind=kind) for m in candidates for kind in KINDS)
    for row in whole if runner else words_table(words) if words else table(studies):
        rows.append(row)
        print(dumps(row), flush=True)
        if json:
            about = {"command": "python " + " ".join(sys.argv), "jax": jax.__version__, "device": jax.default_backend()}
            json.write_text(dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
