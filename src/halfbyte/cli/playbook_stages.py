"""The stages of `halfbyte playbook`. Each types a command as a person would and records its --json. They run in one
process: it holds most of the GPU's memory from the first stage on, and another process would find none."""

import importlib
import shlex
import shutil
import time
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from halfbyte.checkpoint import RunLock
from halfbyte.cli import bench, parity
from halfbyte.cli.console import EXIT_PREEMPTED, CommandResult, print_line
from halfbyte.cli.eval import open_tasks
from halfbyte.cli.flag_parsing import to_command_line, train_arguments
from halfbyte.cli.main import parse_flags, to_jsonable
from halfbyte.cli.study_flags import StudyArgs, base_run_config, build_study_plan, check_validation, checks_of, steps_of
from halfbyte.cli.terminal_signals import sigterm_as_interrupt
from halfbyte.devices import device_by_name
from halfbyte.evaluation.loss_curves import curve_speed, read_curve
from halfbyte.io import check_float, check_int, seconds_of
from halfbyte.plan import make_cluster
from halfbyte.study import SETTINGS, STAGES, StageRecords, write_playbook_report
from halfbyte.study.arms import BASELINE, CANDIDATE, standard_arms
from halfbyte.study.equivalence_test import MIN_SEEDS
from halfbyte.study.study_plan import host_share, with_steps
from halfbyte.study.study_runs import RUN_DONE, gemm_executions
from halfbyte.train import ProfileConfig, TrainConfig, open_batch_source, train
from halfbyte.train.preflight import GIB

MIN_BUDGET = 60.0  # seconds
RESERVE = 0.08  # of the budget, for what comes after the study
PRE_STUDY_FRACTION = 0.25  # of the budget, for the stages up to inspect
MIN_STEPS, MAX_SEEDS = 30, 12  # of a study
TRACE_STEPS, TRACED = 20, ProfileConfig("xprof", 14, 16)
REQUIRED_STAGES = (
    "doctor",
    "preflight",
    "parity",
)  # bad input is an error here; in other stages it is why the result is missing
ELSEWHERE = ("out", "host", "report", "budget")  # flags that may change when a playbook goes on
StageOutput = tuple[str, dict[str, Any]]
"""(command, result)."""


class StageSkippedError(ValueError):
    """Why a stage has no result."""


class StageInterruptedError(Exception):
    """What stopped a stage; the same command goes on."""


def flags(**values: Any) -> list[str]:
    """Returns `--name value` for every value but empty ones."""
    return [str(word) for name, value in values.items() if value for word in (f"--{name.replace('_', '-')}", value)]


def call(name: str, *words: object) -> StageOutput:
    """Run `halfbyte NAME WORDS`."""
    module, typed = importlib.import_module(f"halfbyte.cli.{name}"), [str(word) for word in words]
    data = to_jsonable(module.run(parse_flags(name, module, typed)).data)
    if "stopped" in data:
        raise StageInterruptedError(data["stopped"])
    return shlex.join(["halfbyte", name, *typed]), data


class Playbook:
    """The flags, the run that all arms share, and the records. Each stage is a method."""

    def __init__(self, args: Any):
        self.args, self.budget = args, seconds_of(args.budget, "budget")
        self.base = replace(base_run_config(args, args.model), seed=args.first_seed)
        self.out = Path(args.out or f"playbook/{self.base.name}")
        self.records = StageRecords(self.out / "records")

    def check(self) -> None:
        """Raises ValueError at the first thing that cannot work, before anything is written."""
        if self.budget < MIN_BUDGET and not (self.args.steps or self.args.tokens):
            raise ValueError(f"--budget {self.args.budget} ends while arms compile. The least is --budget 1m")
        check_int("--limit", self.args.limit)
        open_tasks(self.args.tasks)
        study = self.study(self.args.seeds or 1)
        check_validation(study.base)
        if host := self.args.host:
            host_share(study.jobs(), host)
        if host.partition("/")[0] not in ("", "0"):
            raise ValueError(f"--host {host}: the other hosts run the command of {self.records.directory}/06-plan.json")
        if self.args.device:
            make_cluster(device_by_name(self.args.device), self.args.count)

    def study(self, seeds: int) -> Any:
        """Returns the plan of the study."""
        return build_study_plan(replace(self.args, seeds=seeds), self.args.model, self.candidates())

    def candidates(self) -> list[str]:
        """Returns those of the flags, and the policy that `inspect` suggests."""
        names = [text.strip() for text in self.args.candidates.split(",") if text.strip()]
        noise, short = self.records.data("inspect"), self.records.data("trace")
        if noise and short and noise["policy"] not in (short["policy"], "*=bf16"):
            names.append(f"{short['recipe']}@{noise['policy']}")
        return list(dict.fromkeys(names))

    def configs(self) -> dict[str, TrainConfig]:
        """Returns arm -> config, of the baseline and the candidates."""
        arms = standard_arms(self.args.baseline, self.candidates(), controls=False)
        return {arm.name: arm.configure(self.base, self.args.first_seed) for arm in arms}

    def train_words(self) -> list[str]:
        """Returns how `halfbyte train` starts the run, on its data, in its batches and on its mesh."""
        args = self.args
        return [*train_arguments(args.model), *flags(data=args.data, batch=args.batch, seq=args.seq, mesh=args.mesh)]

    def parity_words(self, size: dict[str, Any]) -> list[str]:
        """Returns the words of `halfbyte parity` for a study of this size."""
        own = {"candidates": ",".join(self.candidates()), "seeds": size["seeds"], "steps": size["steps"], "tokens": 0,
               "out": str(self.out / "study"), "host": "", "radar_on": "candidates", "report": False}  # fmt: skip
        shared = {field.name: getattr(self.args, field.name) for field in fields(StudyArgs)}
        return to_command_line(parity.Args(model=self.args.model, **(shared | own)))

    def result(self, stage: str) -> dict[str, Any]:
        """Returns the result of an earlier stage. Raises Missing if it has none."""
        if not (data := self.records.data(stage)):
            raise StageSkippedError(f"it needs the result of {stage}, which is missing")
        return data

    def doctor(self) -> StageOutput:
        return call("doctor")

    def preflight(self) -> StageOutput:
        check, rows, memory = checks_of(self.base), {}, None
        for name, config in self.configs().items():
            checked = check(config)
            manifest, memory = checked.manifests[0], checked.device_memory
            rows[name] = {"execution": gemm_executions(manifest.to_json()), "share_4bit": manifest.share_4bit,
                          "memory_gib": checked.memory.total / GIB}  # fmt: skip
        command = shlex.join(["halfbyte", "train", *self.train_words()])
        return command, {"arms": rows, "device_memory_gib": memory / GIB if memory else None}

    def trace(self) -> StageOutput:
        """A short run of the first candidate: a profile of three steps, and a checkpoint for `inspect`."""
        (name, config), folder, began = list(self.configs().items())[1], self.out / "trace", time.perf_counter()
        shutil.rmtree(folder, ignore_errors=True)  # half a trace, of a start that was stopped; see Records.settle
        with open(self.out / "trace.txt", "w", encoding="utf-8") as log:  # `halfbyte train` would take all signals
            result = train(
                with_steps(config, TRACE_STEPS), folder, console=Console(file=log, width=160), profile=TRACED
            )
        if result.stopped:
            raise StageInterruptedError(result.stopped)
        seconds, curve = time.perf_counter() - began, read_curve(folder, "")
        precision = {"recipe": config.recipe, "policy": config.policy}
        words = flags(**precision, steps=TRACE_STEPS, **asdict(TRACED), run_dir=folder)
        return shlex.join(["halfbyte", "train", *self.train_words(), *words]), {
            "arm": name, **precision, "seconds": seconds,
            "stepping_s": float(curve.column("step_time_s").sum()), "step_time_s": curve_speed(curve).step_time_s,
            "breakdown": result.breakdown,
        }  # fmt: skip

    def inspect(self) -> StageOutput:
        needs = self.records.seconds() + 2 * self.result("trace")["seconds"]  # it compiles about twice as much
        if needs > PRE_STUDY_FRACTION * self.budget:
            enough_m = needs / PRE_STUDY_FRACTION / 60
            raise StageSkippedError(f"it has no time within a quarter of the budget, from --budget {enough_m:.0f}m on")
        return call("inspect", self.out / "trace", *flags(batches=1, snr=self.args.snr))

    def bench(self) -> StageOutput:
        base, rows, commands = self.base, [], []
        names = {(config.policy, config.recipe): name for name, config in self.configs().items()}
        for policy in dict.fromkeys(policy for policy, _ in names):
            command, data = call("bench", self.args.model, *flags(
                recipes=",".join(recipe for own, recipe in names if own == policy), policy=policy, batch=base.batch,
                seq=open_batch_source(base).seq, remat=base.remat, unroll=base.unroll, mesh=base.mesh,
                steps=3))  # fmt: skip
            commands.append(command)
            rows += [{"arm": names[policy, row["recipe"]], **row} for row in data["rows"]]
        return "; ".join(commands), {**data, "baseline": rows[0]["arm"], "rows": rows}

    def plan(self) -> StageOutput:
        """The size of the study, shown before it begins. A run costs its steps, its compiling, and what the short run,
        which validates and saves as often, spent on neither."""
        measured, short, args = self.result("bench"), self.result("trace"), self.args
        if any(row["milliseconds"] is None for row in measured["rows"]):
            raise StageSkippedError("its size follows from measured steps, and bench could not run every arm")
        rows = {row["arm"]: row for row in measured["rows"]}
        arms = [rows.get(arm.name, measured["rows"][0]) for arm in self.study(1).arms]
        own = rows[short["arm"]]
        slower = max(1.0, short["step_time_s"] / (1e-3 * own["milliseconds"]))
        overhead = max(0.0, short["seconds"] - short["stepping_s"] - own["compile_s"])
        step_s = slower * 1e-3 * sum(row["milliseconds"] for row in arms)
        again_s = sum(row["compile_s"] + overhead for row in arms)
        most, fixed = steps_of(args, args.model, self.base), bool(args.steps or args.tokens)
        before, hosts = self.records.seconds(), int(args.host.partition("/")[2] or 1)
        left = hosts * ((1 - RESERVE) * self.budget - before)
        seeds = args.seeds or min(MAX_SEEDS, max(MIN_SEEDS, int(left / (again_s + most * step_s))))
        steps = most if fixed else min(most, max(MIN_STEPS, int((left / seeds - again_s) / step_s)))
        seed_s = again_s + steps * step_s
        print_line(f"the study: {len(arms)} arms, {seeds} seeds of {steps} steps, about {seeds * seed_s / 60:.0f} "
            f"minutes, of which {max(0.0, left) / 60:.0f} are left; fewer than 3 seeds have a gap and no verdict"
        )  # fmt: skip
        size = {"seeds": seeds, "steps": steps, "seconds": seeds * seed_s, "before_s": before, "reserve": RESERVE,
                "costs": {"first_s": 0.0, "again_s": again_s, "step_s": step_s},
                "ended_by": None if fixed or left > seed_s / len(arms) else self.budget}  # fmt: skip
        return shlex.join(["halfbyte", "parity", *self.parity_words(size)]), size

    def parity(self) -> StageOutput:
        """The study, to its end, or to that of the budget where its size followed from the budget."""
        size, args = self.result("plan"), self.args
        if self.records.get("plan").get("ended_by") or not size["seeds"]:
            raise StageSkippedError(f"the budget {args.budget} has no time for a study")
        left = (1 - RESERVE) * self.budget - size["before_s"] - self.records.seconds("parity")
        within = "" if args.steps or args.tokens or args.host else f"{max(1.0, left):.0f}s"
        command, data = call("parity", *self.parity_words(size), *flags(within=within, host=args.host))
        if not (data["complete"] or within):
            raise StageInterruptedError("other hosts, which are not done")
        return command, {**data, "ended_by": None if data["complete"] else self.budget}

    def finished(self) -> dict[str, Path]:
        """Returns arm -> run directory of the first seed, for runs that are done."""
        seed, arms = self.args.first_seed, self.result("parity")["arms"]
        done = [arm["name"] for arm in arms if arm["kind"] in (BASELINE, CANDIDATE)
                and arm["states"].get(str(seed), {}).get("state") == RUN_DONE]  # fmt: skip
        return {name: self.out / "study" / "arms" / name / f"seed-{seed}" for name in done}

    def eval(self) -> StageOutput:
        if not self.args.tasks:
            raise StageSkippedError(
                "no task files were named: --tasks FILE ... (docs/evaluate.md); losses by source are above"
            )
        limit = flags(limit=self.args.limit)
        scores = {arm: call("eval", run, *self.args.tasks, *limit) for arm, run in self.finished().items()}
        return "; ".join(command for command, _ in scores.values()), {"arms": {arm: scores[arm][1] for arm in scores}}

    def compare(self) -> StageOutput:
        arms = self.finished()
        command, data = call("compare", *arms.values(), "--out", "")
        return command, {**data, "runs": [{"arm": arm, **run} for arm, run in zip(arms, data["runs"], strict=True)]}

    def cluster(self) -> StageOutput:
        if not self.args.device:
            raise StageSkippedError("no cluster was named: --device gb300 --count 128")
        report, (base, first) = self.out / "study" / "report.json", list(self.configs().values())[:2]
        return call("plan", self.args.model, *flags(
            device=self.args.device, count=self.args.count, recipe=first.recipe, policy=first.policy,
            versus=base.recipe, parity=report if report.is_file() else ""))  # fmt: skip

    def run_stage(self, stage: str) -> None:
        """Run one stage and write its record."""
        began, before, record = time.perf_counter(), self.records.seconds(stage), {}
        try:
            command, data = getattr(self, stage)()
            record = {"ended_by": data.pop("ended_by", None), "command": command, "data": data}
        except ValueError as error:
            if stage in REQUIRED_STAGES and not isinstance(error, StageSkippedError):
                raise
            print_line(f"{stage}: missing, {error}")
            record = {"command": f"halfbyte {stage}", "missing": str(error)}
        finally:
            self.records.put(stage, **record, seconds=before + time.perf_counter() - began)


def conduct(args: Any) -> CommandResult:
    """Run the stages that are not over, or that a larger budget opens, and write the page."""
    check_float("--snr", args.snr, holds=True, wanted="a number of decibels")
    bench.prepare_environment(bench.Args())
    work, stopped = Playbook(args), ""
    if args.report and not work.records.data(SETTINGS):
        raise ValueError(f"{work.out} holds no playbook; run one there first")
    if not args.report:
        work.check()
        with RunLock(work.out, flag="--out"), sigterm_as_interrupt():
            work.records.check_settings({name: value for name, value in asdict(args).items() if name not in ELSEWHERE})
            try:
                for number, stage in enumerate(STAGES, 1):
                    if not work.records.is_over(stage, work.budget):
                        print_line(f"== {number} of {len(STAGES)}: {stage}")
                        work.run_stage(stage)
            except (StageInterruptedError, KeyboardInterrupt) as why:
                stopped = str(why) or "a signal"
    decision, html = write_playbook_report(work.records, work.out)
    for line in ("", decision.sentence, *decision.because, decision.speed, f"page: {html}"):
        print_line(line)
    data = {**asdict(decision), "page": str(html), "seconds": work.records.seconds()}
    if stopped:
        print_line(f"stopped by {stopped}; the same command goes on")
        return CommandResult({**data, "stopped": stopped}, EXIT_PREEMPTED)
    return CommandResult(data)
