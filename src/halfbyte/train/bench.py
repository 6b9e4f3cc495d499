"""What a training step costs here, recipe by recipe, in one run: time, rates, memory, and the GEMMs that were compiled.

The step is the trainer's own, with float32 master weights and AdamW, over synthetic tokens of one document a row.
Every recipe starts from
the same state; timings are medians over repeated batches of steps after warm-up. Before any ratio is given, the
operands of the backend
that will run are compared with the definition, bit for bit, inside jit on this device.
"""

import dataclasses
import re
import statistics
import time
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from halfbyte import models, ops
from halfbyte.devices import lookup
from halfbyte.ops.passes import XLA, ask
from halfbyte.recipe import Recipe

from .config import TrainConfig
from .manifest import build_manifest
from .precision import phases
from .preflight import run_mesh
from .state import create_state
from .step import batch_sharding, jit_train_step

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
    milliseconds: float | None = None
    spread: float = 0.0
    tokens_per_s: float | None = None
    tflops: float | None = None
    mfu: float | None = None
    ratio: float | None = None
    temporaries_gib: float | None = None
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
    """Backend -> whether the operands it hands to its GEMMs equal the definition's, bit for bit, inside jit on this
    device.

    The definition is evaluated in a program of its own, without any GEMM, so that nothing can be fused away.
    """
    x = jax.random.normal(jax.random.key(1), (tokens, features), jnp.float32).astype(jnp.bfloat16)
    key = jax.random.key(2)
    asks = [ask(chosen, role, key) for role in ("fprop_x", "wgrad_x", "dgrad_dy", "wgrad_dy")]
    groups = [asks[:2], asks[2:]]
    made: dict[str, list[np.ndarray]] = {}
    for name, backend in ops.BACKENDS.items():
        problem = ops.Problem(chosen, tokens, features, features, device=ops.target())
        if backend.unsupported(problem) is not None:
            continue
        run = jax.jit(
            lambda x, p=backend.passes: [
                [(o.values().astype(jnp.float32), o.decode_scale) for o in p.quantize(x, g)] for g in groups
            ]
        )
        made[name] = [np.asarray(leaf) for leaf in jax.tree.leaves(run(x))]
    expected = [
        np.asarray(leaf)
        for leaf in jax.tree.leaves(
            [[(o.values().astype(jnp.float32), o.decode_scale) for o in XLA.quantize(x, g)] for g in groups]
        )
    ]
    return {name: all((a == b).all() for a, b in zip(found, expected, strict=True)) for name, found in made.items()}


def measure(config: TrainConfig, *, seq: int, steps: int = 10, repeats: int = 3) -> Measured:
    """The step of `config` on synthetic tokens: `repeats` timings of `steps` steps each."""
    mesh = run_mesh(config)
    resolved = phases(config)[0].resolved(config)
    row = Measured(config.recipe, config.policy, config.remat, _backends(config, seq))
    step = jit_train_step(config, resolved, mesh)
    batch = _batch(config, mesh, seq)
    started = time.perf_counter()
    try:
        state = create_state(config, mesh)
        compiled = step.lower(state, batch).compile()
        row = dataclasses.replace(
            row, compile_s=time.perf_counter() - started, **_memory(compiled), gemms=count_gemms(compiled.as_text())
        )
        return _timed(row, config, compiled, state, batch, seq=seq, steps=steps, repeats=repeats)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return dataclasses.replace(row, note="out of memory: " + str(error).splitlines()[0][:120])


def _timed(
    row: Measured, config: TrainConfig, compiled: Any, state: Any, batch: Any, *, seq: int, steps: int, repeats: int
) -> Measured:
    for _ in range(3):
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


def _memory(compiled: Any) -> dict[str, float]:
    found = compiled.memory_analysis()
    return {"temporaries_gib": found.temp_size_in_bytes / GIB, "arguments_gib": found.argument_size_in_bytes / GIB}


def _backends(config: TrainConfig, seq: int) -> str:
    """The backends that the layers' linears get, with how many linears each has."""
    phase = phases(config)[0]
    manifest = build_manifest(config, phase.resolved(config), phase.recipe, seq=seq, device=ops.target())
    found = Counter(site.backend for site in manifest.sites if site.path.startswith("layers/"))
    return ", ".join(f"{name} x{count}" for name, count in sorted(found.items()))


def compare(rows: list[Measured]) -> list[Measured]:
    """The rows with their speed as a ratio to the bf16 row of the same remat (or the first bf16 row)."""
    bases = {row.remat: row.milliseconds for row in rows if row.recipe == "bf16" and row.milliseconds}
    first = next(iter(bases.values()), None)
    base = lambda row: bases.get(row.remat, first)  # noqa: E731
    return [dataclasses.replace(r, ratio=base(r) / r.milliseconds) if base(r) and r.milliseconds else r for r in rows]
