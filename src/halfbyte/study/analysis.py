"""Analysis of a study: gaps by seed, intervals over seeds, verdicts and cost, read from the run directories.

A report can be made at any time, also of a study that is half done.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from halfbyte import models
from halfbyte.evaluation import loss_curves
from halfbyte.study import control_arms, study_runs
from halfbyte.study.arms import BASELINE, CANDIDATE, TWIN, Arm
from halfbyte.study.equivalence_test import (
    MIN_SEEDS,
    Verdict,
    VerdictKind,
    judge_all_arms,
    moving_block_bootstrap,
    no_interval_reason,
    paired_t_interval,
    student_t_quantile,
)
from halfbyte.study.study_plan import StudyPlan
from halfbyte.study.study_runs import FINISHED_STATES, RUN_DONE, Cells, StudyCell
from halfbyte.train.run_identity import load_identity

CURVE_POINTS = 24  # points of the fitted curve
MAX_PLOT_POINTS = 240  # points of a drawn curve
MAX_LISTED_ARMS = 4  # candidates whose reasons the verdict line has


def analyse_study(plan: StudyPlan, directory: Path) -> dict[str, Any]:
    """The whole report as plain data."""
    cells = study_runs.read_cells(plan, directory)
    arms = [describe_arm(plan, arm, cells) for arm in plan.arms]
    verdicts = judge_arms(plan, cells)
    gaps = {arm.name: control_arms.finished_seeds(results_by_seed(plan, arm, cells)) for arm in plan.arms}
    checks = control_arms.judge_controls(plan, verdicts, gaps)
    final = {name: control_arms.withhold_pass(found, checks) for name, found in verdicts.items()}
    for entry in arms:
        if entry["name"] in final:
            entry["verdict"] = verdict_json(final[entry["name"]])
    names = {arm.name: arm for arm in plan.of_kind(CANDIDATE) if arm.seeds != 0}
    results = {name: results_by_seed(plan, arm, cells) for name, arm in names.items()}
    candidates = [final[name] for name in names]
    needed = {key: cells[key] for key in required_cells(plan, cells, candidates)}
    done = sum(cell.status.state in FINISHED_STATES for cell in needed.values())
    return {
        "verdict": study_verdict_line(candidates),
        "passed": all(final[arm.name].word is VerdictKind.PASS for arm in plan.of_kind(CANDIDATE)),
        "decided": all(v.word is not VerdictKind.CANNOT_TELL for v in candidates),
        "scope": verdict_scope(plan, arms, directory),
        "complete": done == len(needed),
        "runs": {"done": done, "planned": len(needed), "missing": [
            {"arm": c.arm.name, "seed": c.seed, "state": c.status.state, "step": c.status.step}
            for c in needed.values() if c.status.state not in FINISHED_STATES]},
        "next": remaining_work(plan, candidates, complete=done == len(needed)),
        "notes": study_notes(plan, cells),
        "sees": [line for v in candidates if (line := control_arms.detectable_gap(plan, v))],
        "between": control_arms.pairwise_comparison(
            list(names), {name: control_arms.finished_seeds(gaps) for name, gaps in results.items()}, plan.margin.unit),
        "ranking": control_arms.ranking(results, of=len(plan.of_kind(CANDIDATE)), costs=relative_step_times(arms)),
        "controls": {name: verdict_json(v) if isinstance(v, Verdict) else v for name, v in checks.items()},
        "arms": arms,
        "plan": plan.to_json(),
    }  # fmt: skip


def required_cells(plan: StudyPlan, cells: Cells, found: Sequence[Verdict]) -> list[tuple[str, int]]:
    """Returns all runs of the plan, or if all candidates are decided those of the looks so far."""
    ended = {key for key, cell in cells.items() if cell.status.state in FINISHED_STATES}
    over = [look for look in plan.looks if all((arm.name, seed) in ended for arm, seed in plan.jobs(look))]
    early = over and all(v.word is not VerdictKind.CANNOT_TELL for v in found)
    seeds = plan.seeds[: over[-1]] if early else plan.seeds
    return [key for key, cell in cells.items() if key[1] in seeds or cell.status.step]


def study_notes(plan: StudyPlan, cells: Cells) -> list[str]:
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


def results_by_seed(plan: StudyPlan, arm: Arm, cells: Cells) -> dict[int, float]:
    """Returns seed -> gap of the final validation loss, as `GapsByArmSeed`."""
    found = {}
    for seed in plan.seeds_of(arm):
        mine, base = cells[arm.name, seed], cells[plan.baseline.name, seed]
        if mine.final is not None and base.final is not None:
            found[seed] = plan.margin.measure(mine.final, base.final)
        elif mine.status.state in FINISHED_STATES and base.status.state in FINISHED_STATES:
            found[seed] = math.inf if base.status.state == RUN_DONE else math.nan
    return found


def judge_arms(plan: StudyPlan, cells: Cells) -> dict[str, Verdict]:
    """The verdicts of candidates, which share the 5%, and of each control by itself."""
    groups = [plan.of_kind(CANDIDATE), *([arm] for arm in plan.arms if arm.kind not in (BASELINE, CANDIDATE))]
    found: dict[str, Verdict] = {}
    for group in groups:
        results = {arm.name: results_by_seed(plan, arm, cells) for arm in group}
        found |= judge_all_arms(results, plan.margin, seeds=plan.seeds, looks=plan.looks)
    for arm in plan.of_kind(TWIN):
        shifted = control_arms.shifted_twin(results_by_seed(plan, arm, cells), plan.margin)
        near = {control_arms.shifted_twin_name(arm.name): shifted}
        found |= judge_all_arms(near, plan.margin, seeds=plan.seeds, looks=plan.looks)
    return found


def study_verdict_line(found: Sequence[Verdict]) -> str:
    """The one line; of many candidates it names who passed and who did not, and the table has the reasons."""
    if len(found) <= MAX_LISTED_ARMS:
        return "VERDICT: " + "; ".join(verdict.line() for verdict in found)
    by_word = {word: [v.arm for v in found if v.word is word] for word in VerdictKind}
    waiting = [v.interval for v in found if v.word is VerdictKind.CANNOT_TELL and v.interval is not None]
    few = {interval.count for interval in waiting if interval.low is None}
    why = f" ({', '.join(map(no_interval_reason, sorted(few)))})" if few else ""
    return "VERDICT: " + "; ".join(f"{word.value} {', '.join(arms)}" for word, arms in by_word.items() if arms) + why


def verdict_json(found: Verdict) -> dict[str, Any]:
    interval = asdict(found.interval) if found.interval else None
    return {"word": found.word.value, "reason": found.reason, "interval": interval, "p": found.p, "seeds": found.seeds}


def remaining_work(plan: StudyPlan, found: Sequence[Verdict], *, complete: bool) -> list[str]:
    """What the plan has still to come: seeds beyond it would change what 5% means."""
    waiting = [v for v in found if v.word is VerdictKind.CANNOT_TELL]
    if waiting and not complete:
        looks = sorted({v.seeds for v in waiting if v.seeds})
        later = f"; the next look is after {looks[0]} seeds" if looks else ""
        return [f"some runs are not there: the same command goes on{later}"]
    names = ", ".join(v.arm for v in waiting)
    if waiting and len(plan.seeds) < MIN_SEEDS:
        return [f"{names}: the same command with --seeds {MIN_SEEDS}, the fewest that have an interval"]
    return [f"{names}: the plan is at its end, and CANNOT TELL is this study's answer"] if waiting else []


def verdict_scope(plan: StudyPlan, arms: Sequence[Mapping[str, Any]], directory: Path) -> str:
    """What the verdict is about, and what not."""
    size = non_embedding_params(plan.base.model)
    tokens = tokens_per_run(plan, directory)
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


def non_embedding_params(model: models.LlamaConfig) -> int:
    """Parameters without embeddings and head: those that tokens a parameter are counted by, here and in the grid."""
    return models.count_params(model) - _embeddings(model)


def size_text(model: models.LlamaConfig) -> str:
    """The size as a scope has it; with experts, also how much of it a token passes."""
    active = f" ({models.count_active_params(model) - _embeddings(model):,} a token)" if model.experts else ""
    return f"{non_embedding_params(model):,} parameters without embeddings{active}"


def _embeddings(model: models.LlamaConfig) -> int:
    return (1 if model.tied else 2) * model.vocab_size * model.embed


def tokens_per_run(plan: StudyPlan, directory: Path) -> int:
    """Tokens of a whole run, from any that took a step."""
    for arm, seed in plan.jobs():
        folder = study_runs.cell_directory(directory, arm, seed)
        if (folder / "metrics.jsonl").is_file() and study_runs.run_status(folder, plan.base.steps).step:
            curve = loss_curves.read_curve(folder, "")
            return int(curve.tokens[-1] / curve.steps[-1] * plan.base.steps)
    return plan.base.batch * plan.base.seq * plan.base.steps


def describe_arm(plan: StudyPlan, arm: Arm, cells: Cells) -> dict[str, Any]:
    """Everything about one arm."""
    mine = [cells[arm.name, seed] for seed in plan.seeds_of(arm)]
    base = [cells[plan.baseline.name, seed] for seed in plan.seeds_of(arm)]
    gaps = control_arms.finished_seeds(results_by_seed(plan, arm, cells)) if arm.kind != BASELINE else {}
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
        "within_run": within_run_interval(mine, base) if 0 < len(gaps) < 3 else None,
        "by_source": gaps_by_source(plan, mine, base) if arm.kind != BASELINE else {},
        "token_overhead": token_overhead(mine, base) if arm.kind != BASELINE else None,
        "gap_curve": gap_curve(plan, mine, base) if arm.kind != BASELINE else None,
        "curves": [thin_curve(cell) for cell in mine if cell.curve is not None],
        "spikes": {str(cell.seed): spikes(cell.curve) for cell in mine if cell.curve is not None},
        "cost": arm_cost(mine),
        "execution": gemm_execution(mine),
        "radar": [probe for cell in mine for probe in study_runs.read_radar_probes(cell.folder, cell.seed)],
    }


def interval_json(values: Sequence[float]) -> dict[str, Any] | None:
    return asdict(paired_t_interval(values)) if values else None


def within_run_interval(mine: Sequence[StudyCell], base: Sequence[StudyCell]) -> list[dict[str, Any]]:
    """With too few seeds: the gap of each run's last steps with a moving-block bootstrap, labelled as what it is."""
    found = []
    for a, b in zip(mine, base, strict=True):
        if a.curve is None or b.curve is None:
            continue
        _, ours, theirs, _ = loss_curves.align_curves(a.curve, b.curve)
        tail = (ours - theirs)[-loss_curves.default_tail(len(ours)) :]
        bounds = moving_block_bootstrap(tail)
        if bounds is not None:
            label = "moving-block bootstrap within this run's last steps; nothing about another seed"
            found.append({"seed": a.seed, "mean": float(tail.mean()), "low": bounds[0], "high": bounds[1], "is": label})
    return found


def gaps_by_source(plan: StudyPlan, mine: Sequence[StudyCell], base: Sequence[StudyCell]) -> dict[str, Any]:
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


def token_overhead(mine: Sequence[StudyCell], base: Sequence[StudyCell]) -> dict[str, Any] | None:
    """Returns the tokens a candidate needs beyond the baseline's for the same validation loss, in percent (negative:
    fewer), from where the lower curve passes the other's final loss. A lower bound: a decaying learning rate makes
    curves steep at the end.

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


def gap_curve(plan: StudyPlan, mine: Sequence[StudyCell], base: Sequence[StudyCell]) -> dict[str, Any] | None:
    """Returns the gap at every validation and its fit a + b log(tokens per parameter), seed by seed. The band is over
    the seeds' lines, because points of one run are no replicates."""
    size = non_embedding_params(plan.base.model)
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
    x = np.geomspace(max(first for _, first, _ in lines), min(last for _, _, last in lines), CURVE_POINTS)
    y = np.stack([np.polyval(line, np.log(x)) for line, _, _ in lines])
    slopes = paired_t_interval([line[0] for line, _, _ in lines])
    half = None
    if len(lines) > 2:
        half = student_t_quantile(0.95, len(lines) - 1) * y.std(axis=0, ddof=1) / math.sqrt(len(lines))
    mean = y.mean(axis=0)
    return {
        "form": "a + b ln(tokens a parameter), fitted seed by seed to the last two thirds",
        "x": x.tolist(),
        "y": mean.tolist(),
        "low": None if half is None else (mean - half).tolist(),
        "high": None if half is None else (mean + half).tolist(),
        "slope": asdict(slopes),
    }


def thin_curve(cell: StudyCell) -> dict[str, Any]:
    """A curve as it is drawn: smoothed and thinned."""
    assert cell.curve is not None
    curve = cell.curve
    width = max(1, len(curve.rows) // 50)
    places = np.unique(np.linspace(0, len(curve.rows) - 1, min(MAX_PLOT_POINTS, len(curve.rows))).astype(int))
    smoothed = loss_curves.smooth(curve.loss, width)
    tokens, validation = curve.validation()
    return {
        "seed": cell.seed,
        "tokens": curve.tokens[places].tolist(),
        "loss": [None if math.isnan(v) else float(v) for v in smoothed[places]],
        "validation": [[float(t), float(v)] for t, v in zip(tokens, validation, strict=True) if math.isfinite(v)],
    }


def spikes(curve: loss_curves.MetricCurve, *, width: int = 25, factor: float = 8.0) -> int:
    """Steps whose loss stands more than `factor` median deviations above the curve around them."""
    loss = curve.loss[np.isfinite(curve.loss)]
    if len(loss) < 2 * width:
        return 0
    apart = loss - loss_curves.smooth(loss, width)
    spread = loss_curves.median(np.abs(apart - loss_curves.median(apart)))
    high = apart > factor * max(spread, 1e-12)
    return int(np.sum(high[1:] & ~high[:-1]) + high[0])


def arm_cost(cells: Sequence[StudyCell]) -> dict[str, Any] | None:
    """Median speed over the runs of an arm, and each seed's own step time."""
    found = {c.seed: loss_curves.curve_speed(c.curve) for c in cells if c.curve is not None and len(c.curve.rows) > 2}
    if not found:
        return None
    return {
        "step_time_s": loss_curves.median([speed.step_time_s for speed in found.values()]),
        "tokens_per_s_per_device": loss_curves.median([speed.tokens_per_s_per_device for speed in found.values()]),
        "step_time_by_seed": {str(seed): speed.step_time_s for seed, speed in found.items()},
    }


def relative_step_times(arms: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Arm -> its step time over the baseline's, mean of the seeds that both have."""
    base = next((arm["cost"] or {} for arm in arms if arm["kind"] == BASELINE), {}).get("step_time_by_seed", {})
    found = {}
    for arm in arms:
        mine = (arm["cost"] or {}).get("step_time_by_seed", {})
        ratios = [mine[seed] / base[seed] for seed in mine if seed in base]
        if ratios:
            found[arm["name"]] = sum(ratios) / len(ratios)
    return found


def gemm_execution(cells: Sequence[StudyCell]) -> list[str]:
    """native, emulated or plain: how the arm's quantized GEMMs ran."""
    manifest = next((found for cell in cells if (found := study_runs.read_precision_manifest(cell.folder))), None)
    return [] if manifest is None else study_runs.gemm_executions(manifest)


def interval_text(found: Mapping[str, Any] | None, unit: str) -> str:
    """An interval for people."""
    if found is None:
        return ""
    digits = 4 if unit == "nats" else 3
    mean = f"{found['mean']:+.{digits}f}"
    return mean if found["low"] is None else f"{mean} [{found['low']:+.{digits}f}, {found['high']:+.{digits}f}]"
