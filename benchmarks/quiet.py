"""Trains twins (runs that are equal but for rounding) of several set-ups in one program and records their losses.

    python benchmarks/quiet.py docs/evidence/quiet/plan.json DATA OUT --jobs first --seconds 400 --compare 2

DATA is what `quiet_data.py` packs. A job of the plan is a recipe and a list of set-ups, seeds and twins; all of its
runs are replicas of one program: `vmap` of the library's train step over states, batches and learning rates, many
steps per call. Model, recipe, optimizer, loss, random bits and data order are those of `halfbyte train`; replicas of a
job may differ in everything that only the learning rate sees. `--compare` runs the library's own step beside them.

OUT/records.jsonl gets a line per run and evaluation as it is made, OUT/rows.npz the summed loss of each validation row
after the last step. A job that would not end within --seconds is left out, and the next one is tried.
"""

import argparse
import contextlib
import functools
import hashlib
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import quiet_data
from jax import lax

from halfbyte import models
from halfbyte.io import dataclass_json
from halfbyte.ops import attention as attention_module
from halfbyte.recipes import step_key
from halfbyte.train import train_step
from halfbyte.train.precision_phases import phases
from halfbyte.train.preflight import run_mesh
from halfbyte.train.train_config import TrainConfig
from halfbyte.train.train_state import TrainState, abstract_state, create_state, init_state
from halfbyte.train.train_step import (
    BATCH_KEYS,
    abstract_batch,
    batch_sharding,
    compiler_options,
    jit_train_step,
    make_model_context,
    make_train_step,
)

BEGAN = time.monotonic()
LEARNING_RATE = train_step.learning_rate_schedule
CHUNK = 128  # steps per call at most: their losses come back together
IGNORED_TARGET = -1  # a target that is not scored
MEASURED = 32  # steps of the first call, from which a job's time is predicted
EVALUATIONS = 8  # per run
AVERAGES = (0.01, 0.05)  # time constants of the averaged weights, as fractions of the run
OF_RUN = ("optimizer.learning_rate", "optimizer.schedule", "optimizer.warmup", "optimizer.decay", "optimizer.final",
          "steps", "seed", "precision.noise_seed", "name")  # fmt: skip
RESERVE = 8.0  # seconds kept for writing
Tree = Any


@dataclass(frozen=True)
class Replica:
    """One run of a job: its config, and the factor of its initial matrices."""

    setup: str
    config: TrainConfig
    init_scale: float


@dataclass(frozen=True)
class Job:
    """Runs that one program trains together."""

    name: str
    replicas: tuple[Replica, ...]

    @property
    def config(self) -> TrainConfig:
        """The config of the program: what the replicas share."""
        return replace(self.replicas[0].config, name="quiet", seed=0, precision=self._precision())

    def _precision(self) -> Any:
        return replace(self.replicas[0].config.precision, noise_seed=0)

    @property
    def key(self) -> str:
        """Equal for jobs that one compiled program serves."""
        flat = dataclass_json.flatten_dotted(dataclass_json.to_dict(self.config))
        kept = {name: value for name, value in flat.items() if name not in OF_RUN}
        return json.dumps([kept, len(self.replicas)], sort_keys=True)


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{"a.b": 1} -> {"a": {"b": 1}}."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *groups, name = path.split(".")
        node = tree
        for group in groups:
            node = node.setdefault(group, {})
        node[name] = value
    return tree


def job_of(plan: Mapping[str, Any], name: str) -> Job:
    """The job `name` of the plan, its replicas in the order set-up, seed, twin."""
    stated, replicas = plan["jobs"][name], []
    for setup in stated["setups"]:
        changes = dict(plan["setups"][setup])
        init_scale = float(changes.pop("init_scale", 1.0))
        flat = {**plan["base"], **{f"model.{k}": v for k, v in plan["sizes"][stated["size"]].items()}, **changes}
        flat |= {"recipe": stated["recipe"], "name": name, "steps": 1}
        config = dataclass_json.from_dict(TrainConfig, nested(flat))
        tokens = stated["tokens_per_parameter"] * parameters(config)
        config = replace(config, steps=round(tokens / (config.batch * config.seq)))
        for seed in stated["seeds"]:
            for twin in range(stated["twins"]):
                own = replace(config, seed=seed, precision=replace(config.precision, noise_seed=twin))
                replicas.append(Replica(setup, own, init_scale))
    job = Job(name, tuple(replicas))
    if len({Job(name, (replica,)).key for replica in replicas}) > 1:
        raise ValueError(f"job {name}: its set-ups need different programs; give each its own job")
    return job


def parameters(config: TrainConfig) -> int:
    """Parameters without embeddings, as the league counts them."""
    return models.count_params(config.model) - config.model.vocab_size * config.model.embed


# The program


def attend_with_whole_mask(q: Tree, k: Tree, v: Tree, segments: Tree, *, implementation: str) -> jax.Array:
    """`ops.attention._attention_on_shard` with the mask of cuDNN repeated per head: JAX's batching rule of the fused
    attention reshapes a bias to [batch, heads, seq, seq] (jax 0.11.2, `_dot_product_attention_fwd_batcher`)."""
    if implementation != "cudnn" or segments is None:
        return _local(q, k, v, segments, implementation=implementation)
    mask = (segments[:, :, None] == segments[:, None, :])[:, None]  # [B, 1, S, S]
    mask = jnp.broadcast_to(mask, (mask.shape[0], q.shape[2], *mask.shape[2:]))
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation="cudnn")


_local = attention_module._attention_on_shard
_tracing = threading.Lock()  # a name of a module is replaced while a program is traced


@contextlib.contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Within it `module` has another `name`."""
    given = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, given)


def with_rates(rates: jax.Array) -> contextlib.AbstractContextManager[None]:
    """Within it the library's train step reads its learning rate from the table `rates` f32[steps]."""
    return replaced(train_step, "learning_rate_schedule", lambda config, steps: lambda step: rates[step])


class Program:
    """Compiled train and evaluation programs of a job's key. `rows` and `held` hold batches on the device."""

    def __init__(self, job: Job, rows: Tree, held: Tree, steps: int, options: Mapping[str, Any]):
        self.config, self.count = job.config, len(job.replicas)
        self.mesh = run_mesh(self.config, jax.devices()[:1])
        self.resolved = phases(self.config)[0].resolved(self.config)
        self.rows, self.held, self.steps = rows, held, steps
        made = compiler_options(self.config, self.mesh, self.resolved)
        self.options = None if made is None else {**made, **options}

    def lower(self, attention: str) -> tuple[Any, Any]:
        """(train program, evaluation program), not compiled; `attention` is auto or xla."""
        with (
            _tracing,
            replaced(attention_module, "_attention_on_shard", attend_with_whole_mask),
            contextlib.ExitStack() as also,
        ):
            if attention == "xla":
                also.enter_context(replaced(attention_module, "choose_attention", lambda *shape, **how: "xla"))
            state = jax.eval_shape(functools.partial(fresh, self.config), *[jnp.zeros((self.count,), jnp.uint32)] * 2)
            average = tuple(state.params for _ in AVERAGES)
            table = jax.ShapeDtypeStruct((self.count, self.steps), jnp.float32)
            orders = jax.ShapeDtypeStruct((self.count, self.rows["tokens"].shape[0]), jnp.int32)
            scalar = jax.ShapeDtypeStruct((), jnp.int32)
            decays = jax.ShapeDtypeStruct((len(AVERAGES),), jnp.float32)
            train = jax.jit(self.train, donate_argnums=(0, 1), compiler_options=self.options)
            lowered = train.lower(state, average, self.rows, table, orders, decays, scalar, scalar)
            evaluate = jax.jit(self.evaluate, compiler_options=self.options)
            seeds = jax.ShapeDtypeStruct((self.count,), jnp.uint32)
            return lowered, evaluate.lower(state.params, seeds, self.held)

    def train(
        self, state: TrainState, averages: Tree, rows: Tree, rates: Tree, orders: Tree, decays: Tree, start: Tree,
        count: Tree,
    ) -> Tree:  # fmt: skip
        """`count` steps from step `start`: (state, averages, loss f32[CHUNK, R], gradient norm f32[CHUNK, R])."""
        batch_size = self.config.batch

        def one(state: TrainState, batch: Tree, rates: jax.Array) -> Tree:
            with with_rates(rates):
                return make_train_step(self.config, self.resolved, self.mesh)(state, batch)

        def body(number: jax.Array, carry: Tree) -> Tree:
            state, averages, losses, norms = carry
            index = lax.dynamic_slice_in_dim(orders, (start + number) * batch_size, batch_size, axis=1)  # [R, B]
            batch = {name: rows[name][index].astype(jnp.int32) for name in BATCH_KEYS}  # [R, B, S]
            state, metrics = jax.vmap(one)(state, batch, rates)
            averages = tuple(
                jax.tree.map(lambda a, p, d=decays[which]: a + (1 - d) * (p - a), average, state.params)
                for which, average in enumerate(averages)
            )
            return state, averages, losses.at[number].set(metrics["loss"]), norms.at[number].set(metrics["grad_norm"])

        nothing = jnp.zeros((CHUNK, self.count), jnp.float32)
        return lax.fori_loop(0, count, body, (state, averages, nothing, nothing))

    def evaluate(self, params: Tree, seeds: jax.Array, held: Tree) -> jax.Array:
        """Summed negative log-likelihood of each validation row, f32[R, rows]; batches as `halfbyte train` has them,
        because a per-tensor scale depends on the batch."""

        def nll(params: Tree, seed: jax.Array, batch: Tree) -> jax.Array:
            context = make_model_context(self.config, self.resolved, self.mesh, step_key(seed, 0))
            return jnp.sum(models.token_nll(self.config.model, params, batch, context), axis=-1)

        def batch_of(part: Tree) -> jax.Array:
            batch = {name: jnp.broadcast_to(x.astype(jnp.int32), (self.count, *x.shape)) for name, x in part.items()}
            return jax.vmap(nll)(params, seeds, batch)  # [R, B]

        sums = lax.map(batch_of, held)  # [batches, R, B]
        return sums.swapaxes(0, 1).reshape(self.count, -1)


def fresh(config: TrainConfig, seeds: jax.Array, rounding: jax.Array) -> TrainState:
    """Initial states, stacked."""
    return jax.vmap(functools.partial(init_state, config))(seeds, rounding)


def initial(job: Job) -> TrainState:
    """The states that `halfbyte train` would begin with; their matrices times `init_scale`."""
    twin = replace(job.config, precision=replace(job.config.precision, noise_seed=1))
    seeds = jnp.asarray([r.config.seed for r in job.replicas], jnp.uint32)
    rounding = jnp.asarray([r.config.rounding_seed for r in job.replicas], jnp.uint32)
    first, other = (jax.jit(functools.partial(fresh, config))(seeds, rounding) for config in (job.config, twin))
    nudged = jnp.asarray([r.config.precision.noise_seed > 0 for r in job.replicas])
    state = jax.tree.map(lambda a, b: jnp.where(nudged.reshape(-1, *[1] * (a.ndim - 1)), b, a), first, other)
    scales = np.asarray([r.init_scale for r in job.replicas], np.float32)
    if (scales == 1).all():
        return state
    matrices = models.matrix_mask(job.config.model)

    def scaled(state: TrainState, scale: jax.Array) -> TrainState:
        return state.with_weights(jax.tree.map(lambda w, m: w * scale if m else w, state.params, matrices))

    return jax.jit(jax.vmap(scaled))(state, scales)


def rate_tables(job: Job, length: int) -> np.ndarray:
    """The library's learning rate of each step, f32[R, length]."""
    tables = np.zeros((len(job.replicas), length), np.float32)
    for table, replica in zip(tables, job.replicas, strict=True):
        steps = jnp.arange(replica.config.steps, dtype=jnp.int32)
        table[: len(steps)] = jax.vmap(LEARNING_RATE(replica.config.optimizer, replica.config.steps))(steps)
    return tables


# The run


class Records:
    """records.jsonl and rows.npz."""

    def __init__(self, out: Path):
        out.mkdir(parents=True, exist_ok=True)
        self.out, self.rows = out, dict[str, np.ndarray]()

    def write(self, **fields: Any) -> None:
        with open(self.out / "records.jsonl", "a") as file:
            file.write(json.dumps({"at": round(time.monotonic() - BEGAN, 2), **fields}) + "\n")

    def keep_rows(self, name: str, sums: np.ndarray) -> None:
        self.rows[name] = sums.astype(np.float32)
        np.savez_compressed(self.out / "rows.npz", **self.rows)


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGAN:6.1f} s  {text}", flush=True)


def rows_to_batch(tokens: np.ndarray, segments: np.ndarray) -> dict[str, np.ndarray]:
    """Returns tokens, targets, segments, positions, int16 [rows, S], of rows of S + 1 tokens.

    As `halfbyte.data.encode.rows_to_batch`, which this cannot import: its package needs readers (grain, tokenizers)
    that a GPU host without network lacks. A test holds the two equal.
    """
    same_segment = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != 0)
    index = np.arange(segments.shape[1] - 1)
    starts = np.ones((len(segments), len(index)), bool)
    starts[:, 1:] = segments[:, 1:-1] != segments[:, :-2]
    batch = {
        "tokens": tokens[:, :-1],
        "targets": np.where(same_segment, tokens[:, 1:].astype(np.int32), IGNORED_TARGET),
        "segments": segments[:, :-1],
        "positions": index - np.maximum.accumulate(np.where(starts, index, 0), axis=1),
    }
    return {name: array.astype(np.int16) for name, array in batch.items()}


def on_device(packed: quiet_data.Rows, batch: int) -> tuple[Tree, Tree, dict[str, np.ndarray]]:
    """(training rows i16[rows, S], validation batches i16[batches, B, S], scored tokens and source per row)."""
    held, source = [], []
    for number in range(len(packed.sources)):
        own = np.flatnonzero(packed.held_source == number)
        padding = -len(own) % batch
        parts = rows_to_batch(packed.held_tokens[own], packed.held_segments[own])
        fill = {"targets": IGNORED_TARGET}
        padded = {n: np.pad(x, ((0, padding), (0, 0)), constant_values=fill.get(n, 0)) for n, x in parts.items()}
        held.append({name: x.reshape(-1, batch, x.shape[-1]) for name, x in padded.items()})
        source += [number] * (len(own) + padding)
    whole = {name: np.concatenate([part[name] for part in held]) for name in BATCH_KEYS}
    facts = {"scored": (whole["targets"] >= 0).sum(-1).reshape(-1), "source": np.asarray(source)}
    rows = rows_to_batch(packed.tokens, packed.segments)
    return jax.device_put(rows), jax.device_put(whole), facts


def source_digest() -> str:
    """16 digits of the library's and this script's text, for a copy without its history."""
    root = Path(__file__).parents[1]
    files = sorted((root / "src").rglob("*.py")) + sorted(Path(__file__).parent.glob("quiet*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def commit() -> str:
    asked = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    return asked.stdout.strip() or os.environ.get("QUIET_COMMIT", "")


def run(
    plan: Mapping[str, Any], data: Path, out: Path, jobs: Sequence[str], seconds: float, options: Any, compared: int
) -> None:
    """Train the jobs in order; those of which no time is left are named and left out. The first `compared` of them are
    then compared with the library's own step."""
    records, device = Records(out), jax.devices()[0]
    about = {"commit": commit(), "source": source_digest(), "jax": jax.__version__, "python": sys.version.split()[0]}
    packed = quiet_data.read(data)
    about |= {"device": device.device_kind, "data": packed.digest, "options": options, "jobs": list(jobs)}
    listed = [job_of(plan, name) for name in jobs]
    records.write(kind="begin", **about)
    rows, held, facts = on_device(packed, listed[0].config.batch)
    say(f"{device.device_kind}, jax {jax.__version__}: {len(packed.tokens)} training rows on the device")
    held_of = {listed[0].config.batch: (held, facts)}
    programs: dict[str, Future[Any]] = {}
    with ThreadPoolExecutor(8) as threads:
        for job in listed:  # in order: tracing is one thread's, compiling is not
            batch = job.config.batch
            held_of[batch] = held_of.get(batch) or on_device(packed, batch)[1:]
            if job.key not in programs:
                longest = max(each.replicas[0].config.steps for each in listed if each.key == job.key)
                program = Program(job, rows, held_of[batch][0], longest, options if device.platform == "gpu" else {})
                programs[job.key] = threads.submit(compiled, program, job.name, records)
        beside = [threads.submit(own_step, job) for job in listed[:compared]]
        for job in listed:
            try:
                ready = programs[job.key].result()
                train(job, ready, packed, held_of[job.config.batch][1], records, BEGAN + seconds - RESERVE)
            except Exception as error:
                records.write(kind="failed", job=job.name, error=f"{type(error).__name__}: {error}"[:2000])
                say(f"{job.name} FAILED: {type(error).__name__}: {str(error)[:600]}")
        for job in listed[:compared]:
            compare(job, beside.pop(0), rows, packed, records, until=BEGAN + seconds)
        for waiting in programs.values():
            waiting.cancel()
    records.write(kind="end")


def compiled(program: Program, name: str, records: Records) -> tuple[Program, Any, Any]:
    """The program with its compiled parts. Where cuDNN's attention does not compile, XLA computes it."""

    def attempt(attention: str) -> tuple[Program, Any, Any]:
        began = time.monotonic()
        lowered, evaluate = program.lower(attention)
        traced = time.monotonic()
        with ThreadPoolExecutor(1) as beside:
            other = beside.submit(evaluate.compile)
            step, score = lowered.compile(), other.result()
        took, memory = time.monotonic() - traced, step.memory_analysis()
        times = {"traced_s": traced - began, "compiled_s": took, "temp_bytes": memory.temp_size_in_bytes}
        records.write(kind="compiled", job=name, attention=attention, **times)
        say(f"{name}: traced in {traced - began:.1f} s, compiled in {took:.1f} s")
        return program, step, score

    try:
        return attempt("auto")
    except Exception as error:
        records.write(kind="failed", job=name, error=f"{type(error).__name__}: {error}"[:2000])
        say(f"{name}: {type(error).__name__}: {str(error)[:400]}; again with attention by XLA")
        return attempt("xla")


def train(
    job: Job, ready: tuple[Program, Any, Any], packed: quiet_data.Rows, facts: Mapping[str, np.ndarray],
    records: Records, until: float,
) -> None:  # fmt: skip
    """Train the replicas of one job together, or leave it out where it would not end by `until`."""
    program, step, evaluate = ready
    steps, began = job.replicas[0].config.steps, time.monotonic()
    tokens_of_step = job.config.batch * job.config.seq
    needed, there = steps * job.config.batch, len(packed.tokens)
    if needed > there:
        raise ValueError(f"{job.name} reads {needed} rows and one epoch, which is packed, has {there}; shorten the run")
    rates = jnp.asarray(rate_tables(job, program.steps))
    orders = jnp.asarray(np.stack([packed.orders[r.config.seed] for r in job.replicas]).astype(np.int32))
    state = initial(job)
    averages = tuple(jax.tree.map(jnp.copy, state.params) for _ in AVERAGES)
    decays = jnp.asarray([1 - 1 / max(1.0, part * steps) for part in AVERAGES], jnp.float32)
    marks = sorted({round(steps * (i + 1) / EVALUATIONS) for i in range(EVALUATIONS)})
    losses, norms = np.zeros((0, len(job.replicas))), np.zeros((0, len(job.replicas)))
    done, pace, validated = 0, None, 0.0
    while done < steps:
        mark = next(m for m in marks if m > done)
        count = min(CHUNK, mark - done, MEASURED if pace is None else CHUNK)
        at = time.monotonic()
        state, averages, loss, norm = step(
            state, averages, program.rows, rates, orders, decays, jnp.int32(done), jnp.int32(count)
        )
        loss, norm = np.asarray(loss)[:count], np.asarray(norm)[:count]
        took, done = (time.monotonic() - at) / count, done + count
        losses, norms = np.concatenate([losses, loss]), np.concatenate([norms, norm])
        FIRST[job.name] = losses[:MEASURED]
        if done > count:  # the first call also loads the program
            pace = took if pace is None else 0.9 * pace + 0.1 * took
            left = pace * (steps - done) + (len(marks) + len(AVERAGES)) * validated
            if time.monotonic() + left > until:
                records.write(kind="left out", job=job.name, step=done, step_s=pace, needed_s=left)
                say(f"{job.name}: {1e3 * pace:.2f} ms per step, {left:.0f} s more than are left; left out")
                return
            if done <= 4 * CHUNK:
                records.write(kind="pace", job=job.name, step=done, step_s=took, replicas=len(job.replicas),
                              tokens_per_s=len(job.replicas) * tokens_of_step / took)  # fmt: skip
        elif pace is None:
            pace = took
        if done == mark:
            at = time.monotonic()
            weights = {"last": state.params}
            if done == steps:
                weights |= {f"average {part:g}": average for part, average in zip(AVERAGES, averages, strict=True)}
            sums = {name: np.asarray(evaluate(p, state.seed, program.held), np.float64) for name, p in weights.items()}
            validated = (time.monotonic() - at) / len(weights)
            report(job, records, done, sums, facts, losses, norms, state, rates, time.monotonic() - began)
    say(
        f"{job.name}: {len(job.replicas)} runs of {steps} steps in {time.monotonic() - began:.1f} s, "
        f"{1e3 * (pace or 0):.2f} ms per step, {len(job.replicas) * tokens_of_step / (pace or 1) / 1e6:.2f}M tokens/s"
    )


def report(
    job: Job, records: Records, done: int, sums: Mapping[str, np.ndarray], facts: Mapping[str, np.ndarray],
    losses: np.ndarray, norms: np.ndarray, state: TrainState, rates: jax.Array, seconds: float,
) -> None:  # fmt: skip
    """A record per run."""
    tokens, last = facts["scored"].sum(), slice(-CHUNK, None)
    validation = {name: per_row.sum(1) / tokens for name, per_row in sums.items()}
    skipped, final = np.asarray(state.scaler["skipped"]), len(sums) > 1
    memory = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    number = np.arange(facts["source"].max() + 1)
    for at, replica in enumerate(job.replicas):
        config = replica.config
        more: dict[str, Any] = {}
        if final:
            more = {"averaged": {name: float(v[at]) for name, v in validation.items() if name != "last"}}
            of = [facts["source"] == n for n in number]
            more["by_source"] = [float(sums["last"][at][own].sum() / facts["scored"][own].sum()) for own in of]
            more["curve"] = [round(float(part.mean()), 4) for part in np.array_split(losses[:, at], 64) if len(part)]
        records.write(
            kind="evaluation", job=job.name, setup=replica.setup, recipe=config.recipe, seed=config.seed,
            twin=config.precision.noise_seed, step=done, steps=config.steps, tokens=done * config.batch * config.seq,
            validation=float(validation["last"][at]), train_loss=float(losses[last, at].mean()),
            grad_norm=float(norms[last, at].mean()), grad_norm_max=float(norms[last, at].max()),
            rate=float(rates[at, done - 1]), skipped=int(skipped[at]), seconds=round(seconds, 2), peak_bytes=memory,
            **more,
        )  # fmt: skip
    if final:
        for name, per_row in sums.items():
            records.keep_rows(f"{job.name}/{name}", per_row)
        records.keep_rows("scored", facts["scored"])
    middle = ", ".join(f"{v:.4f}" for v in validation["last"])
    say(f"{job.name} step {done}: {middle}")


# The comparison with the library's own step

FIRST: dict[str, np.ndarray] = {}  # job -> loss f32[steps, R] of its first calls


def own_step(job: Job) -> tuple[TrainConfig, Any]:
    """(config, compiled step) of the job's first replica as `halfbyte train` would run it: no vmap, backend auto."""
    first = job.replicas[0].config
    config = replace(first, precision=replace(first.precision, backend="auto"))
    mesh, resolved = run_mesh(config, jax.devices()[:1]), phases(config)[0].resolved(config)
    with _tracing:
        lowered = jit_train_step(config, resolved, mesh).lower(
            abstract_state(config, mesh), abstract_batch(config, mesh, seq=config.seq)
        )
    return config, lowered.compile()


def compare(
    job: Job, beside: Future[Any], rows: Tree, packed: quiet_data.Rows, records: Records, until: float, steps: int = 32
) -> float | None:
    """Largest relative difference of a loss between the first replica and the library's own step on the same batches,
    and the time of that step; None where no time is left."""
    if job.name not in FIRST or time.monotonic() + 5 > until or not (beside.done() or until == math.inf):
        say(f"{job.name}: not compared with the library's own step, no time is left")
        return None
    config, step = beside.result()
    mesh = run_mesh(config, jax.devices()[:1])
    state, losses, times = create_state(config, mesh), [], []
    for number in range(min(steps, len(FIRST[job.name]))):
        index = packed.orders[config.seed][number * config.batch : (number + 1) * config.batch]
        batch = {name: jax.device_put(rows[name][index].astype(jnp.int32), batch_sharding(mesh)) for name in BATCH_KEYS}
        began = time.monotonic()
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        times.append(time.monotonic() - began)
    ours = FIRST[job.name][: len(losses), 0]
    apart = np.abs(np.asarray(losses) - ours) / ours
    records.write(kind="compared", job=job.name, library=losses, replica=[float(x) for x in ours],
                  apart=[float(x) for x in apart], step_s=float(np.median(times)))  # fmt: skip
    say(f"{job.name}: the library's own step takes {1e3 * float(np.median(times)):.2f} ms; its loss differs by "
        f"{apart[0]:.1e} in step 1, by {apart.max():.1e} at most in {len(apart)} steps")  # fmt: skip
    return float(apart.max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--jobs", required=True, help="names of jobs, or a list of the plan's `calls`")
    parser.add_argument("--seconds", type=float, default=400.0, help="after which nothing more is begun")
    parser.add_argument("--compare", type=int, default=0, help="jobs to compare with the library's own step")
    parser.add_argument("--options", type=json.loads, default={}, help="more options of XLA on a GPU, as JSON")
    given = parser.parse_args()
    plan = json.loads(given.plan.read_text())
    jobs = plan["calls"].get(given.jobs) or given.jobs.split(",")
    run(plan, given.data, given.out, jobs, given.seconds, given.options, given.compare)


if __name__ == "__main__":
    main()
