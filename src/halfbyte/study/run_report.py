"""The page that one run leaves behind: the same page as a parity's, with what one run can say."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halfbyte import report as page
from halfbyte.evaluation.curves import Curve, default_last, end_of, read_curve, smooth, speed_of
from halfbyte.inputs import read_json, replace_file
from halfbyte.report import Axes, Series
from halfbyte.train import TrainConfig, jsonconfig
from halfbyte.train.identity import load_identity
from halfbyte.train.reading import open_directory

from .analysis import DRAWN, body_size, size_text, spikes
from .cells import executions
from .facts import environment, manifest_rows
from .radar_view import radar_of, radar_section

FILE = "report.html"
CAVEAT = (
    "One run: it says what this run did, and not whether another recipe would have done better; halfbyte parity does."
)


def write_run_page(directory: Path, *, sample: tuple[str, str] | None = None) -> Path:
    """report.html of a run directory; `sample` is a prompt and what the model wrote after it."""
    config = open_directory(directory).config
    manifest = read_json(directory / "manifest.json")
    curve = read_curve(directory, config.recipe)
    title = f"{config.name}: {config.model.name}, {config.recipe}, seed {config.seed}"
    path = directory / FILE
    parts = sections(directory, config, manifest, curve, sample)
    replace_file(path, page.html_page(title, parts))
    return path


def sample_section(sample: tuple[str, str] | None) -> str:
    """What the model wrote, its prompt apart."""
    if sample is None:
        return ""
    prompt, written = map(page.text, sample)
    return page.section("Sample", f'<p class="soft">after {prompt}</p>', f'<p class="sample">{written}</p>')


def sections(
    directory: Path, config: TrainConfig, manifest: Mapping[str, Any], curve: Curve, sample: tuple[str, str] | None
) -> list[str]:
    size = body_size(config.model)
    tokens = int(curve.tokens[-1])
    loss, _ = end_of(curve)
    last = default_last(len(curve.rows))
    _, validation = curve.validation()
    held_out = f", validation {validation[-1]:.4f}" if len(validation) else ""
    step = int(curve.steps[-1])
    done = f"{step} of {config.steps} steps" if step < config.steps else f"{step} steps"
    mean = f"mean of the last {last} steps" if last > 1 else "of its last step"
    head = f"training loss {loss:.4f} nats a token ({mean}){held_out} after {done}"
    read = f"{tokens:,} tokens ({tokens / size:.2f} a parameter), data {config.data}"
    scope = f"{size_text(config.model)}, {read}. {CAVEAT}"
    content = load_identity(directory)
    facts = {"run": str(directory), **environment(config, content, str(manifest.get("device", "")))}
    return [
        page.verdict(head, page.paragraph(scope, soft=True)),
        page.figures("Curves", figures(curve)),
        page.section("By source of text", source_table(curve)),
        sample_section(sample),
        radar_section([{"name": config.recipe, "radar": radar_of(directory, config.seed)[:1]}]),
        page.section("Cost", cost_table(curve, dict(manifest))),
        page.section("Precision", precision(dict(manifest), config.recipe)),
        page.section("Provenance", page.table(("", ""), facts.items())),
        page.details("config.json", json.dumps(jsonconfig.to_dict(config), indent=1)),
    ]


def figures(curve: Curve) -> list[str]:
    """Loss, gradient norm and learning rate; the load of experts."""
    width = max(1, len(curve.rows) // 50)
    every = max(1, len(curve.rows) // DRAWN)
    x = curve.tokens[::every].tolist()
    tokens, validation = curve.validation()
    drawn = [Series("training, smoothed", x, _points(smooth(curve.loss, width)[::every]), 0)]
    if len(validation):
        drawn.append(Series("validation", tokens.tolist(), _points(validation), 1, dots=True))
    found = [page.figure("Loss, nats a token", page.line_chart(drawn, Axes("tokens"), label="loss"))]
    for field, name in (("grad_norm", "Gradient norm"), ("learning_rate", "Learning rate")):
        values = curve.column(field)[::every]
        chart = page.line_chart([Series(name, x, _points(values), 2)], Axes("tokens", height=200), label=name)
        found.append(page.figure(name, chart))
    return found + load_figure(curve, x, every)


def load_figure(curve: Curve, x: list[float], every: int) -> list[str]:
    """The load of the fullest and of the emptiest expert, of a model that has experts."""
    if not any("fullest_expert" in row for row in curve.rows):
        return []
    fields = (("fullest_expert", "fullest of any layer"), ("emptiest_expert", "emptiest"))
    drawn = [Series(name, x, _points(curve.column(field)[::every]), n) for n, (field, name) in enumerate(fields)]
    chart = page.line_chart(drawn, Axes("tokens", height=200), label="load of experts")
    return [page.figure("Load of experts, in units of the mean", chart)]


def _points(values: Any) -> list[float | None]:
    return [float(v) if math.isfinite(v) else None for v in values]


def source_table(curve: Curve) -> str:
    last: Mapping[str, float] = next((row for row in reversed(curve.rows) if "validation_loss" in row), {})
    rows = [
        (name.partition("/")[2], f"{value:.4f}") for name, value in last.items() if name.startswith("validation_loss/")
    ]
    return page.table(("source", "validation loss"), rows)


def cost_table(curve: Curve, manifest: dict[str, Any]) -> str:
    speed = speed_of(curve)
    row = (
        ", ".join(executions(manifest)),
        f"{1000 * speed.step_time_s:.0f} ms",
        f"{speed.tokens_per_s_per_device:,.0f}",
        f"{speed.tokens_per_joule:,.1f}" if math.isfinite(speed.tokens_per_joule) else "not counted",
        f"{100 * speed.input_wait:.1f}%",
        spikes(curve),
    )
    head = ("runs", "step", "tokens/s a device", "tokens a joule", "input wait", "spikes of the loss")
    return page.table(head, [row])


def precision(manifest: dict[str, Any], name: str) -> str:
    head = ("recipe of the run", "linears", "recipe", "fprop", "dgrad", "wgrad", "runs", "FLOPs in 4 bits")
    return page.table(head, manifest_rows(manifest, name))
