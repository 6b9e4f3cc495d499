"""Analysis of a study: gaps by seed, intervals over seeds, verdicts and cost, read from the run directories.

All numbers come from the runs' files, so that a report can be written at any time, also of an unfinished study.
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

CURVE_POINTS = 24  # of the fitted gap curve
MAX_PLOT_POINTS = 240  # per drawn curve
MAX_LISTED_ARMS = 4  # with more candidates the verdict line lists names without reasons


def analyse_study(plan: StudyPlan, directory: Path) -> dict[str, Any]:
    """Returns the whole report as plain data, in the layout of report.json."""
    cells = study_runs.read_cells(plan, directory)
    arms = [describe_arm(plan, arm, cells) for arm in plan.arms]
    verdicts = judge_arms(plan, cells)
    gaps = {arm.name: control_arms.finished_seeds(results_by_seed(plan, arm, cells)) for arm in plan.arms}
    checks = control_arms.judge_controls(plan, verdicts, gaps)
    final = {name: control_arms.withhold_pass(verdict, checks) for name, verdict in verdicts.items()}
    for entry in arms:
        if entry["name"] in final:
            entry["verdict"] = verdict_json(final[entry["name"]])
    judged = {arm.name: arm for arm in plan.of_kind(CANDIDATE) if arm.seeds != 0}
    results = {name: results_by_seed(plan, arm, cells) for name, arm in judged.items()}
    candidates = [final[name] for name in judged]
    required = {key: cells[key] for key in required_cells(plan, cells, candidates)}
    done = sum(cell.status.state in FINISHED_STATES for cell in required.values())
    return {
        "verdict": study_verdict_line(candidates),
        "passed": all(final[arm.name].word is VerdictKind.PASS for arm in plan.of_kind(CANDIDATE)),
        "decided": all(v.word is not VerdictKind.CANNOT_TELL for v in candidates),
        "scope": verdict_scope(plan, arms, directory),
        "complete": done == len(required),
        "runs": {"done": done, "planned": len(required), "missing": [
            {"arm": c.arm.name, "seed": c.seed, "state": c.status.state, "step": c.status.step}
            for c in required.values() if c.status.state not in FINISHED_STATES]},
        "next": remaining_work(plan, candidates, complete=done == len(required)),
        "notes": study_notes(plan, cells),
        "sees": [line for v in candidates if (line := control_arms.detectable_gap(plan, v))],
        "between": control_arms.pairwise_comparison(
            list(judged), {name: control_arms.finished_seeds(gaps) for name, gaps in results.items()},
            plan.margin.unit),
        "ranking": control_arms.ranking(results, of=len(plan.of_kind(CANDIDATE)), costs=relative_step_times(arms)),
        "controls": {name: verdict_json(v) if isinstance(v, Verdict) else v for name, v in checks.items()},
        "arms": arms,
        "plan": plan.to_json(),
    }  # fmt: skip


def required_cells(plan: StudyPlan, cells: Cells, verdicts: Sequence[Verdict]) -> list[tuple[str, int]]:
    """Returns the keys of all planned runs, or, once all candidates are decided, of the runs up to the latest complete
    look. A run that has taken a step is always included."""
    finished = {key for key, cell in cells.items() if cell.status.state in FINISHED_STATES}
    complete_looks = [look for look in plan.looks if all((arm.name, seed) in finished for arm, seed in plan.jobs(look))]
    is_decided = complete_looks and all(v.word is not VerdictKind.CANNOT_TELL for v in verdicts)
    seeds = plan.seeds[: complete_looks[-1]] if is_decided else plan.seeds
    return [key for key, cell in cells.items() if key[1] in seeds or cell.status.step]


def study_notes(plan: StudyPlan, cells: Cells) -> list[str]:
    """Returns what qualifies the verdict: seeds beyond the plan, an unsealed plan, runs of unknown data or code."""
    notes = []
    num_extra_seeds = len(plan.seeds) - plan.looks[-1]
    if num_extra_seeds > 0:
        notes.append(
            f"EXPLORATORY: {num_extra_seeds} of {len(plan.seeds)} seeds are beyond the plan, which was to look after "
            f"{', '.join(map(str, plan.looks))}; they are in the gaps below, and no verdict counts them"
        )
    if not plan.sealed:
        notes.append("plan.json has no seal (an earlier version wrote it): whether it was edited since is not known")
    runs = [load_identity(cell.folder) for cell in cells.values() if cell.status.step]
    for kind, count in (("data", runs.count(None)), ("code", sum(not (run and run.made_with) for run in runs))):
        if count:
            notes.append(f"{count} of {len(runs)} runs are of an earlier version: whether all had the same {kind} is "
                         "not known")  # fmt: skip
    return notes


def results_by_seed(plan: StudyPlan, arm: Arm, cells: Cells) -> dict[int, float]:
    """Returns seed -> gap of the final validation loss, as `GapsByArmSeed`."""
    gaps = {}
    for seed in plan.seeds_of(arm):
        cell, baseline = cells[arm.name, seed], cells[plan.baseline.name, seed]
        if cell.final is not None and baseline.final is not None:
            gaps[seed] = plan.margin.measure(cell.final, baseline.final)
        elif cell.status.state in FINISHED_STATES and baseline.status.state in FINISHED_STATES:
            gaps[seed] = math.inf if baseline.status.state == RUN_DONE else math.nan
    return gaps


def judge_arms(plan: StudyPlan, cells: Cells) -> dict[str, Verdict]:
    """Returns the verdict of every arm but the baseline. The candidates share the significance level; each control is
    judged separately at the full level."""
    groups = [plan.of_kind(CANDIDATE), *([arm] for arm in plan.arms if arm.kind not in (BASELINE, CANDIDATE))]
    verdicts: dict[str, Verdict] = {}
    for group in groups:
        results = {arm.name: results_by_seed(plan, arm, cells) for arm in group}
        verdicts |= judge_all_arms(results, plan.margin, seeds=plan.seeds, looks=plan.looks)
    for arm in plan.of_kind(TWIN):
        gaps = control_arms.shifted_twin(results_by_seed(plan, arm, cells), plan.margin)
        shifted_gaps = {control_arms.shifted_twin_name(arm.name): gaps}
        verdicts |= judge_all_arms(shifted_gaps, plan.margin, seeds=plan.seeds, looks=plan.looks)
    return verdicts


def study_verdict_line(verdicts: Sequence[Verdict]) -> str:
    """Returns the verdicts in one line, of more than MAX_LISTED_ARMS candidates without their reasons."""
    if len(verdicts) <= MAX_LISTED_ARMS:
        return "VERDICT: " + "; ".join(verdict.line() for verdict in verdicts)
    by_word = {word: [v.arm for v in verdicts if v.word is word] for word in VerdictKind}
    undecided = [v.interval for v in verdicts if v.word is VerdictKind.CANNOT_TELL and v.interval is not None]
    seed_counts = {interval.count for interval in undecided if interval.low is None}
    why = f" ({', '.join(map(no_interval_reason, sorted(seed_counts)))})" if seed_counts else ""
    return "VERDICT: " + "; ".join(f"{word.value} {', '.join(arms)}" for word, arms in by_word.items() if arms) + why


def verdict_json(v: Verdict) -> dict[str, Any]:
    interval = asdict(v.interval) if v.interval else None
    return {"word": v.word.value, "reason": v.reason, "interval": interval, "p": v.p, "seeds": v.seeds}


def remaining_work(plan: StudyPlan, verdicts: Sequence[Verdict], *, complete: bool) -> list[str]:
    """Returns what the plan still requires; seeds beyond its last look would inflate the significance level."""
    undecided = [v for v in verdicts if v.word is VerdictKind.CANNOT_TELL]
    if undecided and not complete:
        looks = sorted({v.seeds for v in undecided if v.seeds})
        next_look = f"; the next look is after {looks[0]} seeds" if looks else ""
        return [f"some runs are not there: the same command goes on{next_look}"]
    names = ", ".join(v.arm for v in undecided)
    if undecided and len(plan.seeds) < MIN_SEEDS:
        return [f"{names}: the same command with --seeds {MIN_SEEDS}, the fewest that have an interval"]
    return [f"{names}: the plan is at its end, and CANNOT TELL is this study's answer"] if undecided else []


def verdict_scope(plan: StudyPlan, arms: Sequence[Mapping[str, Any]], directory: Path) -> str:
    """Returns the sentence that states which model, data, tokens and arithmetic the verdict covers."""
    size = non_embedding_params(plan.base.model)
    tokens = tokens_per_run(plan, directory)
    executions = sorted({word for arm in arms for word in arm["execution"]})
    execution_text = {
        "native": "low precision on units of its own",
        "emulated": "low precision emulated (its exact numbers, multiplied by bf16 units)",
        "plain": "bf16 as it is",
    }
    arithmetic = ", ".join(execution_text[word] for word in executions if word in execution_text) or "nothing yet"
    length = f"{tokens:,} tokens ({tokens / size:.2f} a parameter)" if tokens else f"{plan.base.steps} steps"
    return (
        f"Scope: {plan.base.model.name}, {size_text(plan.base.model)}, {length}, data {plan.base.data}, "
        f"{arithmetic}. It says nothing about other sizes, longer runs (gaps tend to grow with tokens a parameter), "
        "other data, or tasks downstream."
    )


def non_embedding_params(model: models.LlamaConfig) -> int:
    """Returns the number of parameters without embeddings and head, the size that tokens per parameter refer to."""
    return models.count_params(model) - _embeddings(model)


def size_text(model: models.LlamaConfig) -> str:
    """Returns the model size for a scope sentence; with experts also the active parameters per token."""
    active = f" ({models.count_active_params(model) - _embeddings(model):,} a token)" if model.experts else ""
    return f"{non_embedding_params(model):,} parameters without embeddings{active}"


def _embeddings(model: models.LlamaConfig) -> int:
    return (1 if model.tied else 2) * model.vocab_size * model.embed


def tokens_per_run(plan: StudyPlan, directory: Path) -> int:
    """Returns the tokens of a whole run, extrapolated from one that took a step, else batch * seq * steps."""
    for arm, seed in plan.jobs():
        folder = study_runs.cell_directory(directory, arm, seed)
        if (folder / "metrics.jsonl").is_file() and study_runs.run_status(folder, plan.base.steps).step:
            curve = loss_curves.read_curve(folder, "")
            return int(curve.tokens[-1] / curve.steps[-1] * plan.base.steps)
    return plan.base.batch * plan.base.seq * plan.base.steps


def describe_arm(plan: StudyPlan, arm: Arm, all_cells: Cells) -> dict[str, Any]:
    """Returns the report's entry of one arm: gaps, intervals, curves, cost and radar probes."""
    cells = [all_cells[arm.name, seed] for seed in plan.seeds_of(arm)]
    baseline = [all_cells[plan.baseline.name, seed] for seed in plan.seeds_of(arm)]
    gaps = control_arms.finished_seeds(results_by_seed(plan, arm, all_cells)) if arm.kind != BASELINE else {}
    finals = {cell.seed: cell.final for cell in cells if cell.final is not None}
    return {
        "name": arm.name,
        "kind": arm.kind,
        "note": arm.note,
        "changes": dict(arm.changes),
        "unit": plan.margin.unit,
        "states": {str(cell.seed): asdict(cell.status) for cell in cells},
        "final": {str(seed): value for seed, value in finals.items()},
        "gaps": {str(seed): value for seed, value in gaps.items()},
        "interval": interval_json(list(gaps.values())),
        "within_run": within_run_interval(cells, baseline) if 0 < len(gaps) < 3 else None,
        "by_source": gaps_by_source(plan, cells, baseline) if arm.kind != BASELINE else {},
        "token_overhead": token_overhead(cells, baseline) if arm.kind != BASELINE else None,
        "gap_curve": gap_curve(plan, cells, baseline) if arm.kind != BASELINE else None,
        "curves": [thin_curve(cell) for cell in cells if cell.curve is not None],
        "spikes": {str(cell.seed): spikes(cell.curve) for cell in cells if cell.curve is not None},
        "cost": arm_cost(cells),
        "execution": gemm_execution(cells),
        "radar": [probe for cell in cells for probe in study_runs.read_radar_probes(cell.folder, cell.seed)],
    }


def interval_json(values: Sequence[float]) -> dict[str, Any] | None:
    return asdict(paired_t_interval(values)) if values else None


def within_run_interval(cells: Sequence[StudyCell], baseline: Sequence[StudyCell]) -> list[dict[str, Any]]:
    """Returns, for studies with too few seeds, a moving-block bootstrap interval of each run's gap over its last steps.
    The label `is` states that it is an interval within one run."""
    rows = []
    for a, b in zip(cells, baseline, strict=True):
        if a.curve is None or b.curve is None:
            continue
        _, loss, baseline_loss, _ = loss_curves.align_curves(a.curve, b.curve)
        tail = (loss - baseline_loss)[-loss_curves.default_tail(len(loss)) :]
        bounds = moving_block_bootstrap(tail)
        if bounds is not None:
            label = "moving-block bootstrap within this run's last steps; nothing about another seed"
            rows.append({"seed": a.seed, "mean": float(tail.mean()), "low": bounds[0], "high": bounds[1], "is": label})
    return rows


def gaps_by_source(plan: StudyPlan, cells: Sequence[StudyCell], baseline: Sequence[StudyCell]) -> dict[str, Any]:
    """Returns source -> interval over seeds of the gap of its validation loss, in the margin's unit."""
    values: dict[str, list[float]] = {}
    for a, b in zip(cells, baseline, strict=True):
        if a.final is None or b.final is None or a.curve is None or b.curve is None:
            continue
        row, baseline_row = (c.rows[-1] for c in (a.curve, b.curve))
        for name in row:
            if name.startswith("validation_loss/") and name in baseline_row:
                values.setdefault(name.partition("/")[2], []).append(plan.margin.measure(row[name], baseline_row[name]))
    return {name: interval_json(list(filter(math.isfinite, gaps))) for name, gaps in sorted(values.items())}


def token_overhead(cells: Sequence[StudyCell], baseline: Sequence[StudyCell]) -> dict[str, Any] | None:
    """Returns the additional tokens that a candidate needs for the baseline's validation loss, in percent, as an
    interval over seeds. Negative values are fewer tokens.

    The overhead is read where the lower curve passes the final loss of the other one. It is a lower bound, because a
    decaying learning rate makes curves steep at the end. In addition to the interval over `count` seeds, the result has
    `seeds`, the number of all seeds, and `above`, the number of those whose final loss is above the baseline's whole
    curve, which have no overhead. Returns None if no seed has either.
    """
    overheads, num_above = [], 0
    for a, b in zip(cells, baseline, strict=True):
        if a.final is None or a.curve is None or b.curve is None or b.final is None:
            continue
        lower, final = (b.curve, a.final) if a.final >= b.final else (a.curve, b.final)
        tokens, losses = lower.validation()
        if len(losses) < 3:
            continue
        falling = np.minimum.accumulate(losses)  # np.interp needs monotonic losses
        if final > falling[0]:
            num_above += lower is b.curve  # else every loss of the candidate is lower: no number
            continue
        token_ratio = tokens[-1] / float(np.interp(-final, -falling, tokens))
        overheads.append(100 * (token_ratio - 1 if lower is b.curve else 1 / token_ratio - 1))
    if not overheads and not num_above:
        return None
    interval = interval_json(overheads) or {"mean": None, "low": None, "high": None, "sd": None, "count": 0}
    return {**interval, "seeds": len(cells), "above": num_above}


def gap_curve(plan: StudyPlan, cells: Sequence[StudyCell], baseline: Sequence[StudyCell]) -> dict[str, Any] | None:
    """Returns the gap at every validation and its fit a + b ln(tokens per parameter), seed by seed. The band is over
    the lines of the seeds, because points of one run are no replicates."""
    size = non_embedding_params(plan.base.model)
    points, lines = [], []
    for a, b in zip(cells, baseline, strict=True):
        if a.curve is None or b.curve is None:
            continue
        (tokens, losses), (base_tokens, base_losses) = a.curve.validation(), b.curve.validation()
        common, i, j = np.intersect1d(tokens, base_tokens, return_indices=True)
        values = np.array([plan.margin.measure(x, y) for x, y in zip(losses[i], base_losses[j], strict=True)])
        finite = np.isfinite(values)
        x, y = common[finite] / size, values[finite]
        points += [{"seed": a.seed, "x": float(p), "y": float(q)} for p, q in zip(x, y, strict=True)]
        start = len(x) // 3  # the first third is warmup, where the gap means little
        if len(x) - start >= 3:
            lines.append((np.polyfit(np.log(x[start:]), y[start:], 1), float(x[start]), float(x[-1])))
    if not points:
        return None
    return {"points": points, "fit": _band(lines)}


def _band(lines: Sequence[Any]) -> dict[str, Any] | None:
    if not lines:
        return None
    x = np.geomspace(max(start for _, start, _ in lines), min(end for _, _, end in lines), CURVE_POINTS)
    y = np.stack([np.polyval(line, np.log(x)) for line, _, _ in lines])
    slopes = paired_t_interval([line[0] for line, _, _ in lines])
    half_width = None
    if len(lines) > 2:
        half_width = student_t_quantile(0.95, len(lines) - 1) * y.std(axis=0, ddof=1) / math.sqrt(len(lines))
    mean = y.mean(axis=0)
    return {
        "form": "a + b ln(tokens a parameter), fitted seed by seed to the last two thirds",
        "x": x.tolist(),
        "y": mean.tolist(),
        "low": None if half_width is None else (mean - half_width).tolist(),
        "high": None if half_width is None else (mean + half_width).tolist(),
        "slope": asdict(slopes),
    }


def thin_curve(cell: StudyCell) -> dict[str, Any]:
    """Returns the loss curve of a run for drawing, smoothed over 1/50 of its rows."""
    assert cell.curve is not None
    curve = cell.curve
    width = max(1, len(curve.rows) // 50)
    indices = np.unique(np.linspace(0, len(curve.rows) - 1, min(MAX_PLOT_POINTS, len(curve.rows))).astype(int))
    smoothed = loss_curves.smooth(curve.loss, width)
    tokens, validation = curve.validation()
    return {
        "seed": cell.seed,
        "tokens": curve.tokens[indices].tolist(),
        "loss": [None if math.isnan(v) else float(v) for v in smoothed[indices]],
        "validation": [[float(t), float(v)] for t, v in zip(tokens, validation, strict=True) if math.isfinite(v)],
    }


def spikes(curve: loss_curves.MetricCurve, *, width: int = 25, factor: float = 8.0) -> int:
    """Returns the number of times the loss rises more than `factor` median deviations above the smoothed curve."""
    loss = curve.loss[np.isfinite(curve.loss)]
    if len(loss) < 2 * width:
        return 0
    deviations = loss - loss_curves.smooth(loss, width)
    median_deviation = loss_curves.median(np.abs(deviations - loss_curves.median(deviations)))
    is_spike = deviations > factor * max(median_deviation, 1e-12)
    return int(np.sum(is_spike[1:] & ~is_spike[:-1]) + is_spike[0])


def arm_cost(cells: Sequence[StudyCell]) -> dict[str, Any] | None:
    """Returns the median speed over the runs of an arm and the step time of each seed; None without a measured run."""
    speeds = {c.seed: loss_curves.curve_speed(c.curve) for c in cells if c.curve is not None and len(c.curve.rows) > 2}
    if not speeds:
        return None
    return {
        "step_time_s": loss_curves.median([speed.step_time_s for speed in speeds.values()]),
        "tokens_per_s_per_device": loss_curves.median([speed.tokens_per_s_per_device for speed in speeds.values()]),
        "step_time_by_seed": {str(seed): speed.step_time_s for seed, speed in speeds.items()},
    }


def relative_step_times(arms: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns arm -> step time relative to the baseline's, mean over the seeds that both have."""
    base = next((arm["cost"] or {} for arm in arms if arm["kind"] == BASELINE), {}).get("step_time_by_seed", {})
    relative = {}
    for arm in arms:
        by_seed = (arm["cost"] or {}).get("step_time_by_seed", {})
        ratios = [by_seed[seed] / base[seed] for seed in by_seed if seed in base]
        if ratios:
            relative[arm["name"]] = sum(ratios) / len(ratios)
    return relative


def gemm_execution(cells: Sequence[StudyCell]) -> list[str]:
    """Returns how the arm's quantized GEMMs ran: native, emulated or plain. Empty before the first run."""
    manifest = next((m for cell in cells if (m := study_runs.read_precision_manifest(cell.folder))), None)
    return [] if manifest is None else study_runs.gemm_executions(manifest)


def interval_text(ci: Mapping[str, Any] | None, unit: str) -> str:
    """Returns mean and bounds as text, an empty string for None."""
    if ci is None:
        return ""
    digits = 4 if unit == "nats" else 3
    mean = f"{ci['mean']:+.{digits}f}"
    return mean if ci["low"] is None else f"{mean} [{ci['low']:+.{digits}f}, {ci['high']:+.{digits}f}]"
