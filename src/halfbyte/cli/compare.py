"""Compare training runs: loss curves, gaps paired by seed, speed and config, side by side.

halfbyte compare RUN RUN ...

The first run's arm (its recipe and policy) is the baseline. Each other run is compared with the baseline run of the
same seed, at equal numbers of tokens: a gap is the mean difference over the last steps (--last). The interval of an arm
is over its seeds, three or more; the error beside a single run is of that run alone and says nothing about another
seed. Runs that differ in more than precision are shown, and not averaged; runs whose data, tokenizer, code or recipe
files differ from the baseline's have no gap at all, and the exit code is 2. Prints tables and a plot; writes an SVG."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from halfbyte.cli.eval import EVALUATIONS, cell
from halfbyte.cli.result import BAD_INPUT, DONE, Result
from halfbyte.cli.screen import console, say, table
from halfbyte.inputs import check_output, check_whole, replace_file

if TYPE_CHECKING:
    import numpy as np

    from halfbyte.evaluation.curves import Curve
    from halfbyte.parity.pairing import Arm, Pair, Run
    from halfbyte.report import Series


MOST_TIMES = 4096  # step times that a spread is drawn from, evenly over a longer run
MAX_POINTS = 1000  # of a drawn line, evenly over a longer run
LABEL = "loss, difference and speed over tokens"  # by which `compare` knows a picture of its own


@dataclass(frozen=True)
class Args:
    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN RUN ...")]
    """Run directories; the first is the baseline."""
    last: int = 0
    """Logged steps that count as the end of a run; 0: a tenth of those in common, at least 20."""
    out: str = "compare.svg"
    """Where to write the picture, an SVG; empty: nowhere."""


def run(args: Args) -> Result:
    from halfbyte.evaluation import curves
    from halfbyte.parity.pairing import Run, facts_of, pair_up

    if len(args.runs) < 2:
        raise ValueError(f"compare takes two or more runs, got {len(args.runs)}; the first is the baseline")
    check_whole("--last", args.last)
    out = check_output(args.out, flag="--out") if args.out else None
    if out and out.suffix.lower() != ".svg":
        raise ValueError(f"--out {args.out}: compare writes SVG only; use --out {out.with_suffix('.svg')}")
    if out and out.exists() and LABEL not in out.read_text("utf-8", "replace")[:1000]:
        raise ValueError(f"--out {args.out}: exists and is no picture of `halfbyte compare`; give another --out")
    folders = [Path(name) for name in args.runs]
    loaded = [curves.read_curve(folder, name) for folder, name in zip(folders, short_names(folders), strict=True)]
    width = curves.default_width(max(len(curve.rows) for curve in loaded))
    configs = [config_of(folder) for folder in folders]
    found = zip(loaded, folders, configs, strict=True)
    runs = [Run(curve.name, folder, config, curve, facts_of(folder, config)) for curve, folder, config in found]
    arms = pair_up(runs, last=args.last or None)
    pairs = {pair.run.name: pair for arm in arms for pair in arm.pairs}
    data: dict[str, Any] = {
        "baseline": str(folders[0]),
        "smooth": width,
        "runs": [summary(run, pairs.get(run.name), args) for run in runs],
        "arms": [arm_summary(arm) for arm in arms],
        "config": config_differences(folders),
        "evaluations": evaluations(folders),
    }
    screen = console()
    print_summary(screen, data["runs"])
    print_arms(screen, data["arms"], data["runs"][0]["name"])
    baselines = {name: pair.baseline.curve for name, pair in pairs.items() if pair.baseline}
    print_plots(screen, loaded, width, baselines)
    print_fields(screen, "evaluations", data["evaluations"], loaded)
    print_fields(screen, "config: fields that differ", data["config"], loaded)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        replace_file(out, draw_curves(loaded, baselines, width, args.last or None))
        say(f"picture: {out}")
    foreign = any(pair.foreign for pair in pairs.values())
    return Result({**data, "picture": str(out) if out else None}, BAD_INPUT if foreign else DONE)


def short_names(folders: Sequence[Path]) -> list[str]:
    """The last part of each path, or as many parts as tell the runs apart."""
    for parts in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-parts:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [f"{folder} ({number})" for number, folder in enumerate(folders, 1)]


def summary(run: "Run", pair: "Pair | None", args: Args) -> dict[str, Any]:
    """What the tables show of one run; `gap` is against the baseline run of its seed."""
    import numpy as np

    from halfbyte.evaluation import curves

    curve, folder = run.curve, run.folder
    loss, error = curves.end_of(curve, args.last or None)
    baseline = pair.baseline.curve if pair and pair.baseline else None
    _, validation = curve.validation()
    speed, norms = curves.speed_of(curve), curves.timed(curve).column("grad_norm")
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
        "refusal": pair.refusal if pair else "",
        "gap": asdict(pair.gap) if pair and pair.gap else None,
        "not_finite": int(sum(not math.isfinite(value) for value in curve.loss)),
        "gradient_norm": {"median": curves.median(norms), "largest": float(norms.max())} if len(norms) else None,
        "speed": asdict(speed),
        "speedup": faster[0] if faster else None,
        "speedup_90": faster[1] if faster else None,
    }


def speed_up(curve: "Curve", baseline: "Curve") -> tuple[float, tuple[float, float] | None]:
    """The ratio of the median step times, and a 90% interval within these two runs; None of a few steps."""
    import numpy as np

    from halfbyte.evaluation.curves import median, timed
    from halfbyte.parity.statistics import block_draws, middle

    base, mine = (timed(c).column("step_time_s") for c in (baseline, curve))
    known = [times[np.isfinite(times)] for times in (base, mine)]
    first, second = (
        block_draws(times[:: 1 + len(times) // MOST_TIMES], of=np.median, seed=place)
        for place, times in enumerate(known)
    )
    return median(base) / median(mine), None if first is None or second is None else middle(first / second)


def arm_summary(arm: "Arm") -> dict[str, Any]:
    """An arm's gap over its seeds."""
    return {
        "name": arm.name,
        "seeds": [pair.run.seed for pair in arm.pairs],
        "refusal": arm.refusal,
        "interval_is_over": "seeds" if arm.interval and arm.interval.low is not None else None,
        "gap": asdict(arm.interval) if arm.interval else None,
        "relative_percent": asdict(arm.relative) if arm.relative else None,
    }


def same_work(curve: "Curve", baseline: "Curve") -> bool:
    """Whether both runs take as many tokens a step, so that step times compare."""
    from halfbyte.evaluation.curves import median

    a, b = (median(c.tokens / c.steps) for c in (curve, baseline))
    return bool(a == b)


def config_of(folder: Path) -> Mapping[str, Any]:
    """The fields of a run's config, as it wrote them; none of a folder that holds metrics alone."""
    from halfbyte.train.reading import open_directory

    return open_directory(folder).values if (folder / "config.json").exists() else {}


def device_of(folder: Path) -> str | None:
    """The device that a run's precision manifest names."""
    from halfbyte.parity.cells import manifest_of

    found = manifest_of(folder)
    return found.get("device") if isinstance(found, dict) else None


def config_differences(folders: Sequence[Path]) -> dict[str, list[Any]]:
    """Dotted field -> its value in each run, for every field in which they differ."""
    from halfbyte.train.jsonconfig import flatten

    configs = [flatten(config_of(folder)) for folder in folders]
    names = sorted(set().union(*configs))
    fields = {name: [config.get(name) for config in configs] for name in names}
    return {name: values for name, values in fields.items() if any(value != values[0] for value in values)}


def evaluations(folders: Sequence[Path]) -> dict[str, list[Any]]:
    """Task and metric -> its newest value in each run, for tasks that more than one run has."""
    from halfbyte.metrics import number, read_rows

    found = []
    for folder in folders:
        path, newest = folder / EVALUATIONS, {}
        for row in read_rows(path) if path.is_file() else ():
            metrics = row.get("metrics")
            for name, metric in metrics.items() if isinstance(metrics, Mapping) else ():
                if isinstance(metric, Mapping) and metric.keys() >= {"value", "error"}:  # others are none of ours
                    told = {field: metric[field] for field in ("value", "error")}
                    newest[f"{row.get('task')} {name}"] = {f: None if v is None else number(v) for f, v in told.items()}
        found.append(newest)
    names = sorted(set().union(*found))
    fields = {name: [newest.get(name) for newest in found] for name in names}
    return {name: values for name, values in fields.items() if sum(value is not None for value in values) > 1}


# Printing

ENDS = ("run", "recipe", "seed", "steps", "loss", "gap", "gap %", "paired with", "validation")
ARMS = ("arm", "seeds", "gap", "90% interval over seeds", "gap %", "90% interval over seeds")
SPEEDS = ("run", "device", "step", "tok/s/device", "TFLOP/s/device", "MFU", "tokens/J", "input wait", "speed-up")


def print_summary(screen: Any, runs: Sequence[Mapping[str, Any]]) -> None:
    ends = []
    for r in runs:
        seed = "" if r["seed"] is None else r["seed"]
        ends.append((r["name"], r["recipe"] or "", seed, f"{r['steps']:,}", *_losses(r)))
    screen.print(table(ENDS, ends, title="end of training, nats a token; ± is within one run, not over seeds"))
    for r in runs:
        if r["not_finite"]:
            screen.print(f"{r['name']}: {r['not_finite']} steps have a loss that is not finite")
        if r["gap"] and r["gap"]["interpolated"]:
            screen.print(f"{r['name']}: logged at other tokens than {r['paired_with']}; its loss is interpolated")
    speeds = [(r["name"], r["device"] or "", *_speeds(r)) for r in runs]
    screen.print(table(SPEEDS, speeds, title="speed, medians; brackets: 90% within these runs"))


def print_arms(screen: Any, arms: Sequence[Mapping[str, Any]], baseline: str) -> None:
    """The gap of each arm over its seeds, or why there is none."""
    from halfbyte.parity.verdict import no_interval

    def cells(found: Mapping[str, Any], digits: int) -> tuple[str, str]:
        mean = f"{found['mean']:+.{digits}f}"
        if found["low"] is None:
            return mean, no_interval(found["count"])
        return mean, f"{found['low']:+.{digits}f} to {found['high']:+.{digits}f}"

    rows = [
        (arm["name"], len(arm["seeds"]), *cells(arm["gap"], 4), *cells(arm["relative_percent"], 3))
        for arm in arms
        if arm["gap"]
    ]
    if rows:
        screen.print(table(ARMS, rows, title=f"gap to {baseline} over seeds: paired differences, Student's t"))
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
        _faster(r),
    )


def _faster(r: Mapping[str, Any]) -> str:
    if r["speedup"] is None:
        return ""
    bounds = r["speedup_90"]
    spread = f"[{bounds[0]:.2f}, {bounds[1]:.2f}]" if bounds else "(too few steps for a spread)"
    return f"{r['speedup']:.2f}x {spread}"


def _number(value: float, form: str) -> str:
    return form.format(value) if math.isfinite(value) else "n/a"


def print_plots(screen: Any, loaded: "Sequence[Curve]", width: int, baselines: "Mapping[str, Curve]") -> None:
    """The losses, and their differences from the baseline of their seed."""
    from halfbyte.evaluation.curves import aligned, smooth
    from halfbyte.evaluation.pictures import Line, text_plot

    columns = max(30, min(100, screen.width - 12))
    lines = [Line(curve.name, curve.tokens, smooth(curve.loss, width)) for curve in loaded]
    screen.print(text_plot(lines, title=f"loss, mean over {width} steps", width=columns))
    apart = []
    for curve in loaded:
        nothing = Line(curve.name, curve.tokens[:0], curve.loss[:0])
        if curve.name in baselines:
            tokens, mine, base, _ = aligned(curve, baselines[curve.name])
            nothing = Line(curve.name, tokens, smooth(mine - base, width))
        apart.append(nothing)
    screen.print("")
    several = len({id(curve) for curve in baselines.values()}) > 1
    title = f"loss minus {'the baseline of its seed' if several else loaded[0].name}"
    screen.print(text_plot(apart, title=title, width=columns, height=8, zero=True))


def print_fields(screen: Any, title: str, fields: Mapping[str, Sequence[Any]], loaded: "Sequence[Curve]") -> None:
    screen.print("")
    if fields:
        rows = [(name, *map(_shown, values)) for name, values in fields.items()]
        screen.print(title, style="bold")
        screen.print(table(("", *(curve.name for curve in loaded)), rows))


def _shown(value: Any) -> str:
    if isinstance(value, Mapping) and value["value"] is not None:
        return cell(value["value"], value["error"])
    return "-" if value is None else str(value)


# The picture


def draw_curves(loaded: "Sequence[Curve]", baselines: "Mapping[str, Curve]", width: int, last: int | None) -> str:
    """Returns an SVG of the loss, its difference from the baseline of the same seed, and the speed, over tokens.

    Faint lines are as logged, strong ones smoothed over `width` steps, dots are validations, and the short strong line
    of a difference is its mean over the `last` steps, which the legend names.
    """
    from halfbyte.evaluation.curves import aligned, gap
    from halfbyte.report import Axes, Series, line_frame, svg_document

    loss: list[Series] = []
    gaps: list[Series] = []
    speed: list[Series] = []
    legend = []
    for place, curve in enumerate(loaded):
        rate, text = curve.column("tokens_per_s_per_device"), curve.name
        at, validation = (values.tolist() for values in curve.validation())
        loss += logged_and_smoothed(curve.tokens, curve.loss, place, width)
        loss.append(Series("", at, validation, place, faint=True, dots=True))
        speed += logged_and_smoothed(curve.tokens, rate, place, width)
        if curve.name in baselines:
            tokens, mine, base, _ = aligned(curve, baselines[curve.name])
            gaps += logged_and_smoothed(tokens, mine - base, place, width)
            if end := gap(curve, baselines[curve.name], last=last):
                gaps.append(Series("", [end.first_tokens, end.last_tokens], [end.value] * 2, place))
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


def logged_and_smoothed(tokens: "np.ndarray", values: "np.ndarray", colour: int, width: int) -> "list[Series]":
    """Returns the values as logged and their mean over `width` steps, at most MAX_POINTS of each."""
    from halfbyte.evaluation.curves import smooth
    from halfbyte.report import Series

    every = 1 + len(tokens) // MAX_POINTS
    lines = ((values, True), (smooth(values, width), False))
    return [Series("", tokens[::every].tolist(), y[::every].tolist(), colour, faint=faint) for y, faint in lines]
