"""What `parity` and `league` share: the flags of a comparison, its base run and plan, and its end in a report."""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from halfbyte.cli.console import EXIT_PREEMPTED, CommandResult, console, print_line, rich_table
from halfbyte.io import check_int

if TYPE_CHECKING:
    from halfbyte.study.study_plan import StudyPlan
    from halfbyte.train import TrainConfig

DEFAULT_STEPS = {"demo": 160}  # steps that are enough to tell recipes apart, where the run itself has more


@dataclass(frozen=True, kw_only=True)
class StudyArgs:
    baseline: str = "bf16"
    """RECIPE or RECIPE@POLICY that the others are compared with."""
    arms: str = ""
    """`ablation`: the nvfp4 recipe in full, each ingredient off, each misused, and its neighbours; or a JSON file,
    name -> {field: value}."""
    seeds: int = 3
    """Seeds, at most; three are the fewest that have an interval. More of them later are shown, and not judged."""
    first_seed: int = 0
    """The first of them."""
    steps: int = 0
    """Steps of each run; 0: as the named run, 160 for the demo (five arms of three seeds: about a quarter of an hour on
    two cores)."""
    tokens: int = 0
    """Tokens of each run, instead of steps."""
    margin: str = "0.5%"
    """How large a gap may be: 0.5% of the baseline's loss, or 0.02nats. Fixed before the first step."""
    data: str = ""
    """Prepared directory, `demo` or `synthetic`; default as the named run."""
    batch: int = 0
    """Sequences a step; 0: as the named run."""
    seq: int = 0
    """Tokens a sequence; 0: as the named run."""
    policy: str = ""
    """Which linears, for every arm that does not say (names, rules or @FILE)."""
    mesh: str = ""
    """AXIS=SIZE,... as for train."""
    out: str = ""
    """Directory of plan, runs and report; default COMMAND/NAME."""
    host: str = ""
    """INDEX/HOSTS: run every HOSTS-th run only, for several hosts that share --out."""
    controls: bool = True
    """The twin and the broken recipe; without them nothing passes."""
    radar: int = 0
    """Steps between probes of every quantized GEMM against what its recipe gives; 0: one in the middle of each run; -1:
    none."""
    radar_on: Literal["all", "candidates"] = "all"
    """Which runs are probed: all, or the candidates' in the first seed."""
    report: bool = False
    """Run nothing: write the report of what is there."""


def build_study_plan(args: StudyArgs, model: str, candidates: Sequence[str], **also: Any) -> "StudyPlan":
    """The plan that the flags ask for."""
    from halfbyte.study.arms import ablation_arms, read_arms, standard_arms
    from halfbyte.study.equivalence_test import parse_margin
    from halfbyte.study.study_plan import StudyPlan, seed_range

    check_int("--radar", args.radar, least=-1)
    base = base_run_config(args, model)
    extra = read_arms(Path(args.arms)) if args.arms not in ("", "ablation") else []
    if args.arms == "ablation":  # of a run in all linears, all linears are the recipe in full
        extra = [arm for arm in ablation_arms() if arm.changes.get("policy") != base.policy]
    arms = standard_arms(args.baseline, candidates, controls=args.controls)
    command = "halfbyte " + " ".join(sys.argv[1:]) if len(sys.argv) > 2 else ""
    margin, seeds = parse_margin(args.margin), seed_range(args.seeds, args.first_seed)
    return StudyPlan(base, (arms[0], *extra, *arms[1:]), seeds, margin, command=command, **also)


def base_run_config(args: StudyArgs, model: str) -> "TrainConfig":
    """The run that all arms share."""
    from halfbyte.cli.flag_parsing import config_for_name
    from halfbyte.study.study_plan import with_steps

    base = config_for_name(model)
    given = {n: v for n in ("data", "batch", "seq", "policy", "mesh") if (v := getattr(args, n))}
    base = dataclasses.replace(base, seed=0, **given)
    return with_steps(base, steps_of(args, model, base))


def steps_of(args: StudyArgs, model: str, base: "TrainConfig") -> int:
    """--steps, or as many as --tokens need, or those of the run."""
    if args.steps and args.tokens:
        raise ValueError(f"give --steps ({args.steps}) or --tokens ({args.tokens}), not both")
    if args.steps < 0 or args.tokens < 0:
        raise ValueError(f"--steps and --tokens must be 0 or more, got {args.steps} and {args.tokens}")
    if not args.tokens:
        return args.steps or DEFAULT_STEPS.get(model, base.steps)
    from halfbyte.train import open_batch_source

    return max(1, -(-args.tokens // (base.batch * open_batch_source(base).seq)))


def check_validation(base: "TrainConfig") -> None:
    """ValueError where there is nothing to compare: the outcome of a run is its validation loss."""
    from halfbyte import data
    from halfbyte.train import open_batch_source

    if not base.validation.at_end:
        raise ValueError(
            "validation.at_end is off, and arms are compared by their last validation loss; "
            "leave --validation.no-at-end out"
        )
    dataset = open_batch_source(base).dataset
    if dataset is not None and not data.validation_sources(dataset):
        raise ValueError(
            f"data {base.data}: it has no validation rows, and arms are compared by their validation loss; prepare it "
            "with --val-fraction or --validation FILES"
        )


def checks_of(base: "TrainConfig") -> Callable[["TrainConfig"], Any]:
    """What `halfbyte train` checks before it compiles, on this machine and data: shapes, mesh and memory of a run."""
    import jax

    from halfbyte.devices import lookup
    from halfbyte.train import open_batch_source, run_mesh, run_preflight
    from halfbyte.train.preflight import device_memory_bytes

    here = jax.local_devices()[0]
    return functools.partial(
        run_preflight,
        mesh=run_mesh(base),
        seq=open_batch_source(base).seq,
        device=lookup(here),
        memory=device_memory_bytes(here),
    )


def check_arms(plan: "StudyPlan") -> None:
    """ValueError, naming the arm, where one of them cannot run: before the first is trained, not after hours of it."""
    check = checks_of(plan.base)
    for arm in plan.arms:
        try:
            check(arm.configure(plan.base, plan.seeds[0]))
        except ValueError as error:
            raise ValueError(f"arm {arm.name!r} cannot run: {error}") from None


def run_study_to_report(
    args: StudyArgs, plan: "StudyPlan", directory: Path, *, within: float = math.inf
) -> CommandResult:
    """Settle the plan, run what is not done yet and begins `within` so many seconds, and write the report."""
    from halfbyte.study.study_plan import host_share, load_plan, write_or_check_plan

    if args.host:
        host_share(plan.jobs(), args.host)  # refused before a plan is written that other flags would have to agree with
    settled = load_plan(directory)
    if not args.report:
        check_validation(plan.base)
        if settled is None:
            check_arms(plan)
        settled = write_or_check_plan(directory, plan)
    if settled is None:
        raise ValueError(f"{directory} holds no plan.json; run it without --report first")
    print_line(study_description(settled, directory))
    stopped = None if args.report else run_host_jobs(args, settled, directory, within=within)
    return write_study_report(settled, directory, stopped=stopped)


def run_host_jobs(args: StudyArgs, plan: "StudyPlan", directory: Path, *, within: float) -> str | None:
    """Run this host's jobs; what stopped it before their end."""
    from halfbyte.study.runner import run_cells
    from halfbyte.study.study_plan import host_share

    jobs = host_share(plan.jobs(), args.host) if args.host else plan.jobs()
    try:
        return run_cells(
            plan, directory, jobs, say=print_line, observers=study_observers(args, plan), within=within,
            leave=lambda signal: write_study_report(plan, directory, stopped=signal),
        )  # fmt: skip
    except KeyboardInterrupt:
        return "SIGINT"


def study_observers(args: StudyArgs, plan: "StudyPlan") -> Any:
    """What looks at each run: the radar."""
    if args.radar < 0:
        return None
    from halfbyte.evaluation.radar import Radar

    few = {(arm.name, f"seed-{plan.seeds[0]}") for arm in plan.of_kind("candidate")}

    def observers(config: "TrainConfig", folder: Path) -> list[Radar]:
        probed = args.radar_on == "all" or (folder.parent.name, folder.name) in few
        return [Radar(args.radar or max(1, config.steps // 2), folder)] if probed else []

    return observers


def study_description(plan: "StudyPlan", directory: Path) -> str:
    arms = ", ".join(f"{arm.name} ({arm.kind})" for arm in plan.arms)
    looks = f"looked at after {' and '.join(map(str, plan.looks))} seeds, "
    return (
        f"{directory}/plan.json: {len(plan.arms)} arms x {len(plan.seeds)} seeds of {plan.base.steps} steps of "
        f"{plan.base.name}, "
        f"margin ±{plan.margin}, {looks}fixed {plan.written}\narms: {arms}"
    )


def write_study_report(plan: "StudyPlan", directory: Path, *, stopped: str | None) -> CommandResult:
    """Write the report, print its head."""
    from halfbyte.study.analysis import analyse_study
    from halfbyte.study.study_report import write_report

    data = analyse_study(plan, directory)
    files = write_report(plan, directory, data)
    print_study_table(data)
    print_line(f"report: {files['html']}  ({files['json'].name}, {files['md'].name} beside it)")
    if stopped:
        print_line(
            f"stopped by {stopped} with {data['runs']['done']} of {data['runs']['planned']} runs done; the same "
            f"command goes on"
        )
        return CommandResult({**data, "stopped": stopped}, EXIT_PREEMPTED)
    return CommandResult({**data, "report": str(files["html"])})


def print_study_table(data: Mapping[str, Any]) -> None:
    """The table, the verdict line and the scope line, for a terminal."""
    from halfbyte.study.study_report import arm_summary_cells, rank_heads, rank_rows

    screen, unit, checks = console(), data["arms"][0]["unit"], data["controls"]
    rows = []
    for arm in data["arms"]:
        word, mean, gap, seeds = arm_summary_cells(arm)
        rows.append((arm["name"], mean or "-", gap, seeds, word, ", ".join(arm["execution"])))
    screen.print("")
    screen.print(rich_table(("arm", "loss", f"gap, {unit} [90% over seeds]", "seeds", "verdict", "runs"), rows))
    if data["plan"]["candidates"] > 1 and data["ranking"]:
        screen.print(rich_table(rank_heads(data), rank_rows(data)))
    if checks["noise_floor"] is not None:
        screen.print(f"noise floor (twin of the baseline): {checks['noise_floor']:.4f} {unit}")
    if checks["sensitive"] is False:
        screen.print("the recipe that is broken on purpose did NOT fail: this comparison cannot see a broken recipe")
    if checks["near_seen"] is False:
        screen.print("a twin with a gap of twice the margin did NOT fail: this comparison cannot see such a gap")
    if not data["complete"]:
        screen.print(f"INCOMPLETE: {data['runs']['done']} of {data['runs']['planned']} runs are done", style="bold")
    screen.print("")
    screen.print(data["verdict"], style="bold", soft_wrap=True)
    for line in (data["scope"], *data["notes"], *data["between"], *data["sees"]):
        screen.print(line, soft_wrap=True)
    for line in data["next"]:
        screen.print(f"next: {line}", soft_wrap=True)
