"""Is a recipe as good as another for this model? Paired runs over seeds, one verdict, a report.

halfbyte parity demo --baseline bf16 --candidates nvfp4,mxfp4 --seeds 3

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

from halfbyte.cli.console import EXIT_NOT_PASSED, EXIT_PREEMPTED, CommandResult
from halfbyte.cli.study_flags import StudyArgs, build_study_plan, run_study_to_report
from halfbyte.io import seconds_of

if TYPE_CHECKING:
    from halfbyte.study.study_plan import StudyPlan


@dataclass(frozen=True, kw_only=True)
class Args(StudyArgs):
    model: Annotated[str, tyro.conf.Positional]
    """A named run (demo, llama-60m, ...), a config file (.json)."""
    candidates: str = ""
    """RECIPE or RECIPE@POLICY, several with commas; default nvfp4."""
    looks: str = ""
    """Numbers of seeds, such as 3,5: it is judged then too, and ends where all is decided. Each look has its part of
    the 5%, so the last interval is a little wider."""
    within: str = ""
    """Begin no further run when one as quick as the quickest so far would not end in this time: 90s, 12m, 2h. What is
    there is shown, exit code 75, and the same command goes on."""


def run(args: Args) -> CommandResult:
    within = seconds_of(args.within, "within") if args.within else math.inf
    found = run_study_to_report(args, *make_study_plan(args), within=within)
    if args.within and not found.data["complete"]:
        return dataclasses.replace(found, code=EXIT_PREEMPTED)
    return found if found.code or found.data["passed"] else dataclasses.replace(found, code=EXIT_NOT_PASSED)


def make_study_plan(args: Args) -> tuple["StudyPlan", Path]:
    """The plan that the flags ask for, and its directory."""
    candidates = [text for text in args.candidates.split(",") if text.strip()]
    plan = build_study_plan(args, args.model, candidates or ([] if args.arms else ["nvfp4"]), looks=parse_looks(args))
    return plan, Path(args.out or f"parity/{plan.base.name}")


def parse_looks(args: Args) -> tuple[int, ...]:
    """Those of --looks, and one after all seeds."""
    texts = [text.strip() for text in args.looks.split(",") if text.strip()]
    if not texts:
        return ()
    if not all(text.isdigit() for text in texts):
        raise ValueError(f"--looks must be numbers of seeds with commas, such as 3,5, got {args.looks!r}")
    return tuple(sorted({*map(int, texts), args.seeds}))
