"""The grid's results as a page and pictures, from the JSON that `parity_grid.py collect` has written.

    python benchmarks/parity_page.py            # docs/evidence/parity/results.md, gap.svg, downstream.svg

Everything in the page is computed here from that JSON; what was not run is listed because it is not there.
"""

import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator

sys.path.insert(0, str(Path(__file__).parent))

from parity_grid import ARMS, CONTROL, GRID, SEEDED, SEEDS, SIZES, TWIN, without_embeddings

from halfbyte.parity.statistics import Line

FOLDER = GRID.parent
BASE, TWINS = ARMS[0].name, next(arm.name for arm in ARMS if arm.kind == TWIN)
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5195", "#8a8f98", "#000000")
SCORES = (  # task, metric, heading, how it is written
    ("wikitext2_test", "bits_per_byte", "WikiText-2, bits a byte", ".4f"),
    ("lambada_openai", "acc", "LAMBADA, accuracy", ".3f"),
    ("lambada_openai", "ppl", "LAMBADA, perplexity of the word", ".0f"),
    ("blimp", "acc", "BLiMP, accuracy", ".3f"),
)
plt.rcParams.update({"svg.hashsalt": "halfbyte", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})

Data = Mapping[str, Any]


def planned(size: str) -> list[str]:
    """arm/seed of every run that the grid has at a size."""
    return [
        f"{arm.name}/seed-{seed}"
        for arm in ARMS
        for seed in (SEEDS[size] if arm.name in SEEDED else SEEDS[size][:1])
    ]  # fmt: skip


def runs_of(found: Data) -> dict[str, dict[str, Any]]:
    """arm/seed -> state, step and final loss of every run that was begun."""
    runs = {}
    for arm in found["arms"]:
        for seed, state in arm["states"].items():
            if state["state"] != "missing":
                runs[f"{arm['name']}/seed-{seed}"] = {**state, "final": arm["final"].get(seed)}
    return runs


def noise(found: Data) -> float | None:
    """What equal runs differ by: the root mean square of the twins' gaps, in percent."""
    gaps = next(arm["gaps"] for arm in found["arms"] if arm["name"] == TWINS).values()
    return math.sqrt(sum(gap * gap for gap in gaps) / len(gaps)) if gaps else None


def interval_text(arm: Data) -> str:
    """Mean gap and its 90% interval, where there are seeds for one."""
    values, found = list(arm["gaps"].values()), arm["interval"]
    if found is None or found["low"] is None:
        return ""
    mean = f"{sum(values) / len(values):+.3f}%"
    return f"{mean} [{found['low']:+.3f}, {found['high']:+.3f}] ({len(values)} seeds)"


def loss_table(reports: Mapping[str, Data]) -> Iterator[str]:
    heads = (f"{size}: loss | {size}: gap in seed 0 | {size}: over seeds" for size in reports)
    yield "| arm | " + " | ".join(heads) + " |"
    yield "|---|" + "---|---|---|" * len(reports)
    for arm in ARMS:
        cells = []
        for found in reports.values():
            mine = next(entry for entry in found["arms"] if entry["name"] == arm.name)
            state = next(iter(mine["states"].values()))
            losses = ", ".join(f"{value:.4f}" for value in mine["final"].values())
            stopped = {"diverged": f"diverged at step {state['step']}", "partial": f"cut off at step {state['step']}"}
            first = f"{mine['gaps']['0']:+.3f}%" if "0" in mine["gaps"] else ""
            cells += [losses or stopped.get(state["state"], "not run"), first, interval_text(mine)]
        yield f"| {arm.name} | " + " | ".join(cells) + " |"


def lines_table(gaps: Data) -> Iterator[str]:
    yield "| arm | runs | gap at 1 token a parameter | change for e times as many tokens a parameter, 90% |"
    yield "|---|---|---|---|"
    for name, line in gaps["lines"].items():
        bounds = line["b_90"]
        text = f"{line['b']:+.3f}% " + (f"[{bounds[0]:+.3f}, {bounds[1]:+.3f}]" if bounds else "(no interval)")
        yield f"| {name} | {line['runs']} | {line['a']:+.3f}% | {text} |"


def downstream_table(found: Data) -> Iterator[str]:
    scores = found["evaluations"]
    yield "| run | " + " | ".join(heading for *_, heading, _ in SCORES) + " |"
    yield "|---|" + "---|" * len(SCORES)
    for run, tasks in scores.items():
        cells = []
        for task, metric, _, form in SCORES:
            value = tasks.get(task, {}).get(metric)
            cells.append(f"{value['value']:{form}} ± {value['error']:{form}}" if value else "")
        yield f"| {run} | " + " | ".join(cells) + " |"
    floor = [twin_floor(scores, task, metric) for task, metric, *_ in SCORES]
    if any(value is not None for value in floor):
        pairs = zip(floor, SCORES, strict=True)
        cells = ["" if value is None else f"{value:{form}}" for value, (*_, form) in pairs]
        yield "| *noise floor: twin against bf16* | " + " | ".join(cells) + " |"


def twin_floor(scores: Data, task: str, metric: str) -> float | None:
    """Root mean square of the difference between the baseline and its twin, over the seeds that have both."""
    apart = []
    for run, tasks in scores.items():
        name, _, seed = run.partition("/")
        other = scores.get(f"{BASE}/{seed}", {})
        if name == TWINS and task in tasks and task in other:
            apart.append(tasks[task][metric]["value"] - other[task][metric]["value"])
    return math.sqrt(sum(d * d for d in apart) / len(apart)) if apart else None


def missing(reports: Mapping[str, Data]) -> Iterator[str]:
    """What the grid has and the results have not."""
    for size in SIZES:
        runs = runs_of(reports[size]) if size in reports else {}
        absent = [name for name in planned(size) if runs.get(name, {}).get("state") not in ("done", "diverged")]
        if absent:
            detail = [f"{n} (cut off at step {runs[n]['step']})" if n in runs else n for n in absent]
            yield f"- {size}: {', '.join(detail)}"


def draw_gaps(gaps: Data) -> None:
    """The gap of every arm against tokens a parameter, the fitted line of the seeded one with its band. The recipe that
    is broken on purpose would flatten all others, and is in the table."""
    figure, axes = plt.subplots(figsize=(8, 4.6), layout="constrained")
    names = [arm.name for arm in ARMS if arm.kind != CONTROL and any(p["arm"] == arm.name for p in gaps["points"])]
    for number, name in enumerate(names):
        draw_arm(axes, gaps, name, COLOURS[number % len(COLOURS)], 1 + 0.02 * (number - len(names) / 2))
    axes.axhspan(-0.5, 0.5, color="#009e73", alpha=0.08, zorder=0)
    axes.axhline(0, color="#444", linewidth=0.8, linestyle=":")
    axes.set_xscale("log")
    axes.set_xlabel("training tokens a parameter (without embeddings)")
    axes.set_ylabel("gap of the validation loss to bf16 of the same seed, %")
    sizes = {p["size"]: p["tokens_a_parameter"] for p in gaps["points"]}
    axes.set_xticks(list(sizes.values()), [f"{ratio:.1f}\n({size})" for size, ratio in sizes.items()])
    axes.minorticks_off()
    axes.set_title(
        "dots: seeds; bars: 90% interval over seeds; band: 90% of the fitted line; green: the margin", fontsize=8
    )
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(FOLDER / "gap.svg", metadata={"Date": None})
    plt.close(figure)


def draw_arm(axes: Any, gaps: Data, name: str, colour: str, shift: float) -> None:
    mine = [p for p in gaps["points"] if p["arm"] == name]
    for number, p in enumerate(mine):
        x = p["tokens_a_parameter"] * shift
        label = name if number == 0 else None
        axes.plot([x] * len(p["gaps"]), p["gaps"], "o", color=colour, markersize=4, alpha=0.8, label=label)
        if p["interval"] and p["interval"]["low"] is not None:
            axes.vlines(x, p["interval"]["low"], p["interval"]["high"], color=colour, linewidth=1.6)
    line = gaps["lines"].get(name)
    if line is None:
        return
    ratios = [p["tokens_a_parameter"] for p in mine]
    x = np.geomspace(min(ratios), max(ratios), 40)
    covariance = line["covariance"]
    fit = Line(line["a"], line["b"], covariance and tuple(map(tuple, covariance)), line["freedom"])
    axes.plot(x, fit.at(np.log(x)), color=colour, linewidth=1.0)
    half = fit.half_width(np.log(x)) if name == "nvfp4_all_linear" else None
    if half is not None:
        axes.fill_between(x, fit.at(np.log(x)) - half, fit.at(np.log(x)) + half, color=colour, alpha=0.12, linewidth=0)


def draw_downstream(reports: Mapping[str, Data]) -> None:
    """Each score with one standard error, by arm; bf16 and its twins in grey. The broken recipe is in the table."""
    shown = {
        size: [run for run in found["evaluations"] if not run.startswith("broken/")] for size, found in reports.items()
    }
    names = [arm.name for arm in ARMS if arm.kind != CONTROL]
    heights = [1 + len({run.split("/")[0] for run in runs}) for runs in shown.values()]
    figure, axes = plt.subplots(len(reports), len(SCORES), figsize=(11, 0.25 * sum(heights) + 1.2 * len(reports)),
                                layout="constrained", squeeze=False, height_ratios=heights)  # fmt: skip
    for row, (size, runs) in zip(axes, shown.items(), strict=True):
        places = {name: n for n, name in enumerate(n for n in names if any(run.startswith(n + "/") for run in runs))}
        for here, (task, metric, heading, _) in zip(row, SCORES, strict=True):
            for run in runs:
                value = reports[size]["evaluations"][run].get(task, {}).get(metric)
                if value is not None:
                    arm, _, seed = run.partition("/seed-")
                    colour = "#8a8f98" if arm.startswith("bf16") else "#0072b2"
                    place = places[arm] + 0.2 * (int(seed) - 1)
                    here.errorbar(
                        value["value"], place, xerr=value["error"], fmt="o", color=colour, markersize=3, capsize=2
                    )
            here.set_title(f"{size}: {heading}", fontsize=8)
            here.set_yticks(list(places.values()), list(places) if here is row[0] else [""] * len(places), fontsize=7)
            here.set_ylim(len(places) - 0.5, -0.5)
            here.xaxis.set_major_locator(MaxNLocator(4))
            here.tick_params(axis="x", labelsize=7)
    figure.savefig(FOLDER / "downstream.svg", metadata={"Date": None})
    plt.close(figure)


def verdicts(found: Data) -> Iterator[str]:
    """A line for every candidate that has a run to be judged by."""
    for arm in found["arms"]:
        if arm["kind"] == "candidate" and arm["gaps"]:
            yield f"- {arm['verdict']['word']} {arm['name']}: {arm['verdict']['reason']}"


def page(reports: Mapping[str, Data], gaps: Data) -> str:
    done = {size: sum(r["state"] in ("done", "diverged") for r in runs_of(f).values()) for size, f in reports.items()}
    lines = [
        "# The parity grid on real text: the results",
        "",
        "Made by `benchmarks/parity_page.py` from the JSON beside it; the plan, committed before the first step, is "
        "[README.md](README.md). " + next(iter(reports.values()))["facts"]["the runs"],
        "",
        "Done: " + "; ".join(f"{size} {done.get(size, 0)} of {len(planned(size))} runs" for size in SIZES) + ".",
        "",
    ]
    for size, found in reports.items():
        base = found["plan"]["base"]
        tokens = base["steps"] * base["batch"] * base["seq"]
        small = without_embeddings(size)
        floor = noise(found)
        facts = (
            f"{small / 1e6:.1f}M parameters without embeddings, {tokens / 1e6:.1f}M tokens, {tokens / small:.1f} each"
        )
        twins = f"; equal runs (twins) differ by {floor:.3f}%" if floor is not None else ""
        apart = next(arm["interval"] for arm in found["arms"] if arm["name"] == "nvfp4_all_linear")
        if apart and apart["sd"]:
            twins += f", the gap of nvfp4_all_linear from seed to seed by {apart['sd']:.2f}% (standard deviation)"
        lines += [f"**{size}**: {facts}{twins}.", *verdicts(found), ""]
    lines += ["## Validation loss, and the gap to bf16 of the same seed", "", *loss_table(reports), ""]
    lines += [
        "The gap is in percent of the baseline's loss. Compare arms within one seed: seed 0 is where nvfp4_all_linear",
        "is worst. Brackets are the 90% interval over seeds (Student's t).",
        "",
    ]
    lines += ["![gap against tokens a parameter](gap.svg)", "", *lines_table(gaps), ""]
    lines += [
        "The line is a + b ln(tokens a parameter) through all runs of an arm. Sizes and tokens a parameter go together",
        "here: every size read the same text, so a trend with one is a trend with the other.",
        "",
    ]
    lines += ["## Downstream, with standard errors", "", "![downstream scores](downstream.svg)", ""]
    for size, found in reports.items():
        lines += [f"### {size}", "", *downstream_table(found), ""]
    absent = list(missing(reports))
    lines += ["## What was not run", "", *(absent or ["Nothing: every run of the grid is here."]), ""]
    return "\n".join(lines)


def main() -> None:
    files = {size: FOLDER / f"{size}.json" for size in SIZES}
    reports = {size: json.loads(file.read_text(encoding="utf-8")) for size, file in files.items() if file.is_file()}
    gaps = json.loads((FOLDER / "gaps.json").read_text(encoding="utf-8"))
    draw_gaps(gaps)
    draw_downstream(reports)
    (FOLDER / "results.md").write_text(page(reports, gaps), encoding="utf-8")


if __name__ == "__main__":
    main()
