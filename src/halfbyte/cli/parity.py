"""Is a recipe as good as another for this model? Paired runs over seeds, one verdict, a report.

halfbyte parity demo --baseline bf16 --candidates nvfp4,mxfp4 --seeds 3

halfbyte parity RUN --branch

In each seed all arms share initialisation, batches and schedule; only precision differs. Margin, seeds and looks are
written into plan.json before the first step. PASS: the interval over seeds lies inside the margin; a candidate at the
margin passes in 5% of studies at most, however many looks and candidates. FAIL: wholly beyond it. CANNOT TELL: all
else. A twin of the baseline shows the noise, a recipe that is broken on purpose must be seen to fail, or nothing
passes. Ctrl-C keeps what is done and writes the report; the same command goes on.

Exit code 0: every candidate passed; 3: not; 75: stopped or over its time."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from halfbyte.cli.result import NOT_PASSED, PREEMPTED, Result
from halfbyte.cli.screen import say
from halfbyte.cli.study import Study, conduct, plan_of
from halfbyte.inputs import write_json

if TYPE_CHECKING:
    from halfbyte.parity.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Args(Study):
    model: Annotated[str, tyro.conf.Positional]
    """A named run (demo, llama-60m, ...), a config file (.json), or with --branch a run directory."""
    candidates: str = ""
    """RECIPE or RECIPE@POLICY, several with commas; default nvfp4."""
    looks: str = ""
    """Numbers of seeds, such as 3,5: it is judged then too, and ends where all is decided. Each look has its part of
    the 5%, so the last interval is a little wider."""
    within: str = ""
    """Begin no further run when one as quick as the quickest so far would not end in this time: 90s, 12m, 2h. What is
    there is shown, exit code 75, and the same command goes on."""
    branch: bool = False
    """From a checkpoint of RUN: short branches in the baseline's recipe and in the run's own, on the same data."""
    branch_steps: int = 0
    """Steps of a branch; 0: a twentieth of the run."""


def run(args: Args) -> Result:
    from halfbyte.playbook import seconds_of

    within = seconds_of(args.within, "within") if args.within else math.inf
    if args.branch and args.within:
        raise ValueError("--within is for a whole study; branches are as long as --branch-steps says")
    if args.branch:
        return run_branch_test(args)
    found = conduct(args, *make_plan(args), within=within)
    if args.within and not found.data["complete"]:
        return dataclasses.replace(found, code=PREEMPTED)
    return found if found.code or found.data["passed"] else dataclasses.replace(found, code=NOT_PASSED)


def make_plan(args: Args) -> tuple["Plan", Path]:
    """The plan that the flags ask for, and its directory."""
    candidates = [text for text in args.candidates.split(",") if text.strip()]
    plan = plan_of(args, args.model, candidates or ([] if args.arms else ["nvfp4"]), looks=looks_of(args))
    return plan, Path(args.out or f"parity/{plan.base.name}")


def looks_of(args: Args) -> tuple[int, ...]:
    """Those of --looks, and one after all seeds."""
    texts = [text.strip() for text in args.looks.split(",") if text.strip()]
    if not texts:
        return ()
    if not all(text.isdigit() for text in texts):
        raise ValueError(f"--looks must be numbers of seeds with commas, such as 3,5, got {args.looks!r}")
    return tuple(sorted({*map(int, texts), args.seeds}))


def run_branch_test(args: Args) -> Result:
    """Branches of one run, and their gaps."""
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
    write_json(out / "branches.json", data)
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
