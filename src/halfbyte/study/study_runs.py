"""Runs of a study: read the cell of each arm and seed, check it against the plan, and describe it for reports.

A cell counts if its data, tokenizer, code and recipe files are those of all other cells, and if its config is that of
its arm, because directories of two arms that were exchanged would reverse the verdict. Reports get data, devices and
versions of the runs, the GEMMs in their precision manifests, and a heat map of the radar's gain of every quantized GEMM
by layer, with all alarms.
"""

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from halfbyte import io
from halfbyte.evaluation.loss_curves import MetricCurve, read_curve
from halfbyte.io import dataclass_json, read_json
from halfbyte.study.arms import COMPARED_FIELDS, Arm, read_provenance
from halfbyte.study.study_plan import StudyPlan
from halfbyte.train import TrainConfig, open_batch_source, parse_metric, read_rows
from halfbyte.train.run_directory import open_run_directory
from halfbyte.train.run_identity import RunIdentity, dataset_fingerprint, load_identity, software_versions
from halfbyte.train.train_config import RESUME_IGNORED_FIELDS

RUN_DONE, DIVERGED, RUN_PARTIAL, MISSING = "done", "diverged", "partial", "missing"
FINISHED_STATES = (RUN_DONE, DIVERGED)
RELOCATABLE_FIELDS = (*RESUME_IGNORED_FIELDS, "data")  # a dataset is compared by content, not by path

MAX_LISTED = 6  # alarms per arm


def cell_directory(directory: Path, arm: Arm, seed: int) -> Path:
    return directory / "arms" / arm.name / f"seed-{seed}"


def read_precision_manifest(folder: Path) -> dict[str, Any] | None:
    """Returns the precision manifest of a run, None before it has started."""
    path = folder / "manifest.json"
    return read_json(path) if path.is_file() else None


def gemm_executions(manifest: Mapping[str, Any]) -> list[str]:
    """Returns how the quantized GEMMs of a manifest ran: native, emulated or plain."""
    words = {gemm["execution"] for site in manifest["sites"] for gemm in site["gemms"].values()}
    return sorted(words - {"plain"}) or ["plain"]


@dataclass(frozen=True)
class RunStatus:
    """Progress of a run. `detail` is the reason of a divergence, `loss` the validation loss after the last step."""

    state: str
    step: int = 0
    detail: str = ""
    loss: float | None = None


def run_status(folder: Path, steps: int) -> RunStatus:
    """Returns the status of a run, read from its files. It is done when the row of its last step has a validation loss;
    the validation loss of an earlier step is not the outcome."""
    if (folder / "diverged.json").is_file():
        record = read_json(folder / "diverged.json")
        try:
            return RunStatus(DIVERGED, int(record["step"]), str(record["error"]))
        except (KeyError, TypeError, ValueError, OverflowError):
            raise ValueError(f"{folder / 'diverged.json'} is damaged; remove it, and the run goes on") from None
    if not (folder / "metrics.jsonl").is_file():
        return RunStatus(MISSING)
    rows = {row["step"]: row for row in read_rows(folder / "metrics.jsonl") if "step" in row}
    step = max(rows, default=0)
    if "validation_loss" not in rows.get(steps, {}):
        return RunStatus(RUN_PARTIAL, step)
    loss = parse_metric(rows[steps]["validation_loss"])
    if not math.isfinite(loss):
        return RunStatus(DIVERGED, step, f"validation loss {loss}")
    return RunStatus(RUN_DONE, step, loss=loss)


@dataclass(frozen=True)
class StudyCell:
    """One run: an arm with one seed."""

    arm: Arm
    seed: int
    status: RunStatus
    folder: Path
    curve: MetricCurve | None

    @property
    def final(self) -> float | None:
        """Returns the validation loss after the last step."""
        return self.status.loss


Cells = dict[tuple[str, int], StudyCell]


def read_cells(plan: StudyPlan, directory: Path) -> Cells:
    """Returns every run of the plan, started or not. Raises ValueError if a run does not match the plan."""
    check_cells(plan, directory)
    cells = {}
    for arm, seed in plan.jobs():
        folder = cell_directory(directory, arm, seed)
        status = run_status(folder, plan.base.steps)
        curve = read_curve(folder, f"{arm.name} seed {seed}") if status.state != MISSING and status.step else None
        cells[arm.name, seed] = StudyCell(arm, seed, status, folder, curve)
    return cells


def check_cells(plan: StudyPlan, directory: Path, now: dict[str, str] | None = None) -> None:
    """Raise ValueError, with run and field, unless every started run has the config of its arm and all used the same
    data, code, tokenizer and recipe files, which must also be those of `now`, the provenance of a run started now."""
    expected: dict[str, tuple[str, str]] = {name: (value, "now") for name, value in (now or {}).items()}
    for arm, seed in plan.jobs():
        folder = cell_directory(directory, arm, seed)
        if not (folder / "config.json").is_file():
            if (folder / "metrics.jsonl").exists():
                raise ValueError(
                    f"{folder} holds metrics and no config.json, so that nobody knows whose they are; put config.json "
                    "back, or remove the folder: it is trained anew"
                )
            continue
        config = open_run_directory(folder, say=lambda text: None).values
        _check_config(plan, arm, seed, config, folder)
        for name, value in read_provenance(folder, config).items():
            first_value, source = expected.setdefault(name, (value, str(folder)))
            if first_value != value:
                raise ValueError(
                    f"{name}: {folder} was made from {value}, and {first_value} is what "
                    f"{'there is now' if source == 'now' else f'{source} was made from'}; a gap between them would not "
                    "be the recipe's. Put back what the runs began with, or begin anew with another --out"
                )


def provenance(plan: StudyPlan) -> dict[str, str]:
    """Returns the hashes of data and code of a run that starts now."""
    return {"data": dataset_fingerprint(open_batch_source(plan.base).dataset), **software_versions()}


def run_environment(config: TrainConfig, run: RunIdentity | None, device: str) -> dict[str, str]:
    """Returns data, with the hash of its content, device and versions of a run."""
    programs = software_versions() | {name: metadata.version(name) for name in ("numpy", "optax")}
    programs["Python"] = platform.python_version()
    return {
        "data": f"{config.data} ({run.data})" if run else config.data,
        "device": device or "nothing has run yet",
        "versions": ", ".join(f"{name} {version}" for name, version in programs.items()),
        "backend of this report": jax.default_backend(),
    }


def first_started_run(plan: StudyPlan, directory: Path) -> RunIdentity | None:
    """Returns the identity of the first started run of a plan, None before there is one. All runs have the same
    data."""
    identities = (load_identity(cell_directory(directory, arm, seed)) for arm, seed in plan.jobs())
    return next(filter(None, identities), None)


def study_devices(plan: StudyPlan, directory: Path) -> str:
    manifests = (read_precision_manifest(cell_directory(directory, arm, seed)) for arm, seed in plan.jobs())
    return ", ".join(sorted({manifest["device"] for manifest in manifests if manifest}))


def precision_table(plan: StudyPlan, directory: Path) -> str:
    """Returns the table of the quantized GEMMs of every arm, from the precision manifests."""
    rows = []
    for arm in plan.arms:
        manifest = next(
            (m for seed in plan.seeds if (m := read_precision_manifest(cell_directory(directory, arm, seed)))), None
        )
        rows += manifest_rows(manifest, arm.name) if manifest else []
    return io.html_table(("arm", "linears", "recipe", "fprop", "dgrad", "wgrad", "runs", "FLOPs in 4 bits"), rows)


def manifest_rows(manifest: dict[str, Any], name: str) -> list[tuple[str, ...]]:
    """Returns one row per recipe and phase of a manifest."""
    rows = []
    for phase in manifest.get("phases", [manifest]):
        groups: dict[tuple[str, ...], list[str]] = {}
        for site in phase["sites"]:
            gemms = [f"{g['left']} × {g['right']}" for g in site["gemms"].values()]
            runs = "/".join(sorted({g["execution"] for g in site["gemms"].values()}))
            path = site["path"].removeprefix("layers/")
            linear = path if site["layers"][1] == 1 else f"{path} {site['layers'][0]}-{site['layers'][1] - 1}"
            groups.setdefault((site["recipe"], *gemms, f"{runs} ({site['backend']})"), []).append(linear)
        share = f"{100 * phase['share_4bit']:.1f}%"
        rows += [(name, ", ".join(linears), *key, share) for key, linears in groups.items() if key[0] != "bf16"]
    return rows or [(name, "all", "bf16", "", "", "", "plain", "0.0%")]


def read_radar_probes(folder: Path, seed: int) -> list[dict[str, Any]]:
    """Returns the newest radar probe of a run, and every earlier one with an alarm."""
    path = folder / "radar.jsonl"
    rows = read_rows(path) if path.is_file() else []
    shown = [*rows[-1:], *(row for row in rows[:-1] if row["alarms"])]
    return [{"seed": seed, "probes": len(rows), **row} for row in shown]


def radar_section(arms: Sequence[Mapping[str, Any]]) -> str:
    """Returns the section of the radar: a heat map per arm with quantized GEMMs, of its first seed, below the alarms of
    all seeds and the GEMMs that were not judged."""
    content = []
    for arm in arms:
        name, probes = arm["name"], [probe for probe in arm["radar"] if probe["gemms"]]
        lines = [(p, text) for p in arm["radar"] for text in [*p["alarms"], *unjudged_gemms(p)]]
        content += [
            io.notice_box(f"{name}: seed {p['seed']} step {p['step']}: {text}") for p, text in lines[:MAX_LISTED]
        ]
        if len(lines) > MAX_LISTED:
            content.append(io.notice_box(f"{name}: and {len(lines) - MAX_LISTED} more, in report.json"))
        if probes:
            content.append(gain_figure(name, probes[0]))
    note = (
        "Same weights, same batch: each quantized GEMM's result against its bf16 result. Gain is the regression "
        "slope; 1 is right. Red: not what its recipe gives on these operands. Blue: far from 1, and what the recipe "
        "gives: its own doing, which is for the verdict to judge, and no defect of the run."
    )
    return io.section("Gradient truth", io.paragraph(note, soft=True), *content) if content else ""


def unjudged_gemms(probe: Mapping[str, Any]) -> list[str]:
    """Returns which GEMMs the probe could not judge: some for lack of a band, or all of them."""
    if probe.get("not_judged"):
        return [f"NOT JUDGED: {probe['not_judged']}"]
    unjudged = [g for g in probe["gemms"] if not g["alarm"] and g.get("error") is None and g.get("band") is None]
    if not unjudged:
        return []
    return [f"{len(unjudged)} of {len(probe['gemms'])} GEMMs were NOT JUDGED: an older radar knew no band for them"]


def gain_figure(name: str, probe: Mapping[str, Any]) -> str:
    """Returns the heat map of gains. Rows: site and GEMM; columns: layers."""
    gemms = probe["gemms"]
    layers = sorted({g["layer"] for g in gemms})
    rows = list(dict.fromkeys(f"{g['site']} {g['gemm']}" for g in gemms))
    cell = {(f"{g['site']} {g['gemm']}", g["layer"]): g for g in gemms}
    values = [[cell.get((row, layer), {}).get("gain") for layer in layers] for row in rows]
    alarms = [[bool(cell.get((row, layer), {}).get("alarm")) for layer in layers] for row in rows]
    shade = [[min(1.0, abs((v if v is not None else 1.0) - 1.0) / 0.02) for v in line] for line in values]
    heat_map = io.heat_map(rows, [str(layer) for layer in layers], values, label=f"gain of each GEMM of {name}",
                           shade=shade, alarms=alarms, form="{:.3f}")  # fmt: skip
    spans = [_span(gemms, "snr_db", "signal to noise {:.1f} to {:.1f} dB"),
             _span(gemms, "recipe_gain", "the recipe itself gives gains of {:.3f} to {:.3f}")]  # fmt: skip
    note = "; ".join([f"step {probe['step']}", *(span for span in spans if span)])
    return io.figure(f"{name}: gain by layer", heat_map, note)


def _check_config(plan: StudyPlan, arm: Arm, seed: int, config: Mapping[str, Any], folder: Path) -> None:
    """Raise ValueError if the config of a run is not that of its arm. Fields that the run's version did not have are
    not compared."""
    planned = dataclass_json.flatten_dotted(arm.field_values(plan.base, seed))
    for name, value in dataclass_json.flatten_dotted(config).items():
        compared = name.split(".")[0] in COMPARED_FIELDS and name not in RELOCATABLE_FIELDS
        if compared and value != planned.get(name, value):
            raise ValueError(
                f"{name}: {folder} holds a run with {value!r}; arm {arm.name!r}, seed {seed} has {planned[name]!r}. "
                "The folder is another arm's: put the folders back where they were, or begin anew with another --out"
            )


def _span(gemms: Sequence[Mapping[str, Any]], field: str, form: str) -> str:
    values = [g[field] for g in gemms if g.get(field) is not None]
    return form.format(min(values), max(values)) if values else ""
