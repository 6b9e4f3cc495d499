"""Sets up a run: checks first, then the run directory.

All checks that need no compiled program happen before anything is written.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from rich.console import Console

from halfbyte import models
from halfbyte.checkpoint import CheckpointManager
from halfbyte.devices import EnergyMeter, lookup, open_energy_meter
from halfbyte.distributed import mesh_to_text
from halfbyte.io import dataclass_json, write_json
from halfbyte.models.linear_layers import MLP_SITES
from halfbyte.models.model_context import uses_stacked_residuals
from halfbyte.ops import compare_native_grouped_gemms, compare_native_linears, stacked_residuals_match_reference
from halfbyte.ops.activation import ACTIVATIONS
from halfbyte.recipes import GEMM_ROLES, Recipe, ResolvedPolicy
from halfbyte.train.batch_source import BatchSource, open_batch_source
from halfbyte.train.manifest_entries import PrecisionManifest, manifest_table
from halfbyte.train.metric_writers import BackgroundSink, FaultTolerantSink, JsonlSink, Sink, TensorBoardSink, WandbSink
from halfbyte.train.metrics_log import Throughput, missing_steps, read_rows
from halfbyte.train.nan_guard import Rollback
from halfbyte.train.precision_manifest import build_precision_manifest, native_linears
from halfbyte.train.precision_phases import PrecisionPhase, phases, with_fallback_recipe
from halfbyte.train.preflight import GIB, PreflightReport, device_memory_bytes, run_mesh, run_preflight
from halfbyte.train.profiler import ProfileCapture
from halfbyte.train.progress_display import ProgressDisplay, make_display
from halfbyte.train.resume import Goodput
from halfbyte.train.run_directory import (
    OpenedRun,
    RunDirectory,
    check_data_unchanged,
    examine_directory,
    write_run_files,
)
from halfbyte.train.run_identity import RunDirectoryClaim, dataset_fingerprint
from halfbyte.train.train_config import TrainConfig

Say = Callable[[str], None]


@dataclass(frozen=True)
class Session:
    """Run that may start: data and mesh are opened, and all checks have passed."""

    config: TrainConfig
    existing_run: RunDirectory
    content: str
    """Fingerprint of the data set."""
    allow_change: bool
    mesh: Mesh
    source: BatchSource
    preflight: PreflightReport
    console: Console
    say: Say
    """Prints one line, on the main process only."""
    is_main: bool
    energy: EnergyMeter

    @property
    def directory(self) -> Path:
        """Returns the run directory."""
        return self.existing_run.path

    def manifest_of(self, phase: PrecisionPhase) -> PrecisionManifest:
        """Returns the precision manifest of a phase, also of a fallback phase after a rollback."""
        device = lookup(jax.local_devices()[0])
        return build_precision_manifest(
            self.config, phase.resolved(self.config), phase.recipe, seq=self.source.seq, device=device
        )


def open_session(config: TrainConfig, directory: Path, *, console: Console, allow_change: bool) -> Session:
    """Checks config, data, mesh and memory. Raises ValueError at the first failed check."""
    is_main = jax.process_index() == 0

    def say(text: str) -> None:
        if is_main:
            console.print(text, soft_wrap=not console.is_terminal, markup=False, highlight=False)

    existing = examine_directory(directory, config, allow_change=allow_change, say=say)
    mesh = run_mesh(config)
    source = open_batch_source(config)
    content = dataset_fingerprint(source.dataset)
    check_data_unchanged(existing, content, allow=allow_change, say=say)
    device = lookup(jax.local_devices()[0])
    preflight = run_preflight(
        config, mesh, seq=source.seq, device=device, memory=device_memory_bytes(jax.local_devices()[0])
    )
    energy = open_energy_meter(jax.local_devices())
    return Session(config, existing, content, allow_change, mesh, source, preflight, console, say, is_main, energy)


def log_run_header(session: Session) -> None:
    """Logs the header of a run: model, devices, data, memory and the precision manifest."""
    config, preflight = session.config, session.preflight
    device = lookup(jax.devices()[0])
    processes = f", {jax.process_count()} processes" if jax.process_count() > 1 else ""
    where = f"{len(jax.devices())} x {device.name}{processes}"
    shape = mesh_to_text(dict(session.mesh.shape)) or "one device"
    size = models.count_params(config.model)
    active = f" ({models.count_active_params(config.model):,} a token)" if config.model.experts else ""
    session.say(f"{config.name}: {config.model.name}, {size:,} parameters{active}, on {where}, mesh {shape}")
    tokens = config.batch * session.source.seq
    session.say(
        f"data: {session.source.describe()}; {config.steps} steps of "
        f"{config.batch} x {session.source.seq} = {tokens:,} tokens"
        + (f" in {config.accumulate} microbatches" if config.accumulate > 1 else "")
    )
    capacity = f" of {preflight.device_memory / GIB:.1f}" if preflight.device_memory else ""
    session.say(f"memory: {preflight.memory}{capacity}")
    for remark in preflight.remarks:
        session.say(f"NOTE: {remark}")
    if session.is_main:
        for phase, manifest in zip(phases(config), preflight.manifests, strict=True):
            if len(preflight.manifests) > 1:
                session.say(f"steps {phase.start + 1} to {phase.stop}:")
            session.console.print(manifest_table(manifest))
    on_gpu = session.mesh.devices.flat[0].platform in ("gpu", "cuda")
    if on_gpu and session.energy.missing:
        session.say(f"NOTE: energy is not measured: {session.energy.missing}")
    if on_gpu and not config.deterministic:
        session.say("NOTE: this run does not repeat itself bit for bit on a GPU; --deterministic makes it, slower")
    session.say(f"TFLOP/s counted by {preflight.manifests[0].flops_formula}; {_peak_text(session)}")


def _peak_text(session: Session) -> str:
    peak = session.preflight.manifests[0].peak(lookup(jax.devices()[0]))
    if peak is None:
        return "MFU n/a: the peak of this device is not in the table"
    return f"MFU against {peak / 1e12:,.0f} TFLOP/s, the dense peak of this mix of formats"


def selftest_native_gemms(session: Session) -> None:
    """Compares each direction of each native GEMM with backend `emulated`, at the sizes of the linear on one device.

    Runs under the recipe where the device has native units; grouped GEMMs have the matrices of each expert.
    """
    for phase, manifest in zip(phases(session.config), session.preflight.manifests, strict=True):
        resolved = phase.resolved(session.config)
        sites = native_linears(manifest, resolved)
        if sites:
            _log_selftest_result(session, "GEMMs", sites, list(compare_native_linears(sites).values()))
        experts = native_linears(manifest, resolved, experts=True)
        if experts:
            session.say("comparing native GEMMs of experts with backend emulated ...")
            path_by_gemm = {(recipe, sizes[1:]): path for path, recipe, sizes in experts}
            errors = [
                compare_native_grouped_gemms(r, sides=sides, site=path) for (r, sides), path in path_by_gemm.items()
            ]
            _log_selftest_result(session, "GEMMs of experts", experts, errors)


def _log_selftest_result(session: Session, what: str, sites: Sequence[Any], errors: Sequence[dict[str, float]]) -> None:
    worst = ", ".join(f"{name} {max(error[name] for error in errors):.2g}" for name in GEMM_ROLES)
    names = ", ".join(dict.fromkeys(recipe.name for _, recipe, _ in sites))
    session.say(f"self-test of native {names} {what} against backend emulated passed ({worst})")


def check_stacked_residuals_of_loops(session: Session, every: Sequence[PrecisionPhase]) -> None:
    """Compares the residuals that kernels write into stacks of scanned layers, and read from them, with a single layer.

    Runs under the recipes of each segment's MLPs in these phases. Logs nothing if no kernel uses stacks.
    """
    config = session.config
    if not uses_stacked_residuals(config.unroll, config.remat):
        return
    mlps = (mlp for phase in every for mlp in _looped_mlps(phase.resolved(config), session.manifest_of(phase)))
    for recipes, backend in dict.fromkeys(mlps):
        if stacked_residuals_match_reference(recipes, backend, ACTIVATIONS[config.model.activation]):
            names = ", ".join(dict.fromkeys(recipe.name for recipe in recipes))
            session.say(f"self-test of layers that {backend} keeps in a loop's stacks under {names} passed")


def _looped_mlps(resolved: ResolvedPolicy, manifest: PrecisionManifest) -> Iterator[tuple[tuple[Recipe, ...], str]]:
    """Yields (recipes of gate, up and down; their common backend) of each segment with several layers."""
    mlps = [site for site in manifest.sites if site.path.removeprefix("layers/mlp/") in MLP_SITES]
    for segment in resolved.segments:
        segment_mlps = [site for site in mlps if site.layers[0] <= segment.start < site.layers[1]]
        recipes = tuple(segment.recipes[site.path] for site in segment_mlps)
        backends = {site.backend for site in segment_mlps}
        is_scanned = segment.stop - segment.start > 1
        if is_scanned and len(backends) == 1 and all(recipe.quantized for recipe in recipes):
            yield recipes, backends.pop()


@dataclass
class RunOutputs:
    """Outputs of a run, closed together."""

    stack: ExitStack
    store: CheckpointManager
    sinks: list[Sink]
    goodput: Goodput
    capture: ProfileCapture
    display: ProgressDisplay | None = None
    claim: RunDirectoryClaim | None = None
    """None except on the process that locks the directory."""

    def assert_still_claimed(self) -> None:
        """Raises OSError, and deletes unfinished saves, if the run directory is no longer the claimed one."""
        try:
            if self.claim is not None:
                self.claim.assert_still_held()
        except OSError:
            self.store.discard_directory()
            raise

    def write(self, row: dict[str, Any]) -> None:
        """Writes one row to every sink and to the display."""
        for sink in self.sinks:
            sink.write(row)
        if self.display is not None:
            self.display.step(row)


def finalize_directory(session: Session, taken: OpenedRun, returns: Sequence[Rollback]) -> None:
    """Writes config.json, manifest.json and the facts of the data.

    Call it after the checkpoint was restored: no later check refuses the run.
    """
    if not session.is_main:
        return
    facts = session.source.facts()
    write_run_files(
        session.directory, session.config, taken.identity, content=session.content, facts=facts, say=session.say
    )
    run_phases = phases(session.config)
    for back in returns:
        run_phases = with_fallback_recipe(run_phases, back.step, back.recipe)
    write_manifest(session, run_phases, returns)


def write_manifest(session: Session, every: Sequence[PrecisionPhase], returns: Sequence[Rollback]) -> None:
    """Writes manifest.json: every precision phase of the run with its steps, and every rollback."""
    manifests = [
        {"steps": [phase.start + 1, phase.stop], **session.manifest_of(phase).to_json()}
        for phase in every
        if phase.stop > phase.start
    ]
    manifest = {**manifests[0], "phases": manifests, "returns": [asdict(back) for back in returns]}
    write_json(session.directory / "manifest.json", manifest)


def count_discarded_rows(session: Session, step: int) -> list[dict[str, Any]]:
    """Returns the rows after `step`, whose steps are recomputed. Logs a note if rows before `step` are missing."""
    path = session.directory / "metrics.jsonl"
    if not session.is_main:
        return []
    rows = read_rows(path) if path.exists() else []
    missing, first, last = missing_steps(rows, step)
    if missing:
        session.say(
            f"NOTE: metrics.jsonl lacks the rows of {missing} of the {step} steps before the checkpoint, from "
            f"step {first} to {last}; curves and reports will lack them"
        )
    return [row for row in rows if row.get("step", 0) > step]


def open_sinks(session: Session, stack: ExitStack, *, resume_step: int | None) -> list[Sink]:
    """Opens JSONL, and TensorBoard and Weights & Biases if configured. Returns no sinks except on process 0."""
    if not session.is_main:
        return []
    config, directory = session.config, session.directory
    say, lines, events = session.say, directory / "metrics.jsonl", directory / "tensorboard"
    sinks: list[Sink] = [
        FaultTolerantSink("metrics.jsonl", lambda: JsonlSink(lines, resume_step=resume_step, say=say), say)
    ]
    if config.log.tensorboard:
        sinks.append(
            FaultTolerantSink("TensorBoard's log", lambda: TensorBoardSink(events, resume_step=resume_step), say)
        )
    if config.log.wandb:
        facts: Any = {"name": directory.name, "directory": directory, "config": dataclass_json.to_dict(config)}
        sinks.append(
            FaultTolerantSink("Weights & Biases", lambda: BackgroundSink(WandbSink(config.log.wandb, **facts)), say)
        )
    for sink in sinks:
        stack.callback(sink.close)
    return sinks


def open_display(session: Session, stack: ExitStack, *, done: int) -> ProgressDisplay | None:
    """Opens the live panel or plain lines on process 0; `done` steps are already finished."""
    if not session.is_main:
        return None
    config = session.config
    title = f"{config.name} · {config.recipe} · {mesh_to_text(dict(session.mesh.shape)) or 'one device'}"
    display = make_display(session.console, title=title, steps=config.steps, every=config.log.every, done=done)
    stack.callback(display.close)
    return display


def make_throughput_meter(session: Session, phase: PrecisionPhase) -> Throughput:
    """Returns the throughput meter of one precision phase."""
    tokens = session.config.batch * session.source.seq
    return session.manifest_of(phase).meter(lookup(jax.devices()[0]), tokens=tokens, devices=len(jax.devices()))
