"""From run directories to what a report says: gaps by seed, intervals over seeds, verdicts, and what they cost.

Everything here is read from what the runs left behind, so a report can be made at any time, also of half a parity.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from halfbyte import models
from halfbyte.evaluation.curves import Curve, default_last, differences, median, read_curve, smooth, speed_of
from halfbyte.train.identity import load_identity

from .arms import BASELINE, CANDIDATE, TWIN, Arm
from .between import between, finite, ranking
from .cells import DONE, OVER, Cell, Cells, executions, manifest_of, read_cells, run_directory, status_of
from .controls import controls, displaced, displaced_name, seen, withheld
from .plan import Plan
from .radar_view import radar_of
from .statistics import FEWEST_SEEDS, moving_block_bootstrap, over_seeds, t_quantile
from .verdict import Verdict, Word, judge_study, no_interval

GRID = 24  # points of the fitted curve
DRAWN = 240  # points of a drawn curve
MOST_SPELLED = 4  # candidates whose reasons the verdict line has


def analyse(plan: Plan, directory: Path) -> dict[str, Any]:
    """The whole report as plain data."""
    cells = read_cells(plan, directory)
    arms = [describe_arm(plan, arm, cells) for arm in plan.arms]
    verdicts = judge_arms(plan, cells)
    checks = controls(plan, verdicts, {arm.name: finite(results_of(plan, arm, cells)) for arm in plan.arms})
    final = {name: withheld(found, checks) for name, found in verdicts.items()}
    for entry in arms:
        if entry["name"] in final:
            entry["verdict"] = verdict_json(final[entry["name"]])
    names = {arm.name: arm for arm in plan.of_kind(CANDIDATE) if arm.seeds != 0}
    results = {name: results_of(plan, arm, cells) for name, arm in names.items()}
    candidates = [final[name] for name in names]
    needed = {key: cells[key] for key in needed_cells(plan, cells, candidates)}
    done = sum(cell.status.state in OVER for cell in needed.values())
    return {
        "verdict": verdict_line(candidates),
        "passed": all(final[arm.name].word is Word.PASS for arm in plan.of_kind(CANDIDATE)),
        "decided": all(v.word is not Word.CANNOT_TELL for v in candidates),
        "scope": scope(plan, arms, directory),
        "complete": done == len(needed),
        "runs": {"done": done, "planned": len(needed), "missing": [
            {"arm": c.arm.name, "seed": c.seed, "state": c.status.state, "step": c.status.step}
            for c in needed.values() if c.status.state not in OVER]},
        "next": next_steps(plan, candidates, complete=done == len(needed)),
        "notes": notes(plan, cells),
        "sees": [line for v in candidates if (line := seen(plan, v))],
        "between": between(list(names), {name: finite(found) for name, found in results.items()}, plan.margin.unit),
        "ranking": ranking(results, of=len(plan.of_kind(CANDIDATE)), costs=costs(arms)),
        "controls": {name: verdict_json(v) if isinstance(v, Verdict) else v for name, v in checks.items()},
        "arms": arms,
        "plan": plan.to_json(),
    }  # fmt: skip


def needed_cells(plan: Plan, cells: Cells, found: Sequence[Verdict]) -> list[tuple[str, int]]:
    """Every run of the plan; where all candidates have their word, those before the look that gave the last one."""
    over = [look for look in plan.looks if all(cells[a.name, s].status.state in OVER for a, s in plan.jobs(look))]
    early = over and all(v.word is not Word.CANNOT_TELL for v in found)
    seeds = plan.seeds[: over[-1]] if early else plan.seeds
    return [key for key, cell in cells.items() if key[1] in seeds or cell.status.step]


def notes(plan: Plan, cells: Cells) -> list[str]:
    """What a reader must know of how the runs came about."""
    found = []
    extra = len(plan.seeds) - plan.looks[-1]
    if extra > 0:
        found.append(
            f"EXPLORATORY: {extra} of {len(plan.seeds)} seeds are beyond the plan, which was to look after "
            f"{', '.join(map(str, plan.looks))}; they are in the gaps below, and no verdict counts them"
        )
    if not plan.sealed:
        found.append("plan.json has no seal (an earlier version wrote it): whether it was edited since is not known")
    known = [load_identity(cell.folder) for cell in cells.values() if cell.status.step]
    for what, count in (("data", known.count(None)), ("code", sum(not (run and run.made_with) for run in known))):
        if count:
            found.append(f"{count} of {len(known)} runs are of an earlier version: whether all had the same {what} is "
                         "not known")  # fmt: skip
    return found


def results_of(plan: Plan, arm: Arm, cells: Cells) -> dict[int, float]:
    """As `verdict.Results`: seed -> gap of the final validation loss where both arms are done, and the seeds in which
    one of the two diverged."""
    found = {}
    for seed in plan.seeds_of(arm):
        mine, base = cells[arm.name, seed], cells[plan.baseline.name, seed]
        if mine.final is not None and base.final is not None:
            found[seed] = plan.margin.measure(mine.final, base.final)
        elif mine.status.state in OVER and base.status.state in OVER:
            found[seed] = math.inf if base.status.state == DONE else math.nan
    return found


def judge_arms(plan: Plan, cells: Cells) -> dict[str, Verdict]:
    """The verdicts of candidates, which share the 5%, and of each control by itself."""
    groups = [plan.of_kind(CANDIDATE), *([arm] for arm in plan.arms if arm.kind not in (BASELINE, CANDIDATE))]
    found: dict[str, Verdict] = {}
    for group in groups:
        results = {arm.name: results_of(plan, arm, cells) for arm in group}
        found |= judge_study(results, plan.margin, seeds=plan.seeds, looks=plan.looks)
    for arm in plan.of_kind(TWIN):
        near = {displaced_name(arm.name): displaced(results_of(plan, arm, cells), plan.margin)}
        found |= judge_study(near, plan.margin, seeds=plan.seeds, looks=plan.looks)
    return found


def verdict_line(found: Sequence[Verdict]) -> str:
    """The one line; of many candidates it names who passed and who did not, and the table has the reasons."""
    if len(found) <= MOST_SPELLED:
        return "VERDICT: " + "; ".join(verdict.line() for verdict in found)
    by_word = {word: [v.arm for v in found if v.word is word] for word in Word}
    waiting = [v.interval for v in found if v.word is Word.CANNOT_TELL and v.interval is not None]
    few = {interval.count for interval in waiting if interval.low is None}
    why = f" ({', '.join(map(no_interval, sorted(few)))})" if few else ""
    return "VERDICT: " + "; ".join(f"{word.value} {', '.join(arms)}" for word, arms in by_word.items() if arms) + why


def verdict_json(found: Verdict) -> dict[str, Any]:
    interval = asdict(found.interval) if found.interval else None
    return {"word": found.word.value, "reason": found.reason, "interval": interval, "p": found.p, "seeds": found.seeds}


def next_steps(plan: Plan, found: Sequence[Verdict], *, complete: bool) -> list[str]:
    """What the plan has still to come: seeds beyond it would change what 5% means."""
    waiting = [v for v in found if v.word is Word.CANNOT_TELL]
    if waiting and not complete:
        looks = sorted({v.seeds for v in waiting if v.seeds})
        later = f"; the next look is after {looks[0]} seeds" if looks else ""
        return [f"some runs are not there: the same command goes on{later}"]
    names = ", ".join(v.arm for v in waiting)
    if waiting and len(plan.seeds) < FEWEST_SEEDS:
        return [f"{names}: the same command with --seeds {FEWEST_SEEDS}, the fewest that have an interval"]
    return [f"{names}: the plan is at its end, and CANNOT TELL is this study's answer"] if waiting else []


def scope(plan: Plan, arms: Sequence[Mapping[str, Any]], directory: Path) -> str:
    """What the verdict is about, and what not."""
    size = body_size(plan.base.model)
    tokens = total_tokens(plan, directory)
    runs = sorted({word for arm in arms for word in arm["execution"]})
    how = {
        "native": "low precision on units of its own",
        "emulated": "low precision emulated (its exact numbers, multiplied by bf16 units)",
        "plain": "bf16 as it is",
    }
    ran = ", ".join(how[word] for word in runs if word in how) or "nothing yet"
    spent = f"{tokens:,} tokens ({tokens / size:.2f} a parameter)" if tokens else f"{plan.base.steps} steps"
    return (
        f"Scope: {plan.base.model.name}, {size_text(plan.base.model)}, {spent}, data {plan.base.data}, "
        f"{ran}. It says nothing about other sizes, longer runs (gaps tend to grow with tokens a parameter), other "
        "data, or tasks downstream."
    )


def body_size(model: models.LlamaConfig) -> int:
    """Parameters without embeddings and head: those that tokens a parameter are counted by, here and in the grid."""
    return models.count_params(model) - _embeddings(model)


def size_text(model: models.LlamaConfig) -> str:
    """The size as a scope has it; with experts, also how much of it a token passes."""
    active = f" ({models.count_active(model) - _embeddings(model):,} a token)" if model.experts else ""
    return f"{body_size(model):,} parameters without embeddings{active}"


def _embeddings(model: models.LlamaConfig) -> int:
    return (1 if model.tied else 2) * model.vocab_size * model.embed


def total_tokens(plan: Plan, directory: Path) -> int:
    """Tokens of a whole run, from any that took a step."""
    for arm, seed in plan.jobs():
        folder = run_directory(directory, arm, seed)
        if (folder / "metrics.jsonl").is_file() and status_of(folder, plan.base.steps).step:
            curve = read_curve(folder, "")
            return int(curve.tokens[-1] / curve.steps[-1] * plan.base.steps)
    return plan.base.batch * plan.base.seq * plan.base.steps


# One arm


def describe_arm(plan: Plan, arm: Arm, cells: Cells) -> dict[str, Any]:
    """Everything about one arm."""
    mine = [cells[arm.name, seed] for seed in plan.seeds_of(arm)]
    base = [cells[plan.baseline.name, seed] for seed in plan.seeds_of(arm)]
    gaps = finite(results_of(plan, arm, cells)) if arm.kind != BASELINE else {}
    finals = {cell.seed: cell.final for cell in mine if cell.final is not None}
    return {
        "name": arm.name,
        "kind": arm.kind,
        "note": arm.note,
        "changes": dict(arm.changes),
        "unit": plan.margin.unit,
        "states": {str(cell.seed): asdict(cell.status) for cell in mine},
        "final": {str(seed): value for seed, value in finals.items()},
        "gaps": {str(seed): value for seed, value in gaps.items()},
        "interval": interval_json(list(gaps.values())),
        "within_run": within_run(mine, base) if 0 < len(gaps) < 3 else None,
        "by_source": by_source(plan, mine, base) if arm.kind != BASELINE else {},
        "token_overhead": token_overhead(mine, base) if arm.kind != BASELINE else None,
        "gap_curve": gap_curve(plan, mine, base) if arm.kind != BASELINE else None,
        "curves": [drawn(cell) for cell in mine if cell.curve is not None],
        "spikes": {str(cell.seed): spikes(cell.curve) for cell in mine if cell.curve is not None},
        "cost": cost(mine),
        "execution": execution(mine),
        "radar": [probe for cell in mine for probe in radar_of(cell.folder, cell.seed)],
    }


def interval_json(values: Sequence[float]) -> dict[str, Any] | None:
    return asdict(over_seeds(values)) if values else None


def within_run(mine: Sequence[Cell], base: Sequence[Cell]) -> list[dict[str, Any]]:
    """With too few seeds: the gap of each run's last steps with a moving-block bootstrap, labelled as what it is."""
    found = []
    for a, b in zip(mine, base, strict=True):
        if a.curve is None or b.curve is None:
            continue
        apart = differences(a.curve, b.curve)
        tail = apart[-default_last(len(apart)) :]
        bounds = moving_block_bootstrap(tail)
        if bounds is not None:
            label = "moving-block bootstrap within this run's last steps; nothing about another seed"
            found.append({"seed": a.seed, "mean": float(tail.mean()), "low": bounds[0], "high": bounds[1], "is": label})
    return found


def by_source(plan: Plan, mine: Sequence[Cell], base: Sequence[Cell]) -> dict[str, Any]:
    """Source -> gap of its validation loss over seeds, in the margin's unit."""
    values: dict[str, list[float]] = {}
    for a, b in zip(mine, base, strict=True):
        if a.final is None or b.final is None or a.curve is None or b.curve is None:
            continue
        left, right = (c.rows[-1] for c in (a.curve, b.curve))
        for name in left:
            if name.startswith("validation_loss/") and name in right:
                values.setdefault(name.partition("/")[2], []).append(plan.margin.measure(left[name], right[name]))
    return {name: interval_json(list(filter(math.isfinite, found))) for name, found in sorted(values.items())}


def token_overhead(mine: Sequence[Cell], base: Sequence[Cell]) -> dict[str, Any] | None:
    """How many more tokens than the baseline the candidate needs for the same validation loss, in percent: from where
    the curve of the one that ends lower passes the other's final loss; negative where that is the candidate's. Under a
    decaying learning rate curves fall steeply at the end, so this is a lower bound of what a longer run would show.

    Beside the interval: `seeds`, all of them, of which it has `count`; and `above`, those that end above the baseline's
    whole curve, which have no overhead to give. None if no seed has either.
    """
    found, above = [], 0
    for a, b in zip(mine, base, strict=True):
        if a.final is None or a.curve is None or b.curve is None or b.final is None:
            continue
        ahead, final = (b.curve, a.final) if a.final >= b.final else (a.curve, b.final)
        tokens, losses = ahead.validation()
        if len(losses) < 3:
            continue
        falling = np.minimum.accumulate(losses)
        if final > falling[0]:
            above += ahead is b.curve  # the other way round the candidate is better by more than can be said
            continue
        saved = tokens[-1] / float(np.interp(-final, -falling, tokens))
        found.append(100 * (saved - 1 if ahead is b.curve else 1 / saved - 1))
    if not found and not above:
        return None
    interval = interval_json(found) or {"mean": None, "low": None, "high": None, "sd": None, "count": 0}
    return {**interval, "seeds": len(mine), "above": above}


def gap_curve(plan: Plan, mine: Sequence[Cell], base: Sequence[Cell]) -> dict[str, Any] | None:
    """The gap at every validation against tokens a parameter, and a + b log(tokens a parameter) fitted seed by seed:
    the band is Student's over the seeds' lines, because points of one run are no replicates."""
    size = body_size(plan.base.model)
    points, lines = [], []
    for a, b in zip(mine, base, strict=True):
        if a.curve is None or b.curve is None:
            continue
        (ta, la), (tb, lb) = a.curve.validation(), b.curve.validation()
        common, left, right = np.intersect1d(ta, tb, return_indices=True)
        values = np.array([plan.margin.measure(x, y) for x, y in zip(la[left], lb[right], strict=True)])
        good = np.isfinite(values)
        x, y = common[good] / size, values[good]
        points += [{"seed": a.seed, "x": float(p), "y": float(q)} for p, q in zip(x, y, strict=True)]
        half = len(x) // 3  # the first third is warm-up, where the gap means little
        if len(x) - half >= 3:
            lines.append((np.polyfit(np.log(x[half:]), y[half:], 1), float(x[half]), float(x[-1])))
    if not points:
        return None
    return {"points": points, "fit": _band(lines)}


def _band(lines: Sequence[Any]) -> dict[str, Any] | None:
    if not lines:
        return None
    x = np.geomspace(max(first for _, first, _ in lines), min(last for _, _, last in lines), GRID)
    y = np.stack([np.polyval(line, np.log(x)) for line, _, _ in lines])
    slopes = over_seeds([line[0] for line, _, _ in lines])
    half = None
    if len(lines) > 2:
        half = t_quantile(0.95, len(lines) - 1) * y.std(axis=0, ddof=1) / math.sqrt(len(lines))
    mean = y.mean(axis=0)
    return {
        "form": "a + b ln(tokens a parameter), fitted seed by seed to the last two thirds",
        "x": x.tolist(),
        "y": mean.tolist(),
        "low": None if half is None else (mean - half).tolist(),
        "high": None if half is None else (mean + half).tolist(),
        "slope": asdict(slopes),
    }


def drawn(cell: Cell) -> dict[str, Any]:
    """A curve as it is drawn: smoothed and thinned."""
    assert cell.curve is not None
    curve = cell.curve
    width = max(1, len(curve.rows) // 50)
    places = np.unique(np.linspace(0, len(curve.rows) - 1, min(DRAWN, len(curve.rows))).astype(int))
    smoothed = smooth(curve.loss, width)
    tokens, validation = curve.validation()
    return {
        "seed": cell.seed,
        "tokens": curve.tokens[places].tolist(),
        "loss": [None if math.isnan(v) else float(v) for v in smoothed[places]],
        "validation": [[float(t), float(v)] for t, v in zip(tokens, validation, strict=True) if math.isfinite(v)],
    }


def spikes(curve: Curve, *, width: int = 25, factor: float = 8.0) -> int:
    """Steps whose loss stands more than `factor` median deviations above the curve around them."""
    loss = curve.loss[np.isfinite(curve.loss)]
    if len(loss) < 2 * width:
        return 0
    apart = loss - smooth(loss, width)
    spread = median(np.abs(apart - median(apart)))
    high = apart > factor * max(spread, 1e-12)
    return int(np.sum(high[1:] & ~high[:-1]) + high[0])


def cost(cells: Sequence[Cell]) -> dict[str, Any] | None:
    """Median speed over the runs of an arm, and each seed's own step time."""
    found = {c.seed: speed_of(c.curve) for c in cells if c.curve is not None and len(c.curve.rows) > 2}
    if not found:
        return None
    return {
        "step_time_s": median([speed.step_time_s for speed in found.values()]),
        "tokens_per_s_per_device": median([speed.tokens_per_s_per_device for speed in found.values()]),
        "step_time_by_seed": {str(seed): speed.step_time_s for seed, speed in found.items()},
    }


def costs(arms: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Arm -> its step time over the baseline's, mean of the seeds that both have."""
    base = next((arm["cost"] or {} for arm in arms if arm["kind"] == BASELINE), {}).get("step_time_by_seed", {})
    found = {}
    for arm in arms:
        mine = (arm["cost"] or {}).get("step_time_by_seed", {})
        ratios = [mine[seed] / base[seed] for seed in mine if seed in base]
        if ratios:
            found[arm["name"]] = sum(ratios) / len(ratios)
    return found


def execution(cells: Sequence[Cell]) -> list[str]:
    """native, emulated or plain: how the arm's quantized GEMMs ran."""
    manifest = next((found for cell in cells if (found := manifest_of(cell.folder))), None)
    if manifest is None:
        return []
    return executions(manifest)


def interval_text(found: Mapping[str, Any] | None, unit: str) -> str:
    """An interval for people."""
    if found is None:
        return ""
    digits = 4 if unit == "nats" else 3
    mean = f"{found['mean']:+.{digits}f}"
    return mean if found["low"] is None else f"{mean} [{found['low']:+.{digits}f}, {found['high']:+.{digits}f}]"
