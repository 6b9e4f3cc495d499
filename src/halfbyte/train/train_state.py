"""Train state: all that a run needs to continue, in addition to its config and its position in the data.

An observer gets a snapshot of it before some steps.

The state has no random keys: they are derived from (seed, step), so a restart draws the same random bits. It has the
seed, which thereby is an argument of every compiled program: one program serves all seeds.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from halfbyte import models
from halfbyte.recipes import ResolvedPolicy, site_key, step_key
from halfbyte.train.dynamic_scaling import initial_amax_history
from halfbyte.train.optimizers import adamw, muon
from halfbyte.train.train_config import TrainConfig

PERTURBATION = 2.0**-20  # relative, of the master weights of a twin


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """State of training after `step` finished steps.

    params: float32 master weights. optimizer: counts and moments. scaler: loss scale, steps since its last change,
    skipped steps. seed: uint32 seed of stochastic rounding, derived from the config. sentinel: uint32 checksum of the
    weights as the last step wrote them, derived from the weights. delayed: amax history of delayed scaling; None under
    recipes without one.
    """

    step: Any
    params: Any
    optimizer: Any
    scaler: dict[str, Any]
    seed: Any
    sentinel: Any
    delayed: Any = None

    def items(self) -> dict[str, Any]:
        """Returns the items of a checkpoint. The weights are one item, so that they can be read separately."""
        amax_history = {} if self.delayed is None else {"delayed": self.delayed}
        return {
            "params": self.params,
            "optimizer": self.optimizer,
            "progress": {"step": self.step, "scaler": self.scaler} | amax_history,
        }

    @classmethod
    def from_items(cls, items: dict[str, Any], *, seed: Any) -> "TrainState":
        """Returns the state from the items of a checkpoint."""
        progress = items["progress"]
        sentinel, step, scaler = jax.jit(params_checksum)(items["params"]), progress["step"], progress["scaler"]
        return cls(step, items["params"], items["optimizer"], scaler, seed, sentinel, progress.get("delayed"))

    def with_weights(self, params: Any) -> "TrainState":
        """Returns the state with other weights. The sentinel still detects a memory error in the old weights."""
        sentinel = self.sentinel
        if sentinel is not None:
            sentinel = sentinel + (params_checksum(params) - params_checksum(self.params))
        return dataclasses.replace(self, params=params, sentinel=sentinel)


def params_checksum(params: Any, turn: jax.Array | int = 0) -> jax.Array:
    """Returns a uint32 checksum: the bits of all weights, summed modulo 2^32, each array times a different odd number.

    A flip of any single bit changes it. Integer sums do not depend on the order of summation or the mesh. `turn` is
    XORed with the bits; it is 0, see `check_weights`.
    """
    total = jnp.zeros((), jnp.uint32)
    for number, leaf in enumerate(jax.tree.leaves(params)):
        words = {2: jnp.uint16, 4: jnp.uint32}[leaf.dtype.itemsize]
        bits = jax.lax.bitcast_convert_type(leaf, words).astype(jnp.uint32) ^ jnp.uint32(turn)
        total += jnp.sum(bits, dtype=jnp.uint32) * jnp.uint32(2 * number + 1)
    return total


@dataclasses.dataclass(frozen=True)
class WeightCheck:
    """Result of checking the weights before an update: the number of non-finite ones, and if the checksum matches."""

    not_finite: jax.Array
    intact: jax.Array

    @property
    def is_good(self) -> jax.Array:
        """Returns True if a step may update these weights."""
        return (self.not_finite == 0) & self.intact


def check_weights(state: "TrainState", norm: jax.Array) -> WeightCheck:
    """Checks the weights after the gradients are computed, right before the update that reads them.

    So memory errors during the step are detected too. A state without a sentinel is not checked.
    """
    if state.sentinel is None:
        return WeightCheck(jnp.int32(0), jnp.bool_(True))
    never = (norm == -1.0).astype(
        jnp.uint32
    )  # 0, but XLA has to wait for the norm: the check cannot be moved ahead of the backward pass
    counts = [jnp.sum(~jnp.isfinite(leaf), dtype=jnp.int32) for leaf in jax.tree.leaves(state.params)]
    return WeightCheck(sum(counts, jnp.int32(0)), params_checksum(state.params, never) == state.sentinel)


def make_optimizer(config: TrainConfig) -> Any:
    """Returns the optimizer of the run."""
    decay_mask = models.weight_decay_mask(config.model)
    if config.optimizer.name == "adamw":
        return adamw(config.optimizer, decay_mask)
    return muon(config.optimizer, decay_mask, matrices=models.matrix_mask(config.model))


def rounding_seed_array(config: TrainConfig, mesh: Mesh) -> jax.Array:
    """Returns the seed of stochastic rounding as a uint32 array, replicated on the mesh."""
    replicated = NamedSharding(mesh, PartitionSpec())
    return jax.make_array_from_callback((), replicated, lambda _: np.uint32(config.rounding_seed))


def init_state(config: TrainConfig, seed: jax.Array, rounding_seed: jax.Array) -> TrainState:
    """Returns an initial state, which depends only on the seeds; jit it with `state_shardings` as out_shardings."""
    return state_from_params(config, models.init(config.model, site_key(step_key(seed, 0), "init")), rounding_seed)


def state_from_params(config: TrainConfig, params: Any, rounding_seed: jax.Array) -> TrainState:
    """Returns the initial state of a run that starts from these weights."""
    if config.precision.noise_seed:
        params = perturb_weights(params, site_key(step_key(rounding_seed, 0), "twin"))
    scale = config.loss_scale.initial if config.loss_scale.mode == "dynamic" else 1.0
    scaler = {
        "scale": jnp.asarray(scale, jnp.float32),
        "good_steps": jnp.zeros((), jnp.int32),
        "skipped": jnp.zeros((), jnp.int32),
    }
    optimizer = make_optimizer(config).init(params)
    step = jnp.zeros((), jnp.int32)
    return TrainState(
        step, params, optimizer, scaler, rounding_seed, params_checksum(params), initial_amax_history(config)
    )


SEED = jax.ShapeDtypeStruct((), jnp.uint32)


def perturb_weights(params: Any, key: jax.Array) -> Any:
    """Multiplies every master weight by 1 + 2^-20 or 1 - 2^-20, at random.

    The change is below the resolution of bfloat16, and large enough for two runs to diverge.
    """
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))
    signs = [jax.random.rademacher(k, leaf.shape, leaf.dtype) for k, leaf in zip(keys, leaves, strict=True)]
    perturbed = [leaf * (1 + PERTURBATION * sign) for leaf, sign in zip(leaves, signs, strict=True)]
    return jax.tree.unflatten(structure, perturbed)


def abstract_state(config: TrainConfig, mesh: Mesh) -> TrainState:
    """Returns shapes, dtypes and shardings of the state: the template of a restore and of the planner's compilation."""
    shapes = jax.eval_shape(functools.partial(init_state, config), SEED, SEED)
    shardings = state_shardings(shapes, config, mesh)
    return jax.tree.map(lambda s, where: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where), shapes, shardings)


def state_shardings(shapes: TrainState, config: TrainConfig, mesh: Mesh) -> TrainState:
    """Returns the shardings of the state: moments are sharded as their parameters, scalars are replicated.

    Without an explicit sharding, scalars would be on one device.
    """
    param_shardings = models.param_shardings(config.model, mesh)
    replicated = NamedSharding(mesh, PartitionSpec())
    shardings = dict(jax.tree_util.tree_leaves_with_path(param_shardings))

    def moment_sharding(path: Any, _: Any) -> NamedSharding:
        ends = (path[start:] for start in range(len(path)))  # the path of a moment ends with the path of its parameter
        return next((shardings[end] for end in ends if end in shardings), replicated)

    optimizer = jax.tree_util.tree_map_with_path(moment_sharding, shapes.optimizer)
    scaler = dict.fromkeys(shapes.scaler, replicated)
    delayed = jax.tree.map(lambda _: replicated, shapes.delayed)
    return TrainState(replicated, param_shardings, optimizer, scaler, replicated, replicated, delayed)


def create_state(config: TrainConfig, mesh: Mesh, params: Any = None) -> TrainState:
    """Returns an initial state on the mesh, initialized in place: no device ever has more than its shard.

    `params` are the initial weights, if given; their buffers are donated.
    """
    init = functools.partial(init_state, config)
    shardings = state_shardings(jax.eval_shape(init, SEED, SEED), config, mesh)
    rounding = np.uint32(config.rounding_seed)
    if params is None:
        return jax.jit(init, out_shardings=shardings)(np.uint32(config.seed), rounding)
    init_from_params = functools.partial(state_from_params, config)
    return jax.jit(init_from_params, out_shardings=shardings, donate_argnums=0)(params, rounding)


@dataclasses.dataclass(frozen=True)
class StepSnapshot:
    """Inputs of step number `step`, before it runs."""

    step: int
    config: TrainConfig
    resolved: ResolvedPolicy
    mesh: Mesh
    params: Any
    batch: Any


class Observer(Protocol):
    """Called before every `every`-th step, starting with the first."""

    every: int

    def observe(self, moment: StepSnapshot) -> Sequence[str]:
        """Inspects a snapshot; returns lines for the log."""
        ...


def is_due(observer: Observer, step: int) -> bool:
    """Returns True if the observer is called before step number `step` (from 1)."""
    return observer.every > 0 and (step - 1) % observer.every == 0
