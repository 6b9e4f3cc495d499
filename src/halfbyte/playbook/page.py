"""The page that is forwarded: the answer, the points that it rests on, pictures, and what was not tried; from the
records alone."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from halfbyte import report as page
from halfbyte.diagnosis.inspection_page import noise_figure
from halfbyte.inputs import printable, replace_file, write_json
from halfbyte.metrics import finite
from halfbyte.parity.plan import Plan, plan_from_json
from halfbyte.parity.radar_view import radar_section
from halfbyte.parity.report import arm_table, control_lines, curve_figures, gap_figure, method, source_table

from .decision import DO_NOT, SWITCH, Decision, decide
from .points import TITLES, Point, arms_of, missing, points
from .records import SETTINGS, STAGES, Records

CALLED = {"preflight": "train", "trace": "train", "cluster": "plan", "plan": "parity", "ablation": "parity"}
FILES = {"html": "playbook.html", "json": "playbook.json", "md": "playbook.md"}
BEYOND = (
    "It says nothing about larger models, longer runs (gaps tend to grow with tokens a parameter), other data, or "
    "other hardware than these figures are from. FP8 stays the way back: `halfbyte train --on-divergence fp8`."
)


def write_page(records: Records, directory: Path) -> dict[str, Path]:
    """playbook.html, playbook.json and playbook.md in `directory`."""
    decision, table = decide(records), points(records)
    files = {kind: directory / name for kind, name in FILES.items()}
    replace_file(files["html"], page.html_page(title(records), sections(records, decision, table)))
    write_json(files["json"], finite(as_json(records, decision, table)))
    replace_file(files["md"], printable(markdown(records, decision, table)))
    return files


def title(records: Records) -> str:
    asked = records.data(SETTINGS) or {}
    names = arms_of(records)
    arms = f": {', '.join(names[1:])} instead of {names[0]}?" if names else ""
    return f"Playbook of {asked.get('model', '')}{arms}"


def commands(records: Records) -> list[tuple[str, str, str]]:
    """(section, the command that made it, what it took)."""
    found = ((stage, records.get(stage)) for stage in STAGES)
    return [(TITLES[stage], r["command"], f"{r['seconds']:.0f} s") for stage, r in found if r and "data" in r]


def as_json(records: Records, decision: Decision, table: list[Point]) -> dict[str, Any]:
    """The same as plain data."""
    made = {stage: record["command"] for stage in STAGES if (record := records.get(stage))}
    return {
        "decision": asdict(decision), "scope": scope(records), "arms": arms_of(records),
        "points": [{**vars(point), "command": made[point.made_by]} for point in table],
        "not_tried": [{"what": what, "why": why} for what, why in missing(records)],
        "records": {stage: records.get(stage) for stage in (SETTINGS, *STAGES)},
    }  # fmt: skip


def scope(records: Records) -> str:
    study = records.data("parity")
    return study["scope"] if study else BEYOND


def sections(records: Records, decision: Decision, table: list[Point]) -> list[str]:
    """The page from top to bottom."""
    study = records.data("parity")
    plan = plan_from_json(study["plan"], "the study's plan") if study else None
    return [
        head(decision),
        page.section("Point by point", point_table(records, table)),
        *(study_sections(plan, study) if plan and study else ()),
        page.section(TITLES["inspect"], noise(records)),
        page.section(TITLES["ablation"], ablation(records)),
        page.section("What was not tried", page.table(("what", "why"), missing(records)),
                     page.paragraph(f"{scope(records)} {BEYOND if study else ''}", soft=True)),
        page.section("How it was judged", *(method(plan) if plan else ())),
        page.section("Commands", page.table(("what", "made by", "took"), commands(records))),
    ]  # fmt: skip


def head(decision: Decision) -> str:
    kind = "" if decision.small else {SWITCH: "good", DO_NOT: "bad"}.get(decision.word, "")
    lines = (page.paragraph(line) for line in (*decision.because, decision.speed))
    return page.verdict(decision.sentence, *lines, kind=kind)


def point_table(records: Records, table: list[Point]) -> str:
    names = list(dict.fromkeys([*arms_of(records), *(name for point in table for name in point.values)]))
    rows = [(p.what, *(p.values.get(n, "") for n in names), p.limit, p.verdict, made_by(p)) for p in table]
    return page.table(("", *names, "limit", "verdict", "made by"), rows)


def made_by(point: Point) -> str:
    """The command's first words; the whole of it stands at the end of the page."""
    return f"halfbyte {CALLED.get(point.made_by, point.made_by)}"


def study_sections(plan: Plan, study: Mapping[str, Any]) -> list[str]:
    return [
        page.section("Gap over seeds", gap_figure(plan, study), arm_table(study)),
        page.figures("Curves", curve_figures(plan, study)),
        page.section("Controls", *control_lines(plan, study)),
        page.section("By source of text", source_table(study)),
        radar_section(study["arms"]),
    ]


def noise(records: Records) -> str:
    found = records.data("inspect")
    if found is None:
        return ""
    gemms = {(g["layer"], g["site"], g["gemm"]): g["snr_db"] for g in found["gemms"]}
    return noise_figure(gemms, found["wanted"]) + page.code(f"--policy {found['policy']!r}")


def ablation(records: Records) -> str:
    found = records.data("ablation")
    return page.paragraph(found["verdict"]) + arm_table(found) if found else ""


def markdown(records: Records, decision: Decision, table: list[Point]) -> str:
    """A summary for a pull request or a mail."""
    names = arms_of(records)
    lines = [f"# {title(records)}", "", f"**{decision.sentence}**", ""]
    lines += [f"- {line}" for line in (*decision.because, decision.speed)] + [""]
    lines += [_row("", *names, "limit", "verdict", "made by"), _row(*["---"] * (len(names) + 4))]
    lines += [_row(p.what, *(p.values.get(n, "") for n in names), p.limit, p.verdict, made_by(p)) for p in table]
    lines += ["", "Not tried:", "", *(f"- {what}: {why}" for what, why in missing(records)), "", scope(records), ""]
    return "\n".join([*lines, *(f"    {command}" for _, command, _ in commands(records)), ""])


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"
