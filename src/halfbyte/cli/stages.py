"""The stages of `halfbyte playbook`. Each calls a command of ours as a person would type it, and its record is what
that command gives with --json; where a stage has nothing to say, the record says why."""

import dataclasses
import shlex
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from halfbyte import models
from halfbyte.cli import bench as bench_command
from halfbyte.cli import compare as compare_command
from halfbyte.cli import doctor as doctor_command
from halfbyte.cli import eval as eval_command
from halfbyte.cli import inspect as inspect_command
from halfbyte.cli import parity as parity_command
from halfbyte.cli import plan as plan_command
from halfbyte.cli.base_config import words_for
from halfbyte.cli.flags import words_of
from halfbyte.cli.screen import say
from halfbyte.cli.study import Study, steps_of
from halfbyte.devices import lookup
from halfbyte.diagnosis.telemetry import FILE, Telemetry
from halfbyte.evaluation.curves import read_curve, speed_of
from halfbyte.metrics import read_rows
from halfbyte.parity.arms import Arm, standard_arms
from halfbyte.parity.arms import ablation as ingredients
from halfbyte.parity.cells import DONE, run_directory, status_of
from halfbyte.parity.margin import parse_margin
from halfbyte.parity.plan import of_steps
from halfbyte.playbook import FEWEST_STEPS, Records, could_tell, seconds_of, size_of
from halfbyte.playbook.budget import RESERVE, costs_of
from halfbyte.profiling import ProfileConfig
from halfbyte.train import TrainConfig, check, open_source, run_mesh, train
from halfbyte.train.preflight import GIB, memory_of

TRACE_STEPS, TRACED = 20, (14, 16)
BEFORE = 0.25  # of the budget, that stages before bench may take
WATCHED = 1200.0  # seconds of budget from which the short run has telemetry, too; `inspect` has the same numbers


class Missing(ValueError):
    """A stage that has nothing to say, and why."""


class Stopped(Exception):
    """A stage that was stopped, or waits for others; the same command goes on."""


@dataclass(frozen=True)
class Work:
    """What every stage is given: the flags of the command, the run that all arms share, where it is, the records."""

    args: Any
    base: TrainConfig
    out: Path
    records: Records

    @property
    def is_first(self) -> bool:
        """Of several hosts the first, or the only one."""
        return self.args.host.partition("/")[0] in ("", "0")

    @property
    def policy_arm(self) -> str:
        """The candidate that `inspect` suggests, as typed; empty if there is none."""
        found, short = self.records.data("inspect"), self.records.data("trace")
        if found is None or short is None or found["policy"] in (short["policy"], "*=bf16"):
            return ""
        return f"{short['recipe']}@{found['policy']}"

    def candidates(self) -> list[str]:
        typed = [text.strip() for text in self.args.candidates.split(",") if text.strip()]
        return typed + [text for text in [self.policy_arm] if text and text not in typed]

    def arms(self) -> list[Arm]:
        """The baseline and the candidates."""
        return standard_arms(self.args.baseline, self.candidates(), controls=False)

    def config(self, arm: Arm) -> TrainConfig:
        return arm.configure(self.base, self.args.first_seed)

    def shared(self) -> dict[str, Any]:
        """The flags of a comparison that are this command's too."""
        return {field.name: getattr(self.args, field.name) for field in dataclasses.fields(Study)}

    def folder(self, arm: Arm) -> Path:
        return run_directory(self.out / "study", arm, self.args.first_seed)


def typed(name: str, args: Any, **settings: Any) -> str:
    return shlex.join(["halfbyte", name, *words_of(args, **settings)])


Found = tuple[str, dict[str, Any]]
"""(the command, what it gave)."""


def doctor(work: Work) -> Found:
    return "halfbyte doctor", dict(doctor_command.run(doctor_command.Args()).data)


def preflight(work: Work) -> Found:
    """What `halfbyte train` checks before it compiles, for every arm."""
    here, source, mesh = jax.local_devices()[0], open_source(work.base), run_mesh(work.base)
    device, memory, rows = lookup(here), memory_of(here), {}
    for arm in work.arms():
        found = check(work.config(arm), mesh, seq=source.seq, device=device, memory=memory)
        manifest = found.manifests[0]
        ways = {gemm.execution for site in manifest.sites for gemm in site.gemms.values()} - {"plain"}
        rows[arm.name] = {
            "execution": sorted(ways) or ["plain"], "share_4bit": manifest.share_4bit,
            "memory_gib": found.memory.total / GIB, "remarks": list(found.remarks),
        }  # fmt: skip
    return f"halfbyte train {run_words(work.args)}", {
        "device": device.name, "devices": len(jax.devices()), "parameters": models.count_params(work.base.model),
        "data": source.describe(), "seq": source.seq, "batch": work.base.batch, "arms": rows,
        "device_memory_gib": memory / GIB if memory else None,
    }  # fmt: skip


def run_words(args: Any) -> str:
    """How `halfbyte train` is told which run, on which data, in which batches and on which mesh."""
    words = [*words_for(args.model)]
    for name in ("data", "batch", "seq", "mesh"):
        if given := getattr(args, name):
            words += [f"--{name}", str(given)]
    return shlex.join(words)


def trace(work: Work) -> Found:
    """A short run of the first candidate: a trace of some steps, telemetry, and a checkpoint to inspect."""
    arm, folder = work.arms()[1], work.out / "trace"
    config = of_steps(work.config(arm), TRACE_STEPS)
    unseen = bool(config.model.experts) and run_mesh(config).size > 1  # telemetry looks at experts on one device
    every = TRACED[1] if seconds_of(work.args.budget) >= WATCHED and not unseen else 0
    command = (
        f"halfbyte train {run_words(work.args)} --recipe {config.recipe} --policy {shlex.quote(config.policy)} "
        f"--steps {TRACE_STEPS} --telemetry {every} --profile xprof --profile-start {TRACED[0]} "
        f"--profile-stop {TRACED[1]} --run-dir {shlex.quote(str(folder))}"
    )
    shutil.rmtree(folder, ignore_errors=True)  # of a start that was stopped: half a trace is none
    watching, began = Telemetry(every, folder), time.perf_counter()
    with open(work.out / "trace.txt", "w", encoding="utf-8") as log:
        result = train(
            config, folder, console=Console(file=log, width=160), profile=ProfileConfig("xprof", *TRACED),
            observers=[watching] if every else (),
        )  # fmt: skip
    if result.stopped:
        raise Stopped(result.stopped)
    curve = read_curve(folder, "")
    rows = read_rows(folder / FILE) if (folder / FILE).is_file() else []
    return command, {
        "arm": arm.name, "recipe": config.recipe, "policy": config.policy, "steps": TRACE_STEPS,
        "seconds": time.perf_counter() - began, "stepping_s": float(curve.column("step_time_s").sum()),
        "step_time_s": speed_of(curve).step_time_s, "watching_s": watching.seconds, "breakdown": result.breakdown,
        "telemetry": rows[-1:],
    }  # fmt: skip


def inspect(work: Work) -> Found:
    if work.records.data("trace") is None:
        raise Missing("it looks at the short run, which is not there")
    spent, whole = work.records.seconds(), seconds_of(work.args.budget)
    about = 2 * (work.records.get("trace") or {})["seconds"]  # it compiles about twice as much
    if spent + about > BEFORE * whole:
        least = (spent + about) / BEFORE / 60
        raise Missing(
            f"about {about:.0f} s of {work.args.budget} are better spent on the study; from --budget {least:.0f}m on"
        )
    args = inspect_command.Args(str(work.out / "trace"), batches=1, snr=work.args.snr)
    return typed("inspect", args), dict(inspect_command.run(args).data)


def bench(work: Work) -> Found:
    """Every arm, those of one policy in one call."""
    base, arms = work.base, {arm.name: work.config(arm) for arm in work.arms()}
    rows, commands, data = [], [], {}
    for policy in dict.fromkeys(config.policy for config in arms.values()):
        named = {config.recipe: name for name, config in arms.items() if config.policy == policy}
        args = bench_command.Args(
            work.args.model, recipes=",".join(named), policy=policy, batch=base.batch, seq=open_source(base).seq,
            remat=base.remat, unroll=base.unroll, mesh=base.mesh, steps=3, repeats=3,
        )  # fmt: skip
        found = bench_command.run(args)
        if "stopped" in found.data:
            raise Stopped(str(found.data["stopped"]))
        commands.append(typed("bench", args))
        rows += [{"arm": named[row["recipe"]], **row} for row in found.data["rows"]]
        data = {name: found.data[name] for name in ("device", "jax", "jaxlib", "python", "commit")}
    return "; ".join(commands), {"baseline": next(iter(arms)), "rows": rows, **data}


def plan(work: Work) -> Found:
    """The size of the study, said before it begins."""
    measurements, short = work.records.data("bench"), work.records.data("trace")
    if measurements is None or short is None or any(row["milliseconds"] is None for row in measurements["rows"]):
        raise Missing("its size follows from the steps that were measured, and bench or the short run has none")
    measured = {arm.name: arm.name for arm in work.arms()}
    like = {arm.name: measured.get(arm.name, work.arms()[0].name)
            for arm in standard_arms(work.args.baseline, work.candidates(), controls=work.args.controls)}  # fmt: skip
    costs = costs_of({"bench": measurements, "trace": short}, like, radar=work.args.radar >= 0)
    before = work.records.seconds()
    left = hosts_of(work) * time_for_the_study(work, before)
    steps = steps_of(work.args, work.args.model, work.base)
    size = size_of(left, costs, steps=steps, seeds=work.args.seeds, fixed=bool(work.args.steps or work.args.tokens))
    tells = could_tell(size, parse_margin(work.args.margin), len(work.arms()) - 1)
    say(f"the study: {len(like)} arms, about {size.seconds / hosts_of(work) / 60:.0f} minutes; {tells}")
    return study_command(work, size.seeds, size.steps)[0], {
        "seeds": size.seeds, "steps": size.steps, "arms": list(like), "seconds": size.seconds, "needs_s": size.needs,
        "costs": costs, "before_s": before, "left_s": left, "reserve": RESERVE,
        "policy_arm": work.policy_arm, "tells": tells,
        "fewest_steps": min(steps, FEWEST_STEPS),
    }  # fmt: skip


def time_for_the_study(work: Work, before: float) -> float:
    """Seconds of the budget behind `before`, what the stages before the study took."""
    return (1 - RESERVE) * seconds_of(work.args.budget) - before


def hosts_of(work: Work) -> int:
    return int(work.args.host.partition("/")[2] or 1)


def study_command(work: Work, seeds: int, steps: int, **changes: Any) -> tuple[str, Any]:
    """`halfbyte parity` of this size."""
    asked = {"candidates": ",".join(work.candidates()), "seeds": seeds, "steps": steps, "tokens": 0}
    asked |= {"out": str(work.out / "study"), "radar_on": "candidates", "report": False}
    args = parity_command.Args(model=work.args.model, **(work.shared() | asked | changes))
    return typed("parity", args, without=("host",)), args


def parity(work: Work) -> Found:
    size = sized(work)
    if not size["seeds"]:
        short = f"three seeds of {size['fewest_steps']} steps need about {size['needs_s'] / 60:.0f} minutes"
        raise Missing(f"the budget {work.args.budget} leaves no room for a study: {short}")
    fixed = work.args.steps or work.args.tokens or work.args.host  # as large as asked, or with others
    whole = time_for_the_study(work, size["before_s"])
    within = "" if fixed else f"{max(1.0, whole - work.records.spent('parity')):.0f}s"
    command, data = conducted(*study_command(work, size["seeds"], size["steps"], within=within))
    return command, {**data, "within_s": None if fixed else whole}


def conducted(command: str, args: Any) -> Found:
    """A parity, run to its end, or to that of its time."""
    found = parity_command.run(args)
    if "stopped" in found.data or not (found.data["complete"] or args.within):
        raise Stopped(str(found.data.get("stopped", "other hosts, which are not done")))
    return command, dict(found.data)


def reopen_study(work: Work) -> None:
    """Where the budget is a larger one than then, a study that the clock has cut short goes on, and one that had no
    room is planned anew."""
    study, size = work.records.data("parity"), work.records.data("plan")
    if size is None:
        return
    had = study and not study["complete"] and study.get("within_s")
    if had and time_for_the_study(work, size["before_s"]) > had + 1:
        work.records.reopen("parity")
    if not size["seeds"] and hosts_of(work) * time_for_the_study(work, size["before_s"]) > size["left_s"] + 1:
        work.records.reopen("plan")


def sized(work: Work) -> dict[str, Any]:
    size = work.records.data("plan")
    if size is None:
        raise Missing("it has no size: " + (work.records.get("plan") or {}).get("missing", "it is not planned"))
    return size


def eval(work: Work) -> Found:
    """Scores of the baseline and the candidates in the first seed."""
    if not work.args.tasks:
        raise Missing("no task files were named: --tasks FILE ... (see docs/evaluate.md); losses by source are above")
    found, commands = {}, []
    for arm in finished(work):
        args = eval_command.Args(str(work.folder(arm)), tuple(work.args.tasks), limit=work.args.limit)
        found[arm.name] = eval_command.run(args).data
        commands.append(typed("eval", args))
    return "; ".join(commands), {"arms": found}


def finished(work: Work) -> list[Arm]:
    """The arms whose run of the first seed is over and has losses; Missing if there are none."""
    size = sized(work)
    done = [arm for arm in work.arms() if status_of(work.folder(arm), size["steps"]).state == DONE]
    if not size["seeds"] or len(done) < 2:
        raise Missing("there are no two finished runs to look at")
    return done


def compare(work: Work) -> Found:
    arms = finished(work)
    args = compare_command.Args(tuple(str(work.folder(arm)) for arm in arms), out="")
    found = dict(compare_command.run(args).data)
    named = [{"arm": arm.name, **row} for arm, row in zip(arms, found["runs"], strict=True)]
    return typed("compare", args), {**found, "runs": named}


def ablation(work: Work) -> Found:
    """Each ingredient left out, as many seeds and steps as the study, if the budget has room for it."""
    size = sized(work)
    if not size["seeds"]:
        raise Missing("there was no room for the study itself")
    many = len(ingredients()) + 3
    needs = size["seconds"] * many / len(size["arms"])
    left = seconds_of(work.args.budget) - work.records.seconds()
    command, args = study_command(
        work, size["seeds"], size["steps"], candidates="", arms="ablation", out=str(work.out / "ablation"), radar=-1
    )
    if needs > left:
        time_left = f"{max(0.0, left) / 60:.0f} minutes of the budget are left"
        raise Missing(f"{many} arms need about {needs / 60:.0f} minutes, and {time_left}: {command}")
    return conducted(command, args)


def cluster(work: Work) -> Found:
    if not work.args.device:
        raise Missing("no cluster was named: --device gb300 --count 128")
    study, first = work.out / "study" / "report.json", work.arms()
    candidate = work.config(first[1])
    args = plan_command.Args(
        work.args.model, device=work.args.device, count=work.args.count, recipe=candidate.recipe,
        policy=candidate.policy, versus=work.config(first[0]).recipe, parity=study if study.is_file() else None,
    )  # fmt: skip
    return typed("plan", args), dict(plan_command.run(args).data)


RUN: dict[str, Callable[[Work], Found]] = {
    stage.__name__: stage
    for stage in (doctor, preflight, trace, inspect, bench, plan, parity, eval, compare, ablation, cluster)
}
MUST = ("doctor", "preflight", "parity")
"""Stages in which bad input is an error; in the others it is the reason why they are missing."""


def run_stage(name: str, work: Work) -> None:
    """Run one stage and write its record."""
    began, before = time.perf_counter(), work.records.spent(name)
    try:
        command, data = RUN[name](work)
        found: dict[str, Any] = {"command": command, "data": data}
    except (Stopped, KeyboardInterrupt):
        if work.is_first:
            work.records.spend(name, before + time.perf_counter() - began)
        raise
    except ValueError as error:
        if name in MUST and not isinstance(error, Missing):
            raise
        say(f"{name}: missing, {error}")
        found = {"command": f"halfbyte {name}", "missing": str(error)}
    work.records.put(name, {**found, "seconds": before + time.perf_counter() - began})
