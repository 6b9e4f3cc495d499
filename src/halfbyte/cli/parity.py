"""Is a recipe as good as another for this model? Paired runs over seeds, one verdict, a report.

halfbyte parity demo --baseline bf16 --candidates nvfp4,mxfp4 --seeds 3

halfbyte parity RUN --branch

In each seed all arms share initialisation, batches and schedule; only precision differs. Margin, seeds and looks are
written into plan.json before the first step. PASS: the interval over seeds lies inside the margin; a candidate at the
margin passes in 5% of studies at most, however many looks and candidates. FAIL: wholly beyond it. CANNOT TELL: all
else. A twin of the baseline shows the noise, a recipe that is broken on purpose must be seen to fail, or nothing
passes. Ctrl-C keeps what is done and writes the report; the same command goes on.

Exit code 0: every candidate passed; 3: not."""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from halfbyte.cli.result import DONE, NOT_PASSED, PREEMPTED, Result
from halfbyte.cli.screen import say

if TYPE_CHECKING:
    from halfbyte.parity.plan import Plan
    from halfbyte.train import TrainConfig


SHORT = {"demo": 160}  # steps that are enough to tell recipes apart, where the run itself has more


@dataclass(frozen=True)
class Args:
    model: Annotated[str, tyro.conf.Positional]
    """A named run (demo, llama-60m, ...), a config file (.json), or with --branch a run directory."""
    baseline: str = "bf16"
    """RECIPE or RECIPE@POLICY that the others are compared with."""
    candidates: str = ""
    """RECIPE or RECIPE@POLICY, several with commas; default nvfp4."""
    arms: str = ""
    """`ablation`: the nvfp4 recipe in full, each ingredient off, each misused, and its neighbours; or a JSON file,
    name -> {field: value}."""
    seeds: int = 3
    """Seeds, at most; three are the fewest that have an interval. More of them later are shown, and not judged."""
    looks: str = ""
    """Numbers of seeds, such as 3,5: it is judged then too, and ends where all is decided. Each look has its part of
    the 5%, so the last interval is a little wider."""
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
    """Directory of plan, runs and report; default parity/NAME."""
    host: str = ""
    """INDEX/HOSTS: run every HOSTS-th run only, for several hosts that share --out."""
    controls: bool = True
    """The twin and the broken recipe; without them nothing passes."""
    radar: int = 0
    """Steps between probes of every quantized GEMM against what its recipe gives; 0: one in the middle of each run; -1:
    none."""
    report: bool = False
    """Run nothing: write the report of what is there."""
    branch: bool = False
    """From a checkpoint of RUN: short branches in the baseline's recipe and in the run's own, on the same data."""
    branch_steps: int = 0
    """Steps of a branch; 0: a twentieth of the run."""


def run(args: Args) -> Result:
    if args.branch:
        return run_branch_test(args)
    plan, directory = make_plan(args)
    from halfbyte.parity.analysis import decided
    from halfbyte.parity.plan import settle, share
    from halfbyte.parity.runner import run_jobs

    if args.report:
        return finish(load(directory), directory, stopped=None)
    check_validation(plan.base)
    plan = settle(directory, plan)
    say(describe(plan, directory))
    jobs = share(plan.jobs(), args.host) if args.host else plan.jobs()
    try:
        stopped = run_jobs(
            plan, directory, jobs, say=say, observers=watchers(args.radar), decided=lambda: decided(plan, directory),
            leave=lambda signal: finish(plan, directory, stopped=signal),
        )  # fmt: skip
    except KeyboardInterrupt:
        stopped = "SIGINT"
    return finish(plan, directory, stopped=stopped)


def run_branch_test(args: Args) -> Result:
    """Branches of one run, and their gaps."""
    import json

    from halfbyte.inputs import replace_file
    from halfbyte.parity.branching import plan_branches, run_branches, verdict_line
    from halfbyte.parity.margin import parse_margin

    margin = parse_margin(args.margin)
    plan = plan_branches(Path(args.model), baseline=args.baseline, steps=args.branch_steps)
    out = Path(args.out or f"{args.model.rstrip('/')}-branches")
    out.mkdir(parents=True, exist_ok=True)
    steps = ", ".join(map(str, plan.at))
    say(f"{out}: branches of {plan.run} at step {steps}, {plan.steps} steps each, margin ±{margin}")
    found, stopped = run_branches(plan, out, say=say)
    line = verdict_line(plan, found, margin)
    data = {"verdict": line, "baseline": plan.baseline, "recipe": plan.config.recipe, "margin": str(margin),
            "branch_steps": plan.steps, "branches": found}  # fmt: skip
    replace_file(out / "branches.json", json.dumps(data, indent=1) + "\n")
    for row in found:
        bounds = row["within_run"]
        within = f", within this branch {bounds[0]:+.4f} to {bounds[1]:+.4f}" if bounds else ""
        if row["training_gap"] is not None:
            say(f"step {row['step']}: training loss {row['training_gap']:+.4f} nats over the branch{within}")
    say(line)
    say("Scope: branches of one run, on its data, size and tokens; a gap that needs longer to show is not seen here.")
    if stopped:
        say(f"stopped by {stopped} with {len(found)} of {len(plan.at)} branches done; the same command goes on")
        return Result({**data, "stopped": stopped}, PREEMPTED)
    return Result(data, NOT_PASSED)


def load(directory: Path) -> "Plan":
    from halfbyte.parity.plan import load_plan

    plan = load_plan(directory)
    if plan is None:
        raise ValueError(f"{directory} holds no plan.json; run a parity there first")
    return plan


def make_plan(args: Args) -> tuple["Plan", Path]:
    """The plan that the flags ask for, and its directory."""
    from halfbyte.parity.arms import ablation, read_arms, standard_arms
    from halfbyte.parity.margin import parse_margin
    from halfbyte.parity.plan import Plan, first_seeds

    base = base_run(args)
    candidates = [text for text in args.candidates.split(",") if text.strip()]
    extra = ablation() if args.arms == "ablation" else read_arms(Path(args.arms)) if args.arms else []
    arms = standard_arms(args.baseline, candidates if candidates or extra else ["nvfp4"])
    if not args.controls:
        arms = [arm for arm in arms if arm.kind in ("baseline", "candidate")]
    places = [arms[0], *extra, *arms[1:]]
    command = "halfbyte " + " ".join(["parity", *sys.argv[2:]]) if len(sys.argv) > 2 else ""
    margin, seeds = parse_margin(args.margin), first_seeds(args.seeds, args.first_seed)
    plan = Plan(base, tuple(places), seeds, margin, command=command, looks=looks_of(args))
    return plan, Path(args.out or f"parity/{base.name}")


def looks_of(args: Args) -> tuple[int, ...]:
    """Those of --looks, and one after all seeds."""
    texts = [text.strip() for text in args.looks.split(",") if text.strip()]
    if not all(text.isdigit() for text in texts):
        raise ValueError(f"--looks must be numbers of seeds with commas, such as 3,5, got {args.looks!r}")
    return tuple(sorted({*map(int, texts), args.seeds}))


def base_run(args: Args) -> "TrainConfig":
    """The run that all arms share."""
    from halfbyte.runs import run_config
    from halfbyte.train import LogConfig, TrainConfig, jsonconfig

    file = args.model.endswith(".json")
    base = (
        jsonconfig.from_dict(TrainConfig, jsonconfig.read_values(Path(args.model))) if file else run_config(args.model)
    )
    given = {n: v for n in ("data", "batch", "seq", "policy", "mesh") if (v := getattr(args, n))}
    base = dataclasses.replace(base, seed=0, **given)
    steps = steps_of(args, base)
    looks = max(1, steps // 6)
    return dataclasses.replace(
        base,
        steps=steps,
        log=LogConfig(every=max(1, steps // 40), tensorboard=False),
        validation=dataclasses.replace(base.validation, every=looks),
        checkpoint=dataclasses.replace(base.checkpoint, every=max(1, steps // 4), keep_last=1),
    )


def check_validation(base: "TrainConfig") -> None:
    """ValueError where there is nothing to compare: the outcome of a run is its validation loss."""
    from halfbyte import data
    from halfbyte.train import open_source

    dataset = open_source(base).dataset
    if dataset is not None and not data.validation_sources(dataset):
        raise ValueError(
            f"data {base.data}: it has no validation rows, and arms are compared by their validation loss; prepare it "
            "with --val-fraction or --validation FILES"
        )


def steps_of(args: Args, base: "TrainConfig") -> int:
    """--steps, or as many as --tokens need, or those of the run."""
    if args.steps and args.tokens:
        raise ValueError(f"give --steps ({args.steps}) or --tokens ({args.tokens}), not both")
    if args.steps < 0 or args.tokens < 0:
        raise ValueError(f"--steps and --tokens must be 0 or more, got {args.steps} and {args.tokens}")
    if not args.tokens:
        return args.steps or SHORT.get(args.model, base.steps)
    from halfbyte.train import open_source

    return max(1, -(-args.tokens // (base.batch * open_source(base).seq)))


def watchers(every: int) -> Any:
    """What looks at each run: the radar."""
    if every < 0:
        return None
    from halfbyte.diagnosis.radar import Radar

    return lambda config, folder: [Radar(every or max(1, config.steps // 2), folder)]


def describe(plan: "Plan", directory: Path) -> str:
    arms = ", ".join(f"{arm.name} ({arm.kind})" for arm in plan.arms)
    looks = f"looked at after {' and '.join(map(str, plan.looks))} seeds, "
    return (
        f"{directory}/plan.json: {len(plan.arms)} arms x {len(plan.seeds)} seeds of {plan.base.steps} steps of "
        f"{plan.base.name}, "
        f"margin ±{plan.margin}, {looks}fixed {plan.written}\narms: {arms}"
    )


def finish(plan: "Plan", directory: Path, *, stopped: str | None) -> Result:
    """Write the report, print its head."""
    from halfbyte.parity.analysis import analyse
    from halfbyte.parity.report import print_report, write_report

    data = analyse(plan, directory)
    files = write_report(plan, directory, data)
    print_report(data)
    say(f"report: {files['html']}  ({files['json'].name}, {files['md'].name} beside it)")
    if stopped:
        say(
            f"stopped by {stopped} with {data['runs']['done']} of {data['runs']['planned']} runs done; the same "
            f"command goes on"
        )
        return Result({**data, "stopped": stopped}, PREEMPTED)
    return Result({**data, "report": str(files["html"])}, DONE if data["passed"] else NOT_PASSED)
