"""Checks of a run before anything is compiled: mesh, shapes, blocks, backends, memory; and the manifest as a table."""

import io
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh
from rich import box
from rich.console import Console
from rich.table import Table

from halfbyte import models
from halfbyte.devices import Device
from halfbyte.distributed import DEFAULT_RULES, axis_size, default_shape, make_mesh, mesh_to_text, parse_mesh
from halfbyte.recipes import GEMM_ROLES
from halfbyte.train.precision_manifest import (
    TILES_NAME,
    XLA_BACKENDS,
    XLA_NAME,
    GemmEntry,
    LinearEntry,
    PrecisionManifest,
    build_precision_manifest,
)
from halfbyte.train.precision_phases import phases
from halfbyte.train.train_config import TrainConfig
from halfbyte.train.train_state import TrainState, abstract_state

GIB = 2**30


class OutOfMemoryEstimateError(ValueError):
    """Arrays do not fit into the memory of a device."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes per device: exact for the state; a lower bound (only the residual stream) and an estimate for
    activations."""

    state: int
    gradients: int
    activations_floor: int
    activations: int

    @property
    def lower_bound(self) -> int:
        """Bytes that every program of this run needs."""
        return self.state + self.gradients + self.activations_floor

    @property
    def total(self) -> int:
        """Estimate of the bytes that the run needs."""
        return self.state + self.gradients + self.activations

    def __str__(self) -> str:
        activations = f"activations ~{self.activations / GIB:.2f}"
        parts = f"state {self.state / GIB:.2f} + gradients {self.gradients / GIB:.2f} + {activations}"
        return f"{self.total / GIB:.2f} GiB a device ({parts})"


@dataclass(frozen=True)
class PreflightReport:
    """The precision manifest of each phase, memory, and remarks."""

    manifests: tuple[PrecisionManifest, ...]
    memory: MemoryEstimate
    device_memory: int | None
    remarks: tuple[str, ...]


def run_mesh(config: TrainConfig, devices: list[jax.Device] | np.ndarray | None = None) -> Mesh:
    """Returns the mesh of the run; without one in the config, fsdp over every device."""
    shape = parse_mesh(config.mesh)
    if not shape:
        shape = default_shape(jax.devices() if devices is None else list(np.ravel(np.asarray(devices, dtype=object))))
    return make_mesh(shape, devices)


def run_preflight(config: TrainConfig, mesh: Mesh, *, seq: int, device: Device, memory: int | None) -> PreflightReport:
    """Raises ValueError at the first thing that cannot work. Returns what is known about the run before it compiles."""
    models.check_mesh(config.model, mesh, batch=config.batch // config.accumulate, seq=seq)
    if mesh.size > 1 and (config.radar or config.telemetry):
        models.check_dense(config.model, "radar and telemetry on a mesh")
    estimate = estimate_memory(config, mesh, seq=seq)
    remarks = []
    if memory is not None and estimate.lower_bound > memory:
        raise ValueError(
            f"the run needs at least {estimate.lower_bound / GIB:.1f} GiB a device (state {estimate.state / GIB:.1f}, "
            f"gradients {estimate.gradients / GIB:.1f}), and the device has {memory / GIB:.1f} GiB; use a larger mesh "
            f"(now {mesh_to_text(dict(mesh.shape)) or 'one device'}), --optimizer.mu-dtype bfloat16, or a smaller model"
        )
    if memory is not None and estimate.total > memory:
        remarks.append(
            f"memory may not suffice: about {estimate.total / GIB:.1f} of {memory / GIB:.1f} GiB; "
            "try --remat full, --remat quantized, more --accumulate, or a larger mesh"
        )
    manifests = tuple(
        build_precision_manifest(config, phase.resolved(config), phase.recipe, seq=seq, device=device)
        for phase in phases(config)
    )
    return PreflightReport(manifests, estimate, memory, tuple(remarks))


def shard_bytes(tree: object) -> int:
    """Returns the bytes of one device's shards of abstract arrays with shardings."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def check_fits_memory(tree: object) -> None:
    """Raises OutOfMemoryEstimateError if abstract arrays with shardings take more memory than a device has."""
    size, memory = shard_bytes(tree), device_memory_bytes(jax.local_devices()[0])
    if memory is not None and size > memory:
        raise OutOfMemoryEstimateError(
            f"the arrays take {size / GIB:,.1f} GiB of a device, and it has {memory / GIB:,.1f} GiB; is the run's "
            "config as it was? If so, read it where there is more memory, or more devices (--mesh)"
        )


def activation_bytes(config: TrainConfig, tensor: int) -> tuple[int, int, int]:
    """Returns bytes per token: of the residual stream, of what a layer saves under the run's remat policy (at least the
    stream), and of what is live inside a layer.
    """
    model = config.model
    stream = 2 * model.embed // tensor  # bf16, sequence-sharded over tensor between blocks
    inside = 2 * ((model.heads + 2 * model.kv_heads) * model.head_dim * 2 + model.active_mlp * 3) // tensor + 4 * stream
    attended = 2 * 2 * (model.heads + model.kv_heads) * model.head_dim // tensor  # q, k, v and the output
    saved = {
        "full": stream,
        "dots": stream + inside,
        "none": stream + inside * 2,
        "quantized": 2 * stream + attended,
    }[config.remat]
    return stream, saved, inside


def estimate_memory(config: TrainConfig, mesh: Mesh, *, seq: int) -> MemoryEstimate:
    """Estimates bytes per device from shapes and shardings."""
    state: TrainState = abstract_state(config, mesh)
    shards = axis_size(mesh, (*DEFAULT_RULES.mesh_axes("batch"), "context"))
    tokens = config.batch // config.accumulate * seq // shards
    stream, saved, live = activation_bytes(config, axis_size(mesh, "tensor"))
    accumulator = 2 if config.accumulate > 1 else 1
    return MemoryEstimate(
        state=shard_bytes(state),
        gradients=shard_bytes(state.params) * accumulator,
        activations_floor=tokens * stream * config.model.layers,
        activations=tokens * (saved * config.model.layers + live),
    )


def device_memory_bytes(device: jax.Device) -> int | None:
    """Returns the bytes that one device may use; for a CPU its share of the host. None if the device does not tell."""
    if device.platform == "cpu":
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total // jax.local_device_count()
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit")


def manifest_table(manifest: PrecisionManifest) -> Table:
    """Returns the manifest as a table; manifest.json has every operand of every GEMM."""
    rows = Table(
        title=f"precision manifest: recipe {manifest.recipe}, policy {manifest.policy}, {manifest.device}",
        title_style="bold",
        title_justify="left",
        caption=manifest_caption(manifest),
        caption_justify="left",
        caption_style="",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    for name in ("linear", "layers", "k×n", "fprop", "dgrad", "wgrad", "runs", "FLOPs"):
        rows.add_column(name, justify="right" if name == "FLOPs" else "left", no_wrap=True)
    for site in manifest.sites:
        in_layers = site.path.startswith("layers/")
        executions = sorted({gemm.execution for gemm in site.gemms.values()} - {"plain"})
        rows.add_row(
            site.path.removeprefix("layers/"),
            f"{site.layers[0]}-{site.layers[1] - 1}" if in_layers else "-",
            f"{site.k}×{site.n}",
            *(_cell(site.gemms[gemm]) for gemm in GEMM_ROLES),
            _runs_cell(site, executions),
            f"{100 * site.flops / manifest.step_flops:.1f}%",
            style="" if executions else "dim",
        )
    return rows


def manifest_text(manifest: PrecisionManifest) -> str:
    """Returns `manifest_table` as text of at most 120 columns."""
    text = io.StringIO()
    Console(width=120, file=text, color_system=None).print(manifest_table(manifest))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _runs_cell(site: LinearEntry, executions: list[str]) -> str:
    """Returns how the GEMMs of a linear run and by which backend, without the backend where it has the same name."""
    backend = backend_summary(site.backend, site.gemms)
    if not executions:
        return site.backend
    return backend if executions == [backend] else f"{', '.join(executions)} ({backend})"


def manifest_caption(manifest: PrecisionManifest) -> str:
    """Lists the operands of each quantized recipe with the passes that quantize them, and the totals."""
    lines = []
    quantized = (site for site in manifest.sites if any(gemm.execution != "plain" for gemm in site.gemms.values()))
    for site in {site.recipe: site for site in quantized}.values():
        for name, gemm in site.gemms.items():
            left, right = gemm.made_by
            lines.append(f"{site.recipe} {name}: {gemm.left} ({left})  ×  {gemm.right} ({right})")
    lines += sorted(
        {
            f"{backend} does not serve {site.path.removeprefix('layers/')}: {reason}"
            for site in manifest.sites
            for backend, reason in site.passed_over.items()
            if not manifest.device.startswith("cpu")
        }
    )
    multipliers = ", ".join(f"{name} {100 * share:.1f}%" for name, share in manifest.share_by_multiplier.items())
    lines += [] if manifest.device.startswith("cpu") else [f"norms of a layer: {manifest.norms}"]
    tokens, tiled = manifest.sites[0].tokens, any(site.backend == TILES_NAME for site in manifest.sites)
    return "\n".join(
        [
            *lines,
            *(["routers of experts are float32 and never quantized"] if tiled else []),
            f"{tokens:,} tokens a GEMM; the rest up to 100% of FLOPs is attention, in bf16",
            f"{100 * manifest.share_4bit:.1f}% of FLOPs in 4 bits; multiplied in {multipliers}",
        ]
    )


def backend_summary(backend: str, gemms: Mapping[str, GemmEntry]) -> str:
    """Returns the backend of a linear, and which of its GEMMs XLA multiplies instead."""
    by_xla = [name for name, gemm in gemms.items() if gemm.multiplied_by == XLA_NAME]
    is_uniform = backend in (*XLA_BACKENDS, XLA_NAME, TILES_NAME) or not by_xla
    return backend if is_uniform else f"{backend}; {' '.join(by_xla)} by xla"


def pass_summary(gemms: Mapping[str, GemmEntry]) -> str:
    """Returns the backends whose passes quantize the operands of a linear: one name, or the GEMMs of each."""
    backends: dict[str, list[str]] = {}
    for name, gemm in gemms.items():
        backends.setdefault("+".join(dict.fromkeys(gemm.made_by)), []).append(name)
    texts = [f"{' '.join(names)}: {by}" for by, names in backends.items()]
    return next(iter(backends)) if len(backends) == 1 else "; ".join(texts)


def _cell(gemm: GemmEntry) -> str:
    """Returns the formats of both operands; one name if they are the same."""
    left, right = gemm.left.split()[0], gemm.right.split()[0]
    return left if left == right else f"{left}×{right}"
