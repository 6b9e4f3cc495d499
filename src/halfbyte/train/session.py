"""Setting a run up: checks first, then the run directory. What is checked before anything is compiled is checked before
anything is written.
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
    """A run that may start: everything opened, everything checked."""

    config: TrainConfig
    existing_run: RunDirectory
    content: str
    """What the data set holds, as a hash."""
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
        """Where the run lives."""
        return self.existing_run.path

    def manifest_of(self, phase: PrecisionPhase) -> PrecisionManifest:
        """What every GEMM of a phase is; also of one that was not planned."""
        device = lookup(jax.local_devices()[0])
        return build_precision_manifest(
            self.config, phase.resolved(self.config), phase.recipe, seq=self.source.seq, device=device
        )


def open_session(config: TrainConfig, directory: Path, *, console: Console, allow_change: bool) -> Session:
    """Check config, data, mesh and memory. Raises ValueError at the first thing that is wrong."""
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
    counted = open_energy_meter(jax.local_devices())
    return Session(config, existing, content, allow_change, mesh, source, preflight, console, say, is_main, counted)


def log_run_header(session: Session) -> None:
    """The head of the log: what will run, where, in which precision."""
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
            each = {(recipe, sizes[1:]): path for path, recipe, sizes in experts}
            errors = [compare_native_grouped_gemms(r, sides=sides, site=path) for (r, sides), path in each.items()]
            _log_selftest_result(session, "GEMMs of experts", experts, errors)


def _log_selftest_result(session: Session, what: str, sites: Sequence[Any], errors: Sequence[dict[str, float]]) -> None:
    worst = ", ".join(f"{name} {max(each[name] for each in errors):.2g}" for name in GEMM_ROLES)
    names = ", ".join(dict.fromkeys(recipe.name for _, recipe, _ in sites))
    session.say(f"self-test of native {names} {what} against backend emulated passed ({worst})")


def check_stacked_residuals_of_loops(session: Session, every: Sequence[PrecisionPhase]) -> None:
    """Compare what kernels write into, and read from, the stacks of looped layers with a layer alone, under the recipes
    of each segment's MLPs in these phases; where no kernel does so, nothing is said.
    """
    config = session.config
    if not uses_stacked_residuals(config.unroll, config.remat):
        return
    looped = (each for phase in every for each in _looped_mlps(phase.resolved(config), session.manifest_of(phase)))
    for recipes, backend in dict.fromkeys(looped):
        if stacked_residuals_match_reference(recipes, backend, ACTIVATIONS[config.model.activation]):
            names = ", ".join(dict.fromkeys(recipe.name for recipe in recipes))
            session.say(f"self-test of layers that {backend} keeps in a loop's stacks under {names} passed")


def _looped_mlps(resolved: ResolvedPolicy, manifest: PrecisionManifest) -> Iterator[tuple[tuple[Recipe, ...], str]]:
    """(the recipes of gate, up and down, the backend that serves them all) of each segment with several layers."""
    mlps = [site for site in manifest.sites if site.path.removeprefix("layers/mlp/") in MLP_SITES]
    for segment in resolved.segments:
        here = [site for site in mlps if site.layers[0] <= segment.start < site.layers[1]]
        recipes = tuple(segment.recipes[site.path] for site in here)
        backends = {site.backend for site in here}
        several = segment.stop - segment.start > 1
        if several and len(backends) == 1 and all(recipe.quantized for recipe in recipes):
            yield recipes, backends.pop()


@dataclass
class RunOutputs:
    """Everything a run writes to, closed together."""

    stack: ExitStack
    store: CheckpointManager
    sinks: list[Sink]
    goodput: Goodput
    capture: ProfileCapture
    display: ProgressDisplay | None = None
    claim: RunDirectoryClaim | None = None
    """On the process that holds the directory."""

    def assert_still_claimed(self) -> None:
        """Raise OSError if the run directory is no longer the one that was claimed; nothing is left at its place."""
        try:
            if self.claim is not None:
                self.claim.assert_still_held()
        except OSError:
            self.store.discard_directory()
            raise

    def write(self, row: dict[str, Any]) -> None:
        """One record to every sink and to the display."""
        for sink in self.sinks:
            sink.write(row)
        if self.display is not None:
            self.display.step(row)


def finalize_directory(session: Session, taken: OpenedRun, returns: Sequence[Rollback]) -> None:
    """The checkpoint is restored, nothing can be refused any more: write config.json, manifest.json and the facts of
    the data."""
    if not session.is_main:
        return
    facts = session.source.facts()
    write_run_files(
        session.directory, session.config, taken.identity, content=session.content, facts=facts, say=session.say
    )
    every = phases(session.config)
    for back in returns:
        every = with_fallback_recipe(every, back.step, back.recipe)
    write_manifest(session, every, returns)


def write_manifest(session: Session, every: Sequence[PrecisionPhase], returns: Sequence[Rollback]) -> None:
    """manifest.json: every phase of the run with its steps, and every return to a checkpoint."""
    listed = [
        {"steps": [phase.start + 1, phase.stop], **session.manifest_of(phase).to_json()}
        for phase in every
        if phase.stop > phase.start
    ]
    manifest = {**listed[0], "phases": listed, "returns": [asdict(back) for back in returns]}
    write_json(session.directory / "manifest.json", manifest)


def count_discarded_rows(session: Session, step: int) -> list[dict[str, Any]]:
    """Rows that the run before has written past `step`: work that is done again. Those that are missing are said."""
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
    """JSONL always; TensorBoard and Weights & Biases as configured. None on other processes than the first."""
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
    """The live panel or plain lines, on the first process; `done` steps are behind the run."""
    if not session.is_main:
        return None
    config = session.config
    title = f"{config.name} · {config.recipe} · {mesh_to_text(dict(session.mesh.shape)) or 'one device'}"
    display = make_display(session.console, title=title, steps=config.steps, every=config.log.every, done=done)
    stack.callback(display.close)
    return display


def make_throughput_meter(session: Session, phase: PrecisionPhase) -> Throughput:
    """Rates of a step in one precision phase."""
    tokens = session.config.batch * session.source.seq
    return session.manifest_of(phase).meter(lookup(jax.devices()[0]), tokens=tokens, devices=len(jax.devices()))
