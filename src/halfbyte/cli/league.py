"""Rank recipes by what they lose against bf16, from one initialisation on one data order.

halfbyte league --recipes nvfp4,mxfp4,fp8 --model demo --seeds 3

As `halfbyte parity`, with as many candidates as there are recipes: the same runs, controls and verdicts, and beside
them the order by gap, with intervals that are corrected for the number of candidates, the places that each may have,
and a picture of gap against cost. Ctrl-C keeps what is done and writes the report; the same command goes on.

Exit code 0: the ranking is there, whatever it says."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from halfbyte.cli.console import CommandResult, print_line
from halfbyte.cli.study_flags import StudyArgs, base_run_config, build_study_plan, checks_of, run_study_to_report


@dataclass(frozen=True, kw_only=True)
class Args(StudyArgs):
    recipes: str = ""
    """RECIPE or RECIPE@POLICY, several with commas; default every preset (`halfbyte recipes`) that the shapes of the
    model allow."""
    model: str = "demo"
    """A named run (demo, llama-60m, ...) or a config file (.json)."""
    policy: str = "all_linear"
    """Which linears, for every recipe that does not say (names, rules or @FILE)."""


def run(args: Args) -> CommandResult:
    from halfbyte.recipes import recipe_names
    from halfbyte.study.arms import BROKEN_RECIPE

    field = [text for text in args.recipes.split(",") if text.strip()]
    if not field and not args.arms:
        names = [name for name in recipe_names() if name not in (args.baseline.partition("@")[0], BROKEN_RECIPE)]
        field = names if args.report else recipes_that_fit(args, names)
    plan = build_study_plan(args, args.model, field)
    return run_study_to_report(args, plan, Path(args.out or f"league/{plan.base.name}"))


def recipes_that_fit(args: Args, names: Sequence[str]) -> list[str]:
    """The recipes that can cut this model's linears into their blocks, one of those that differ by name alone; the
    others are said, with the reason."""
    from halfbyte.recipes import recipe, recipe_diff

    base = base_run_config(args, args.model)
    check, field = checks_of(base), list[str]()
    check(dataclasses.replace(base, recipe="bf16"))  # what is wrong with every one of them is an error
    for name in names:
        same = [other for other in field if not recipe_diff(recipe(other), recipe(name))]
        if same:
            print_line(f"{name} is left out: it is {same[0]} by another name")
            continue
        try:
            check(dataclasses.replace(base, recipe=name))
            field.append(name)
        except ValueError as error:
            print_line(f"{name} is left out: {error}")
    return field
