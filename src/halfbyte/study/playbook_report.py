"""Playbook report as one HTML page and as JSON: decision, evidence table, and the commands behind it.

An evidence row has the measured quantity, its value per arm, the limit and the verdict.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from halfbyte import io
from halfbyte.evaluation.inspection import noise_section
from halfbyte.io import atomic_write, write_json
from halfbyte.study.analysis import interval_text
from halfbyte.study.arms import BASELINE, CANDIDATE
from halfbyte.study.playbook_decision import (
    BETTER,
    DO_NOT,
    MAX_DATA_WAIT_FRACTION,
    SETTINGS,
    STAGES,
    SWITCH,
    Data,
    Decision,
    StageRecords,
    alarms,
    make_decision,
    verdict_of,
)
from halfbyte.study.study_plan import plan_from_json
from halfbyte.study.study_report import method_section, study_sections
from halfbyte.train import replace_nonfinite

HELD = {True: "PASS", False: "FAIL", None: "CANNOT TELL"}
MAX_GRAD_NORM_RATIO = 3.0  # relative to the baseline's ratio of peak to median gradient norm
SCOPE_NOTE = "It says nothing about larger models, longer runs, other data or other hardware. FP8 stays the way back: "
BENCH = (
    ("step alone, ms", "milliseconds", "{:.1f}", "it did not run"),
    ("tokens/s a device", "tokens_per_s", "{:,.0f}", "it did not run"),
    ("TFLOP/s a device", "tflops", "{:.3g}", "it did not run"),
    ("MFU", "mfu", "{:.1%}", "the peak of this device is not in the table"),
    ("peak memory, GiB", "peak_gib", "{:.2f}", "this device's allocator does not say"),
    ("memory of the program, GiB", "needed_gib", "{:.2f}", "it did not run"),
)


@dataclass(frozen=True)
class EvidenceRow:
    """One row of the evidence table.

    Args:
        made_by: stage that measured it.
        values: arm -> value as text.
        verdict: empty if the quantity has no limit.
    """

    made_by: str
    what: str
    values: Mapping[str, str]
    limit: str = ""
    verdict: str = ""


def evidence_rows(records: StageRecords) -> list[EvidenceRow]:
    """Returns all rows for which a stage has a result."""
    return [*machine(records), *study(records.data("parity")), *runs(records), *arithmetic(records)]


def machine(records: StageRecords) -> Iterator[EvidenceRow]:
    """Yield the rows of doctor, preflight and bench."""
    arms, limit = records.data("preflight").get("arms", {}), records.data("preflight").get("device_memory_gib")
    checks, rows = records.data("doctor").get("checks", ()), records.data("bench").get("rows", ())
    if checks:
        num_passed = sum(check["passed"] for check in checks)
        values = dict.fromkeys(list(arms)[:1], f"{num_passed} of {len(checks)}")
        yield EvidenceRow("doctor", "quantizers with their stored bits", values, "all", HELD[num_passed == len(checks)])
    if arms:
        execution = {name: ", ".join(row["execution"]) for name, row in arms.items()}
        yield EvidenceRow("preflight", "its linears run here", execution)
        yield EvidenceRow(
            "preflight", "FLOPs in 4 bits", {name: f"{row['share_4bit']:.0%}" for name, row in arms.items()}
        )
        memory = {name: f"{row['memory_gib']:.2f} GiB" for name, row in arms.items()}
        verdict = HELD[all(row["memory_gib"] <= limit for row in arms.values())] if limit else ""
        yield EvidenceRow(
            "preflight", "memory a device, estimated", memory, f"{limit:.1f} GiB" if limit else "", verdict
        )
    for quantity, field, form, missing_reason in BENCH if rows else ():
        values = {row["arm"]: form.format(row[field]) for row in rows if row[field] is not None}
        yield EvidenceRow("bench", quantity, values, verdict="" if values else f"missing: {missing_reason}")


def study(data: Data) -> Iterator[EvidenceRow]:
    """Yield the rows of parity."""
    arms = {arm["name"]: arm for arm in data.get("arms", ()) if arm["kind"] in (BASELINE, CANDIDATE)}
    if not arms:
        return
    candidates = {name: arm for name, arm in arms.items() if arm["kind"] == CANDIDATE}
    base, unit, checks = next(iter(arms)), data["arms"][0]["unit"], data["controls"]
    losses = {name: f"{fmean(arm['final'].values()):.4f}" for name, arm in arms.items() if arm["final"]}
    yield EvidenceRow("parity", "validation loss, nats a token", losses)
    gaps = {name: interval_text(arm["interval"], unit) or "diverged" for name, arm in candidates.items()}
    words = {name: arm["verdict"]["word"] for name, arm in candidates.items()}
    words |= {name: BETTER for name, arm in candidates.items() if verdict_of(data, arm) == BETTER}
    listed = ", ".join(f"{name} {word}" for name, word in words.items())
    verdict = listed if len(set(words.values())) > 1 else max(words.values())
    quantity = f"gap to the baseline, {unit} [90% over seeds]"
    yield EvidenceRow("parity", quantity, gaps, f"±{data['plan']['margin']}", verdict)
    if checks["noise_floor"] is not None:
        floor, near_seen = {base: f"{checks['noise_floor']:.4f} {unit}"}, HELD[checks["near_seen"]]
        yield EvidenceRow("parity", "noise of equal runs; twice the margin is seen", floor, "seen", near_seen)
    if checks["broken"] is not None:
        yield EvidenceRow("parity", "a recipe broken on purpose is seen", {}, "seen", HELD[checks["sensitive"]])
    probed = {name: sum(len(probe["gemms"]) for probe in arm["radar"]) for name, arm in candidates.items()}
    counts = {name: len(alarms(arm)) for name, arm in candidates.items()}
    if any(probed.values()) or any(counts.values()):
        radar = {
            name: f"{counts[name]} in {num_gemms} GEMMs" if num_gemms else "not probed"
            for name, num_gemms in probed.items()
        }
        yield EvidenceRow("parity", "radar: alarms", radar, "0", HELD[not any(counts.values())])
    yield EvidenceRow(
        "parity", "spikes of the loss", {name: str(sum(arm["spikes"].values())) for name, arm in arms.items()}
    )
    overheads = {name: (arm["token_overhead"] or {"mean": None})["mean"] for name, arm in candidates.items()}
    if texts := {name: f"{mean:+.1f}%" for name, mean in overheads.items() if mean is not None}:
        yield EvidenceRow("parity", "tokens more for the same loss", texts)


def runs(records: StageRecords) -> Iterator[EvidenceRow]:
    """Yield the rows of compare and eval."""
    compared = records.data("compare").get("runs", ())
    norms = {run["arm"]: run["gradient_norm"] for run in compared}
    if peaks := {name: norm["largest"] / norm["median"] for name, norm in norms.items() if norm and norm["median"]}:
        ratios = {name: f"{peak:.1f}" for name, peak in peaks.items()}
        limit = MAX_GRAD_NORM_RATIO * next(iter(peaks.values()))
        verdict = HELD[max(peaks.values()) <= limit]
        yield EvidenceRow("compare", "gradient norm, largest over median", ratios, f"{limit:.1f}", verdict)
    if speeds := {run["arm"]: run["speed"] for run in compared}:
        steps = {name: 1e3 * speed["step_time_s"] for name, speed in speeds.items() if speed["step_time_s"]}
        yield EvidenceRow("compare", "step in training, ms", {name: f"{step:.0f}" for name, step in steps.items()})
        waits = {name: speed["input_wait"] or 0.0 for name, speed in speeds.items()}
        shares, verdict = (
            {name: f"{wait:.1%}" for name, wait in waits.items()},
            HELD[max(waits.values()) <= MAX_DATA_WAIT_FRACTION],
        )
        yield EvidenceRow("compare", "input wait, of a step", shares, f"{MAX_DATA_WAIT_FRACTION:.0%}", verdict)
    scores: dict[str, dict[str, str]] = {}
    for name, arm in records.data("eval").get("arms", {}).items():
        for task, metrics in ((result["task"], result["metrics"]) for result in arm["results"]):
            if metric := metrics.get("acc_norm") or metrics.get("acc") or metrics.get("nats_per_token"):
                error = "" if metric["error"] is None else f" ± {metric['error']:.4f}"
                scores.setdefault(task, {})[name] = f"{metric['value']:.4f}{error}"
    yield from (EvidenceRow("eval", task, values) for task, values in scores.items())


def arithmetic(records: StageRecords) -> Iterator[EvidenceRow]:
    """Yield the rows of trace, inspect and cluster."""
    trace, noise, cluster = (records.data(stage) for stage in ("trace", "inspect", "cluster"))
    for category, share in (trace.get("breakdown") or {}).items():
        yield EvidenceRow("trace", f"of a step: {category}", {trace["arm"]: f"{share:.1%}"})
    for worst in noise.get("gemms", ())[:1]:
        values = {trace["arm"]: "{snr_db:.1f} dB, layer {layer} {site} {gemm}".format(**worst)}
        verdict = HELD[worst["snr_db"] >= noise["wanted"]]
        yield EvidenceRow("inspect", "noisiest GEMM", values, f"{noise['wanted']:g} dB", verdict)
    if rows := cluster.get("recipes"):
        cluster_text = f"{cluster['count']} {cluster['device']}"
        steps = {name: row["step_time_s"] for name, row in rows.items()}
        yield EvidenceRow(
            "cluster", f"step on {cluster_text}, simulated", {name: f"{step:.3f} s" for name, step in steps.items()}
        )
        fits = {name: "yes" if row["fits"] else "NO" for name, row in rows.items()}
        yield EvidenceRow("cluster", f"fits {cluster_text}", fits, "yes", HELD["NO" not in fits.values()])


SCOPE_NOTE += "`halfbyte train --on-divergence fp8`."


def write_playbook_report(records: StageRecords, directory: Path) -> tuple[Decision, Path]:
    """Write playbook.html and playbook.json. Returns the decision and the path of the page."""
    decision, table, study = make_decision(records), evidence_rows(records), records.data("parity")
    stored = {stage: records.get(stage) for stage in (SETTINGS, *STAGES)}
    commands = {stage: record.get("command", "") for stage, record in stored.items()}
    data = {"decision": asdict(decision), "points": [vars(row) | {"command": commands[row.made_by]} for row in table]}
    write_json(directory / "playbook.json", replace_nonfinite({**data, "records": stored}))
    kind = "" if decision.small else {SWITCH: "good", DO_NOT: "bad"}.get(decision.word, "")
    lines = (io.paragraph(line) for line in (*decision.because, decision.speed))
    arms = list(dict.fromkeys(name for point in table for name in point.values))
    rows = [(row.what, *(row.values.get(arm, "") for arm in arms), row.limit, row.verdict,
             " ".join(commands[row.made_by].split()[:2])) for row in table]  # fmt: skip
    stage_rows = [(stage, stored[stage].get("missing", commands[stage]) or "not run yet: the same command goes on",
            f"{stored[stage].get('seconds', 0.0):.0f} s") for stage in STAGES]  # fmt: skip
    plan = plan_from_json(study["plan"], "the study's plan") if study else None
    sections = [
        io.verdict_box(decision.sentence, *lines, kind=kind),
        io.section("Point by point", io.html_table(("", *arms, "limit", "verdict", "made by"), rows)),
        *(study_sections(plan, study) if plan else ()),
        noise_section(records.data("inspect")),
        io.section("How it was judged", *(method_section(plan) if plan else ())),
        io.section("Commands, and why a result is missing", io.html_table(("stage", "command", "took"), stage_rows)),
        io.section("Scope", io.paragraph(f"{study.get('scope', '')} {SCOPE_NOTE}", soft=True)),
    ]
    title = f"Playbook of {records.data(SETTINGS).get('model', '')}" + (f": {' or '.join(arms)}?" if arms else "")
    atomic_write(directory / "playbook.html", io.html_page(title, sections))
    return decision, directory / "playbook.html"
