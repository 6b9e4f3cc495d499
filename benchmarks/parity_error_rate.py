"""How often a parity passes a candidate that is exactly at the margin: simulated studies under the product's rules.

    python benchmarks/parity_error_rate.py                  # 10,000 studies a row through `judge_study`: the table
    python benchmarks/parity_error_rate.py --runner 200     # 200 studies through the whole runner, command and report

All candidates of a study have a true gap of exactly the margin, so every PASS is wrong. A study is followed to its end:
from look to look, as its report says, until nothing is left to do. The noise of a seed has a standard deviation of a
fifth of the margin (`normal`, `t3`: Student's with three degrees of freedom, `skewed`: log-normal, the long tail on the
side of larger gaps, where it does most harm); candidates of a study share half of its variance, as those that are
subtracted from one baseline do. `before` are the rules without a plan: normal noise, judged at 5% after every look and
candidate.
"""

import argparse
import contextlib
import io
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from halfbyte.parity.margin import parse_margin
from halfbyte.parity.verdict import Word, judge, judge_study

MARGIN = parse_margin("0.5%")
SPREAD = 0.2 * MARGIN.value
KINDS = ("normal", "t3", "skewed")
PLANS = ((3,), (5,), (8,), (3, 5), (3, 5, 8), (3, 4, 5, 6, 7, 8))  # looks
CANDIDATES = (1, 8)


def draw(random: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Noise of mean 0 and standard deviation 1."""
    if kind == "normal":
        return random.standard_normal(shape)
    if kind == "t3":
        return random.standard_t(3, shape) / np.sqrt(3)
    return (np.exp(random.standard_normal(shape)) - np.exp(0.5)) / np.sqrt((np.e - 1) * np.e)


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
    found = judge_study(results, MARGIN, seeds=range(looks[-1]), looks=looks)
    return any(verdict.word is Word.PASS for verdict in found.values())


def passed_before(study: np.ndarray, looks: tuple[int, ...]) -> bool:
    """The same without a plan: every candidate at 5%, at every look, until it is clear."""
    for row in study.tolist():
        for count in looks:
            word = judge("", dict(enumerate(row[:count])), MARGIN).word
            if word is not Word.CANNOT_TELL:
                break
        if word is Word.PASS:
            return True
    return False


def rates(kind: str, looks: tuple[int, ...], candidates: int, studies: int) -> tuple[float, float]:
    """Shares of studies with a wrong PASS: by the plan's rules, and before, of normal noise and a tenth of them."""
    random = np.random.default_rng([KINDS.index(kind), candidates, *looks])
    found = gaps(random, kind, studies=studies, candidates=candidates, seeds=looks[-1])
    few = found[: max(1, studies // 10)] if kind == "normal" else ()
    before = float(np.mean([passed_before(s, looks) for s in few])) if len(few) else 0.0
    return float(np.mean([passes(s, looks) for s in found])), before


def table(studies: int) -> Iterator[str]:
    yield "| looks after seeds | candidates | " + " | ".join(KINDS) + " | before |"
    yield "|---|---|" + "---|" * (len(KINDS) + 1)
    for looks in PLANS:
        for candidates in CANDIDATES:
            found = [rates(kind, looks, candidates, studies) for kind in KINDS]
            cells = [f"{100 * plan:.1f}%" for plan, _ in found] + [f"{100 * found[0][1]:.1f}%"]
            yield f"| {', '.join(map(str, looks))} | {candidates} | " + " | ".join(cells) + " |"


# Through the whole runner


def invented(losses: Callable[[str, int], float]) -> Callable[..., Any]:
    """In place of training: leaves what a run leaves, with the validation loss that `losses(arm, seed)` says."""
    from halfbyte.train import jsonconfig
    from halfbyte.train.loop import RunResult

    def train(config: Any, folder: Path, **_: Any) -> RunResult:
        folder.mkdir(parents=True, exist_ok=True)
        end = losses(folder.parent.name, config.seed)
        rows = [
            {"step": step, "tokens": 256 * step, "loss": end, "step_time_s": 0.1, "tokens_per_s_per_device": 1.0,
             "tflops_per_device": 1.0, "input_wait_s": 0.0, "validation_loss": end}
            for step in range(1, config.steps + 1)
        ]  # fmt: skip
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        jsonconfig.save(config, folder / "config.json")
        return RunResult(folder, config.steps)

    return train


def one_study(folder: Path, study: np.ndarray, looks: tuple[int, ...], random: np.random.Generator) -> dict[str, Any]:
    """The command, typed again as long as its report has something to come; what it said last."""
    from halfbyte.cli.main import main as halfbyte
    from halfbyte.parity import runner

    names = ("nvfp4", "mxfp4", "fp8", "nvfp4@all_linear", "mxfp4@all_linear", "fp8@all_linear", "nvfp4_no_sr",
             "nvfp4_no_rht")[: len(study)]  # fmt: skip
    levels = 3 + 0.05 * random.standard_normal(study.shape[1])
    twins = 0.3 * SPREAD * random.standard_normal(study.shape[1])

    def loss(arm: str, seed: int) -> float:
        gap = study[names.index(arm), seed] if arm in names else twins[seed] if "twin" in arm else 90.0
        return float(levels[seed] * (1 + (gap if arm != "bf16" else 0.0) / 100))

    planned = ["--seeds", str(looks[-1]), "--looks", ",".join(map(str, looks)), "--candidates", ",".join(names)]
    run = ["--data", "synthetic", "--steps", "6", "--radar", "-1", "--out", str(folder)]
    command = ["parity", "demo", *run, *planned]
    real, runner.train = runner.train, invented(loss)
    try:
        for _ in looks:
            with contextlib.redirect_stdout(io.StringIO()):
                code = halfbyte(command)
            found = json.loads((folder / "report.json").read_text())
            if code not in (0, 3):
                raise SystemExit(f"{' '.join(command)} ended with {code}")
            if not any("the same command" in line for line in found["next"]):
                return found
    finally:
        runner.train = real
    return found


def through_the_runner(
    studies: int, *, looks: tuple[int, ...] = (3, 5), candidates: int = 2, kinds: tuple[str, ...] = KINDS
) -> dict[str, int]:
    """Kind of noise -> studies, of this many each, in which some candidate passed."""
    wrong = {}
    for kind in kinds:
        random = np.random.default_rng([KINDS.index(kind), studies])
        found = gaps(random, kind, studies=studies, candidates=candidates, seeds=looks[-1])
        wrong[kind] = 0
        for study in found:
            with tempfile.TemporaryDirectory() as folder:
                report = one_study(Path(folder) / "p", study, looks, random)
            words = [arm["verdict"]["word"] for arm in report["arms"] if arm["kind"] == "candidate"]
            wrong[kind] += "PASS" in words
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=10_000)
    parser.add_argument("--runner", type=int, default=0, help="studies through the whole runner, in place of the table")
    args = parser.parse_args()
    if args.runner:
        for kind, wrong in through_the_runner(-(-args.runner // 3)).items():
            print(f"{kind}: a wrong PASS in {wrong} of {-(-args.runner // 3)} studies", flush=True)
        return
    for line in table(args.studies):
        print(line, flush=True)


if __name__ == "__main__":
    main()
