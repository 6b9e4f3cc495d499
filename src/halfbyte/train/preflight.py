"""Checks a run before anything is compiled: mesh, shapes, blocks, backends and memory."""

import math
import os
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh

from halfbyte import models
from halfbyte.devices import Device
from halfbyte.distributed import DEFAULT_RULES, axis_size, default_shape, make_mesh, mesh_to_text, parse_mesh
from halfbyte.train.manifest_entries import PrecisionManifest
from halfbyte.train.precision_manifest import build_precision_manifest
from halfbyte.train.precision_phases import phases
from halfbyte.train.train_config import TrainConfig
from halfbyte.train.train_state import TrainState, abstract_state

GIB = 2**30


class OutOfMemoryEstimateError(ValueError):
    """Raised if arrays do not fit into the memory of a device."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Estimated bytes per device.

    The state is exact. Activations have a lower bound (only the residual stream) and an estimate.
    """

    state: int
    gradients: int
    activations_floor: int
    activations: int

    @property
    def lower_bound(self) -> int:
        """Returns the bytes that every program of this run needs."""
        return self.state + self.gradients + self.activations_floor

    @property
    def total(self) -> int:
        """Returns the estimated bytes that the run needs."""
        return self.state + self.gradients + self.activations

    def __str__(self) -> str:
        activations = f"activations ~{self.activations / GIB:.2f}"
        parts = f"state {self.state / GIB:.2f} + gradients {self.gradients / GIB:.2f} + {activations}"
        return f"{self.total / GIB:.2f} GiB a device ({parts})"


@dataclass(frozen=True)
class PreflightReport:
    """Result of the checks: the precision manifest of each phase, the memory estimate and remarks."""

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
    """Checks the run and returns the report. Raises ValueError at the first failed check."""
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
    """Returns bytes per token of the residual stream, of the residuals of a layer, and of the live values in a layer.

    The residuals depend on the remat policy of the run; they are at least the residual stream.
    """
    model = config.model
    stream = 2 * model.embed // tensor  # bf16, sequence-sharded over tensor between blocks
    live = 2 * ((model.heads + 2 * model.kv_heads) * model.head_dim * 2 + model.active_mlp * 3) // tensor + 4 * stream
    attention = 2 * 2 * (model.heads + model.kv_heads) * model.head_dim // tensor  # q, k, v and the output
    saved = {
        "full": stream,
        "dots": stream + live,
        "none": stream + live * 2,
        "quantized": 2 * stream + attention,
    }[config.remat]
    return stream, saved, live


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
    """Returns the bytes that one device may use; for a CPU its share of the host. None if it is unknown."""
    if device.platform == "cpu":
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total // jax.local_device_count()
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit")
