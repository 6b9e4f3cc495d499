"""Report of a single run: an HTML page with those sections of a study report that apply to one run."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halfbyte import io
from halfbyte.evaluation.loss_curves import MetricCurve, curve_speed, default_tail, final_loss, read_curve, smooth
from halfbyte.io import Axes, LineSeries, atomic_write, dataclass_json, read_json
from halfbyte.study.analysis import MAX_PLOT_POINTS, non_embedding_params, size_text, spikes
from halfbyte.study.study_runs import gemm_executions, manifest_rows, radar_section, read_radar_probes, run_environment
from halfbyte.train import TrainConfig
from halfbyte.train.run_directory import open_run_directory
from halfbyte.train.run_identity import load_identity

RUN_REPORT_FILE = "report.html"
SINGLE_RUN_CAVEAT = (
    "One run: it says what this run did, and not whether another recipe would have done better; halfbyte parity does."
)


def write_run_report(directory: Path, *, sample: tuple[str, str] | None = None) -> Path:
    """Write report.html of a run directory and return its path. `sample`: a prompt and the model's completion."""
    config = open_run_directory(directory).config
    manifest = read_json(directory / "manifest.json")
    curve = read_curve(directory, config.recipe)
    title = f"{config.name}: {config.model.name}, {config.recipe}, seed {config.seed}"
    path = directory / RUN_REPORT_FILE
    sections = run_sections(directory, config, manifest, curve, sample)
    atomic_write(path, io.html_page(title, sections))
    return path


def sample_section(sample: tuple[str, str] | None) -> str:
    """Returns the section with the prompt and its completion."""
    if sample is None:
        return ""
    prompt, completion = map(io.escape_html, sample)
    return io.section("Sample", f'<p class="soft">after {prompt}</p>', f'<p class="sample">{completion}</p>')


def run_sections(
    directory: Path,
    config: TrainConfig,
    manifest: Mapping[str, Any],
    curve: MetricCurve,
    sample: tuple[str, str] | None,
) -> list[str]:
    size = non_embedding_params(config.model)
    tokens = int(curve.tokens[-1])
    loss, _ = final_loss(curve)
    last = default_tail(len(curve.rows))
    _, validation = curve.validation()
    held_out = f", validation {validation[-1]:.4f}" if len(validation) else ""
    step = int(curve.steps[-1])
    progress = f"{step} of {config.steps} steps" if step < config.steps else f"{step} steps"
    mean = f"mean of the last {last} steps" if last > 1 else "of its last step"
    head = f"training loss {loss:.4f} nats a token ({mean}){held_out} after {progress}"
    length = f"{tokens:,} tokens ({tokens / size:.2f} a parameter), data {config.data}"
    scope = f"{size_text(config.model)}, {length}. {SINGLE_RUN_CAVEAT}"
    identity = load_identity(directory)
    provenance = {"run": str(directory), **run_environment(config, identity, str(manifest.get("device", "")))}
    return [
        io.verdict_box(head, io.paragraph(scope, soft=True)),
        io.figure_row("Curves", run_figures(curve)),
        io.section("By source of text", run_source_table(curve)),
        sample_section(sample),
        radar_section([{"name": config.recipe, "radar": read_radar_probes(directory, config.seed)[:1]}]),
        io.section("Cost", run_cost_table(curve, dict(manifest))),
        io.section("Precision", precision_section(dict(manifest), config.recipe)),
        io.section("Provenance", io.html_table(("", ""), provenance.items())),
        io.collapsible("config.json", json.dumps(dataclass_json.to_dict(config), indent=1)),
    ]


def run_figures(curve: MetricCurve) -> list[str]:
    """Returns the figures of loss, gradient norm and learning rate, and of the expert load if there are experts."""
    width = max(1, len(curve.rows) // 50)
    stride = max(1, len(curve.rows) // MAX_PLOT_POINTS)
    x = curve.tokens[::stride].tolist()
    tokens, validation = curve.validation()
    series = [LineSeries("training, smoothed", x, _points(smooth(curve.loss, width)[::stride]), 0)]
    if len(validation):
        series.append(LineSeries("validation", tokens.tolist(), _points(validation), 1, dots=True))
    figures = [io.figure("Loss, nats a token", io.line_chart(series, Axes("tokens"), label="loss"))]
    for field, name in (("grad_norm", "Gradient norm"), ("learning_rate", "Learning rate")):
        values = curve.column(field)[::stride]
        chart = io.line_chart([LineSeries(name, x, _points(values), 2)], Axes("tokens", height=200), label=name)
        figures.append(io.figure(name, chart))
    return figures + load_figure(curve, x, stride)


def load_figure(curve: MetricCurve, x: list[float], every: int) -> list[str]:
    """Returns the figure of the load of the fullest and the emptiest expert, none for a dense model."""
    if not any("fullest_expert" in row for row in curve.rows):
        return []
    fields = (("fullest_expert", "fullest of any layer"), ("emptiest_expert", "emptiest"))
    series = [LineSeries(name, x, _points(curve.column(field)[::every]), n) for n, (field, name) in enumerate(fields)]
    chart = io.line_chart(series, Axes("tokens", height=200), label="load of experts")
    return [io.figure("Load of experts, in units of the mean", chart)]


def _points(values: Any) -> list[float | None]:
    return [float(v) if math.isfinite(v) else None for v in values]


def run_source_table(curve: MetricCurve) -> str:
    last: Mapping[str, float] = next((row for row in reversed(curve.rows) if "validation_loss" in row), {})
    rows = [
        (name.partition("/")[2], f"{value:.4f}") for name, value in last.items() if name.startswith("validation_loss/")
    ]
    return io.html_table(("source", "validation loss"), rows)


def run_cost_table(curve: MetricCurve, manifest: dict[str, Any]) -> str:
    speed = curve_speed(curve)
    row = (
        ", ".join(gemm_executions(manifest)),
        f"{1000 * speed.step_time_s:.0f} ms",
        f"{speed.tokens_per_s_per_device:,.0f}",
        f"{speed.tokens_per_joule:,.1f}" if math.isfinite(speed.tokens_per_joule) else "not counted",
        f"{100 * speed.input_wait:.1f}%",
        spikes(curve),
    )
    head = ("runs", "step", "tokens/s a device", "tokens a joule", "input wait", "spikes of the loss")
    return io.html_table(head, [row])


def precision_section(manifest: dict[str, Any], name: str) -> str:
    head = ("recipe of the run", "linears", "recipe", "fprop", "dgrad", "wgrad", "runs", "FLOPs in 4 bits")
    return io.html_table(head, manifest_rows(manifest, name))
