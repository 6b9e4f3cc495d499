"""The page that is forwarded, and the same as JSON: the decision, the table of points, and the commands behind it."""

from dataclasses import asdict
from pathlib import Path

from halfbyte import report as page
from halfbyte.diagnosis.inspection_page import noise_section
from halfbyte.inputs import replace_file, write_json
from halfbyte.metrics import finite
from halfbyte.parity.plan import plan_from_json
from halfbyte.parity.report import method, study_sections

from .decision import DO_NOT, SWITCH, Decision, decide
from .points import points
from .records import SETTINGS, STAGES, Records

BEYOND = "It says nothing about larger models, longer runs, other data or other hardware. FP8 stays the way back: "
BEYOND += "`halfbyte train --on-divergence fp8`."


def write_page(records: Records, directory: Path) -> tuple[Decision, Path]:
    """Write playbook.html and playbook.json. Returns the decision and the path of the page."""
    decision, table, study = decide(records), points(records), records.data("parity")
    stored = {stage: records.get(stage) for stage in (SETTINGS, *STAGES)}
    commands = {stage: record.get("command", "") for stage, record in stored.items()}
    data = {"decision": asdict(decision), "points": [vars(p) | {"command": commands[p.made_by]} for p in table]}
    write_json(directory / "playbook.json", finite({**data, "records": stored}))
    kind = "" if decision.small else {SWITCH: "good", DO_NOT: "bad"}.get(decision.word, "")
    lines = (page.paragraph(line) for line in (*decision.because, decision.speed))
    arms = list(dict.fromkeys(name for point in table for name in point.values))
    rows = [(p.what, *(p.values.get(arm, "") for arm in arms), p.limit, p.verdict,
             " ".join(commands[p.made_by].split()[:2])) for p in table]  # fmt: skip
    ran = [(stage, stored[stage].get("missing", commands[stage]) or "not run yet: the same command goes on",
            f"{stored[stage].get('seconds', 0.0):.0f} s") for stage in STAGES]  # fmt: skip
    plan = plan_from_json(study["plan"], "the study's plan") if study else None
    sections = [
        page.verdict(decision.sentence, *lines, kind=kind),
        page.section("Point by point", page.table(("", *arms, "limit", "verdict", "made by"), rows)),
        *(study_sections(plan, study) if plan else ()),
        noise_section(records.data("inspect")),
        page.section("How it was judged", *(method(plan) if plan else ())),
        page.section("Commands, and why a result is missing", page.table(("stage", "command", "took"), ran)),
        page.section("Scope", page.paragraph(f"{study.get('scope', '')} {BEYOND}", soft=True)),
    ]
    title = f"Playbook of {records.data(SETTINGS).get('model', '')}" + (f": {' or '.join(arms)}?" if arms else "")
    replace_file(directory / "playbook.html", page.html_page(title, sections))
    return decision, directory / "playbook.html"
