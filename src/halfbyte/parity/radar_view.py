"""The radar's last probes in the report: gain of every quantized GEMM as a heat map, layer by layer."""

from collections.abc import Mapping, Sequence
from typing import Any

from halfbyte import report as page


def radar_section(arms: Sequence[Mapping[str, Any]]) -> str:
    """Heat maps of the arms that have quantized GEMMs, first seed; alarms of all seeds named above."""
    parts = []
    for arm in arms:
        probes = [probe for probe in arm["radar"] if probe["gemms"]]
        if not probes:
            continue
        alarms = [f"seed {p['seed']} step {p['step']}: {text}" for p in probes for text in p["alarms"]]
        parts += [page.notice(f"{arm['name']}: {line}") for line in alarms[:6]]
        parts.append(gain_figure(arm["name"], probes[0]))
    note = (
        "Same weights, same batch: each quantized GEMM's result against its bf16 result. Gain is the regression "
        "slope; 1 is right. "
        "Red: outside the band that healthy runs fixed."
    )
    return page.section("Gradient truth", page.paragraph(note, soft=True), *parts) if parts else ""


def gain_figure(name: str, probe: Mapping[str, Any]) -> str:
    """Rows: site and GEMM; columns: layers."""
    gemms = probe["gemms"]
    layers = sorted({g["layer"] for g in gemms})
    rows = list(dict.fromkeys(f"{g['site']} {g['gemm']}" for g in gemms))
    cell = {(f"{g['site']} {g['gemm']}", g["layer"]): g for g in gemms}
    values = [[_get(cell.get((row, layer)), "gain") for layer in layers] for row in rows]
    alarms = [[bool(_get(cell.get((row, layer)), "alarm")) for layer in layers] for row in rows]
    shade = [[min(1.0, abs((v if v is not None else 1.0) - 1.0) / 0.02) for v in line] for line in values]
    drawn = page.heat_map(rows, [str(layer) for layer in layers], values, label=f"gain of each GEMM of {name}",
                          shade=shade, alarms=alarms, form="{:.3f}")  # fmt: skip
    snr = [g["snr_db"] for g in gemms if g["snr_db"] is not None]
    note = (
        f"step {probe['step']}; signal to noise {min(snr):.1f} to {max(snr):.1f} dB" if snr else f"step {probe['step']}"
    )
    return page.figure(f"{name}: gain by layer", drawn, note)


def _get(found: Mapping[str, Any] | None, field: str) -> Any:
    return None if found is None else found[field]
