"""Train step: a pure function (state, batch) -> (state, metrics), and its compilation by XLA.

The loop runs this step, and the planner lowers the same one. The batch is split into `accumulate` microbatches; a scan
sums their gradients in float32, each divided by the scored tokens of the *whole* step, so that the result does not
depend on how tokens are split into microbatches. Then clip, optimizer, and loss scale. Random bits are derived from
(seed, step, microbatch, layer, site, role).

On several GPUs the step is compiled, read, and compiled again with the times of a roofline (`hlo.roofline`) as XLA's
profile of an earlier run (`StepScheduling`).
"""

import dataclasses
import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from halfbyte import models, ops
from halfbyte.devices import Device, is_known_xla_flag, lookup
from halfbyte.devices.device_table import NETWORK_BANDWIDTH
from halfbyte.devices.jax_versions import ALL_GATHER_PIPELINING
from halfbyte.distributed import DEFAULT_RULES, named_sharding
from halfbyte.hlo import HloParseError, Roofline, instruction_costs_us, parse_hlo, to_profile_proto
from halfbyte.io import atomic_write, user_cache
from halfbyte.io.disk_cache import cached_json, is_cached
from halfbyte.recipes import ResolvedPolicy, step_key
from halfbyte.train.dynamic_scaling import update_amax_history, update_loss_scale
from halfbyte.train.optimizers import apply_updates, clip_by_norm, global_norm, learning_rate_schedule
from halfbyte.train.train_config import TrainConfig
from halfbyte.train.train_state import TrainState, abstract_state, check_weights, make_optimizer, params_checksum

Batch = dict[str, jax.Array]
# Compiler options, by the names of each JAX version.
NO_GATHER_PIPELINING = dict(zip(ALL_GATHER_PIPELINING, ("COLLECTIVE_PIPELINING_MODE_OFF", False), strict=True))
NO_ZERO_INIT_FLAG = "xla_gpu_enable_dus_accumulator_zero_init_elimination"
Metrics = dict[str, jax.Array]
TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
BATCH_KEYS = ("tokens", "targets", "segments", "positions")
SUMS = ("nll_sum", "z_sum", "tokens")  # over the scored tokens of a microbatch, float32
SEPARATE_REDUCE_AXIS = "data"  # gradients are summed over this axis once per step
ROUTER_SUMS = ("balance_sum", "router_z_sum", "load")  # of models with experts
PROFILE = "xla_gpu_pgle_profile_file_or_directory_path"
# Measured fractions of the peaks in the device table: GEMMs, attention forward and backward, passes, links. Only their
# ratios affect the order.
GEMM_EFFICIENCY, ATTENTION_EFFICIENCY, MEMORY_EFFICIENCY_GPU, LINKS = 0.72, (0.6, 0.45), 0.75, 0.78


def _single_rank_share(topic: str, value: Any) -> dict[int, Any]:
    return {0: value}


def _print_line(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class StepScheduling:
    """Order of a step on several GPUs: the mesh, `by` (roofline or xla), how ranks `share` values
    (`ProcessGroup.all_gather_json`), and `say` for messages.

    The times are stored in the user's cache, so that the next start compiles once. A profile of the user or of JAX
    takes precedence; a step that XLA orders by its own estimates on several GPUs is reported.
    """

    mesh: Mesh
    by: str = "roofline"
    share: Callable[[str, Any], dict[int, Any]] = _single_rank_share
    say: Callable[[str], None] = _print_line
    options: Mapping[str, Any] | None = None
    """Compiler options in addition to those of the step."""

    def compile(self, lowered: Any) -> Any:
        """Compiles the lowered step; on several GPUs in the order of the roofline."""
        first = self.mesh.devices.flat[0]
        if self.by == "xla" or self.mesh.size == 1 or first.platform not in ("gpu", "cuda"):
            return lowered.compile()
        device = lookup(first)
        why = _no_roofline_reason(device)
        times = None if why else self._times(lowered, device)
        if not times:
            self.say(f"NOTE: XLA orders this step by its own guess of times: {why or 'the program cannot be read'}")
            return lowered.compile()
        return lowered.compile(compiler_options={PROFILE: str(_write_profile(to_profile_proto(times)))})

    def _times(self, lowered: Any, device: Device) -> dict[str, float] | None:
        """Returns microseconds by instruction, on all ranks those of rank 0: from its cache, or from a compilation in
        which all ranks take part.
        """
        text = hashlib.sha256(lowered.as_text().encode()).hexdigest()
        facts = {"step": text, "mesh": dict(self.mesh.shape), "device": device.name, "options": self.options}

        def compute() -> dict[str, float] | None:
            self.say("compiling the step to see how long things take; then again, ordered by that")
            try:
                return instruction_costs_us(
                    parse_hlo(lowered.compile().as_text()), dict(self.mesh.shape), device_roofline(device)
                )
            except HloParseError as error:
                self.say(f"NOTE: {error}")
                return None

        main = jax.process_index() == 0
        known = self.share("known", main and is_cached("schedule", facts))[0]
        local_times = cached_json("schedule", facts, compute, say=self.say) if main else None if known else compute()
        times: dict[str, float] | None = self.share("times", local_times if main else None)[0]
        return times


def make_train_step(config: TrainConfig, resolved: ResolvedPolicy, mesh: Mesh) -> TrainStep:
    """Returns the pure step of one precision phase. A step whose loss, gradient or weights are not finite, or whose
    weights are not those that the step before has written, leaves params and moments unchanged and counts as
    skipped."""
    transform = make_optimizer(config)
    rate_at = learning_rate_schedule(config.optimizer, config.steps)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        scale, rate = state.scaler["scale"], rate_at(state.step)
        inputs = state.params, None if state.delayed is None else state.delayed["amaxes"]
        with ops.trace_with_backend_options(backends_of_policy(resolved)):
            (grads, sums), seen = loss_and_grads(config, resolved, mesh, inputs, batch, **step_inputs(state))
        grads = jax.tree.map(lambda g: g * (1.0 / scale), grads)
        norm = global_norm(grads)
        scored = jnp.maximum(sums["tokens"], 1.0)
        loss = sums["nll_sum"] / scored
        check = check_weights(state, norm)
        finite = jnp.isfinite(norm) & jnp.isfinite(loss) & check.is_good
        clipped = clip_by_norm(grads, norm, config.optimizer.clip)
        updates, optimizer = transform.update(clipped, state.optimizer, state.params)
        params = models.update_router_biases(
            apply_updates(state.params, updates, rate), sums.get("load"), config.balance_rate
        )
        keep = lambda new, old: jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)  # noqa: E731
        params = lax.optimization_barrier(keep(params, state.params))  # `params_checksum` reads the stored values
        next_state = TrainState(
            step=state.step + 1,
            params=params,
            optimizer=keep(optimizer, state.optimizer),
            scaler=update_loss_scale(config.loss_scale, state.scaler, finite),
            seed=state.seed,
            sentinel=None if state.sentinel is None else params_checksum(params),
            delayed=keep(update_amax_history(state.delayed, seen), state.delayed),
        )
        metrics = {
            "loss": loss,
            "z_loss": sums["z_sum"] / scored,
            "scored_tokens": sums["tokens"],
            "grad_norm": norm,
            "learning_rate": rate,
            "loss_scale": scale,
            "skipped": next_state.scaler["skipped"].astype(jnp.float32),
            "weights_not_finite": check.not_finite.astype(jnp.float32),
            "weights_intact": check.intact.astype(jnp.float32),
        }
        return next_state, metrics | _router_metrics(sums)

    return train_step


def step_inputs(state: TrainState) -> dict[str, jax.Array]:
    """Returns key and loss scale, the arguments of `loss_and_grads` that depend on the state. Also for the radar."""
    return {"key": step_key(state.seed, state.step), "scale": state.scaler["scale"]}


def fold_in_microbatch(key: jax.Array, index: jax.Array | int) -> jax.Array:
    """Returns the key of one microbatch, derived from the key of the step."""
    return jax.random.fold_in(key, index)


def make_eval_step(config: TrainConfig, resolved: ResolvedPolicy, mesh: Mesh) -> Any:
    """Returns jitted (params, seed, batch) -> (sum of nll, scored tokens), forward only, under the recipe of the
    phase."""

    def evaluate(params: Any, seed: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
        context = make_model_context(config, resolved, mesh, step_key(seed, 0))
        _, aux = models.loss_sum(config.model, params, batch, context)
        return aux["nll_sum"], aux["tokens"]

    return jax.jit(evaluate, out_shardings=NamedSharding(mesh, PartitionSpec()))


def jit_train_step(
    config: TrainConfig, resolved: ResolvedPolicy, mesh: Mesh, *, options: Mapping[str, Any] | None = None
) -> Any:
    """Jits the step: the state is donated and keeps its shardings. `options` are for XLA on a GPU, in addition to those
    of `compiler_options`.
    """
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(config, mesh))
    replicated = NamedSharding(mesh, PartitionSpec())
    return jax.jit(
        make_train_step(config, resolved, mesh),
        donate_argnums=0,
        out_shardings=(shardings, replicated),
        compiler_options=compiler_options(config, mesh, resolved, options or {}),
    )


def lower_train_step(config: TrainConfig, resolved: ResolvedPolicy, mesh: Mesh, *, seq: int) -> Any:
    """Lowers the step for the mesh's devices from shapes; allocates nothing."""
    step = jit_train_step(config, resolved, mesh)
    return step.lower(abstract_state(config, mesh), abstract_batch(config, mesh, seq=seq))


def compile_train_step(lowered: Any, resolved: ResolvedPolicy, scheduling: StepScheduling | None = None) -> Any:
    """Compiles the step, ordered as `scheduling` says. Each backend checks the compiled program: an unexpected GEMM
    stops the run.
    """
    compiled = lowered.compile() if scheduling is None else scheduling.compile(lowered)
    ops.check_no_unexpected_gemms(backends_of_policy(resolved), lowered, compiled)
    return compiled


def compiler_options(
    config: TrainConfig, mesh: Mesh, resolved: ResolvedPolicy, more: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any] | None:
    """Returns the compiler options of this program on a GPU; None on other platforms. A backend may add its own.

    On a single GPU XLA's rematerialization, which starts at 80% of the memory, is disabled: in a step that fills the
    memory it recomputed slices and casts and saved nothing. Stacks that a loop writes whole are not filled with zeros
    first. With remat=full and all-gathered activations, the pipelining of all-gathers is disabled: XLA would all-gather
    not only weights one iteration ahead but activations too, and compute their inputs, the linears of attention, twice.
    """
    if mesh.devices.flat[0].platform not in ("gpu", "cuda"):
        return None
    memory = {"xla_gpu_memory_limit_slop_factor": 300} if mesh.size == 1 else {}
    no_zero_init = {NO_ZERO_INIT_FLAG: True} if is_known_xla_flag(NO_ZERO_INIT_FLAG) else {}
    gathered = any(mesh.shape.get(axis, 1) > 1 for axis in ("tensor", "context"))
    routed = mesh.size > 1 and bool(config.model.experts)  # router logits are all-gathered
    regathers = config.remat == "full" and (gathered or routed)
    pipelining = {flag: off for flag, off in NO_GATHER_PIPELINING.items() if regathers and is_known_xla_flag(flag)}
    options: dict[str, Any] = {**ops.GPU_OPTIONS, **memory, **no_zero_init, **pipelining}
    for backend in backends_of_policy(resolved):
        options |= backend.compiler_options
    return options | dict(more)


def backends_of_policy(resolved: ResolvedPolicy) -> list[ops.Backend]:
    """Returns the backends that may serve the step."""
    return ops.backends_for(recipe for segment in resolved.segments for recipe in segment.recipes.values())


def gradients(
    config: TrainConfig,
    resolved: ResolvedPolicy,
    mesh: Mesh,
    params: Any,
    batch: Batch,
    *,
    key: jax.Array,
    scale: jax.Array,
) -> tuple[Any, Metrics]:
    """Returns float32 gradients of the mean loss over all scored tokens of the step, times `scale`, and sums for the
    metrics."""
    return loss_and_grads(config, resolved, mesh, (params, None), batch, key=key, scale=scale)[0]


def loss_and_grads(
    config: TrainConfig, resolved: ResolvedPolicy, mesh: Mesh, inputs: tuple[Any, jax.Array | None], batch: Batch, *,
    key: jax.Array, scale: jax.Array,
) -> tuple[tuple[Any, Metrics], jax.Array | None]:  # fmt: skip
    """Returns (`gradients`, amaxes of this step) for `inputs` (weights, amaxes of delayed scaling).

    Without delayed scaling all amaxes are None."""
    params, amaxes = inputs
    scored = jnp.sum((batch["targets"] >= 0).astype(jnp.float32))
    weight = scale / jnp.maximum(scored, 1.0)

    # Codes do not change between microbatches; with one microbatch the model quantizes layer by layer.
    once = config.accumulate > 1
    ready = models.quantize_weights(config.model, params, resolved, mesh) if once else params
    known = ready, amaxes
    data_axis = (
        SEPARATE_REDUCE_AXIS
        if once and not config.model.experts and mesh.shape.get(SEPARATE_REDUCE_AXIS, 1) > 1
        else None
    )
    batch_over = tuple(axis for axis in DEFAULT_RULES.mesh_axes("batch") if axis != data_axis)

    def grads_of(params: Any, known: Any, micro: Batch, key: jax.Array) -> tuple[tuple[Any, Metrics], jax.Array | None]:
        ready, amaxes = known

        def loss(params: Any, amaxes: jax.Array | None) -> tuple[jax.Array, Metrics]:
            context, rules = make_model_context(config, resolved, mesh, key), DEFAULT_RULES.replace(batch=batch_over)
            context = dataclasses.replace(context, stacked=True, rules=rules, delayed_amaxes=amaxes)
            weights = models.with_master_weights(ready, params)
            extra = {name: getattr(config, name) for name in ("z_loss", "balance_loss", "router_z_loss")}
            total, aux = models.loss_sum(config.model, weights, micro, context, **extra)
            return total * weight, {name: aux[name] for name in (*SUMS, *ROUTER_SUMS) if name in aux}

        (grads, seen), sums = jax.grad(loss, argnums=(0, 1), has_aux=True)(params, amaxes)
        return (lax.with_sharding_constraint(grads, models.param_shardings(config.model, mesh)), sums), seen

    if not once:
        return grads_of(params, known, batch, fold_in_microbatch(key, 0))

    def accumulate(params: Any, known: Any, micros: Batch) -> tuple[tuple[Any, Metrics], jax.Array | None]:
        def add(so_far: Any, micro: tuple[jax.Array, Batch]) -> tuple[Any, None]:
            index, rows = micro
            more, micro_amaxes = grads_of(params, known, rows, fold_in_microbatch(key, index))
            total, seen = so_far
            return (jax.tree.map(jnp.add, total, more), jax.tree.map(jnp.maximum, seen, micro_amaxes)), None

        sums = dict.fromkeys(SUMS, jnp.zeros((), jnp.float32))
        if config.model.experts:
            sums |= dict.fromkeys(ROUTER_SUMS, jnp.zeros((), jnp.float32))
            sums["load"] = jnp.zeros((config.model.layers, config.model.experts), jnp.float32)
        start = jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), params), sums
        zero_amaxes = jax.tree.map(jnp.zeros_like, known[1])
        total, seen = lax.scan(add, (start, zero_amaxes), (jnp.arange(config.accumulate), micros))[0]
        return total if data_axis is None else lax.psum(total, data_axis), seen

    micros = split_microbatches(batch, config.accumulate)
    if data_axis is None:
        return accumulate(params, known, micros)
    # JAX all-reduces the gradient of a replicated value in every microbatch. So this axis is manual in the gradient
    # computation: each index along it accumulates its own gradients, and one psum follows.
    specs = PartitionSpec(), PartitionSpec(), PartitionSpec(None, data_axis)
    mapped = jax.shard_map(
        accumulate, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), axis_names={data_axis}, check_vma=False
    )
    return mapped(params, known, micros)


def split_microbatches(batch: Batch, count: int) -> Batch:
    """Reshapes [B, S] to [count, B / count, S]: row r is in microbatch r % count, so rows stay on their device."""
    return {name: x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1) for name, x in batch.items()}


def make_model_context(
    config: TrainConfig, resolved: ResolvedPolicy | None, mesh: Mesh, key: jax.Array | None
) -> models.ModelContext:
    """Returns the context of the model in a step of this run."""
    return models.ModelContext(
        policy=resolved,
        key=key,
        mesh=mesh,
        backend=config.precision.backend,
        remat=config.remat,
        unroll=config.unroll or config.model.layers,
        compute_dtype=jnp.dtype(config.precision.compute_dtype),
        reduce_dtype=config.precision.reduce_dtype,
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a global batch."""
    return named_sharding(("batch", "seq"), mesh)


def abstract_batch(config: TrainConfig, mesh: Mesh, *, seq: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes and shardings of a global batch."""
    shape = jax.ShapeDtypeStruct((config.batch, seq), jnp.int32, sharding=batch_sharding(mesh))
    return dict.fromkeys(BATCH_KEYS, shape)


def device_roofline(device: Device) -> Roofline:
    """Returns the roofline of a device in the table, at measured efficiencies."""
    assert device.bandwidth and device.nvlink_bandwidth and device.nvlink_domain
    bf16 = device.peak["bf16"]
    return Roofline(
        gemm={name: GEMM_EFFICIENCY * peak for name, peak in device.gemm_peaks.items()},
        attention=(ATTENTION_EFFICIENCY[0] * bf16, ATTENTION_EFFICIENCY[1] * bf16),
        memory=MEMORY_EFFICIENCY_GPU * device.bandwidth,
        nvlink_bandwidth=LINKS * device.nvlink_bandwidth / 2,
        network_bandwidth=LINKS * NETWORK_BANDWIDTH[device.name],
        nvlink_domain_size=device.nvlink_domain,
    )


def _router_metrics(sums: Metrics) -> Metrics:
    """Returns router losses, and the largest and smallest load of an expert in any layer, relative to the layer's mean;
    {} without experts.
    """
    if "load" not in sums:
        return {}
    scored, load = jnp.maximum(sums["tokens"], 1.0), sums["load"]
    relative = load * load.shape[1] / jnp.maximum(jnp.sum(load, axis=1, keepdims=True), 1.0)
    return {
        "balance_loss": sums["balance_sum"] / scored,
        "router_z_loss": sums["router_z_sum"] / scored,
        "fullest_expert": jnp.max(relative),
        "emptiest_expert": jnp.min(relative),
    }


def _no_roofline_reason(device: Device) -> str:
    """Returns why XLA gets no roofline; "" if it does."""
    if device.name not in NETWORK_BANDWIDTH:
        return f"the table knows no links of {device.name}"
    made_by_jax: bool = getattr(jax.config, "jax_enable_pgle")  # noqa: B009  typed in some JAX versions only
    if PROFILE in os.environ.get("XLA_FLAGS", "") or made_by_jax:
        return "you gave it a profile, or let JAX make one"
    return ""


def _write_profile(profile: str) -> Path:
    """Writes the profile to the user's cache, named by its content: the path is part of JAX's compile cache key."""
    name = f"{hashlib.sha256(profile.encode()).hexdigest()[:32]}.pbtxt"
    try:
        path = user_cache() / "schedule" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, profile)
    except OSError:
        path = Path(tempfile.mkdtemp(prefix="halfbyte-")) / name
        atomic_write(path, profile)
    return path
