"""A screening round: every arm for a few steps of the first seed, and a rule of who goes on that the plan has fixed.

An arm goes on if its gap there is at most that of a reference arm, plus so many times what a twin of the baseline
differs by. The reference is an arm by name, or the arm at a place of that round's own order. Baseline and controls
always go on. The round has runs of its own in screen/, a study beside the study: no verdict counts them, and arms that
were dropped still count among the candidates that share the 5%.
"""

import math
from dataclasses import replace
from pathlib import Path

from .analysis import results_of
from .arms import CANDIDATE, TWIN
from .cells import OVER, read_cells
from .plan import Plan, load_plan, of_steps

FOLDER = "screen"


def round_of(plan: Plan) -> Plan:
    """The screening round as a study of its own."""
    assert plan.screen is not None
    return replace(plan, base=of_steps(plan.base, plan.screen.steps), seeds=plan.seeds[:1], looks=(), screen=None)


def is_over(directory: Path) -> bool:
    """Whether every run of the screening round is done, by whatever host."""
    first = load_plan(directory / FOLDER)
    return first is not None and all(c.status.state in OVER for c in read_cells(first, directory / FOLDER).values())


def screened(plan: Plan, directory: Path) -> Plan:
    """The plan with the arms that were dropped in no seed; as it is while the round is not over."""
    if plan.screen is None or not is_over(directory):
        return plan
    first = round_of(plan)
    cells = read_cells(first, directory / FOLDER)
    gaps = {arm.name: results_of(first, arm, cells).get(first.seeds[0], math.nan) for arm in first.arms}
    fields = [gaps[arm.name] for arm in plan.of_kind(CANDIDATE)]
    noise = max((abs(gaps[arm.name]) for arm in plan.of_kind(TWIN)), default=0.0)
    keep, most = plan.screen.keep, plan.screen.steps
    reference = sorted(fields)[min(int(keep), len(fields)) - 1] if keep.isdigit() else gaps[keep]
    limit = reference + plan.screen.noise * noise
    note = "dropped by the screening round: {} after {} steps, and {} goes on"
    arms = (
        replace(arm, seeds=0, note=note.format(plan.margin.show(gaps[arm.name]), most, plan.margin.show(limit)))
        if arm.kind == CANDIDATE and gaps[arm.name] > limit
        else arm
        for arm in plan.arms
    )
    return replace(plan, arms=tuple(arms))
