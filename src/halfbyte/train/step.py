"""The train step: a pure function (state, batch) -> (state, metrics). The loop runs it, the planner lowers the very
same.

One step: the batch is cut into `accumulate` microbatches; a scan adds up their gradients in float32, each divided by
the scored tokens of the *whole* step, so that the result does not depend on how the tokens fall into microbatches; then
clip, AdamW, and the loss scale. Random bits come from (seed, step, microbatch, layer, site, role).
"""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from halfbyte import models, ops, optim
from halfbyte.devices import known_to_xla
from halfbyte.devices.jax_versions import ALL_GATHER_PIPELINING
from halfbyte.recipe import Resolved, step_key
from halfbyte.sharding import DEFAULT_RULES, named_sharding

from .config import TrainConfig
from .delayed import advanced
from .scaling import next_scaler
from .scheduling import Scheduling
from .state import TrainState, abstract_state, bit_sum, make_optimizer, watch_weights

Batch = dict[str, jax.Array]
# As compiler options, under the name of each JAX version.
NOT_AHEAD = dict(zip(ALL_GATHER_PIPELINING, ("COLLECTIVE_PIPELINING_MODE_OFF", False), strict=True))
UNFILLED = "xla_gpu_enable_dus_accumulator_zero_init_elimination"
Metrics = dict[str, jax.Array]
TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
BATCH_KEYS = ("tokens", "targets", "segments", "positions")
SUMS = ("nll_sum", "z_sum", "tokens")  # over the scored tokens of a microbatch, float32
APART = "data"  # the axis over which gradients are summed once a step
ROUTED = ("balance_sum", "router_z_sum", "load")  # of models with experts


def make_context(config: TrainConfig, resolved: Resolved | None, mesh: Mesh, key: jax.Array | None) -> models.Context:
    """How the model runs inside a step of this run."""
    return models.Context(
        policy=resolved,
        key=key,
        mesh=mesh,
        backend=config.precision.backend,
        remat=config.remat,
        unroll=config.unroll or config.model.layers,
        compute_dtype=jnp.dtype(config.precision.compute_dtype),
        reduce_dtype=config.precision.reduce_dtype,
    )


def microbatches(batch: Batch, count: int) -> Batch:
    """[B, S] -> [count, B / count, S]. Row r goes to microbatch r % count, so that rows stay on their device."""
    return {name: x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1) for name, x in batch.items()}


def gradients(
    config: TrainConfig, resolved: Resolved, mesh: Mesh, params: Any, batch: Batch, *, key: jax.Array, scale: jax.Array
) -> tuple[Any, Metrics]:
    """Float32 gradients of the mean loss over all scored tokens of the step, times `scale`, and sums for the
    metrics."""
    return gradients_and_seen(config, resolved, mesh, (params, None), batch, key=key, scale=scale)[0]


def gradients_and_seen(
    config: TrainConfig, resolved: Resolved, mesh: Mesh, given: tuple[Any, jax.Array | None], batch: Batch, *,
    key: jax.Array, scale: jax.Array,
) -> tuple[tuple[Any, Metrics], jax.Array | None]:  # fmt: skip
    """(`gradients`, the largest magnitudes that the step has seen) of the weights and the amaxes of delayed scaling;
    None for None."""
    params, amaxes = given
    scored = jnp.sum((batch["targets"] >= 0).astype(jnp.float32))
    weight = scale / jnp.maximum(scored, 1.0)

    # Codes do not change between microbatches; with one microbatch the model makes them layer by layer.
    once = config.accumulate > 1
    ready = models.quantize_weights(config.model, params, resolved, mesh) if once else params
    known = ready, amaxes
    apart = APART if once and not config.model.experts and mesh.shape.get(APART, 1) > 1 else None
    batch_over = tuple(axis for axis in DEFAULT_RULES.mesh_axes("batch") if axis != apart)

    def one(params: Any, known: Any, micro: Batch, key: jax.Array) -> tuple[tuple[Any, Metrics], jax.Array | None]:
        ready, amaxes = known

        def loss(params: Any, amaxes: jax.Array | None) -> tuple[jax.Array, Metrics]:
            context, rules = make_context(config, resolved, mesh, key), DEFAULT_RULES.replace(batch=batch_over)
            context = dataclasses.replace(context, stacked=True, rules=rules, amaxes=amaxes)
            weights = models.with_anchors(ready, params)
            extra = {name: getattr(config, name) for name in ("z_loss", "balance_loss", "router_z_loss")}
            total, aux = models.loss_sum(config.model, weights, micro, context, **extra)
            return total * weight, {name: aux[name] for name in (*SUMS, *ROUTED) if name in aux}

        (grads, seen), sums = jax.grad(loss, argnums=(0, 1), has_aux=True)(params, amaxes)
        return (lax.with_sharding_constraint(grads, models.param_shardings(config.model, mesh)), sums), seen

    if not once:
        return one(params, known, batch, jax.random.fold_in(key, 0))

    def added_up(params: Any, known: Any, micros: Batch) -> tuple[tuple[Any, Metrics], jax.Array | None]:
        def add(so_far: Any, micro: tuple[jax.Array, Batch]) -> tuple[Any, None]:
            index, rows = micro
            more, found = one(params, known, rows, jax.random.fold_in(key, index))
            total, seen = so_far
            return (jax.tree.map(jnp.add, total, more), jax.tree.map(jnp.maximum, seen, found)), None

        sums = dict.fromkeys(SUMS, jnp.zeros((), jnp.float32))
        if config.model.experts:
            sums |= dict.fromkeys(ROUTED, jnp.zeros((), jnp.float32))
            sums["load"] = jnp.zeros((config.model.layers, config.model.experts), jnp.float32)
        start = jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), params), sums
        nothing = jax.tree.map(jnp.zeros_like, known[1])
        total, seen = lax.scan(add, (start, nothing), (jnp.arange(config.accumulate), micros))[0]
        return total if apart is None else lax.psum(total, apart), seen

    micros = microbatches(batch, config.accumulate)
    if apart is None:
        return added_up(params, known, micros)
    # A gradient of what is the same along an axis is summed over it at once, in every microbatch: so the axis is taken
    # away from all that computes one, and each of its places adds up its own.
    specs = PartitionSpec(), PartitionSpec(), PartitionSpec(None, apart)
    mapped = jax.shard_map(
        added_up, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), axis_names={apart}, check_vma=False
    )
    return mapped(params, known, micros)


def make_train_step(config: TrainConfig, resolved: Resolved, mesh: Mesh) -> TrainStep:
    """The pure step of one precision phase. A step whose loss, gradient or weights are not finite, or whose weights are
    not those that the step before has written, leaves params and moments as they were and counts as skipped."""
    transform = make_optimizer(config)
    rate_at = optim.learning_rate(config.optimizer, config.steps)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        scale, rate = state.scaler["scale"], rate_at(state.step)
        key = step_key(state.seed, state.step)
        given = state.params, None if state.delayed is None else state.delayed["amaxes"]
        with ops.tracing(serving(resolved)):
            made, seen = gradients_and_seen(config, resolved, mesh, given, batch, key=key, scale=scale)
        grads, sums = made
        grads = jax.tree.map(lambda g: g * (1.0 / scale), grads)
        norm = optim.global_norm(grads)
        scored = jnp.maximum(sums["tokens"], 1.0)
        loss = sums["nll_sum"] / scored
        watched = watch_weights(state, norm)
        finite = jnp.isfinite(norm) & jnp.isfinite(loss) & watched.good
        clipped = optim.clip_by_norm(grads, norm, config.optimizer.clip)
        updates, optimizer = transform.update(clipped, state.optimizer, state.params)
        params = models.rebalance(optim.apply(state.params, updates, rate), sums.get("load"), config.balance_rate)
        keep = lambda new, old: jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)  # noqa: E731
        params = lax.optimization_barrier(keep(params, state.params))  # the sum is of what is stored
        next_state = TrainState(
            step=state.step + 1,
            params=params,
            optimizer=keep(optimizer, state.optimizer),
            scaler=next_scaler(config.loss_scale, state.scaler, finite),
            seed=state.seed,
            sentinel=None if state.sentinel is None else bit_sum(params),
            delayed=keep(advanced(state.delayed, seen), state.delayed),
        )
        metrics = {
            "loss": loss,
            "z_loss": sums["z_sum"] / scored,
            "scored_tokens": sums["tokens"],
            "grad_norm": norm,
            "learning_rate": rate,
            "loss_scale": scale,
            "skipped": next_state.scaler["skipped"].astype(jnp.float32),
            "weights_not_finite": watched.not_finite.astype(jnp.float32),
            "weights_intact": watched.intact.astype(jnp.float32),
        }
        return next_state, metrics | _routed(sums)

    return train_step


def _routed(sums: Metrics) -> Metrics:
    """What the routers of a model with experts did: their losses, and the load of the fullest and of the emptiest
    expert of any layer, 1 where all have the same; nothing without experts.
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


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Where the rows of a global batch lie."""
    return named_sharding(("batch", "seq"), mesh)


def abstract_batch(config: TrainConfig, mesh: Mesh, *, seq: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and shardings of a global batch."""
    shape = jax.ShapeDtypeStruct((config.batch, seq), jnp.int32, sharding=batch_sharding(mesh))
    return dict.fromkeys(BATCH_KEYS, shape)


def jit_train_step(
    config: TrainConfig, resolved: Resolved, mesh: Mesh, *, options: Mapping[str, Any] | None = None
) -> Any:
    """The step, jitted: the state is donated and comes back where it was. `options` are for XLA on a GPU, beside its
    own.
    """
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(config, mesh))
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.jit(
        make_train_step(config, resolved, mesh),
        donate_argnums=0,
        out_shardings=(shardings, everywhere),
        compiler_options=compiler_options(config, mesh, resolved, options or {}),
    )


def compiler_options(
    config: TrainConfig, mesh: Mesh, resolved: Resolved, more: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any] | None:
    """What XLA is told for this program, beside what every program for a GPU is. On a single GPU its own
    rematerialization, which begins at 80% of the memory, is put out of reach: in a step that fills the card it computed
    slices and casts again and saved nothing. Stacks that a loop writes whole are not filled with zeros first. A backend
    may have options of its own.

    Where a layer is made again from its input alone and activations are gathered too, XLA would not only gather weights
    a turn of the loop ahead but activations as well, and compute all that they are made of twice: attention's linears.
    """
    if mesh.devices.flat[0].platform not in ("gpu", "cuda"):
        return None
    memory = {"xla_gpu_memory_limit_slop_factor": 300} if mesh.size == 1 else {}
    unfilled = {UNFILLED: True} if known_to_xla(UNFILLED) else {}
    gathered = any(mesh.shape.get(axis, 1) > 1 for axis in ("tensor", "context"))
    routed = mesh.size > 1 and bool(config.model.experts)  # all devices know all logits
    twice = config.remat == "full" and (gathered or routed)
    ahead = {flag: off for flag, off in NOT_AHEAD.items() if twice and known_to_xla(flag)}
    options: dict[str, Any] = {**ops.GPU_OPTIONS, **memory, **unfilled, **ahead}
    for backend in serving(resolved):
        options |= backend.compiler_options
    return options | dict(more)


def serving(resolved: Resolved) -> list[ops.Backend]:
    """The backends that may take part in the step."""
    return ops.serving(recipe for segment in resolved.segments for recipe in segment.recipes.values())


def compile_train_step(lowered: Any, resolved: Resolved, scheduling: Scheduling | None = None) -> Any:
    """The step compiled, ordered as `scheduling` says, and read by each backend that takes part: a GEMM that became
    something else stops the run.
    """
    compiled = lowered.compile() if scheduling is None else scheduling.compile(lowered)
    ops.refuse_strays(serving(resolved), lowered, compiled)
    return compiled


def lower_train_step(config: TrainConfig, resolved: Resolved, mesh: Mesh, *, seq: int) -> Any:
    """The step lowered for the mesh's devices from shapes alone; nothing is allocated."""
    step = jit_train_step(config, resolved, mesh)
    return step.lower(abstract_state(config, mesh), abstract_batch(config, mesh, seq=seq))


def make_eval_step(config: TrainConfig, resolved: Resolved, mesh: Mesh) -> Any:
    """Jitted (params, seed, batch) -> (sum of nll, scored tokens). Forward only, under the recipe of the phase."""

    def evaluate(params: Any, seed: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
        context = make_context(config, resolved, mesh, step_key(seed, 0))
        _, aux = models.loss_sum(config.model, params, batch, context)
        return aux["nll_sum"], aux["tokens"]

    return jax.jit(evaluate, out_shardings=NamedSharding(mesh, PartitionSpec()))
