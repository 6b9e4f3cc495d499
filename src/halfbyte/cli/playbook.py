"""Should this model switch to 4 bits? One command, one page: a decision with its error rate.

halfbyte playbook demo --budget 12m

halfbyte playbook RUN --data DIR --budget 2h --device gb300 --count 128

Runs doctor, pre-flight, a short run with a trace and telemetry, inspect (whose policy joins as a further candidate),
bench of every arm, a parity study against the FP8 baseline of the size that the budget allows (planned and shown before
it begins), task scores, and, where asked and where there is room, plan and ablation. Each leaves a record; the page is
made from the records. Stopped at any point, the same command goes on.

Exit code 0: the page is there, whatever it says."""

import dataclasses
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from halfbyte.cli.interrupting import terminated_as_interrupted
from halfbyte.cli.result import PREEMPTED, Result
from halfbyte.cli.screen import say
from halfbyte.cli.study import Study, base_run, check_validation, plan_of

if TYPE_CHECKING:
    from halfbyte.cli.stages import Work

ELSEWHERE = ("out", "host", "report", "budget")
"""Flags that may change when a playbook goes on."""


@dataclass(frozen=True, kw_only=True)
class Args(Study):
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL|RUN")]
    """A named run (demo, llama-60m, ...), a config (.json), or a run directory."""
    baseline: str = "fp8"
    """RECIPE or RECIPE@POLICY that the cluster runs now, and falls back to."""
    candidates: str = "nvfp4,nvfp4_no_rht"
    """RECIPE or RECIPE@POLICY, several with commas; what `inspect` suggests is added."""
    seeds: int = 0
    """Seeds of the study; 0: as the budget allows."""
    budget: str = "30m"
    """Time for everything: 12m, 2h. The study gets what is left of it."""
    snr: float = 12.0
    """Signal-to-noise ratio that `inspect` wants of every GEMM, in decibels."""
    tasks: tuple[str, ...] = ()
    """Task files to score the arms on, as for eval."""
    limit: int = 200
    """Examples a task; 0: all."""
    device: str = ""
    """A cluster to plan for: h100, h200, b200, gb200, b300 or gb300."""
    count: int = 128
    """How many of them."""


def run(args: Args) -> Result:
    from halfbyte.checkpoint import RunLock
    from halfbyte.cli.bench import Args as BenchArgs
    from halfbyte.cli.bench import prepare
    from halfbyte.cli.stages import Work
    from halfbyte.playbook import Records

    prepare(BenchArgs())
    base = dataclasses.replace(base_run(args, args.model), seed=args.first_seed)
    out = Path(args.out or f"playbook/{base.name}")
    work = Work(args, base, out, Records(out / "records"))
    if args.report:
        if not work.records.directory.is_dir():
            raise ValueError(f"{out} holds no records; run a playbook there first")
        return conduct(work)
    check(args)
    with RunLock(out, flag="--out") if work.is_first else nullcontext():  # each stage is run once
        asked = {name: value for name, value in dataclasses.asdict(args).items() if name not in ELSEWHERE}
        work.records.settle(asked)
        return conduct(work)


def check(args: Args) -> None:
    """ValueError at the first thing that cannot work, before anything is written."""
    from halfbyte.cli.eval import open_tasks
    from halfbyte.parity.plan import share
    from halfbyte.playbook import check_budget, seconds_of

    seconds_of(args.budget)
    if not (args.steps or args.tokens):
        check_budget(args.budget)
    if args.seeds < 0 or args.limit < 0:
        raise ValueError(f"--seeds and --limit must be 0 or more, got {args.seeds} and {args.limit}")
    candidates = [text for text in args.candidates.split(",") if text.strip()]
    plan = plan_of(dataclasses.replace(args, seeds=args.seeds or 1), args.model, candidates)
    check_validation(plan.base)
    open_tasks(args.tasks)
    if args.host:
        share(plan.jobs(), args.host)
    if args.device:
        from halfbyte.devices import device
        from halfbyte.plan import cluster

        cluster(device(args.device), args.count)


def conduct(work: "Work") -> Result:
    """Run the stages that have no record yet, and write the page."""
    from halfbyte.cli.stages import Stopped, reopen_study, run_stage
    from halfbyte.playbook import STAGES

    stopped = ""
    if not work.args.report and work.is_first:
        reopen_study(work)
    with terminated_as_interrupted():
        try:
            for place, stage in enumerate(STAGES, 1):
                if work.args.report or work.records.get(stage) is not None:
                    continue
                if not work.is_first and stage != "parity":  # of several hosts the first alone runs what is no study
                    raise Stopped("host 0, whose turn it is")
                say(f"== {place} of {len(STAGES)}: {stage}")
                run_stage(stage, work)
        except Stopped as why:
            stopped = str(why)
        except KeyboardInterrupt:
            stopped = "a signal"
    return finish(work, stopped)


def finish(work: "Work", stopped: str) -> Result:
    """Write the page and print its head."""
    from halfbyte.playbook import decide, write_page

    files = write_page(work.records, work.out)
    decision = decide(work.records)
    say("")
    for line in (decision.sentence, *decision.because, decision.speed):
        say(line)
    say(f"page: {files['html']}  ({files['json'].name}, {files['md'].name} beside it)")
    data = {**dataclasses.asdict(decision), "page": str(files["html"]), "seconds": work.records.seconds()}
    if stopped:
        say(f"stopped by {stopped}; the same command goes on")
        return Result({**data, "stopped": stopped}, PREEMPTED)
    return Result(data)
