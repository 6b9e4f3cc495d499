"""Compare training runs: loss curves, gaps paired by seed, speed and config, side by side.

halfbyte compare RUN RUN ...
halfbyte compare BF16,BF16,BF16 NVFP4,NVFP4,NVFP4    several seeds of MaxText runs, in one order

The first run's arm (its recipe and policy) is the baseline. Each other run is compared with the baseline run of the
same seed, at equal numbers of tokens: a gap is the mean difference over the last steps (--last). The interval of an arm
is over its seeds, three or more; the error beside a single run is of that run alone and says nothing about another
seed. Runs that differ in more than precision are shown, and not averaged; runs whose data, tokenizer, code or recipe
files differ from the baseline's have no gap at all, and the exit code is 2. Prints tables and a plot; writes an SVG.

A RUN of MaxText is the file of its metrics_file=, or its TensorBoard directory. Such metrics name neither recipe nor
seed: each argument is an arm, its runs joined by commas are its seeds. From three seeds on, an arm has the verdict of
`halfbyte parity` with --margin, without its controls."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from halfbyte.cli.compare_runs import judge_seeds, load_runs, print_verdicts, read_config
from halfbyte.cli.console import EXIT_BAD_INPUT, EXIT_OK, CommandResult, console, print_line, rich_table
from halfbyte.cli.eval import EVALUATIONS, cell
from halfbyte.io import atomic_write, check_int, validated_output_path

if TYPE_CHECKING:
    import numpy as np

    from halfbyte.evaluation.loss_curves import MetricCurve
    from halfbyte.io import LineSeries
    from halfbyte.study.arms import ComparedRun, PairedArm, SeedPair


MAX_STEP_TIMES = 4096  # step times that a spread is drawn from, evenly over a longer run
MAX_POINTS = 1000  # of a drawn line, evenly over a longer run
LABEL = "loss, difference and speed over tokens"  # by which `compare` knows a picture of its own


@dataclass(frozen=True)
class Args:
    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN RUN ...")]
    """Run directories, or metrics of MaxText runs; the first is the baseline."""
    margin: str = "0.5%"
    """For seeds of MaxText runs: the largest gap that does not matter, as 0.5% or 0.02nats."""
    last: int = 0
    """Logged steps that count as the end of a run; 0: a tenth of those in common, at least 20."""
    out: str = "compare.svg"
    """Where to write the picture, an SVG; empty: nowhere."""


def run(args: Args) -> CommandResult:
    from halfbyte.evaluation import loss_curves
    from halfbyte.study.arms import pair_up

    if len(args.runs) < 2:
        raise ValueError(f"compare takes two or more runs, got {len(args.runs)}; the first is the baseline")
    check_int("--last", args.last)
    out = validated_output_path(args.out, flag="--out") if args.out else None
    if out and out.suffix.lower() != ".svg":
        raise ValueError(f"--out {args.out}: compare writes SVG only; use --out {out.with_suffix('.svg')}")
    if out and out.exists() and LABEL not in out.read_text("utf-8", "replace")[:1000]:
        raise ValueError(f"--out {args.out}: exists and is no picture of `halfbyte compare`; give another --out")
    runs = load_runs(args.runs)
    loaded, folders = [run.curve for run in runs], [run.folder for run in runs]
    width = loss_curves.default_smoothing_width(max(len(curve.rows) for curve in loaded))
    arms = pair_up(runs, last=args.last or None)
    pairs = {pair.run.name: pair for arm in arms for pair in arm.pairs}
    data: dict[str, Any] = {
        "baseline": str(folders[0]),
        "smooth": width,
        "runs": [summarise_run(run, pairs.get(run.name), args) for run in runs],
        "arms": [arm_summary(arm) for arm in arms],
        "verdicts": judge_seeds(arms, args.margin) if len(runs) > len(args.runs) else [],
        "config": differing_fields(folders),
        "evaluations": evaluations(folders),
    }
    screen = console()
    print_summary(screen, data["runs"])
    print_arms(screen, data["arms"], data["runs"][0]["name"])
    print_verdicts(screen, data["verdicts"])
    baselines = {name: pair.baseline.curve for name, pair in pairs.items() if pair.baseline}
    print_plots(screen, loaded, width, baselines)
    print_fields(screen, "evaluations", data["evaluations"], loaded)
    print_fields(screen, "config: fields that differ", data["config"], loaded)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(out, draw_curves(loaded, baselines, width, args.last or None))
        print_line(f"picture: {out}")
    foreign = any(pair.has_other_provenance for pair in pairs.values())
    return CommandResult({**data, "picture": str(out) if out else None}, EXIT_BAD_INPUT if foreign else EXIT_OK)


def summarise_run(run: "ComparedRun", pair: "SeedPair | None", args: Args) -> dict[str, Any]:
    """What the tables show of one run; `gap` is against the baseline run of its seed."""
    import numpy as np

    from halfbyte.evaluation import loss_curves

    curve, folder = run.curve, run.folder
    loss, error = loss_curves.final_loss(curve, args.last or None)
    baseline = pair.baseline.curve if pair and pair.baseline else None
    _, validation = curve.validation()
    speed, norms = loss_curves.curve_speed(curve), loss_curves.steady_state_steps(curve).column("grad_norm")
    norms = norms[np.isfinite(norms)]
    device = device_of(folder)
    same = pair is not None and pair.baseline is not None and device == device_of(pair.baseline.folder)
    faster = speed_up(curve, baseline) if baseline is not None and same and same_work(curve, baseline) else None
    return {
        "name": curve.name,
        "run": str(folder),
        "device": device,
        "recipe": run.config.get("recipe"),
        "seed": run.config.get("seed"),
        "steps": int(curve.steps[-1]),
        "tokens": int(curve.tokens[-1]),
        "loss": loss,
        "loss_error": error,
        "validation_loss": float(validation[-1]) if len(validation) else None,
        "paired_with": pair.baseline.name if pair and pair.baseline else None,
        "refusal": pair.unpaired_reason if pair else "",
        "gap": asdict(pair.gap) if pair and pair.gap else None,
        "not_finite": int(sum(not math.isfinite(value) for value in curve.loss)),
        "gradient_norm": {"median": loss_curves.median(norms), "largest": float(norms.max())} if len(norms) else None,
        "speed": asdict(speed),
        "speedup": faster[0] if faster else None,
        "speedup_90": faster[1] if faster else None,
    }


def speed_up(curve: "MetricCurve", baseline: "MetricCurve") -> tuple[float, tuple[float, float] | None]:
    """The ratio of the median step times, and a 90% interval within these two runs; None of a few steps."""
    import numpy as np

    from halfbyte.evaluation.loss_curves import median, steady_state_steps
    from halfbyte.study.equivalence_test import block_bootstrap, percentile_interval

    base, mine = (steady_state_steps(c).column("step_time_s") for c in (baseline, curve))
    known = [times[np.isfinite(times)] for times in (base, mine)]
    first, second = (
        block_bootstrap(times[:: 1 + len(times) // MAX_STEP_TIMES], of=np.median, seed=place)
        for place, times in enumerate(known)
    )
    return median(base) / median(mine), None if first is None or second is None else percentile_interval(first / second)


def arm_summary(arm: "PairedArm") -> dict[str, Any]:
    """An arm's gap over its seeds."""
    return {
        "name": arm.name,
        "seeds": [pair.run.seed for pair in arm.pairs],
        "refusal": arm.refusal,
        "interval_is_over": "seeds" if arm.interval and arm.interval.low is not None else None,
        "gap": asdict(arm.interval) if arm.interval else None,
        "relative_percent": asdict(arm.relative) if arm.relative else None,
    }


def same_work(curve: "MetricCurve", baseline: "MetricCurve") -> bool:
    """Whether both runs take as many tokens a step, so that step times compare."""
    from halfbyte.evaluation.loss_curves import median

    a, b = (median(c.tokens / c.steps) for c in (curve, baseline))
    return bool(a == b)


def device_of(folder: Path) -> str | None:
    """The device that a run's precision manifest names."""
    from halfbyte.study.study_runs import read_precision_manifest

    found = read_precision_manifest(folder)
    return found.get("device") if isinstance(found, dict) else None


def differing_fields(folders: Sequence[Path]) -> dict[str, list[Any]]:
    """Dotted field -> its value in each run, for every field in which they differ."""
    from halfbyte.io.dataclass_json import flatten_dotted

    configs = [flatten_dotted(read_config(folder)) for folder in folders]
    names = sorted(set().union(*configs))
    fields = {name: [config.get(name) for config in configs] for name in names}
    return {name: values for name, values in fields.items() if any(value != values[0] for value in values)}


def evaluations(folders: Sequence[Path]) -> dict[str, list[Any]]:
    """Task and metric -> its newest value in each run, for tasks that more than one run has."""
    from halfbyte.train import parse_metric, read_rows

    found = []
    for folder in folders:
        path, newest = folder / EVALUATIONS, {}
        for row in read_rows(path) if path.is_file() else ():
            metrics = row.get("metrics")
            for name, metric in metrics.items() if isinstance(metrics, Mapping) else ():
                if isinstance(metric, Mapping) and metric.keys() >= {"value", "error"}:  # others are none of ours
                    told = {field: metric[field] for field in ("value", "error")}
                    newest[f"{row.get('task')} {name}"] = {
                        f: None if v is None else parse_metric(v) for f, v in told.items()
                    }
        found.append(newest)
    names = sorted(set().union(*found))
    fields = {name: [newest.get(name) for newest in found] for name in names}
    return {name: values for name, values in fields.items() if sum(value is not None for value in values) > 1}


# Printing

LOSS_COLUMNS = ("run", "recipe", "seed", "steps", "loss", "gap", "gap %", "paired with", "validation")
ARM_COLUMNS = ("arm", "seeds", "gap", "90% interval over seeds", "gap %", "90% interval over seeds")
SPEED_COLUMNS = ("run", "device", "step", "tok/s/device", "TFLOP/s/device", "MFU", "tokens/J", "input wait", "speed-up")


def print_summary(screen: Any, runs: Sequence[Mapping[str, Any]]) -> None:
    ends = []
    for r in runs:
        seed = "" if r["seed"] is None else r["seed"]
        ends.append((r["name"], r["recipe"] or "", seed, f"{r['steps']:,}", *_losses(r)))
    screen.print(
        rich_table(LOSS_COLUMNS, ends, title="end of training, nats a token; ± is within one run, not over seeds")
    )
    for r in runs:
        if r["not_finite"]:
            screen.print(f"{r['name']}: {r['not_finite']} steps have a loss that is not finite")
        if r["gap"] and r["gap"]["interpolated"]:
            screen.print(f"{r['name']}: logged at other tokens than {r['paired_with']}; its loss is interpolated")
    speeds = [(r["name"], r["device"] or "", *_speeds(r)) for r in runs]
    screen.print(rich_table(SPEED_COLUMNS, speeds, title="speed, medians; brackets: 90% within these runs"))


def print_arms(screen: Any, arms: Sequence[Mapping[str, Any]], baseline: str) -> None:
    """The gap of each arm over its seeds, or why there is none."""
    from halfbyte.study.equivalence_test import no_interval_reason

    def cells(found: Mapping[str, Any], digits: int) -> tuple[str, str]:
        mean = f"{found['mean']:+.{digits}f}"
        if found["low"] is None:
            return mean, no_interval_reason(found["count"])
        return mean, f"{found['low']:+.{digits}f} to {found['high']:+.{digits}f}"

    rows = [
        (arm["name"], len(arm["seeds"]), *cells(arm["gap"], 4), *cells(arm["relative_percent"], 3))
        for arm in arms
        if arm["gap"]
    ]
    if rows:
        screen.print(
            rich_table(ARM_COLUMNS, rows, title=f"gap to {baseline} over seeds: paired differences, Student's t")
        )
    for arm in arms:
        if arm["refusal"]:
            screen.print(f"not averaged: {arm['refusal']}", markup=False)


def _losses(r: Mapping[str, Any]) -> tuple[str, ...]:
    gap = r["gap"]
    apart = ("baseline", "", "")
    if gap is not None:
        apart = (_with_error(gap["value"], gap["error"], "+"), _percent(gap), r["paired_with"])
    elif r["refusal"]:
        apart = ("no pair", "", "")
    validation = "" if r["validation_loss"] is None else f"{r['validation_loss']:.4f}"
    return (_with_error(r["loss"], r["loss_error"]), *apart, validation)


def _percent(gap: Mapping[str, Any]) -> str:
    scale = 100 * gap["relative"] / gap["value"] if gap["value"] else 0.0
    return _with_error(100 * gap["relative"], None if gap["error"] is None else abs(scale) * gap["error"], "+", 3)


def _with_error(value: float, error: float | None, sign: str = "", digits: int = 4) -> str:
    return f"{value:{sign}.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def _speeds(r: Mapping[str, Any]) -> tuple[str, ...]:
    speed = r["speed"]
    time = speed["step_time_s"]
    return (
        f"{time:.2f} s" if time >= 10 else f"{1000 * time:.0f} ms",
        _number(speed["tokens_per_s_per_device"], "{:,.0f}"),
        _number(speed["tflops_per_device"], "{:.3g}"),
        _number(speed["mfu"], "{:.1%}"),
        _number(speed["tokens_per_joule"], "{:.1f}"),
        _number(speed["input_wait"], "{:.1%}"),
        _speed_text(r),
    )


def _speed_text(r: Mapping[str, Any]) -> str:
    if r["speedup"] is None:
        return ""
    bounds = r["speedup_90"]
    spread = f"[{bounds[0]:.2f}, {bounds[1]:.2f}]" if bounds else "(too few steps for a spread)"
    return f"{r['speedup']:.2f}x {spread}"


def _number(value: float, form: str) -> str:
    return form.format(value) if math.isfinite(value) else "n/a"


def print_plots(
    screen: Any, loaded: "Sequence[MetricCurve]", width: int, baselines: "Mapping[str, MetricCurve]"
) -> None:
    """The losses, and their differences from the baseline of their seed."""
    from halfbyte.evaluation.loss_curves import PlotLine, align_curves, braille_plot, smooth

    columns = max(30, min(100, screen.width - 12))
    lines = [PlotLine(curve.name, curve.tokens, smooth(curve.loss, width)) for curve in loaded]
    screen.print(braille_plot(lines, title=f"loss, mean over {width} steps", width=columns))
    apart = []
    for curve in loaded:
        nothing = PlotLine(curve.name, curve.tokens[:0], curve.loss[:0])
        if curve.name in baselines:
            tokens, mine, base, _ = align_curves(curve, baselines[curve.name])
            nothing = PlotLine(curve.name, tokens, smooth(mine - base, width))
        apart.append(nothing)
    screen.print("")
    several = len({id(curve) for curve in baselines.values()}) > 1
    title = f"loss minus {'the baseline of its seed' if several else loaded[0].name}"
    screen.print(braille_plot(apart, title=title, width=columns, height=8, zero=True))


def print_fields(screen: Any, title: str, fields: Mapping[str, Sequence[Any]], loaded: "Sequence[MetricCurve]") -> None:
    screen.print("")
    if fields:
        rows = [(name, *map(_format_value, values)) for name, values in fields.items()]
        screen.print(title, style="bold")
        screen.print(rich_table(("", *(curve.name for curve in loaded)), rows))


def _format_value(value: Any) -> str:
    if isinstance(value, Mapping) and value["value"] is not None:
        return cell(value["value"], value["error"])
    return "-" if value is None else str(value)


# The picture


def draw_curves(
    loaded: "Sequence[MetricCurve]", baselines: "Mapping[str, MetricCurve]", width: int, last: int | None
) -> str:
    """Returns an SVG of the loss, its difference from the baseline of the same seed, and the speed, over tokens.

    Faint lines are as logged, strong ones smoothed over `width` steps, dots are validations, and the short strong line
    of a difference is its mean over the `last` steps, which the legend names.
    """
    from halfbyte.evaluation.loss_curves import align_curves, final_gap
    from halfbyte.io import Axes, LineSeries, line_frame, svg_document

    loss: list[LineSeries] = []
    gaps: list[LineSeries] = []
    speed: list[LineSeries] = []
    legend = []
    for place, curve in enumerate(loaded):
        rate, text = curve.column("tokens_per_s_per_device"), curve.name
        at, validation = (values.tolist() for values in curve.validation())
        loss += logged_and_smoothed(curve.tokens, curve.loss, place, width)
        loss.append(LineSeries("", at, validation, place, faint=True, dots=True))
        speed += logged_and_smoothed(curve.tokens, rate, place, width)
        if curve.name in baselines:
            tokens, mine, base, _ = align_curves(curve, baselines[curve.name])
            gaps += logged_and_smoothed(tokens, mine - base, place, width)
            if end := final_gap(curve, baselines[curve.name], last=last):
                gaps.append(LineSeries("", [end.first_tokens, end.last_tokens], [end.value] * 2, place))
                text += f": {end.value:+.4f} over the last {end.points} steps"
        legend.append((text, place))
    x_range = min(curve.tokens[0] for curve in loaded), max(curve.tokens[-1] for curve in loaded)
    panels = (
        (f"loss, nats per token (mean over {width} steps; dots: validation)", loss, Axes("tokens", x_range=x_range)),
        ("loss minus the baseline's", gaps, Axes("tokens", zero=True, height=200, x_range=x_range)),
        ("tokens/s per device", speed, Axes("tokens", zero=True, clip=100, height=160, x_range=x_range)),
    )
    frames = [(caption, line_frame(series, axes)) for caption, series, axes in panels]
    return svg_document(frames, legend, label=LABEL)


def logged_and_smoothed(tokens: "np.ndarray", values: "np.ndarray", colour: int, width: int) -> "list[LineSeries]":
    """Returns the values as logged and their mean over `width` steps, at most MAX_POINTS of each."""
    from halfbyte.evaluation.loss_curves import smooth
    from halfbyte.io import LineSeries

    every = 1 + len(tokens) // MAX_POINTS
    lines = ((values, True), (smooth(values, width), False))
    return [LineSeries("", tokens[::every].tolist(), y[::every].tolist(), colour, faint=faint) for y, faint in lines]
