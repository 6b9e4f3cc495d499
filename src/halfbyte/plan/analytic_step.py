"""Analytic model of a step: needed FLOPs, compulsory bytes and collectives per layer, without compiling it.

It models a well placed program: each GEMM runs once (twice if remat repeats it), the weights of a layer are
all-gathered while the previous layer computes, and its gradients are reduce-scattered during the next one. The model is
used where the compiler plugin is missing, as the bound of a layout search before anything is compiled, and to fit rates
to published throughputs, because the compiled programs of other software are not known.

`planned_gemms` lists the GEMMs of the linears from the precision manifest: format, size and number of calls. A compiled
step is compared with the same list.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from halfbyte import models
from halfbyte.devices import Device
from halfbyte.distributed import parse_mesh
from halfbyte.distributed.mesh import total_axis_sizes
from halfbyte.ops.backends.cudnn_block_scaled import SCALE_TILE_ROWS
from halfbyte.plan.cluster_model import GROUPED_PREFIX, ClusterModel, axes_across_racks, group_span
from halfbyte.plan.operand_traffic import BF16_BYTES, FLOAT32_BYTES, compulsory_bytes
from halfbyte.plan.simulator import StepEvent
from halfbyte.plan.step_placement import REMAT_LINEARS, balanced_expert_load, token_expert_pairs
from halfbyte.train import TrainConfig, phases
from halfbyte.train.manifest_entries import TILES_NAME, LinearEntry
from halfbyte.train.precision_manifest import build_precision_manifest
from halfbyte.train.preflight import activation_bytes

MMA_FORMAT = {"nvfp4": "fp4", "mxfp4": "fp4", "fp8": "fp8", "mxfp8": "fp8"}
BYTES_OF_DTYPE = {"bfloat16": BF16_BYTES, "float32": FLOAT32_BYTES}
BYTES_PER_CODE = {"fp4": 0.5, "fp8": 1.0}  # bytes per element of an all-gathered weight
# Counted in the compiled programs of llama3-8b on 8 GB200: memory traffic besides operands. STREAMS is per layer, in
# units of the residual stream [tokens, embed] in bfloat16; LOGITS is in units of the float32 logits; PARAMETER is in
# bytes per parameter (optimizer).
STREAMS, LOGITS, PARAMETER = 57.0, 3.75, 28.0
# Arrays [tokens, mlp] that an unquantized SwiGLU moves, forward and backward: reads gate, up (dy), writes h (dx).
SWIGLU = 9.0
OPERAND_TRAFFIC_EXCESS = 1.3  # operand bytes over compulsory ones in the same programs


@dataclass(frozen=True)
class PlannedGemm:
    """One of the three GEMMs of a linear, over consecutive layers with one recipe."""

    path: str
    gemm: str
    format: str
    """Format that the tensor cores multiply: fp4, fp8 or bf16 (emulated GEMMs are bf16)."""
    native: bool
    """True if block-scaled tensor cores read the codes: cuDNN calls, and this package's kernel for experts."""
    experts: bool
    sizes: tuple[int, int, int]
    """(m, n, k) on one device."""
    layers: int
    microbatches: int
    forward_calls: int
    backward_calls: int
    """Calls per layer and microbatch in each pass."""
    flops: float
    """FLOPs of one call per layer and microbatch, summed over all of them and over all devices."""

    @property
    def calls(self) -> int:
        """Returns the calls per step and device."""
        return self.layers * self.microbatches * (self.forward_calls + self.backward_calls)

    @property
    def padding_flops(self) -> int:
        """Returns the FLOPs per step and device that cuDNN's block-scaled GEMMs spend on padding to whole tiles."""
        if not self.native or self.experts:  # ExpertRowLoad has the padding of experts
            return 0
        lhs_rows, rhs_rows, k = self.sizes
        padded = (lhs_rows + -lhs_rows % SCALE_TILE_ROWS) * (rhs_rows + -rhs_rows % SCALE_TILE_ROWS)
        return self.calls * 2 * (padded - lhs_rows * rhs_rows) * k


@dataclasses.dataclass(frozen=True)
class DeviceShard:
    """Share of one device in a step."""

    tokens: float
    tensor: int
    shards: int
    """Devices over which each parameter is sharded."""
    experts: int = 1
    """Size of the mesh axis `expert`, which shards the stacks of experts in addition."""


def planned_gemms(config: TrainConfig, device: Device) -> tuple[PlannedGemm, ...]:
    """Returns the GEMMs of the first precision phase of `config` on `device`, those of the head last.

    Raises ValueError if a backend does not support a linear.
    """
    phase, meshed = phases(config)[0], dataclasses.replace(config, mesh=config.mesh or "fsdp=1")
    resolved = phase.resolved(config)
    manifest = build_precision_manifest(meshed, resolved, phase.recipe, seq=config.seq, device=device)
    gemms = []
    for site in manifest.sites:
        layered = site.path.startswith("layers/")
        terms = 2 if resolved.recipe_at(site.path, site.layers[0] if layered else None).remainder else 1
        gemms += _gemms_of_linear(site, config, terms)
    return tuple(gemms)


def _gemms_of_linear(site: LinearEntry, config: TrainConfig, terms: int) -> list[PlannedGemm]:
    """Returns the GEMMs of one linear. x is the sum of `terms` operands, each with an fprop GEMM of its own."""
    (start, stop), (tokens, inputs, outputs) = site.layers, site.on_device
    remat_calls = terms if site.path in REMAT_LINEARS[config.remat] else 0
    sizes = {"fprop": (tokens, outputs, inputs), "dgrad": (tokens, inputs, outputs), "wgrad": (inputs, outputs, tokens)}
    return [
        PlannedGemm(
            path=site.path,
            gemm=name,
            format=MMA_FORMAT.get(gemm.runs_in, "bf16"),
            native=gemm.multiplied_by == "native",
            experts=site.backend == TILES_NAME,
            sizes=sizes[name],
            layers=stop - start,
            microbatches=config.accumulate,
            forward_calls=terms if name == "fprop" else 0,
            backward_calls=remat_calls if name == "fprop" else 1,
            flops=site.flops / 3,
        )
        for name, gemm in site.gemms.items()
    ]


def fp4_calls(gemms: Iterable[PlannedGemm]) -> int:
    """Returns the calls of native FP4 GEMMs per step."""
    return sum(gemm.calls for gemm in gemms if gemm.native and gemm.format == "fp4")


def sizes_of(config: TrainConfig) -> DeviceShard:
    """Returns the share of one device of the mesh of `config`."""
    mesh = total_axis_sizes(parse_mesh(config.mesh))
    token_shards = prod(mesh.get(axis, 1) for axis in ("data", "fsdp", "expert", "context"))
    tensor = mesh.get("tensor", 1)
    return DeviceShard(
        config.batch * config.seq / token_shards / tensor, tensor, mesh.get("fsdp", 1) * tensor, mesh.get("expert", 1)
    )


def analytic_step_events(
    config: TrainConfig, cluster: ClusterModel, linears: Sequence[PlannedGemm]
) -> tuple[StepEvent, ...]:
    """Returns the events of a step of `config` on `cluster`, with the GEMMs `linears` in their planned formats."""
    sizes, layers = sizes_of(config), config.model.layers
    forward, backward = _layer(config, cluster, sizes, linears)
    return (
        StepEvent("loop", "forward", times=layers, body=forward),
        *_head(config, sizes),
        StepEvent("loop", "backward", times=layers, body=backward),
        _pass_event("optimizer", PARAMETER * _parameters(config, sizes)),
    )


def analytic_memory(config: TrainConfig) -> dict[str, float]:
    """Returns the bytes per device by category, computed from shapes only."""
    sizes, layers = sizes_of(config), config.model.layers
    parameters = _parameters(config, sizes)
    tokens = sizes.tokens * sizes.tensor / config.accumulate
    _, saved, live = activation_bytes(config, sizes.tensor)
    specs, optimizer = models.flat_param_specs(config.model).values(), config.optimizer
    muon_parameters = sum(spec.size for spec in specs if optimizer.name == "muon" and spec.kind in models.GEMM_KINDS)
    second_moments = parameters - muon_parameters / sizes.shards  # Muon has one moment
    return {
        "weights": 4 * parameters,
        "optimizer": parameters * BYTES_OF_DTYPE[optimizer.mu_dtype]
        + second_moments * BYTES_OF_DTYPE[optimizer.nu_dtype],
        "gradients": 4 * parameters * (2 if config.accumulate > 1 else 1),
        "residuals": (tokens * saved + (0 if config.remat == "full" else _expert_residual_bytes(config))) * layers,
        "activations": tokens * live + _expert_workspace_bytes(config),
        "workspace": _layer_in_flight_bytes(config, sizes) if sizes.shards > sizes.tensor else 0.0,
    }


def _layer_in_flight_bytes(config: TrainConfig, sizes: DeviceShard) -> float:
    """Returns the bytes of two layers' all-gathered bf16 weights and of their gradients before the reduce-scatter."""
    return _weights(config) / sizes.tensor * 2 * (BF16_BYTES + BYTES_OF_DTYPE[config.precision.reduce_dtype])


def memory_floor(config: TrainConfig) -> float:
    """Returns a lower bound of the bytes per device of `config`; no compiled program was seen below it.

    It counts the state, gradients in their reduce dtype, and the residual stream of each layer. For full and quantized
    remat it is at least four fifths of `analytic_memory`, which is -8% to +1% off compiled steps (docs/plan.md).
    """
    sizes, memory = sizes_of(config), analytic_memory(config)
    gradients = memory["gradients"] * (0.5 if config.precision.reduce_dtype == "bfloat16" else 1.0)
    stream = sizes.tokens * config.model.embed * BF16_BYTES / config.accumulate
    floor = memory["weights"] + memory["optimizer"] + gradients + stream * config.model.layers
    return max(floor, 0.8 * sum(memory.values())) if config.remat in ("full", "quantized") else floor


def _parameters(config: TrainConfig, sizes: DeviceShard) -> float:
    """Returns the parameters per device."""
    experts = sum(spec.size for spec in models.flat_param_specs(config.model).values() if spec.kind == "experts")
    return (models.count_params(config.model) - experts + experts / sizes.experts) / sizes.shards


def _expert_workspace_bytes(config: TrainConfig) -> float:
    """Returns the peak bytes of one expert layer: twice its residuals, and float32 gradients of a device's experts."""
    gradients = FLOAT32_BYTES * _expert_weights(config) / prod(parse_mesh(config.mesh).values())
    return 2 * _expert_residual_bytes(config) + gradients  # both 0 without experts


def _expert_residual_bytes(config: TrainConfig) -> float:
    """Returns the bytes of one expert layer's residuals: x of gate and up, both outputs, and x of down, in bfloat16.

    The buffers of each device fit all (token, expert) pairs of a microbatch, because any routing may occur.
    """
    return float(token_expert_pairs(config) * BF16_BYTES * (2 * config.model.embed + 3 * config.model.mlp))


def _expert_weights(config: TrainConfig) -> float:
    """Returns the weights of one layer's experts, all together."""
    specs = models.flat_param_specs(config.model).values()
    return sum(spec.size for spec in specs if spec.kind == "experts") / config.model.layers


def _layer(
    config: TrainConfig, cluster: ClusterModel, sizes: DeviceShard, linears: Sequence[PlannedGemm]
) -> tuple[tuple[StepEvent, ...], tuple[StepEvent, ...]]:
    """Returns the events (forward, backward with what remat repeats) of one layer: the mean layer if layers differ."""
    segments, layers = phases(config)[0].resolved(config).segments, config.model.layers
    devices, fill_ratio = cluster.count, balanced_expert_load(config, cluster.count).filled
    forward: list[StepEvent] = []
    backward: list[StepEvent] = []
    gathered_bytes = 0.0
    for gemm in (gemm for gemm in linears if gemm.path.startswith("layers/")):
        flops, name, format = gemm.flops / layers / devices, "attention linears", gemm.format
        if gemm.experts:
            flops, name, format = flops * fill_ratio, "experts", f"{GROUPED_PREFIX}{format}"
        elif "/mlp/" in gemm.path:
            name = "mlp"
        event = StepEvent("gemm", gemm.path, name, format=format, flops=flops)
        forward += [event] * gemm.forward_calls
        backward += [event] * gemm.backward_calls
        if gemm.gemm == "fprop" and not gemm.experts:
            _, outputs, inputs = gemm.sizes
            gathered_bytes += gemm.layers / layers * inputs * outputs * BYTES_PER_CODE.get(format, BF16_BYTES)
    quantized = any(r.quantized for s in segments for r in s.recipes.values())
    bytes_moved = (
        OPERAND_TRAFFIC_EXCESS * _compulsory(config) / layers if quantized else _unquantized_pass_bytes(config, sizes)
    )
    pass_format = "kernel" if quantized else ""
    streams = STREAMS * sizes.tokens * config.model.embed * BF16_BYTES
    attention_flops = 4 * sizes.tokens * config.seq * config.model.heads * config.model.head_dim / 2
    forward_core = _attention("forward", attention_flops, config.model.head_dim)
    forward += [
        forward_core,
        _pass_event("operands", bytes_moved / 3, pass_format),
        _pass_event("norm and residual", streams / 3),
    ]
    backward += [forward_core] * (config.remat == "full")
    backward += [
        _attention("backward", 2.5 * attention_flops, config.model.head_dim),
        _pass_event("operands", 2 * bytes_moved / 3, pass_format),
        _pass_event("norm and residual", 2 * streams / 3),
    ]
    gradient_bytes = _weights(config) / sizes.tensor * BYTES_OF_DTYPE[config.precision.reduce_dtype]
    gather, scatter = _weight_collectives(config, cluster, gathered_bytes, gradient_bytes)
    tensor_collectives = list(_tensor_parallel_collectives(config, cluster, sizes))
    if config.model.experts:
        forward_sends, backward_sends = _expert_all_to_alls(config, cluster)
        remat_events = [*_router(config, devices), *forward_sends] if config.remat == "full" else []
        forward += [*_router(config, devices), *forward_sends]
        backward += [*remat_events, *_router(config, devices) * 2, *backward_sends]
    return (*gather, *forward, *tensor_collectives, *_waits(gather)), (
        *gather,
        *scatter,
        *backward,
        *tensor_collectives,
        *tensor_collectives,
        *_waits((*gather, *scatter)),
    )


def _weights(config: TrainConfig) -> float:
    """Returns the weights of one layer's linears, without experts."""
    return sum(site.k * site.n for site in models.linear_shapes(config.model, 1, 1)[:-1] if not site.experts)


def _unquantized_pass_bytes(config: TrainConfig, sizes: DeviceShard) -> float:
    """Returns the bytes that an unquantized layer moves for its SwiGLU and for casts of its weights."""
    gated = SWIGLU * sizes.tokens * config.model.active_mlp * BF16_BYTES
    cast = _weights(config) / sizes.shards + _expert_weights(config) / prod(parse_mesh(config.mesh).values())
    return gated + (FLOAT32_BYTES + BF16_BYTES) * cast


def _compulsory(config: TrainConfig) -> float:
    mesh = total_axis_sizes(parse_mesh(config.mesh))
    microbatch = dataclasses.replace(config, accumulate=1, batch=config.batch // config.accumulate)
    return config.accumulate * compulsory_bytes(microbatch, mesh)


def _weight_collectives(
    config: TrainConfig, cluster: ClusterModel, weights: float, gradients: float
) -> tuple[list[StepEvent], list[StepEvent]]:
    """Returns (all-gathers of a layer's weights over fsdp, reductions of its gradients over fsdp, data and expert)."""
    over = axes_across_racks(config.mesh, cluster)
    gather, scatter = [], []
    if "fsdp" in over:
        gather.append(_collective_event("all-gather", ("fsdp",), over, config.accumulate * weights, "codes"))
        scatter.append(_collective_event("reduce-scatter", ("fsdp",), over, config.accumulate * gradients, "f32"))
    for axis, scattered in (("data", ("fsdp",)), ("expert", ("data", "fsdp"))):
        if axis in over:
            inner, outer = group_span(tuple(name for name in scattered if name in over), over)
            scatter.append(_collective_event("all-reduce", (axis,), over, gradients / (inner * outer), "f32"))
    return gather, scatter


def _tensor_parallel_collectives(config: TrainConfig, cluster: ClusterModel, sizes: DeviceShard) -> Iterator[StepEvent]:
    """Yields the exposed all-gathers and reduce-scatters of [tokens, embed] of tensor parallelism."""
    over = axes_across_racks(config.mesh, cluster)
    if "tensor" in over:
        elements = sizes.tokens * sizes.tensor * config.model.embed
        kinds = ("all-gather", BF16_BYTES, "bf16"), ("reduce-scatter", FLOAT32_BYTES, "f32")
        for kind, itemsize, dtype in kinds * 2:
            yield _collective_event(kind, ("tensor",), over, elements * itemsize, dtype, asynchronous=False)


def _expert_all_to_alls(config: TrainConfig, cluster: ClusterModel) -> tuple[list[StepEvent], list[StepEvent]]:
    """Returns the exposed collectives (forward, backward) of one layer's experts.

    They are the all-gather of router logits, the all-to-alls of one row per (token, expert) pair (dispatch and combine,
    and their gradients), and the all-to-all of expert weights if `fsdp` or `tensor` shards them.
    """
    over, model = axes_across_racks(config.mesh, cluster), config.model
    axes, tokens = tuple(over), config.batch * config.seq
    if not axes:
        return [], []
    logits = _collective_event(
        "all-gather", axes, over, float(tokens * model.experts * FLOAT32_BYTES), "f32", asynchronous=False
    )
    bytes_per_device = tokens * model.experts_per_token * model.embed * BF16_BYTES / cluster.count
    rows = [_collective_event("ragged-all-to-all", axes, over, bytes_per_device, "bf16", asynchronous=False)] * 2
    forward, backward = [logits, *rows], [*rows]
    shard_axes = tuple(axis for axis in ("fsdp", "tensor") if axis in over)
    if shard_axes:
        bytes_per_device = FLOAT32_BYTES * config.accumulate * _expert_weights(config) / cluster.count
        all_to_all = _collective_event("all-to-all", shard_axes, over, bytes_per_device, "f32", asynchronous=False)
        forward, backward = [*forward, all_to_all], [*backward, all_to_all]
    return forward, backward


def _router(config: TrainConfig, devices: int) -> list[StepEvent]:
    flops = 2.0 * config.batch * config.seq * config.model.embed * config.model.experts / devices
    return [StepEvent("gemm", "router", "router", format="f32", flops=flops)]


def _collective_event(
    kind: str, axes: tuple[str, ...], over: Mapping[str, tuple[int, int]], array_bytes: float, dtype: str, *,
    asynchronous: bool = True,
) -> StepEvent:  # fmt: skip
    inner, outer = group_span(axes, over)
    return StepEvent(
        "send", f"{kind} over {'+'.join(axes)}", "communication", format=kind, moved=array_bytes, axes=axes,
        dtypes=(dtype,), inner=inner, outer=outer, asynchronous=asynchronous,
    )  # fmt: skip


def _waits(collectives: list[StepEvent] | tuple[StepEvent, ...]) -> list[StepEvent]:
    return [StepEvent("wait", collective.name) for collective in collectives]


def _head(config: TrainConfig, sizes: DeviceShard) -> list[StepEvent]:
    flops = 2.0 * sizes.tokens * config.model.embed * config.model.vocab_size
    gemms = [StepEvent("gemm", "head", "head", format="bf16", flops=flops)] * 3
    return [*gemms, _pass_event("loss", LOGITS * sizes.tokens * config.model.vocab_size * FLOAT32_BYTES)]


def _pass_event(purpose: str, bytes_moved: float, pass_format: str = "") -> StepEvent:
    return StepEvent("pass", purpose, purpose, format=pass_format, moved=bytes_moved)


def _attention(direction: str, flops: float, head_dim: int) -> StepEvent:
    return StepEvent("attention", "attention", "attention", format=direction, flops=flops, head_dim=head_dim)
