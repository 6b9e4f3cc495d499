"""Should this model switch to 4 bits? One command, one page: a decision with its error rate.

halfbyte playbook demo --budget 12m

halfbyte playbook RUN --data DIR --budget 2h --tasks TASKS

Runs doctor, pre-flight, a short run with a trace, inspect (whose policy joins as a candidate), bench of every arm, a
parity study against the FP8 baseline of the size that the budget allows, and task scores. Each stage leaves a record,
and the page is written from the records. Stopped at any point, the same command goes on.

Exit code 0: the page is written, whatever it says; 75: stopped."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from halfbyte.cli.console import CommandResult
from halfbyte.cli.study_flags import StudyArgs


@dataclass(frozen=True, kw_only=True)
class Args(StudyArgs):
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
    """Signal-to-noise ratio that `inspect` requires of every GEMM, in decibels."""
    tasks: tuple[str, ...] = ()
    """Task files to score the arms on, as for eval."""
    limit: int = 200
    """Examples per task; 0: all."""
    device: str = ""
    """A cluster to plan for: h100, h200, b200, gb200, b300 or gb300."""
    count: int = 128
    """Number of its devices."""


def run(args: Args) -> CommandResult:
    from halfbyte.cli.playbook_stages import conduct

    return conduct(args)
