"""The radar in the report: gain of every quantized GEMM at the last probe as a heat map, layer by layer; and every
alarm."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from halfbyte import report as page
from halfbyte.metrics import read_rows

MOST = 6  # lines of one arm


def radar_of(folder: Path, seed: int) -> list[dict[str, Any]]:
    """The newest probe of a run that has one, and every earlier one that raised an alarm."""
    path = folder / "radar.jsonl"
    rows = read_rows(path) if path.is_file() else []
    shown = [*rows[-1:], *(row for row in rows[:-1] if row["alarms"])]
    return [{"seed": seed, "probes": len(rows), **row} for row in shown]


def radar_section(arms: Sequence[Mapping[str, Any]]) -> str:
    """Heat maps of the arms that have quantized GEMMs, first seed; alarms of all seeds, and what was not judged, named
    above."""
    parts = []
    for arm in arms:
        name, probes = arm["name"], [probe for probe in arm["radar"] if probe["gemms"]]
        lines = [(p, text) for p in arm["radar"] for text in [*p["alarms"], *not_judged(p)]]
        parts += [page.notice(f"{name}: seed {p['seed']} step {p['step']}: {text}") for p, text in lines[:MOST]]
        if len(lines) > MOST:
            parts.append(page.notice(f"{name}: and {len(lines) - MOST} more, in report.json"))
        if probes:
            parts.append(gain_figure(name, probes[0]))
    note = (
        "Same weights, same batch: each quantized GEMM's result against its bf16 result. Gain is the regression "
        "slope; 1 is right. Red: not what its recipe gives on these operands. Blue: far from 1, and what the recipe "
        "gives: its own doing, which is for the verdict to judge, and no defect of the run."
    )
    return page.section("Gradient truth", page.paragraph(note, soft=True), *parts) if parts else ""


def not_judged(probe: Mapping[str, Any]) -> list[str]:
    """What the probe said nothing about: GEMMs of which it had nothing to judge by, or all of them."""
    if probe.get("not_judged"):
        return [f"NOT JUDGED: {probe['not_judged']}"]
    blind = [g for g in probe["gemms"] if not g["alarm"] and g.get("error") is None and g.get("band") is None]
    if not blind:
        return []
    return [f"{len(blind)} of {len(probe['gemms'])} GEMMs were NOT JUDGED: an older radar knew no band for them"]


def gain_figure(name: str, probe: Mapping[str, Any]) -> str:
    """Rows: site and GEMM; columns: layers."""
    gemms = probe["gemms"]
    layers = sorted({g["layer"] for g in gemms})
    rows = list(dict.fromkeys(f"{g['site']} {g['gemm']}" for g in gemms))
    cell = {(f"{g['site']} {g['gemm']}", g["layer"]): g for g in gemms}
    values = [[cell.get((row, layer), {}).get("gain") for layer in layers] for row in rows]
    alarms = [[bool(cell.get((row, layer), {}).get("alarm")) for layer in layers] for row in rows]
    shade = [[min(1.0, abs((v if v is not None else 1.0) - 1.0) / 0.02) for v in line] for line in values]
    drawn = page.heat_map(rows, [str(layer) for layer in layers], values, label=f"gain of each GEMM of {name}",
                          shade=shade, alarms=alarms, form="{:.3f}")  # fmt: skip
    spans = [_span(gemms, "snr_db", "signal to noise {:.1f} to {:.1f} dB"),
             _span(gemms, "recipe_gain", "the recipe itself gives gains of {:.3f} to {:.3f}")]  # fmt: skip
    note = "; ".join([f"step {probe['step']}", *(span for span in spans if span)])
    return page.figure(f"{name}: gain by layer", drawn, note)


def _span(gemms: Sequence[Mapping[str, Any]], field: str, form: str) -> str:
    found = [g[field] for g in gemms if g.get(field) is not None]
    return form.format(min(found), max(found)) if found else ""
