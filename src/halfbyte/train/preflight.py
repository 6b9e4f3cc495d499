"""What can be known to fail is found here, before anything is compiled: mesh, shapes, blocks, backends, memory."""

import math
import os
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh

from halfbyte import models
from halfbyte.devices import Device
from halfbyte.sharding import DEFAULT_RULES, axis_size, default_shape, format_mesh, make_mesh, parse_mesh

from .config import TrainConfig
from .precision import phases
from .precision_manifest import Manifest, build_manifest
from .state import TrainState, abstract_state

GIB = 2**30


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes a device: exact for the state, a floor for activations (the residual stream alone) and an estimate."""

    state: int
    gradients: int
    activations_floor: int
    activations: int

    @property
    def floor(self) -> int:
        """No program of this run can need less."""
        return self.state + self.gradients + self.activations_floor

    @property
    def total(self) -> int:
        """What the run probably needs."""
        return self.state + self.gradients + self.activations

    def __str__(self) -> str:
        activations = f"activations ~{self.activations / GIB:.2f}"
        parts = f"state {self.state / GIB:.2f} + gradients {self.gradients / GIB:.2f} + {activations}"
        return f"{self.total / GIB:.2f} GiB a device ({parts})"


@dataclass(frozen=True)
class Preflight:
    """What was found: the manifest of each precision phase, memory, and remarks."""

    manifests: tuple[Manifest, ...]
    memory: MemoryEstimate
    device_memory: int | None
    remarks: tuple[str, ...]


def run_mesh(config: TrainConfig, devices: list[jax.Device] | np.ndarray | None = None) -> Mesh:
    """The mesh of the run; without one in the config, fsdp over every device."""
    shape = parse_mesh(config.mesh)
    if not shape:
        shape = default_shape(jax.devices() if devices is None else list(np.ravel(np.asarray(devices, dtype=object))))
    return make_mesh(shape, devices)


def check(config: TrainConfig, mesh: Mesh, *, seq: int, device: Device, memory: int | None) -> Preflight:
    """Raise ValueError at the first thing that cannot work; else what is known about the run before it compiles."""
    models.check_mesh(config.model, mesh, batch=config.batch // config.accumulate, seq=seq)
    if mesh.size > 1 and (config.radar or config.telemetry):
        models.refuse_experts(config.model, "radar and telemetry on a mesh")
    estimate = estimate_memory(config, mesh, seq=seq)
    remarks = []
    if memory is not None and estimate.floor > memory:
        raise ValueError(
            f"the run needs at least {estimate.floor / GIB:.1f} GiB a device (state {estimate.state / GIB:.1f}, "
            f"gradients {estimate.gradients / GIB:.1f}), and the device has {memory / GIB:.1f} GiB; use a larger mesh "
            f"(now {format_mesh(dict(mesh.shape)) or 'one device'}), --optimizer.mu-dtype bfloat16, or a smaller model"
        )
    if memory is not None and estimate.total > memory:
        remarks.append(
            f"memory may not suffice: about {estimate.total / GIB:.1f} of {memory / GIB:.1f} GiB; "
            "try --remat full, --remat quantized, more --accumulate, or a larger mesh"
        )
    manifests = tuple(
        build_manifest(config, phase.resolved(config), phase.recipe, seq=seq, device=device) for phase in phases(config)
    )
    return Preflight(manifests, estimate, memory, tuple(remarks))


def shard_bytes(tree: object) -> int:
    """Bytes of one device's shards of abstract arrays that carry shardings."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


class TooLarge(ValueError):
    """Arrays for which there is no room here."""


def check_room(tree: object) -> None:
    """TooLarge if abstract arrays that carry shardings take more than a device has."""
    size, memory = shard_bytes(tree), memory_of(jax.local_devices()[0])
    if memory is not None and size > memory:
        raise TooLarge(
            f"the arrays take {size / GIB:,.1f} GiB of a device, and it has {memory / GIB:,.1f} GiB; is the run's "
            "config as it was? If so, read it where there is more memory, or more devices (--mesh)"
        )


def estimate_memory(config: TrainConfig, mesh: Mesh, *, seq: int) -> MemoryEstimate:
    """Bytes a device, from shapes and shardings alone."""
    state: TrainState = abstract_state(config, mesh)
    shards = axis_size(mesh, (*DEFAULT_RULES.mesh_axes("batch"), "context"))
    tokens = config.batch // config.accumulate * seq // shards
    model, tensor = config.model, axis_size(mesh, "tensor")
    stream = 2 * model.embed // tensor  # bf16, sequence-sharded over tensor between blocks
    inside = 2 * ((model.heads + 2 * model.kv_heads) * model.head_dim * 2 + model.active_mlp * 3) // tensor + 4 * stream
    attended = 2 * 2 * (model.heads + model.kv_heads) * model.head_dim // tensor  # q, k, v and the output
    kept = {
        "full": stream,
        "dots": stream + inside,
        "none": stream + inside * 2,
        "quantized": 2 * stream + attended,
    }[config.remat]
    accumulator = 2 if config.accumulate > 1 else 1
    return MemoryEstimate(
        state=shard_bytes(state),
        gradients=shard_bytes(state.params) * accumulator,
        activations_floor=tokens * stream * model.layers,
        activations=tokens * (kept * model.layers + inside),
    )


def memory_of(device: jax.Device) -> int | None:
    """Bytes that one device may use; for a CPU its share of the machine. None where nobody says."""
    if device.platform == "cpu":
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total // jax.local_device_count()
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit")
