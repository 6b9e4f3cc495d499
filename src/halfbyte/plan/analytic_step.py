"""Analytic model of a step: needed FLOPs, compulsory bytes and collectives per layer, without compiling it.

It models a well placed program: each GEMM runs once (twice where remat repeats it), the weights of a layer are
all-gathered while the previous layer computes, and its gradients are reduce-scattered behind the next one. It is used
where the compiler plugin is missing, bounds a layout search before anything is compiled, and is what published
throughputs are calibrated on, because of other programs no more is known.

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
from halfbyte.plan.operand_traffic import compulsory_bytes
from halfbyte.plan.simulator import StepEvent
from halfbyte.plan.step_placement import REMAT_LINEARS, balanced_expert_load, token_expert_pairs
from halfbyte.train import TrainConfig, phases
from halfbyte.train.precision_manifest import TILES_NAME, LinearEntry, build_precision_manifest
from halfbyte.train.preflight import activation_bytes

MMA_FORMAT = {"nvfp4": "fp4", "mxfp4": "fp4", "fp8": "fp8", "mxfp8": "fp8"}
BF16_BYTES_PER_ELEMENT, FLOAT32_BYTES_PER_ELEMENT = 2, 4
BYTES_PER_CODE = {"fp4": 0.5, "fp8": 1.0}  # bytes of a weight's element that travels
# Counted in the compiled programs of llama3-8b on 8 GB200: bytes that are no operand's, in units of a layer's residual
# stream [tokens, embed] in bfloat16; of the logits in float32; of a parameter.
STREAMS, LOGITS, PARAMETER = 57.0, 3.75, 28.0
SWIGLU = 9.0  # of a token's width in the MLP, both ways, where nothing is quantized: reads gate, up (dy), writes h (dx)
OPERAND_TRAFFIC_EXCESS = 1.3  # operand bytes for each that is compulsory, as these programs have them


@dataclass(frozen=True)
class PlannedGemm:
    """One of the three GEMMs of a linear, over layers that have one recipe."""

    path: str
    gemm: str
    format: str
    """Of the unit that multiplies: fp4, fp8 or bf16 (the last also for what is emulated)."""
    native: bool
    """Whether block-scaled units read codes: calls of a library, and of experts our own kernel."""
    experts: bool
    sizes: tuple[int, int, int]
    """On a device: rows of the left operand and of the right one, and what is summed over."""
    layers: int
    microbatches: int
    forward_calls: int
    backward_calls: int
    """Calls of a layer and microbatch in each pass."""
    flops: float
    """Of one call for each layer and microbatch, all devices together."""

    @property
    def calls(self) -> int:
        """Of a step."""
        return self.layers * self.microbatches * (self.forward_calls + self.backward_calls)

    @property
    def padding_flops(self) -> int:
        """FLOPs of a step and device that only fill tiles of a library's block-scaled GEMMs up."""
        if not self.native or self.experts:  # of experts, ExpertRowLoad says how full tiles are
            return 0
        left, right, summed = self.sizes
        whole = (left + -left % SCALE_TILE_ROWS) * (right + -right % SCALE_TILE_ROWS)
        return self.calls * 2 * (whole - left * right) * summed


@dataclasses.dataclass(frozen=True)
class DeviceShard:
    """One device's part of a step."""

    tokens: float
    tensor: int
    shards: int
    """Devices that the parameters lie on."""
    experts: int = 1
    """Devices of the axis that cuts stacks of experts beside."""


def planned_gemms(config: TrainConfig, device: Device) -> tuple[PlannedGemm, ...]:
    """Those of the first precision phase of `config` on `device`, the head's last. ValueError where a backend cannot
    serve a linear.
    """
    phase, meshed = phases(config)[0], dataclasses.replace(config, mesh=config.mesh or "fsdp=1")
    resolved = phase.resolved(config)
    manifest = build_precision_manifest(meshed, resolved, phase.recipe, seq=config.seq, device=device)
    found = []
    for site in manifest.sites:
        layered = site.path.startswith("layers/")
        pieces = 2 if resolved.recipe_at(site.path, site.layers[0] if layered else None).remainder else 1
        found += _gemms_of_linear(site, config, pieces)
    return tuple(found)


def _gemms_of_linear(site: LinearEntry, config: TrainConfig, pieces: int) -> list[PlannedGemm]:
    """`pieces`: in how many x is multiplied in fprop."""
    (first, last), (tokens, inputs, outputs) = site.layers, site.on_device
    again = pieces if site.path in REMAT_LINEARS[config.remat] else 0
    sizes = {"fprop": (tokens, outputs, inputs), "dgrad": (tokens, inputs, outputs), "wgrad": (inputs, outputs, tokens)}
    return [
        PlannedGemm(
            path=site.path,
            gemm=name,
            format=MMA_FORMAT.get(gemm.runs_in, "bf16"),
            native=gemm.multiplied_by == "native",
            experts=site.backend == TILES_NAME,
            sizes=sizes[name],
            layers=last - first,
            microbatches=config.accumulate,
            forward_calls=pieces if name == "fprop" else 0,
            backward_calls=again if name == "fprop" else 1,
            flops=site.flops / 3,
        )
        for name, gemm in site.gemms.items()
    ]


def fp4_calls(found: Iterable[PlannedGemm]) -> int:
    """How often a step calls native FP4 GEMMs."""
    return sum(each.calls for each in found if each.native and each.format == "fp4")


def sizes_of(config: TrainConfig) -> DeviceShard:
    """The part of one device of the mesh of `config`."""
    mesh = total_axis_sizes(parse_mesh(config.mesh))
    parts = prod(mesh.get(axis, 1) for axis in ("data", "fsdp", "expert", "context"))
    tensor = mesh.get("tensor", 1)
    return DeviceShard(
        config.batch * config.seq / parts / tensor, tensor, mesh.get("fsdp", 1) * tensor, mesh.get("expert", 1)
    )


def analytic_step_events(
    config: TrainConfig, on: ClusterModel, linears: Sequence[PlannedGemm]
) -> tuple[StepEvent, ...]:
    """The events of a step of `config` on `on`, whose GEMMs of `linears` run in the units of the manifest."""
    sizes, layers = sizes_of(config), config.model.layers
    forward, backward = _layer(config, on, sizes, linears)
    return (
        StepEvent("loop", "forward", times=layers, body=forward),
        *_head(config, sizes),
        StepEvent("loop", "backward", times=layers, body=backward),
        _pass_event("optimizer", PARAMETER * _parameters(config, sizes)),
    )


def analytic_memory(config: TrainConfig) -> dict[str, float]:
    """Bytes of a device by category, from shapes alone."""
    sizes, layers = sizes_of(config), config.model.layers
    parameters = _parameters(config, sizes)
    tokens = sizes.tokens * sizes.tensor / config.accumulate
    _, saved, live = activation_bytes(config, sizes.tensor)
    wide = {"bfloat16": 2, "float32": 4}
    specs = models.flat_param_specs(config.model).values()
    by_muon = (
        sum(spec.size for spec in specs if spec.kind in models.GEMM_KINDS) if config.optimizer.name == "muon" else 0
    )
    second = parameters - by_muon / sizes.shards  # Muon has one moment
    return {
        "weights": 4 * parameters,
        "optimizer": parameters * wide[str(config.optimizer.mu_dtype)] + second * wide[str(config.optimizer.nu_dtype)],
        "gradients": 4 * parameters * (2 if config.accumulate > 1 else 1),
        "residuals": (tokens * saved + (0 if config.remat == "full" else _expert_residual_bytes(config))) * layers,
        "activations": tokens * live + _expert_workspace_bytes(config),
        "workspace": _layer_in_flight_bytes(config, sizes) if sizes.shards > sizes.tensor else 0.0,
    }


def _layer_in_flight_bytes(config: TrainConfig, sizes: DeviceShard) -> float:
    """Bytes of two layers' gathered weights in bfloat16, and of two layers' gradients before they are scattered."""
    wide = 2 if config.precision.reduce_dtype == "bfloat16" else 4
    return _weights(config) / sizes.tensor * 2 * (BF16_BYTES_PER_ELEMENT + wide)


def memory_floor(config: TrainConfig) -> float:
    """Bytes of a device under which no program of `config` was seen: state, gradients in the type that they are reduced
    in, and the residual stream of each layer. Full and quantized remat save what shapes tell (docs/plan.md): four
    fifths of that.
    """
    sizes, memory = sizes_of(config), analytic_memory(config)
    gradients = memory["gradients"] * (0.5 if config.precision.reduce_dtype == "bfloat16" else 1.0)
    stream = sizes.tokens * config.model.embed * BF16_BYTES_PER_ELEMENT / config.accumulate
    least = memory["weights"] + memory["optimizer"] + gradients + stream * config.model.layers
    return max(least, 0.8 * sum(memory.values())) if config.remat in ("full", "quantized") else least


def _parameters(config: TrainConfig, sizes: DeviceShard) -> float:
    """Of one device."""
    experts = sum(spec.size for spec in models.flat_param_specs(config.model).values() if spec.kind == "experts")
    return (models.count_params(config.model) - experts + experts / sizes.experts) / sizes.shards


def _expert_workspace_bytes(config: TrainConfig) -> float:
    """Bytes of what a layer's experts hold at once: pairs as they come, and twice through the layer, and in float32 the
    gradients of the experts that a device multiplies.
    """
    gradients = FLOAT32_BYTES_PER_ELEMENT * _expert_weights(config) / prod(parse_mesh(config.mesh).values())
    return 2 * _expert_residual_bytes(config) + gradients  # both 0 without experts


def _expert_residual_bytes(config: TrainConfig) -> float:
    """Bytes that the backward pass of a layer's experts reads: the buffers of a device fit all (token, expert) pairs of
    a microbatch, x of gate and up, both results, and x of down.
    """
    return float(token_expert_pairs(config) * BF16_BYTES_PER_ELEMENT * (2 * config.model.embed + 3 * config.model.mlp))


def _expert_weights(config: TrainConfig) -> float:
    """Of one layer, all experts."""
    specs = models.flat_param_specs(config.model).values()
    return sum(spec.size for spec in specs if spec.kind == "experts") / config.model.layers


def _layer(
    config: TrainConfig, on: ClusterModel, sizes: DeviceShard, linears: Sequence[PlannedGemm]
) -> tuple[tuple[StepEvent, ...], tuple[StepEvent, ...]]:
    """(a layer forward, a layer backward with what remat repeats); the mean layer where they differ."""
    segments, layers = phases(config)[0].resolved(config).segments, config.model.layers
    parts, filled = on.count, balanced_expert_load(config, on.count).filled
    forward: list[StepEvent] = []
    backward: list[StepEvent] = []
    travels = 0.0
    for each in (gemm for gemm in linears if gemm.path.startswith("layers/")):
        flops, name, format = each.flops / layers / parts, "attention linears", each.format
        if each.experts:
            flops, name, format = flops * filled, "experts", f"{GROUPED_PREFIX}{format}"
        elif "/mlp/" in each.path:
            name = "mlp"
        event = StepEvent("gemm", each.path, name, format=format, flops=flops)
        forward += [event] * each.forward_calls
        backward += [event] * each.backward_calls
        if each.gemm == "fprop" and not each.experts:
            _, outputs, inputs = each.sizes
            travels += each.layers / layers * inputs * outputs * BYTES_PER_CODE.get(format, BF16_BYTES_PER_ELEMENT)
    quantized = any(r.quantized for s in segments for r in s.recipes.values())
    bytes_moved = (
        OPERAND_TRAFFIC_EXCESS * _compulsory(config) / layers if quantized else _unquantized_pass_bytes(config, sizes)
    )
    maker = "kernel" if quantized else ""
    streams = STREAMS * sizes.tokens * config.model.embed * BF16_BYTES_PER_ELEMENT
    core = 4 * sizes.tokens * config.seq * config.model.heads * config.model.head_dim / 2
    forward_core = _attention("forward", core, config.model.head_dim)
    forward += [
        forward_core,
        _pass_event("operands", bytes_moved / 3, maker),
        _pass_event("norm and residual", streams / 3),
    ]
    backward += [forward_core] * (config.remat == "full")
    backward += [
        _attention("backward", 2.5 * core, config.model.head_dim),
        _pass_event("operands", 2 * bytes_moved / 3, maker),
        _pass_event("norm and residual", 2 * streams / 3),
    ]
    wide = {"bfloat16": 2, "float32": 4}[config.precision.reduce_dtype]
    weights = _weights(config) / sizes.tensor
    gather, scatter = _weight_collectives(config, on, travels, weights * wide)
    sums = list(_tensor_parallel_collectives(config, on, sizes))
    if config.model.experts:
        there, back = _expert_all_to_alls(config, on)
        repeated = [*_router(config, parts), *there] if config.remat == "full" else []
        forward += [*_router(config, parts), *there]
        backward += [*repeated, *_router(config, parts) * 2, *back]
    return (*gather, *forward, *sums, *_waits(gather)), (
        *gather,
        *scatter,
        *backward,
        *sums,
        *sums,
        *_waits((*gather, *scatter)),
    )


def _weights(config: TrainConfig) -> float:
    """Of one layer, without experts."""
    return sum(site.k * site.n for site in models.linear_shapes(config.model, 1, 1)[:-1] if not site.experts)


def _unquantized_pass_bytes(config: TrainConfig, sizes: DeviceShard) -> float:
    """Bytes of a layer's SwiGLU, and of its weights' casts, where nothing is quantized."""
    gated = SWIGLU * sizes.tokens * config.model.active_mlp * BF16_BYTES_PER_ELEMENT
    cast = _weights(config) / sizes.shards + _expert_weights(config) / prod(parse_mesh(config.mesh).values())
    return gated + (FLOAT32_BYTES_PER_ELEMENT + BF16_BYTES_PER_ELEMENT) * cast


def _compulsory(config: TrainConfig) -> float:
    mesh = total_axis_sizes(parse_mesh(config.mesh))
    one = dataclasses.replace(config, accumulate=1, batch=config.batch // config.accumulate)
    return config.accumulate * compulsory_bytes(one, mesh)


def _weight_collectives(
    config: TrainConfig, on: ClusterModel, weights: float, gradients: float
) -> tuple[list[StepEvent], list[StepEvent]]:
    """Gathers of a layer's weights over fsdp, and the reductions of its gradients over fsdp and data."""
    over = axes_across_racks(config.mesh, on)
    gather, scatter = [], []
    if "fsdp" in over:
        gather.append(_collective_event("all-gather", ("fsdp",), over, config.accumulate * weights, "codes"))
        scatter.append(_collective_event("reduce-scatter", ("fsdp",), over, config.accumulate * gradients, "f32"))
    for axis, scattered in (("data", ("fsdp",)), ("expert", ("data", "fsdp"))):
        if axis in over:
            inner, outer = group_span(tuple(each for each in scattered if each in over), over)
            scatter.append(_collective_event("all-reduce", (axis,), over, gradients / (inner * outer), "f32"))
    return gather, scatter


def _tensor_parallel_collectives(config: TrainConfig, on: ClusterModel, sizes: DeviceShard) -> Iterator[StepEvent]:
    """What tensor parallelism gathers and sums of [tokens, embed], in the open."""
    over = axes_across_racks(config.mesh, on)
    if "tensor" in over:
        whole = sizes.tokens * sizes.tensor * config.model.embed
        sent = ("all-gather", BF16_BYTES_PER_ELEMENT, "bf16"), ("reduce-scatter", FLOAT32_BYTES_PER_ELEMENT, "f32")
        for kind, wide, dtype in sent * 2:
            yield _collective_event(kind, ("tensor",), over, whole * wide, dtype, asynchronous=False)


def _expert_all_to_alls(config: TrainConfig, on: ClusterModel) -> tuple[list[StepEvent], list[StepEvent]]:
    """What a layer's experts exchange (forward, backward), in the open: logits; a row of each (token, expert) pair to
    the expert and back, and their gradients; experts' weights, where `fsdp` or `tensor` cut them, for whole ones.
    """
    over, model = axes_across_racks(config.mesh, on), config.model
    axes, tokens = tuple(over), config.batch * config.seq
    if not axes:
        return [], []
    logits = _collective_event(
        "all-gather", axes, over, float(tokens * model.experts * FLOAT32_BYTES_PER_ELEMENT), "f32", asynchronous=False
    )
    own = tokens * model.experts_per_token * model.embed * BF16_BYTES_PER_ELEMENT / on.count
    rows = [_collective_event("ragged-all-to-all", axes, over, own, "bf16", asynchronous=False)] * 2
    forward, backward = [logits, *rows], [*rows]
    cut = tuple(axis for axis in ("fsdp", "tensor") if axis in over)
    if cut:
        own = FLOAT32_BYTES_PER_ELEMENT * config.accumulate * _expert_weights(config) / on.count
        exchange = _collective_event("all-to-all", cut, over, own, "f32", asynchronous=False)
        forward, backward = [*forward, exchange], [*backward, exchange]
    return forward, backward


def _router(config: TrainConfig, parts: int) -> list[StepEvent]:
    flops = 2.0 * config.batch * config.seq * config.model.embed * config.model.experts / parts
    return [StepEvent("gemm", "router", "router", format="f32", flops=flops)]


def _collective_event(
    kind: str, axes: tuple[str, ...], over: Mapping[str, tuple[int, int]], moved: float, dtype: str, *,
    asynchronous: bool = True,
) -> StepEvent:  # fmt: skip
    inner, outer = group_span(axes, over)
    return StepEvent(
        "send", f"{kind} over {'+'.join(axes)}", "communication", format=kind, moved=moved, axes=axes, dtypes=(dtype,),
        inner=inner, outer=outer, asynchronous=asynchronous,
    )  # fmt: skip


def _waits(sent: list[StepEvent] | tuple[StepEvent, ...]) -> list[StepEvent]:
    return [StepEvent("wait", each.name) for each in sent]


def _head(config: TrainConfig, sizes: DeviceShard) -> list[StepEvent]:
    flops = 2.0 * sizes.tokens * config.model.embed * config.model.vocab_size
    gemms = [StepEvent("gemm", "head", "head", format="bf16", flops=flops)] * 3
    return [*gemms, _pass_event("loss", LOGITS * sizes.tokens * config.model.vocab_size * FLOAT32_BYTES_PER_ELEMENT)]


def _pass_event(purpose: str, moved: float, maker: str = "") -> StepEvent:
    return StepEvent("pass", purpose, purpose, format=maker, moved=moved)


def _attention(direction: str, flops: float, head_dim: int) -> StepEvent:
    return StepEvent("attention", "attention", "attention", format=direction, flops=flops, head_dim=head_dim)
