"""An inspection for people: heat maps in a page and in a terminal."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from halfbyte import report as page

from .inspection import SNRS, Inspection

WORST_ROWS = 12
IF_NVFP4 = "in brackets: bf16 here, as nvfp4 would have it"
LOW, HIGH = 8.0, 22.0  # decibels between which cells are tinted


def tint(decibels: float | None) -> float:
    """1 for much noise, 0 for little."""
    return 0.0 if decibels is None else min(1.0, max(0.0, (HIGH - decibels) / (HIGH - LOW)))


Noise = Mapping[tuple[int, str, str], float]


def gemm_rows(gemms: Noise) -> tuple[list[str], list[int], list[list[float | None]]]:
    """(site and GEMM, layers, decibels)."""
    layers = sorted({layer for layer, _, _ in gemms})
    rows = list(dict.fromkeys(f"{site} {gemm}" for _, site, gemm in sorted(gemms, key=lambda p: p[1:])))
    names = {(f"{site} {gemm}", layer): value for (layer, site, gemm), value in gemms.items()}
    return rows, layers, [[names.get((row, layer)) for layer in layers] for row in rows]


def noise_figure(gemms: Noise, wanted: float) -> str:
    """The heat map."""
    rows, layers, values = gemm_rows(gemms)
    shade = [[tint(value) for value in row] for row in values]
    alarms = [[value is not None and value < wanted for value in row] for row in values]
    drawn = page.heat_map(rows, [str(at) for at in layers], values, label="signal to noise by layer", shade=shade,
                          alarms=alarms, form="{:.1f}")  # fmt: skip
    note = (
        f"decibels, quantized result against bf16, of linears that stay in bf16 as nvfp4 would have it; red: below the "
        f"wanted {wanted:g} dB; columns are layers"
    )
    return page.figure("Signal to noise", drawn, note)


def noise_section(data: Mapping[str, Any]) -> str:
    """Returns the section that another page shows of the JSON of `halfbyte inspect`, empty if there is none."""
    gemms = {(gemm["layer"], gemm["site"], gemm["gemm"]): gemm["snr_db"] for gemm in data.get("gemms", ())}
    if not gemms:
        return ""
    return page.section(
        "Noise of every GEMM", noise_figure(gemms, data["wanted"]), page.code(f"--policy {data['policy']!r}")
    )


def html(found: Inspection, *, title: str, lines: list[str], policy: str, wanted: float) -> str:
    """The page."""
    worst = [(*row[:3], decibels(found, row)) for row in found.worst()[:WORST_ROWS]]
    body = [
        *(page.paragraph(line, soft=True) for line in lines),
        page.section("Recommendation", page.code(f"--policy {policy!r}")),
        page.section("Noise of every GEMM", noise_figure(found.gemms, wanted)),
        page.section("Noisiest first", page.table(("layer", "linear", "GEMM", f"dB ({IF_NVFP4})"), worst)),
        page.section("Operands", page.table(OPERANDS, [operand_row(o) for o in found.operands])),
    ]
    return page.html_page(title, body)


RANGES = ("amax", "crest", "to zero", "saturated")
OPERANDS = ("layer", "linear", "operand", *RANGES, *(f"{way}, dB" for way in SNRS), "scales")


def operand_row(o: dict[str, Any]) -> tuple[Any, ...]:
    shares = (f"{100 * o[name]:.2f}%" if name in o else "" for name in ("zeros", "saturated"))
    snr = (f"{value:.1f}" if (value := o["snr"].get(way)) is not None else "" for way in SNRS)
    return (o["layer"], o["site"], o["role"], f"{o['amax']:.3g}", f"{o['crest']:.1f}", *shares, *snr, scale_range(o))


def scale_range(o: dict[str, Any]) -> str:
    """The block-scale codes in use, and how many are zero."""
    codes = o["scale_codes"]
    if not codes:
        return ""
    total = sum(codes.values())
    return f"{len(codes)} codes {min(codes)}..{max(codes)}, {100 * codes.get(0, 0) / total:.1f}% zero"


def decibels(found: Inspection, row: tuple[int, str, str, float]) -> str:
    """The number of one GEMM, in brackets where its linear is not quantized."""
    layer, site, _, value = row
    return f"{value:.1f}" if (layer, site) in found.quantized else f"({value:.1f})"


def terminal(found: Inspection, wanted: float) -> Table:
    """The heat map as a table of coloured numbers."""
    rows, layers, values = gemm_rows(found.gemms)
    title = f"signal to noise, dB, of every GEMM against bf16; red: below {wanted:g}; {IF_NVFP4}"
    made = Table(title=title, title_justify="left")
    made.add_column("linear, GEMM")
    for layer in layers:
        made.add_column(str(layer), justify="right")
    for name, line in zip(rows, values, strict=True):
        site, gemm = name.rsplit(" ", 1)
        cells = zip(layers, line, strict=True)
        made.add_row(
            name, *(_cell(found, (at, site, gemm, value), wanted) if value is not None else "" for at, value in cells)
        )
    return made


def _cell(found: Inspection, row: tuple[int, str, str, float], wanted: float) -> Text:
    value = row[3]
    style = (
        "bold white on red" if value < wanted else "green" if value > HIGH else "yellow" if tint(value) > 0.4 else ""
    )
    return Text(decibels(found, row), style=style)
