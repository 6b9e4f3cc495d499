"""Report of a study: one HTML page, the same content as JSON, and a summary in Markdown."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halfbyte import io
from halfbyte.io import Axes, ConfidenceBand, ForestRow, LineSeries, atomic_write, escape_control_chars
from halfbyte.study.analysis import MAX_LISTED_ARMS, interval_text
from halfbyte.study.arms import BASELINE, CANDIDATE, CONTROL
from halfbyte.study.equivalence_test import FAIL_SHARE, alpha_spending
from halfbyte.study.study_plan import StudyPlan
from halfbyte.study.study_runs import first_started_run, precision_table, radar_section, run_environment, study_devices
from halfbyte.train import replace_nonfinite

Data = Mapping[str, Any]
REPORT_FILES = {"html": "report.html", "json": "report.json", "md": "report.md"}
# Half width of the gap axis in margins, larger if a candidate's gap is. A control beyond it is drawn at the edge, so
# that the others remain distinguishable.
AXIS_CLIP = 3.0


def write_report(plan: StudyPlan, directory: Path, data: Data) -> dict[str, Path]:
    """Write report.html, report.json and report.md in `directory`. Returns their paths by kind."""
    facts = {"plan": str(directory / "plan.json"), "written": plan.written}
    report = {
        **data,
        "facts": facts | run_environment(plan.base, first_started_run(plan, directory), study_devices(plan, directory)),
    }
    files = {kind: directory / name for kind, name in REPORT_FILES.items()}
    atomic_write(files["html"], io.html_page(study_title(plan), sections(plan, directory, report)))
    atomic_write(files["json"], json.dumps(replace_nonfinite(report), indent=1, allow_nan=False) + "\n")
    atomic_write(files["md"], escape_control_chars(study_markdown(plan, report)))
    return files


def study_title(plan: StudyPlan) -> str:
    names = [arm.name for arm in plan.of_kind(CANDIDATE)]
    candidates = ", ".join(names) if len(names) <= MAX_LISTED_ARMS else f"{len(names)} recipes"
    return f"Parity: {candidates} against {plan.baseline.name}, {plan.base.model.name}"


def sections(plan: StudyPlan, directory: Path, data: Data) -> list[str]:
    """Returns the sections of the page in order."""
    facts = io.html_table(("", ""), data["facts"].items())
    return [
        *report_head(data),
        *study_sections(plan, data),
        io.section("Precision", precision_table(plan, directory)),
        io.section("How it was judged", *method_section(plan)),
        io.section("Provenance", facts, io.code_block(plan.command) if plan.command else ""),
    ]


def study_sections(plan: StudyPlan, data: Data) -> list[str]:
    """Returns the sections that the study report and the playbook page share."""
    return [
        io.section("Gap over seeds", gap_figure(plan, data), arm_table(data)),
        io.section("Ranking", *ranking_section(plan, data)) if data["ranking"] else "",
        io.figure_row("Curves", curve_figures(plan, data)),
        io.section("Controls", *control_summary(plan, data)),
        io.section("By source of text", study_source_table(data)),
        io.section("Tokens", token_table(data), *token_notes(data)),
        radar_section(data["arms"]),
        io.section("Cost", study_cost_table(data), io.paragraph(COST_NOTE, soft=True)),
    ]


def report_head(data: Data) -> list[str]:
    """Returns the missing runs, the verdict with its scope, notes, and the next steps."""
    lines = []
    runs = data["runs"]
    if not data["complete"]:
        missing = ", ".join(f"{m['arm']} seed {m['seed']} ({m['state']})" for m in runs["missing"][:12])
        more = f" and {len(runs['missing']) - 12} more" if len(runs["missing"]) > 12 else ""
        lines.append(
            io.notice_box(f"INCOMPLETE: {runs['done']} of {runs['planned']} runs are done; missing: {missing}{more}")
        )
    words = [arm["verdict"]["word"] for arm in data["arms"] if arm["kind"] == CANDIDATE]
    kind = "good" if data["passed"] else "bad" if "FAIL" in words else ""
    lines.append(io.verdict_box(data["verdict"], io.paragraph(data["scope"], soft=True), kind=kind))
    lines += [io.paragraph(f"{line}.") for line in (*data["notes"], *data["between"])]
    return [*lines, *(io.paragraph(f"Next: {line}") for line in data["next"])]


def gap_figure(plan: StudyPlan, data: Data) -> str:
    """Returns the forest plot: seeds as dots, the interval over them, and the margin."""
    rows = []
    for index, arm in enumerate(data["arms"]):
        if arm["kind"] == BASELINE:
            continue
        interval = arm["interval"] or {"mean": None, "low": None, "high": None}
        dots = [(value, f"seed {seed}: {value:+.4f}") for seed, value in arm["gaps"].items()]
        diverged = sum(state["state"] == "diverged" for state in arm["states"].values())
        note = f"diverged in {diverged}" if diverged else ""
        rows.append(ForestRow(arm["name"], dots, interval["mean"], interval["low"], interval["high"], index, note))
    unit = "% of the baseline's loss" if plan.margin.relative else "nats a token"
    candidate_gaps = [abs(v) for arm in data["arms"] if arm["kind"] != CONTROL for v in arm["gaps"].values()]
    clip = 1.2 * max([AXIS_CLIP * plan.margin.value, *candidate_gaps])
    label = "gap of each arm over seeds"
    plot = io.forest_plot(rows, margin=plan.margin.value, x_label=f"gap, {unit}", label=label, clip=clip)
    note = (
        f"dots: seeds; diamond: mean; bar: 90% interval over all seeds; shaded: margin ±{plan.margin}; the verdict's "
        "interval is wider where looks and candidates share the 5%"
    )
    return io.figure("Validation loss minus the baseline's, paired by seed", plot, note)


def arm_summary_cells(arm: Data) -> tuple[str, str, str, str]:
    """Returns verdict, mean loss, gap and number of seeds of an arm, the cells that all tables share."""
    losses = list(arm["final"].values())
    word = arm["verdict"]["word"] if arm.get("verdict") else "baseline"
    mean = f"{sum(losses) / len(losses):.4f}" if losses else ""
    return word, mean, interval_text(arm["interval"], arm["unit"]), str(len(arm["gaps"]) or len(losses))


def arm_table(data: Data) -> str:
    rows = []
    for arm in data["arms"]:
        word, mean, gap, seeds = arm_summary_cells(arm)
        p = (arm.get("verdict") or {"p": None})["p"]
        spikes = sum(arm["spikes"].values())
        rows.append((arm["name"], word, mean, gap, "" if p is None else f"{p:.3g}", seeds, spikes, arm["note"]))
    unit = data["arms"][0]["unit"]
    gap = f"gap, {unit} [90% over seeds]"
    return io.html_table(("arm", "verdict", "loss", gap, "p of equivalence", "seeds", "spikes", "what it is"), rows)


def rank_rows(data: Data) -> list[tuple[str, ...]]:
    """Returns a row per candidate: rank, arm, gap with its corrected interval, possible ranks, verdict, cost and
    execution."""
    by_name = {arm["name"]: arm for arm in data["arms"]}
    return [
        (str(rank), row["arm"],
         f"diverged in {row['diverged']}" if row["diverged"] else interval_text(row, by_name[row["arm"]]["unit"]),
         "{} to {}".format(*row["places"]) if row["low"] is not None else f"not known over {row['count']}",
         by_name[row["arm"]]["verdict"]["word"], "" if row["cost"] is None else f"{row['cost']:.2f}x",
         ", ".join(by_name[row["arm"]]["execution"]))
        for rank, row in enumerate(data["ranking"], 1)
    ]  # fmt: skip


def rank_heads(data: Data) -> tuple[str, ...]:
    level = f"{100 * data['ranking'][0]['level']:.4g}% over seeds"
    gap = f"gap, {data['arms'][0]['unit']} [{level}]"
    return ("", "recipe", gap, "its place may be", "verdict", "step time / baseline's", "runs")


def ranking_section(plan: StudyPlan, data: Data) -> list[str]:
    """Returns the candidates sorted by gap, and the figure of gap against step time."""
    colours = {arm["name"]: index for index, arm in enumerate(data["arms"])}
    series = []
    for row in (row for row in data["ranking"] if row["cost"] is not None and not row["diverged"]):
        colour, name = colours[row["arm"]], row["arm"]
        series.append(LineSeries("", [row["cost"]], [row["mean"]], colour, dots=True, label=name))
        if row["low"] is not None:
            series.append(LineSeries("", [row["cost"]] * 2, [row["low"], row["high"]], colour, faint=True))
    chart = io.line_chart(
        series, Axes("step time over the baseline's", zero=True, clip=100), label="gap against cost",
        lines=[(plan.margin.value, f"margin +{plan.margin}")],
    )  # fmt: skip
    note = (
        "All intervals of the plan's candidates hold at once in 90% of studies; the places are those that the paired "
        "differences to all others leave open, at a level that all pairs share. Step times are this machine's: "
        "emulated arithmetic, and runs that share a device, say nothing about hardware with 4-bit units."
    )
    figure = io.figure(f"Gap, {plan.margin.unit}, against cost", chart, "bars: the corrected interval")
    return [figure, io.html_table(rank_heads(data), rank_rows(data)), io.paragraph(note, soft=True)]


def curve_figures(plan: StudyPlan, data: Data) -> list[str]:
    """Returns the figures of the loss, and of the gap against tokens per parameter."""
    series, gap_series = [], []
    for index, arm in enumerate(data["arms"]):
        for curve in arm["curves"]:
            series.append(
                LineSeries(arm["name"], curve["tokens"], curve["loss"], index, faint=curve["seed"] != plan.seeds[0])
            )
    shown = [arm for arm in data["arms"] if arm["gap_curve"] and arm["kind"] != CONTROL]
    colours = {arm["name"]: index for index, arm in enumerate(data["arms"])}
    bands = []
    for arm in shown:
        seeds = sorted({point["seed"] for point in arm["gap_curve"]["points"]})
        for seed in seeds:
            points = [p for p in arm["gap_curve"]["points"] if p["seed"] == seed]
            xs, ys = [p["x"] for p in points], [p["y"] for p in points]
            gap_series.append(LineSeries(arm["name"], xs, ys, colours[arm["name"]], faint=True, dots=True))
        fit = arm["gap_curve"]["fit"]
        if fit:
            gap_series.append(LineSeries(arm["name"], fit["x"], fit["y"], colours[arm["name"]]))
            if fit["low"]:
                bands.append(ConfidenceBand(fit["x"], fit["low"], fit["high"], colours[arm["name"]]))
    limits = [(plan.margin.value, f"margin +{plan.margin}")]
    loss_chart = io.line_chart(series, Axes("tokens"), label="training loss")
    axes = Axes("tokens a parameter", zero=True, clip=97, log=True)
    gap_chart = io.line_chart(gap_series, axes, label="gap against tokens a parameter", bands=bands, lines=limits)
    note = "dots: validations; line: a + b ln(tokens a parameter), fitted seed by seed; band: 90% over seeds"
    return [
        io.figure("Training loss, nats a token", loss_chart, "first seed strong, others faint; smoothed"),
        io.figure(f"Gap along the run, {plan.margin.unit}, against tokens a parameter", gap_chart, note),
    ]


def control_summary(plan: StudyPlan, data: Data) -> list[str]:
    """Returns paragraphs on the noise floor, on whether the broken recipe and the shifted twin failed, and on the
    detectable gap."""
    checks, lines = data["controls"], []
    if checks["noise_floor"] is not None:
        floor, twin = plan.margin.format_gap(checks["noise_floor"], ""), checks["twin"]
        lines.append(
            f"Noise floor: two runs that are equal but for rounding differ by {floor} (root mean square over seeds); "
            f"the twin: {twin['word']}, {twin['reason']}."
        )
    if checks["broken"] is not None:
        outcome = _control_outcome(checks["sensitive"], "a PASS here would mean nothing")
        lines.append(f"Broken on purpose: {checks['broken']['reason']}. {outcome}")
    if checks["near"] is not None:
        outcome = _control_outcome(checks["near_seen"], "no candidate passes here")
        lines.append(f"Near the margin, the twin displaced by twice as much: {checks['near']['reason']}. {outcome}")
    if not lines:
        lines.append("This parity was run without controls: nothing shows that it would have seen a broken recipe.")
    return [io.paragraph(line) for line in (*lines, *(f"{line}." for line in data["sees"]))]


def _control_outcome(failed: bool | None, otherwise: str) -> str:
    words = {True: "It was seen to fail, as it must.", False: f"IT DID NOT FAIL: {otherwise}."}
    return "Not judged yet: until it is, no candidate passes." if failed is None else words[failed]


def study_source_table(data: Data) -> str:
    """Returns the table of gaps by source of text, one column per arm."""
    arms = [arm for arm in data["arms"] if arm["by_source"]]
    names = sorted({name for arm in arms for name in arm["by_source"]})
    rows = [(name, *(interval_text(arm["by_source"].get(name), arm["unit"]) for arm in arms)) for name in names]
    return io.html_table(("source", *(f"{arm['name']}, {arm['unit']}" for arm in arms)), rows)


def token_table(data: Data) -> str:
    rows = []
    for arm in data["arms"]:
        if arm["kind"] == BASELINE or not (arm["token_overhead"] or arm["gap_curve"]):
            continue
        fit = (arm["gap_curve"] or {}).get("fit")
        slope = interval_text(fit["slope"], arm["unit"]) if fit else ""
        rows.append((arm["name"], overhead_text(arm["token_overhead"]), slope))
    return io.html_table(("arm", "token overhead, % [90% over seeds]", "slope of the gap a factor e of tokens"), rows)


def overhead_text(overhead: Data | None) -> str:
    """Returns the token overhead as text, with the number of seeds that have one and of those that ended above the
    baseline's whole curve."""
    if overhead is None:
        return ""
    interval = interval_text(overhead, "%") if overhead["count"] else "none to give"
    if overhead["count"] == overhead["seeds"]:
        return interval
    above = f"; {overhead['above']} ended above the baseline's whole curve" if overhead["above"] else ""
    return f"{interval} ({overhead['count']} of {overhead['seeds']} seeds{above})"


def token_notes(data: Data) -> list[str]:
    note = (
        "Token overhead: how many more tokens the arm needs for the loss that the baseline reaches, read where the "
        "baseline's validation curve passes the arm's final loss. Under a decaying learning rate curves fall steeply "
        "at the end: a lower bound of what a longer run would show."
    )
    return [io.paragraph(note, soft=True)] if any(arm["token_overhead"] for arm in data["arms"]) else []


COST_NOTE = (
    "Median step time of these runs on this machine. 'emulated' is exact 4-bit arithmetic carried out in wider "
    "multipliers: its speed says nothing about hardware with 4-bit units. The speed against the baseline is the mean "
    "over seeds of the ratio in each, with the lowest and the highest."
)


def study_cost_table(data: Data) -> str:
    rows = []
    baseline = next((arm["cost"] for arm in data["arms"] if arm["kind"] == BASELINE), None)
    for arm in data["arms"]:
        if arm["cost"] is None:
            continue
        speed = speed_text(baseline, arm["cost"])
        rows.append((arm["name"], ", ".join(arm["execution"]), f"{1000 * arm['cost']['step_time_s']:.0f} ms",
                     f"{arm['cost']['tokens_per_s_per_device']:,.0f}", speed))  # fmt: skip
    return io.html_table(("arm", "runs", "step", "tokens/s a device", "speed against the baseline"), rows)


def speed_text(baseline: Data | None, cost: Data) -> str:
    """Returns mean, minimum and maximum of the baseline's step time over the arm's, over the seeds that both have."""
    baseline_times, times = ((entry or {}).get("step_time_by_seed", {}) for entry in (baseline, cost))
    ratios = [baseline_times[seed] / times[seed] for seed in times if seed in baseline_times]
    if not ratios:
        return ""
    mean = f"{sum(ratios) / len(ratios):.2f}x"
    return f"{mean} (one seed)" if len(ratios) == 1 else f"{mean} ({min(ratios):.2f} to {max(ratios):.2f})"


def method_section(plan: StudyPlan) -> list[str]:
    looks, levels = plan.looks, alpha_spending(plan.looks)
    spending = ", ".join(f"{100 * level:.2g}% after {count} seeds" for count, level in zip(looks, levels, strict=True))
    num_candidates = len(plan.of_kind(CANDIDATE))
    text = (
        f"Outcome: {plan.to_json()['outcome']}. The margin ±{plan.margin} was written into plan.json on "
        f"{plan.written}, before the first step. In each seed all arms share initialisation, data order, batches and "
        "schedule; only precision differs. The interval is Student's over the paired differences of seeds, never "
        "within a run. PASS: the interval lies inside the margin. FAIL: wholly beyond it. A wrong PASS has probability "
        f"5% at most in the whole study: the plan fixed its looks ({spending}) and its candidates ({num_candidates}; "
        f"Holm: the first to pass needs a level {num_candidates} times smaller, the next less; a FAIL is each "
        "candidate's own, at "
        f"{FAIL_SHARE:g} of the look's level). Seeds that were added later are shown and count in no verdict. Noise "
        "that is skewed over seeds costs more (docs/parity.md)."
    )
    return [io.paragraph(text)]


def study_markdown(plan: StudyPlan, data: Data) -> str:
    """Returns the summary in Markdown, for a pull request or an e-mail."""
    unit = data["arms"][0]["unit"]
    lines = [f"# {study_title(plan)}", ""]
    if not data["complete"]:
        lines += [f"**INCOMPLETE: {data['runs']['done']} of {data['runs']['planned']} runs are done.**", ""]
    lines += [f"**{data['verdict']}**", "", data["scope"], ""]
    lines += [text for line in (*data["notes"], *data["between"]) for text in (f"{line}.", "")]
    lines += [f"Next: {line}" for line in data["next"]] + [""] * bool(data["next"])
    lines += [f"| arm | verdict | gap, {unit} [90% over seeds] | seeds |", "|---|---|---|---|"]
    for arm in data["arms"]:
        word, _, gap, seeds = arm_summary_cells(arm)
        lines.append(f"| {arm['name']} | {word} | {gap} | {seeds} |")
    return "\n".join([*lines, ""])
