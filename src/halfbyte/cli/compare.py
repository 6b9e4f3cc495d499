"""Compare training runs: loss curves, final gaps, speed and config, side by side.

halfbyte compare RUN RUN ...

The first run is the baseline. Losses are compared at equal numbers of tokens; a gap is the mean difference over the
last steps (--last), with a standard error that allows for neighbouring steps moving together. Prints tables and a plot,
and writes a PNG."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from halfbyte.cli.result import Result

if TYPE_CHECKING:
    from halfbyte.evaluation.curves import Curve


@dataclass(frozen=True)
class Args:
    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN RUN ...")]
    """Run directories; the first is the baseline."""
    last: int = 0
    """Logged steps that count as the end of a run; 0: a tenth of those in common, at least 20."""
    smooth: int = 0
    """Steps to average the drawn curves over; 0: a fiftieth of the longest run, at least 5."""
    png: str = "compare.png"
    """Where to write the picture; empty: nowhere."""


def run(args: Args) -> Result:
    from halfbyte.cli.screen import console
    from halfbyte.evaluation import curves, pictures

    if len(args.runs) < 2:
        raise ValueError(f"compare takes two or more runs, got {len(args.runs)}; the first is the baseline")
    if args.last < 0 or args.smooth < 0:
        raise ValueError(f"--last and --smooth must be 0 or more, got {args.last} and {args.smooth}")
    folders = [Path(name) for name in args.runs]
    loaded = [curves.read_curve(folder, name) for folder, name in zip(folders, short_names(folders), strict=True)]
    width = args.smooth or curves.default_width(max(len(curve.rows) for curve in loaded))
    data: dict[str, Any] = {
        "baseline": str(folders[0]),
        "smooth": width,
        "runs": [summary(curve, loaded[0], folder, args) for curve, folder in zip(loaded, folders, strict=True)],
        "config": config_differences(folders),
        "evaluations": evaluations(folders),
    }
    screen = console()
    print_summary(screen, data["runs"])
    print_plots(screen, loaded, width)
    print_fields(screen, "evaluations", data["evaluations"], loaded)
    print_fields(screen, "config: fields that differ", data["config"], loaded)
    if args.png:
        Path(args.png).parent.mkdir(parents=True, exist_ok=True)
        pictures.draw_png(loaded, Path(args.png), width=width, last=args.last or None)
        print(f"picture: {args.png}")
    return Result({**data, "png": args.png or None})


def short_names(folders: Sequence[Path]) -> list[str]:
    """The last part of each path, or as many parts as tell the runs apart."""
    for parts in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-parts:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [f"{folder} ({number})" for number, folder in enumerate(folders, 1)]


def summary(curve: "Curve", baseline: "Curve", folder: Path, args: Args) -> dict[str, Any]:
    """What the tables show of one run."""
    from halfbyte.evaluation import curves

    loss, error = curves.end_of(curve, args.last or None)
    found = None if curve is baseline else curves.gap(curve, baseline, last=args.last or None)
    _, validation = curve.validation()
    speed = curves.speed_of(curve)
    return {
        "name": curve.name,
        "run": str(folder),
        "device": manifest_of(folder).get("device"),
        "recipe": config_of(folder).get("recipe"),
        "steps": int(curve.steps[-1]),
        "tokens": int(curve.tokens[-1]),
        "loss": loss,
        "loss_error": error,
        "validation_loss": float(validation[-1]) if len(validation) else None,
        "gap": asdict(found) if found else None,
        "not_finite": int(sum(not math.isfinite(value) for value in curve.loss)),
        "speed": asdict(speed),
        "speedup": curves.speed_of(baseline).step_time_s / speed.step_time_s if same_work(curve, baseline) else None,
    }


def same_work(curve: "Curve", baseline: "Curve") -> bool:
    """Whether both runs take as many tokens a step, so that step times compare."""
    from halfbyte.evaluation.curves import median

    a, b = (median(c.tokens / c.steps) for c in (curve, baseline))
    return bool(a == b)


def config_of(folder: Path) -> dict[str, Any]:
    return _object(folder / "config.json")


def manifest_of(folder: Path) -> dict[str, Any]:
    return _object(folder / "manifest.json")


def _object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    return found if isinstance(found, dict) else {}


def config_differences(folders: Sequence[Path]) -> dict[str, list[Any]]:
    """Dotted field -> its value in each run, for every field in which they differ."""
    from halfbyte.train.jsonconfig import flatten

    configs = [flatten(config_of(folder)) for folder in folders]
    names = sorted(set().union(*configs))
    table = {name: [config.get(name) for config in configs] for name in names}
    return {name: values for name, values in table.items() if any(value != values[0] for value in values)}


def evaluations(folders: Sequence[Path]) -> dict[str, list[Any]]:
    """Task and metric -> its newest value in each run, for tasks that more than one run has."""
    from halfbyte.cli.eval import EVALUATIONS
    from halfbyte.metrics import read_rows

    found = []
    for folder in folders:
        path, newest = folder / EVALUATIONS, {}
        for row in read_rows(path) if path.is_file() else ():
            for name, metric in row["metrics"].items():
                newest[f"{row['task']} {name}"] = metric
        found.append(newest)
    names = sorted(set().union(*found))
    table = {name: [newest.get(name) for newest in found] for name in names}
    return {name: values for name, values in table.items() if sum(value is not None for value in values) > 1}


# Printing

ENDS = ("run", "recipe", "steps", "loss", "gap", "gap %", "validation")
SPEEDS = ("run", "device", "step", "tok/s/device", "TFLOP/s/device", "MFU", "input wait", "speed-up")


def print_summary(screen: Any, runs: Sequence[Mapping[str, Any]]) -> None:
    from halfbyte.cli.screen import table

    ends = [(r["name"], r["recipe"] or "", f"{r['steps']:,}", *_losses(r)) for r in runs]
    screen.print(table(ENDS, ends, title="end of training, nats a token"))
    for r in runs:
        if r["not_finite"]:
            screen.print(f"{r['name']}: {r['not_finite']} steps have a loss that is not finite")
        if r["gap"] and r["gap"]["interpolated"]:
            screen.print(f"{r['name']}: logged at other tokens than {runs[0]['name']}; its loss is interpolated")
    speeds = [(r["name"], r["device"] or "", *_speeds(r)) for r in runs]
    screen.print(table(SPEEDS, speeds, title="speed, medians"))


def _losses(r: Mapping[str, Any]) -> tuple[str, ...]:
    gap = r["gap"]
    apart = ("baseline", "") if gap is None else (_with_error(gap["value"], gap["error"], "+"), _percent(gap))
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
        _number(speed["input_wait"], "{:.1%}"),
        "" if r["speedup"] is None else f"{r['speedup']:.2f}x",
    )


def _number(value: float, form: str) -> str:
    return form.format(value) if math.isfinite(value) else "n/a"


def print_plots(screen: Any, loaded: "Sequence[Curve]", width: int) -> None:
    """The losses, and their differences from the first run."""
    from halfbyte.evaluation.curves import aligned, smooth
    from halfbyte.evaluation.pictures import Line, text_plot

    columns = max(30, min(100, screen.width - 12))
    lines = [Line(curve.name, curve.tokens, smooth(curve.loss, width)) for curve in loaded]
    screen.print(text_plot(lines, title=f"loss, mean over {width} steps", width=columns))
    apart = [Line(loaded[0].name, loaded[0].tokens[:0], loaded[0].loss[:0])]
    for curve in loaded[1:]:
        tokens, mine, base, _ = aligned(curve, loaded[0])
        apart.append(Line(curve.name, tokens, smooth(mine - base, width)))
    screen.print("")
    screen.print(text_plot(apart, title=f"loss minus {loaded[0].name}", width=columns, height=8, zero=True))


def print_fields(screen: Any, title: str, fields: Mapping[str, Sequence[Any]], loaded: "Sequence[Curve]") -> None:
    from halfbyte.cli.screen import table

    screen.print("")
    if fields:
        rows = [(name, *map(_shown, values)) for name, values in fields.items()]
        screen.print(title, style="bold")
        screen.print(table(("", *(curve.name for curve in loaded)), rows))


def _shown(value: Any) -> str:
    from halfbyte.cli.eval import cell

    if isinstance(value, Mapping) and value["value"] is not None:
        return cell(value["value"], value["error"])
    return "-" if value is None else str(value)
