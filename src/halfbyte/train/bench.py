"""What a training step costs here, recipe by recipe, in one run: time, rates, memory, and the GEMMs that were compiled.

The step is the trainer's own, with float32 master weights and AdamW, over synthetic tokens of one document a row.
Every recipe starts from
the same state; timings are medians over repeated batches of steps after warm-up. Before any ratio is given, the
operands of the backend
that will run are compared with the definition, bit for bit, inside jit on this device.
"""

import dataclasses
import functools
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from halfbyte import models, ops
from halfbyte.devices import lookup
from halfbyte.ops.operand import Operand
from halfbyte.ops.passes import XLA, Ask, XlaPasses, ask
from halfbyte.ops.weight import CONTRACTED, quantize_weight, weight_operand
from halfbyte.recipe import Recipe

from .config import TrainConfig
from .fitting import bytes_needed, compile_step, fit_batch
from .manifest import build_manifest
from .precision import phases
from .preflight import run_mesh, shard_bytes
from .state import abstract_state, create_state
from .step import batch_sharding

GIB = 2**30
GEMM_CALLS = {
    "fp4": re.compile(r'custom_call_target="__cudnn\$blockScaledDot'),
    "f8": re.compile(r'custom_call_target="__cublas\$lt\$matmul\$f8'),
    "bf16": re.compile(
        r'custom_call_target="__cublas\$(?:gemm|lt\$matmul)"|"kind":"__triton(?:_nested)?_gemm|(?<!%)\bdot\('
    ),
    "own": re.compile(r'custom_call_target="mosaic_gpu'),
}


@dataclasses.dataclass(frozen=True)
class Measured:
    """One recipe. `milliseconds` is None if it did not run, and `note` says why."""

    recipe: str
    policy: str
    remat: str
    backends: str
    batch: int = 0
    milliseconds: float | None = None
    spread: float = 0.0
    tokens_per_s: float | None = None
    tflops: float | None = None
    mfu: float | None = None
    ratio: float | None = None
    temporaries_gib: float | None = None
    activations_gib: float | None = None  # temporaries without the float32 gradients
    needed_gib: float | None = None  # arguments and temporaries
    limit_gib: float | None = None  # what the batch was fitted to
    arguments_gib: float | None = None
    peak_gib: float | None = None
    compile_s: float | None = None
    loss: float | None = None
    gemms: dict[str, int] = dataclasses.field(default_factory=dict)
    note: str = ""


def count_gemms(program: str) -> dict[str, int]:
    """GEMM calls in a compiled program's text, by what the hardware multiplies; a loop's body counts once."""
    return {name: len(pattern.findall(program)) for name, pattern in GEMM_CALLS.items()}


def operands_agree(chosen: Recipe, *, tokens: int = 256, features: int = 512) -> dict[str, bool]:
    """Backend -> whether the operands it hands to its GEMMs equal the definition's, bit for bit, inside jit, here."""
    x, dy, w = (
        jax.random.normal(jax.random.key(seed), (rows, features), jnp.float32).astype(dtype)
        for seed, rows, dtype in ((1, tokens, jnp.bfloat16), (2, tokens, jnp.bfloat16), (3, features, jnp.float32))
    )
    problem = ops.Problem(chosen, tokens, features, features, device=ops.target())
    serving = [backend for backend in ops.BACKENDS.values() if backend.unsupported(problem) is None]
    right = definition(chosen, x, dy, w)
    counts = {passes: differing(chosen, passes, x, dy, w, right) for passes in {b.passes for b in serving}}
    return {backend.name: counts[backend.passes] == 0 for backend in serving}


def definition(chosen: Recipe, x: jax.Array, dy: jax.Array, w: jax.Array) -> list[Operand]:
    """The six operands of a linear's x, dy and w, made one a program, so that nothing is fused with them."""
    tensors = [(tensor, a) for tensor, asks in _asks(chosen, x, dy) for a in asks]
    made = [jax.jit(functools.partial(XLA.quantize, asks=[a]))(tensor)[0] for tensor, a in tensors]
    return made + _weights(chosen, XLA, w)


def differing(
    chosen: Recipe, passes: XlaPasses, x: jax.Array, dy: jax.Array, w: jax.Array, right: list[Operand]
) -> int:
    """How many numbers, tensor scales included, of the six operands that `passes` make differ from `right`, those of
    the definition.
    """
    found = []
    for tensor, asks in _asks(chosen, x, dy):
        found += jax.jit(functools.partial(passes.quantize, asks=asks))(tensor)
    return sum(_distance(a, b) for a, b in zip(found + _weights(chosen, passes, w), right, strict=True))


def _asks(chosen: Recipe, x: jax.Array, dy: jax.Array) -> list[tuple[jax.Array, list[Ask]]]:
    pairs = ((x, ("fprop_x", "wgrad_x")), (dy, ("dgrad_dy", "wgrad_dy")))
    return [(tensor, [ask(chosen, role, jax.random.key(2)) for role in roles]) for tensor, roles in pairs]


def _weights(chosen: Recipe, passes: XlaPasses, w: jax.Array) -> list[Operand]:
    return [jax.jit(functools.partial(_weight, chosen, role, passes))(w) for role in CONTRACTED]


def _weight(chosen: Recipe, role: str, passes: XlaPasses, w: jax.Array) -> Operand:
    return weight_operand(quantize_weight(w, recipe=chosen, key=jax.random.key(2), passes=passes), role)


def _distance(found: Operand, right: Operand) -> int:
    """How many numbers differ, in every order in which `found` has them."""
    want = right.values().astype(jnp.float32)
    orders = [found.values()] if found.turned is None else [found.values(), found.turned.T]
    count = sum(int(jnp.sum(order.astype(jnp.float32) != want)) for order in orders)
    if found.decode_scale is None or right.decode_scale is None:
        return count + (found.decode_scale is not right.decode_scale)
    return count + (float(found.decode_scale) != float(right.decode_scale))


def measure(
    config: TrainConfig, *, seq: int, steps: int = 10, repeats: int = 3, warmup: int = 3, compiled: Any = None
) -> Measured:
    """The step of `config` on synthetic tokens: `repeats` timings of `steps` steps each (of `compiled`, if given)."""
    mesh = run_mesh(config)
    row = _row(config, seq)
    started = time.perf_counter()
    try:
        if compiled is None:
            compiled = compile_step(config, mesh, seq=seq)
            row = dataclasses.replace(row, compile_s=time.perf_counter() - started)
        row = _of_program(row, compiled, gradients=shard_bytes(abstract_state(config, mesh).params))
        state, batch = create_state(config, mesh), _batch(config, mesh, seq)
        return _timed(row, config, compiled, state, batch, seq=seq, steps=steps, repeats=repeats, warmup=warmup)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return dataclasses.replace(row, note="out of memory: " + str(error).splitlines()[0][:120])


def measure_largest(
    config: TrainConfig, *, seq: int, limit: int, say: Callable[[str], None] = lambda _: None
) -> Measured:
    """The step at the largest batch that needs at most `limit` bytes a device, executed there to prove it.

    A device that cannot run what the compiler says would fit (its allocator's memory in pieces) is asked for less.
    """
    mesh = run_mesh(config)
    fit = fit_batch(config, mesh, seq=seq, limit=limit, say=say)
    if not fit.batch:
        smallest = min(fit.needed)
        short = f"batch {smallest} needs {fit.needed[smallest] / GIB:.2f} GiB"
        return dataclasses.replace(_row(config, seq), batch=0, limit_gib=limit / GIB, note=short)
    unit = min(fit.needed)
    compiled = fit.compiled
    for batch in range(fit.batch, 0, -unit):
        at = dataclasses.replace(config, batch=batch)
        row = measure(at, seq=seq, steps=2, repeats=1, warmup=1, compiled=compiled)
        compiled = None
        if row.milliseconds is not None or batch <= fit.batch - 2 * unit:
            break
        say(f"  batch {batch} did not run: {row.note}")
    return dataclasses.replace(row, limit_gib=limit / GIB)


def _row(config: TrainConfig, seq: int) -> Measured:
    return Measured(config.recipe, config.policy, config.remat, _backends(config, seq), config.batch)


def _of_program(row: Measured, compiled: Any, *, gradients: int) -> Measured:
    """`row` with what the compiled program says of itself; `gradients` are a device's, in bytes."""
    found = compiled.memory_analysis()
    return dataclasses.replace(
        row,
        temporaries_gib=found.temp_size_in_bytes / GIB,
        activations_gib=(found.temp_size_in_bytes - gradients) / GIB,
        arguments_gib=found.argument_size_in_bytes / GIB,
        needed_gib=bytes_needed(compiled) / GIB,
        gemms=count_gemms(compiled.as_text()),
    )


def _timed(
    row: Measured, config: TrainConfig, compiled: Any, state: Any, batch: Any,
    *, seq: int, steps: int, repeats: int, warmup: int,
) -> Measured:  # fmt: skip
    for _ in range(warmup):
        state, metrics = compiled(state, batch)
    jax.block_until_ready(metrics)
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(steps):
            state, metrics = compiled(state, batch)
        jax.block_until_ready(metrics)
        times.append((time.perf_counter() - started) / steps)
    median = statistics.median(times)
    devices = len(jax.devices())
    tokens = config.batch * seq
    flops = models.flops_per_token(config.model, seq) * tokens / devices / median
    peak = lookup(jax.devices()[0]).peak.get("bf16")
    stats = jax.local_devices()[0].memory_stats() or {}
    return dataclasses.replace(
        row,
        milliseconds=1e3 * median,
        spread=(max(times) - min(times)) / median,
        tokens_per_s=tokens / devices / median,
        tflops=flops / 1e12,
        mfu=flops / peak if peak else None,
        peak_gib=stats["peak_bytes_in_use"] / GIB if "peak_bytes_in_use" in stats else None,
        loss=float(metrics["loss"]),
    )


def _batch(config: TrainConfig, mesh: Any, seq: int) -> dict[str, jax.Array]:
    """Random tokens, one document a row: the batch holds no segment ids, so that attention is plainly causal."""
    rng = np.random.default_rng(config.seed)
    rows = rng.integers(0, config.model.vocab_size, (config.batch, seq + 1), dtype=np.int32)
    where = batch_sharding(mesh)
    return {"tokens": jax.device_put(rows[:, :-1], where), "targets": jax.device_put(rows[:, 1:], where)}


def _backends(config: TrainConfig, seq: int) -> str:
    """The backends that the layers' linears get, with how many linears each has."""
    phase = phases(config)[0]
    manifest = build_manifest(config, phase.resolved(config), phase.recipe, seq=seq, device=ops.target())
    found = Counter(site.backend for site in manifest.sites if site.path.startswith("layers/"))
    return ", ".join(f"{name} x{count}" for name, count in sorted(found.items()))


def compare(rows: list[Measured]) -> list[Measured]:
    """The rows with their speed as a ratio to bf16 under the same remat, or to the first bf16 row."""
    bases = {row.remat: each for row in rows if row.recipe == "bf16" and (each := _per_sequence(row))}
    first = next(iter(bases.values()), None)
    return [dataclasses.replace(row, ratio=_ratio(bases.get(row.remat, first), _per_sequence(row))) for row in rows]


def _per_sequence(row: Measured) -> float | None:
    return row.milliseconds / (row.batch or 1) if row.milliseconds else None


def _ratio(base: float | None, found: float | None) -> float | None:
    return base / found if base and found else None
