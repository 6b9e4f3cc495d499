"""Pictures of the measurements under docs/evidence: speed.svg, frontier.svg and loss.svg.

    python benchmarks/plot_evidence.py

The table of emulations in docs/speed.md is filled from evidence/emulations_h200.json, if that is there.
"""

import json
import pathlib
import re
import statistics
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

EVIDENCE = pathlib.Path(__file__).resolve().parents[1] / "docs" / "evidence"
COLORS = {"bf16": "#8a8f98", "fp8": "#e08e2b", "nvfp4": "#2f6fde"}
plt.rcParams.update({"svg.hashsalt": "halfbyte", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False})


def speed() -> None:
    """Tokens a second of every measured step, with the ratio to bf16 of its own run."""
    groups = [
        (found, [row for row in found["rows"] if row["tokens_per_s"] and row["remat"] == remat])
        for file in sorted([*EVIDENCE.glob("step_*.json"), *EVIDENCE.glob("frontier_*.json")])
        for found in [json.loads(file.read_text(encoding="utf-8"))]
        for remat in found["args"]["remat"].split(",")
    ]
    figure, axes = plt.subplots(figsize=(8, 0.9 + 0.75 * len(groups)), layout="constrained")
    labels, place = [], 0.0
    for found, rows in groups:
        for row in rows:
            share = row["ratio"] or 0.0
            axes.barh(place, share, color=COLORS.get(row["recipe"], "#555"), height=0.8)
            of = "MFU" if "peak_tflops" in row else "of the bf16 peak"  # rows from before were all held against bf16's
            text = f"{row['recipe']} {share:.3f}x   {row['tokens_per_s']:,.0f} tokens/s, {row['mfu']:.1%} {of}"
            axes.text(0.01, place, text, va="center", color="white", fontsize=8)
            place += 0.85
        args = found["args"]
        layers = f", {args['layers']} layers" if args["layers"] else ""
        loop = "unrolled" if args["unroll"] == 0 else "looped"
        labels.append(
            (
                place - 0.85 * (len(rows) + 1) / 2,
                f"{args['model']}{layers}\nseq {args['seq']}, {args['policy']}, {loop}, remat {rows[0]['remat']}",
            )
        )
        place += 0.5
    axes.set_yticks([at for at, _ in labels], [label for _, label in labels])
    axes.invert_yaxis()
    axes.axvline(1.0, color="#444", linewidth=0.8, linestyle=":")
    axes.set_xlabel("speed of a training step relative to bf16 (one H200)")
    figure.savefig(EVIDENCE / "speed.svg", metadata={"Date": None})


def smooth(values: list[float], width: int = 20) -> list[float]:
    """Running mean over the last `width` values."""
    return [sum(values[max(0, i - width + 1) : i + 1]) / (i + 1 - max(0, i - width + 1)) for i in range(len(values))]


def loss() -> None:
    """Training loss of each arm and seed, and its gap to bf16 at equal seeds (thick: their mean)."""
    arms = {
        f.stem.removeprefix("loss_"): json.loads(f.read_text(encoding="utf-8"))["runs"]
        for f in sorted(EVIDENCE.glob("loss_*.json"))
    }
    figure, (curves, gaps) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=[2, 1], layout="constrained")
    base = {run["seed"]: smooth(run["loss"]) for run in arms["bf16"]}
    for name, runs in arms.items():
        millions = [t / 1e6 for t in runs[0]["tokens"]]
        each = [smooth(run["loss"]) for run in runs]
        for run, curve in zip(runs, each, strict=True):
            style = dict(zip(range(3), ("-", "--", ":"), strict=True))[run["seed"] % 3]
            label = f"{name}, seed {run['seed']}, validation {run['validation']:.3f}"
            curves.plot(millions, curve, style, color=COLORS.get(name), linewidth=1, label=label)
        if name == "bf16":
            continue
        differences = [
            [a - b for a, b in zip(curve, base[run["seed"]], strict=True)]
            for curve, run in zip(each, runs, strict=True)
        ]
        for difference in differences:
            gaps.plot(millions, difference, color=COLORS.get(name), linewidth=0.5, alpha=0.6)
        gaps.plot(millions, mean_of(differences), color=COLORS.get(name))
    curves.set_ylabel("training loss, nats (mean of 20 steps)")
    curves.legend(frameon=False)
    gaps.axhline(0, color="#444", linewidth=0.8, linestyle=":")
    gaps.set_ylim(-0.1, 0.15)
    gaps.set_ylabel("gap to bf16, nats")
    gaps.set_xlabel("million tokens")
    figure.savefig(EVIDENCE / "loss.svg", metadata={"Date": None})


def mean_of(curves: list[list[float]]) -> list[float]:
    """The mean curve."""
    return [statistics.mean(values) for values in zip(*curves, strict=True)]


def frontier() -> None:
    """Step time against activation temporaries, each relative to bf16 *fast* of the same run."""
    files = sorted(EVIDENCE.glob("frontier_*.json"))
    figure, axes = plt.subplots(1, len(files), figsize=(4.4 * len(files), 3.6), squeeze=False, layout="constrained")
    for file, panel in zip(files, axes[0], strict=True):
        found = json.loads(file.read_text(encoding="utf-8"))
        rows = [row for row in found["rows"] if row["milliseconds"]]
        base = next(row for row in rows if row["recipe"] == "bf16" and row["remat"] == "none")
        for row in rows:
            memory = row["activations_gib"] / base["activations_gib"]
            time = row["milliseconds"] / base["milliseconds"]
            mode = "fast" if row["remat"] == "none" else "small"
            panel.plot(
                memory, time, "o" if mode == "fast" else "s", color=COLORS.get(row["recipe"], "#555"), markersize=8
            )
            text = f"{row['recipe']} {mode}: {row['activations_gib']:.1f} GiB, {row['milliseconds']:.0f} ms"
            slowest = max(r["milliseconds"] for r in rows if r["remat"] == row["remat"])
            offset = (0, 10 if row["milliseconds"] == slowest else -16)
            panel.annotate(text, (memory, time), textcoords="offset points", xytext=offset, fontsize=8, ha="center")
        panel.axvline(0.6, color="#444", linewidth=0.8, linestyle=":")
        args = found["args"]
        layers = f", {args['layers']} layers" if args["layers"] else ""
        panel.set_title(f"{args['model']}{layers}, batch {args['batch']} x {args['seq']}", fontsize=10)
        panel.set(xlim=(0, 1.4), ylim=(0.97, 1.16), xlabel="activation temporaries, of bf16 fast")
    axes[0][0].set_ylabel("step time, of bf16 fast")
    figure.savefig(EVIDENCE / "frontier.svg", metadata={"Date": None})


def emulations() -> None:
    """The table between the marks of docs/speed.md, from evidence/emulations_h200.json."""
    source, page = EVIDENCE / "emulations_h200.json", EVIDENCE.parent / "speed.md"
    if not source.exists():
        return
    found = json.loads(source.read_text(encoding="utf-8"))
    lines = ["| linear | program | forward | | forward + backward | | differing | noise |", "|---" * 8 + "|"]
    lines += [emulation_line(row) for row in found["rows"]]
    where = found["environment"]
    lines += ["", f"{where['device']}, JAX {where['jax']}, PyTorch {where['torch']}, commit {where['commit'][:7]}."]
    text = page.read_text(encoding="utf-8")
    marks = re.compile(r"(<!-- emulations:.*?-->\n).*?(<!-- end of emulations -->)", re.DOTALL)
    page.write_text(marks.sub(lambda m: m[1] + "\n".join(lines) + "\n" + m[2], text), encoding="utf-8")


def emulation_line(row: dict[str, Any]) -> str:
    def number(value: float | None, form: str, unit: str = "") -> str:
        return "" if value is None else format(value, form) + unit

    cells = [
        " x ".join(map(str, row["shape"])), f"{row['framework']}: {row['name']}",
        number(row["forward_ms"], ".2f", " ms") or row["note"], number(row["forward_ratio"], ".2f", "x"),
        number(row["both_ms"], ".2f", " ms"), number(row["both_ratio"], ".2f", "x"),
        number(row["differing"], ","), number(row["noise"], ".3f"),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    emulations()
    speed()
    frontier()
    loss()
