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

from halfbyte import metrics, models
from halfbyte.checkpoint import Checkpoints
from halfbyte.conformance import check_stacks, native_experts_agree, native_sites_agree
from halfbyte.devices import Energy, energy, lookup
from halfbyte.inputs import write_json
from halfbyte.models.context import keeps_stacks
from halfbyte.models.linear import MLP_SITES
from halfbyte.ops.activation import ACTIVATIONS
from halfbyte.profiling import Capture
from halfbyte.recipe import GEMMS, Recipe, Resolved
from halfbyte.sharding import format_mesh

from . import jsonconfig
from .claim import Claim
from .config import TrainConfig
from .directory import Taken, check_data, look_at, settle
from .goodput import Goodput
from .guard import Return
from .identity import fingerprint
from .manifest_table import table
from .precision import Phase, phases, with_fallback
from .precision_manifest import Manifest, build_manifest, native_sites
from .preflight import GIB, Preflight, check, memory_of, run_mesh
from .reading import RunDirectory
from .source import Source, open_source

Say = Callable[[str], None]


@dataclass(frozen=True)
class Session:
    """A run that may start: everything opened, everything checked."""

    config: TrainConfig
    found: RunDirectory
    content: str
    """What the data set holds, as a hash."""
    allow_change: bool
    mesh: Mesh
    source: Source
    preflight: Preflight
    console: Console
    say: Say
    """Prints one line, on the main process only."""
    is_main: bool
    energy: Energy

    @property
    def directory(self) -> Path:
        """Where the run lives."""
        return self.found.path

    def manifest_of(self, phase: Phase) -> Manifest:
        """What every GEMM of a phase is; also of one that was not planned."""
        device = lookup(jax.local_devices()[0])
        return build_manifest(
            self.config, phase.resolved(self.config), phase.recipe, seq=self.source.seq, device=device
        )


def open_session(config: TrainConfig, directory: Path, *, console: Console, allow_change: bool) -> Session:
    """Check config, data, mesh and memory. Raises ValueError at the first thing that is wrong."""
    is_main = jax.process_index() == 0

    def say(text: str) -> None:
        if is_main:
            console.print(text, soft_wrap=True, markup=False, highlight=False)

    found = look_at(directory, config, allow_change=allow_change, say=say)
    mesh = run_mesh(config)
    source = open_source(config)
    content = fingerprint(source.dataset)
    check_data(found, content, allow=allow_change, say=say)
    device = lookup(jax.local_devices()[0])
    preflight = check(config, mesh, seq=source.seq, device=device, memory=memory_of(jax.local_devices()[0]))
    counted = energy(jax.local_devices())
    return Session(config, found, content, allow_change, mesh, source, preflight, console, say, is_main, counted)


def show_start(session: Session) -> None:
    """The head of the log: what will run, where, in which precision."""
    config, preflight = session.config, session.preflight
    device = lookup(jax.devices()[0])
    processes = f", {jax.process_count()} processes" if jax.process_count() > 1 else ""
    where = f"{len(jax.devices())} x {device.name}{processes}"
    shape = format_mesh(dict(session.mesh.shape)) or "one device"
    size = models.count_params(config.model)
    active = f" ({models.count_active(config.model):,} a token)" if config.model.experts else ""
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
            session.console.print(table(manifest))
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


def check_native_gemms(session: Session) -> None:
    """Compare each native GEMM direction with `carrier`, under the recipe and at the sizes of each native linear on one
    device, where the device has native units; of experts with the matrices of each.
    """
    for phase, manifest in zip(phases(session.config), session.preflight.manifests, strict=True):
        resolved = phase.resolved(session.config)
        sites = native_sites(manifest, resolved)
        if sites:
            _say_agreed(session, "GEMMs", sites, list(native_sites_agree(sites).values()))
        experts = native_sites(manifest, resolved, experts=True)
        if experts:
            session.say("comparing native GEMMs of experts with carrier ...")
            each = {(recipe, sizes[1:]): path for path, recipe, sizes in experts}
            found = [native_experts_agree(r, sides=sides, site=path) for (r, sides), path in each.items()]
            _say_agreed(session, "GEMMs of experts", experts, found)


def _say_agreed(session: Session, what: str, sites: Sequence[Any], found: Sequence[dict[str, float]]) -> None:
    worst = ", ".join(f"{name} {max(each[name] for each in found):.2g}" for name in GEMMS)
    names = ", ".join(dict.fromkeys(recipe.name for _, recipe, _ in sites))
    session.say(f"self-test of native {names} {what} against carrier passed ({worst})")


def check_stacks_of_loops(session: Session, every: Sequence[Phase]) -> None:
    """Compare what kernels write into, and read from, the stacks of looped layers with a layer alone, under the recipes
    of each segment's MLPs in these phases; where no kernel does so, nothing is said.
    """
    config = session.config
    if not keeps_stacks(config.unroll, config.remat):
        return
    looped = (each for phase in every for each in _looped_mlps(phase.resolved(config), session.manifest_of(phase)))
    for recipes, backend in dict.fromkeys(looped):
        if check_stacks(recipes, backend, ACTIVATIONS[config.model.activation]):
            names = ", ".join(dict.fromkeys(recipe.name for recipe in recipes))
            session.say(f"self-test of layers that {backend} keeps in a loop's stacks under {names} passed")


def _looped_mlps(resolved: Resolved, manifest: Manifest) -> Iterator[tuple[tuple[Recipe, ...], str]]:
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
class Outputs:
    """Everything a run writes to, closed together."""

    stack: ExitStack
    store: Checkpoints
    sinks: list[metrics.Sink]
    goodput: Goodput
    capture: Capture
    display: metrics.Display | None = None
    claim: Claim | None = None
    """On the process that holds the directory."""

    def check_place(self) -> None:
        """Raise OSError if the run directory is no longer the one that was claimed; nothing is left at its place."""
        try:
            if self.claim is not None:
                self.claim.check()
        except OSError:
            self.store.abandon()
            raise

    def write(self, row: dict[str, Any]) -> None:
        """One record to every sink and to the display."""
        for sink in self.sinks:
            sink.write(row)
        if self.display is not None:
            self.display.step(row)


def settle_directory(session: Session, taken: Taken, returns: Sequence[Return]) -> None:
    """The checkpoint is restored, nothing can be refused any more: write config.json, manifest.json and the facts of
    the data."""
    if not session.is_main:
        return
    facts = session.source.facts()
    settle(session.directory, session.config, taken.identity, content=session.content, facts=facts, say=session.say)
    every = phases(session.config)
    for back in returns:
        every = with_fallback(every, back.step, back.recipe)
    write_manifest(session, every, returns)


def write_manifest(session: Session, every: Sequence[Phase], returns: Sequence[Return]) -> None:
    """manifest.json: every phase of the run with its steps, and every return to a checkpoint."""
    listed = [
        {"steps": [phase.start + 1, phase.stop], **session.manifest_of(phase).to_json()}
        for phase in every
        if phase.stop > phase.start
    ]
    found = {**listed[0], "phases": listed, "returns": [asdict(back) for back in returns]}
    write_json(session.directory / "manifest.json", found)


def dropped_rows(session: Session, step: int) -> list[dict[str, Any]]:
    """Rows that the run before has written past `step`: work that is done again. Those that are missing are said."""
    path = session.directory / "metrics.jsonl"
    if not session.is_main:
        return []
    rows = metrics.read_rows(path) if path.exists() else []
    missing, first, last = metrics.missing_steps(rows, step)
    if missing:
        session.say(
            f"NOTE: metrics.jsonl lacks the rows of {missing} of the {step} steps before the checkpoint, from "
            f"step {first} to {last}; curves and reports will lack them"
        )
    return [row for row in rows if row.get("step", 0) > step]


def open_sinks(session: Session, stack: ExitStack, *, resume_step: int | None) -> list[metrics.Sink]:
    """JSONL always; TensorBoard and Weights & Biases as configured. None on other processes than the first."""
    if not session.is_main:
        return []
    config, directory = session.config, session.directory
    say, lines, events = session.say, directory / "metrics.jsonl", directory / "tensorboard"
    sinks: list[metrics.Sink] = [
        metrics.Guarded("metrics.jsonl", lambda: metrics.Jsonl(lines, resume_step=resume_step, say=say), say)
    ]
    if config.log.tensorboard:
        sinks.append(
            metrics.Guarded("TensorBoard's log", lambda: metrics.TensorBoard(events, resume_step=resume_step), say)
        )
    if config.log.wandb:
        facts: Any = {"name": directory.name, "directory": directory, "config": jsonconfig.to_dict(config)}
        sinks.append(
            metrics.Guarded("Weights & Biases", lambda: metrics.Aside(metrics.WandB(config.log.wandb, **facts)), say)
        )
    for sink in sinks:
        stack.callback(sink.close)
    return sinks


def open_display(session: Session, stack: ExitStack) -> metrics.Display | None:
    """The live panel or plain lines, on the first process."""
    if not session.is_main:
        return None
    config = session.config
    title = f"{config.name} · {config.recipe} · {format_mesh(dict(session.mesh.shape)) or 'one device'}"
    display = metrics.make_display(session.console, title=title, steps=config.steps, every=config.log.every)
    stack.callback(display.close)
    return display


def make_meter(session: Session, phase: Phase) -> metrics.Throughput:
    """Rates of a step in one precision phase."""
    tokens = session.config.batch * session.source.seq
    return session.manifest_of(phase).meter(lookup(jax.devices()[0]), tokens=tokens, devices=len(jax.devices()))
