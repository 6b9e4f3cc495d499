"""A step that nobody compiled: the FLOPs that are needed, the bytes that must move, and what travels, layer by layer.

It is the step of a program that is placed well: every GEMM once (and once more where remat says so), a layer's weights
gathered while the layer before computes, its gradients scattered behind the next. It answers where the compiler plugin
is missing, bounds a search before anything is compiled, and is what the published rows are calibrated on: they are of
other people's programs, of which no more is known.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from math import prod

from halfbyte import models
from halfbyte.bench.load import even_load, pairs_of
from halfbyte.bench.operand_traffic import compulsory_bytes
from halfbyte.sharding import parse_mesh
from halfbyte.sharding.mesh import whole_sizes
from halfbyte.train import TrainConfig, phases

from .cluster import Cluster, crossing, span
from .linears import LinearGemm
from .rates import GROUPED
from .schedule import Event

BF16, FLOAT32 = 2, 4
CODES = {"fp4": 0.5, "fp8": 1.0}  # bytes of a weight's element that travels
# Counted in the compiled programs of llama3-8b on 8 GB200: bytes that are no operand's, in units of a layer's residual
# stream [tokens, embed] in bfloat16; of the logits in float32; of a parameter.
STREAMS, LOGITS, PARAMETER = 57.0, 3.75, 28.0
SWIGLU = 9.0  # of a token's width in the MLP, both ways, where nothing is quantized: reads gate, up (dy), writes h (dx)
EXCESS = 1.3  # operand bytes for each that is compulsory, as these programs have them


@dataclasses.dataclass(frozen=True)
class Sizes:
    """One device's part of a step."""

    tokens: float
    tensor: int
    shards: int
    """Devices that the parameters lie on."""
    experts: int = 1
    """Devices of the axis that cuts stacks of experts beside."""


def sizes_of(config: TrainConfig) -> Sizes:
    """The part of one device of the mesh of `config`."""
    mesh = whole_sizes(parse_mesh(config.mesh))
    parts = prod(mesh.get(axis, 1) for axis in ("data", "fsdp", "expert", "context"))
    tensor = mesh.get("tensor", 1)
    return Sizes(
        config.batch * config.seq / parts / tensor, tensor, mesh.get("fsdp", 1) * tensor, mesh.get("expert", 1)
    )


def step(config: TrainConfig, on: Cluster, linears: Sequence[LinearGemm]) -> tuple[Event, ...]:
    """The events of a step of `config` on `on`, whose GEMMs of `linears` run in the units of the manifest."""
    sizes, layers = sizes_of(config), config.model.layers
    forward, backward = _layer(config, on, sizes, linears)
    return (
        Event("loop", "forward", times=layers, body=forward),
        *_head(config, sizes),
        Event("loop", "backward", times=layers, body=backward),
        _pass("optimizer", PARAMETER * _parameters(config, sizes)),
    )


def memory(config: TrainConfig) -> dict[str, float]:
    """Bytes of a device by category, from shapes alone."""
    sizes, model = sizes_of(config), config.model
    parameters = _parameters(config, sizes)
    numbers = sizes.tokens / config.accumulate * BF16  # bytes of one number a token
    stream = numbers * model.embed
    inside = numbers * (2 * (model.heads + 2 * model.kv_heads) * model.head_dim + 3 * model.active_mlp)
    attended = numbers * 2 * (model.heads + model.kv_heads) * model.head_dim
    kept = {"full": stream, "quantized": 2 * stream + attended, "dots": stream + inside, "none": stream + 2 * inside}
    wide = {"bfloat16": 2, "float32": 4}
    specs = models.declared(model).values()
    by_muon = sum(spec.size for spec in specs if spec.kind in models.GEMMS) if config.optimizer.name == "muon" else 0
    second = parameters - by_muon / sizes.shards  # Muon has one moment
    return {
        "weights": 4 * parameters,
        "optimizer": parameters * wide[str(config.optimizer.mu_dtype)] + second * wide[str(config.optimizer.nu_dtype)],
        "gradients": 4 * parameters * (2 if config.accumulate > 1 else 1),
        "residuals": (kept[config.remat] + (0 if config.remat == "full" else _of_pairs(config))) * model.layers,
        "activations": inside + 4 * stream + _room(config),
        "workspace": 0.0,
    }


def _parameters(config: TrainConfig, sizes: Sizes) -> float:
    """Of one device."""
    experts = sum(spec.size for spec in models.declared(config.model).values() if spec.kind == "experts")
    return (models.count_params(config.model) - experts + experts / sizes.experts) / sizes.shards


def _room(config: TrainConfig) -> float:
    """Bytes of what a layer's experts hold at once: pairs as they come, and twice through the layer, and in float32 the
    gradients of the experts that a device multiplies.
    """
    model, devices = config.model, prod(whole_sizes(parse_mesh(config.mesh)).values())
    return 2 * _of_pairs(config) + FLOAT32 * _expert_weights(config) / devices if model.experts else 0.0


def _of_pairs(config: TrainConfig) -> float:
    """Bytes that the backward pass of a layer's experts reads: every device has room for all (token, expert) pairs of a
    microbatch, x of gate and up, both results, and x of down.
    """
    return float(pairs_of(config) * BF16 * (2 * config.model.embed + 3 * config.model.mlp))


def _expert_weights(config: TrainConfig) -> float:
    """Of one layer, all experts."""
    specs = models.declared(config.model).values()
    return sum(spec.size for spec in specs if spec.kind == "experts") / config.model.layers


def _layer(
    config: TrainConfig, on: Cluster, sizes: Sizes, linears: Sequence[LinearGemm]
) -> tuple[tuple[Event, ...], tuple[Event, ...]]:
    """(a layer forward, a layer backward with what remat repeats); the mean layer where they differ."""
    segments, layers = phases(config)[0].resolved(config).segments, config.model.layers
    parts, filled = on.count, even_load(config, on.count).filled
    forward: list[Event] = []
    backward: list[Event] = []
    travels = 0.0
    for each in (gemm for gemm in linears if gemm.path.startswith("layers/")):
        flops, name, format = each.flops / layers / parts, "attention linears", each.format
        if each.experts:
            flops, name, format = flops * filled, "experts", f"{GROUPED}{format}"
        elif "/mlp/" in each.path:
            name = "mlp"
        event = Event("gemm", each.path, name, format=format, flops=flops)
        forward += [event] * each.forward
        backward += [event] * each.backward
        if each.gemm == "fprop" and not each.experts:
            _, outputs, inputs = each.sizes
            travels += each.layers / layers * inputs * outputs * CODES.get(format, BF16)
    quantized = any(r.quantized for s in segments for r in s.recipes.values())
    bytes_moved = EXCESS * _compulsory(config) / layers if quantized else _plain(config, sizes)
    maker = "kernel" if quantized else ""
    streams = STREAMS * sizes.tokens * config.model.embed * BF16
    core = 4 * sizes.tokens * config.seq * config.model.heads * config.model.head_dim / 2
    forward_core = _attention("forward", core, config.model.head_dim)
    forward += [
        forward_core,
        _pass("operands", bytes_moved / 3, maker),
        _pass("norm and residual", streams / 3),
    ]
    backward += [forward_core] * (config.remat == "full")
    backward += [
        _attention("backward", 2.5 * core, config.model.head_dim),
        _pass("operands", 2 * bytes_moved / 3, maker),
        _pass("norm and residual", 2 * streams / 3),
    ]
    wide = 2 if config.precision.reduce_dtype == "bfloat16" else 4
    weights = _weights(config) / sizes.tensor
    gather, scatter = _sends(config, on, travels, weights * wide)
    sums = list(_sums(config, on, sizes))
    if config.model.experts:
        there, back = _exchanges(config, on)
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
    return sum(site.k * site.n for site in models.gemm_sites(config.model, 1, 1)[:-1] if not site.experts)


def _plain(config: TrainConfig, sizes: Sizes) -> float:
    """Bytes of a layer's SwiGLU, and of its weights' casts, where nothing is quantized."""
    gated = SWIGLU * sizes.tokens * config.model.active_mlp * BF16
    cast = _weights(config) / sizes.shards
    if config.model.experts:
        cast += _expert_weights(config) / prod(whole_sizes(parse_mesh(config.mesh)).values())
    return gated + (FLOAT32 + BF16) * cast


def _compulsory(config: TrainConfig) -> float:
    mesh = whole_sizes(parse_mesh(config.mesh))
    one = dataclasses.replace(config, accumulate=1, batch=config.batch // config.accumulate)
    return config.accumulate * compulsory_bytes(one, mesh)


def _sends(config: TrainConfig, on: Cluster, weights: float, gradients: float) -> tuple[list[Event], list[Event]]:
    """Gathers of a layer's weights over fsdp, and the reductions of its gradients over fsdp and data."""
    over = crossing(config.mesh, on)
    gather, scatter = [], []
    if "fsdp" in over:
        gather.append(_send("all-gather", ("fsdp",), over, config.accumulate * weights, "codes"))
        scatter.append(_send("reduce-scatter", ("fsdp",), over, config.accumulate * gradients, "f32"))
    if "data" in over:
        inner, outer = over.get("fsdp", (1, 1))
        scatter.append(_send("all-reduce", ("data",), over, gradients / (inner * outer), "f32"))
    if "expert" in over:
        inner, outer = span(tuple(axis for axis in ("data", "fsdp") if axis in over), over)
        scatter.append(_send("all-reduce", ("expert",), over, gradients / (inner * outer), "f32"))
    return gather, scatter


def _sums(config: TrainConfig, on: Cluster, sizes: Sizes) -> Iterator[Event]:
    """What tensor parallelism gathers and sums of [tokens, embed], in the open."""
    over = crossing(config.mesh, on)
    if "tensor" in over:
        whole = sizes.tokens * sizes.tensor * config.model.embed
        for _ in range(2):
            yield _send("all-gather", ("tensor",), over, whole * BF16, "bf16", asynchronous=False)
            yield _send("reduce-scatter", ("tensor",), over, whole * FLOAT32, "f32", asynchronous=False)


def _exchanges(config: TrainConfig, on: Cluster) -> tuple[list[Event], list[Event]]:
    """What a layer's experts exchange (forward, backward), in the open: logits; a row of each (token, expert) pair to
    the expert and back, and their gradients; experts' weights, where `fsdp` or `tensor` cut them, for whole ones.
    """
    over, model = crossing(config.mesh, on), config.model
    axes, tokens = tuple(over), config.batch * config.seq
    if not axes:
        return [], []
    logits = _send("all-gather", axes, over, float(tokens * model.experts * FLOAT32), "f32", asynchronous=False)
    own = tokens * model.experts_per_token * model.embed * BF16 / on.count
    rows = [_send("ragged-all-to-all", axes, over, own, "bf16", asynchronous=False)] * 2
    forward, backward = [logits, *rows], [*rows]
    cut = tuple(axis for axis in ("fsdp", "tensor") if axis in over)
    if cut:
        own = FLOAT32 * config.accumulate * _expert_weights(config) / on.count
        exchange = _send("all-to-all", cut, over, own, "f32", asynchronous=False)
        forward, backward = [*forward, exchange], [*backward, exchange]
    return forward, backward


def _router(config: TrainConfig, parts: int) -> list[Event]:
    flops = 2.0 * config.batch * config.seq * config.model.embed * config.model.experts / parts
    return [Event("gemm", "router", "router", format="f32", flops=flops)]


def _send(
    kind: str, axes: tuple[str, ...], over: Mapping[str, tuple[int, int]], moved: float, dtype: str, *,
    asynchronous: bool = True,
) -> Event:  # fmt: skip
    inner, outer = span(axes, over)
    return Event(
        "send", f"{kind} over {'+'.join(axes)}", "communication", format=kind, moved=moved, axes=axes, dtypes=(dtype,),
        inner=inner, outer=outer, asynchronous=asynchronous,
    )  # fmt: skip


def _waits(sent: list[Event] | tuple[Event, ...]) -> list[Event]:
    return [Event("wait", each.name) for each in sent]


def _head(config: TrainConfig, sizes: Sizes) -> list[Event]:
    flops = 2.0 * sizes.tokens * config.model.embed * config.model.vocab_size
    gemms = [Event("gemm", "head", "head", format="bf16", flops=flops)] * 3
    return [*gemms, _pass("loss", LOGITS * sizes.tokens * config.model.vocab_size * FLOAT32)]


def _pass(purpose: str, moved: float, maker: str = "") -> Event:
    return Event("pass", purpose, purpose, format=maker, moved=moved)


def _attention(direction: str, flops: float, head_dim: int) -> Event:
    return Event("attention", "attention", "attention", format=direction, flops=flops, head_dim=head_dim)
