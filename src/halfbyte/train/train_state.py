"""The train state: all that a run needs to continue, besides its config and its position in the data.

An observer is shown a snapshot of it before some steps.

Random keys are not in it: they are derived from (seed, step), so nothing random is lost at a restart. The seed is in
it, and so is an argument of every compiled program: one program serves all seeds.
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

PERTURBATION = 2.0**-20  # of a twin's master weights


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """step: finished steps. params: float32 master weights. optimizer: counts and moments. scaler: loss scale,
    steps since its last change, steps skipped. seed: of the rounding's random bits, uint32; derived from the config.
    sentinel: the sum of all bits of the weights as the last step wrote them, uint32; derived from the weights.
    delayed: the maxima that delayed scaling remembers; None under recipes that do not."""

    step: Any
    params: Any
    optimizer: Any
    scaler: dict[str, Any]
    seed: Any
    sentinel: Any
    delayed: Any = None

    def items(self) -> dict[str, Any]:
        """As a checkpoint stores it: the weights apart, so that they can be read alone."""
        remembered = {} if self.delayed is None else {"delayed": self.delayed}
        return {
            "params": self.params,
            "optimizer": self.optimizer,
            "progress": {"step": self.step, "scaler": self.scaler} | remembered,
        }

    @classmethod
    def from_items(cls, items: dict[str, Any], *, seed: Any) -> "TrainState":
        """The state back from a checkpoint's items."""
        progress = items["progress"]
        sentinel, step, scaler = jax.jit(params_checksum)(items["params"]), progress["step"], progress["scaler"]
        return cls(step, items["params"], items["optimizer"], scaler, seed, sentinel, progress.get("delayed"))

    def with_weights(self, params: Any) -> "TrainState":
        """The state with other weights. What memory may have changed in the old ones is still seen."""
        sentinel = self.sentinel
        if sentinel is not None:
            sentinel = sentinel + (params_checksum(params) - params_checksum(self.params))
        return dataclasses.replace(self, params=params, sentinel=sentinel)


def params_checksum(params: Any, turn: jax.Array | int = 0) -> jax.Array:
    """uint32: the sum of the bits of every weight (its lowest bit turned by `turn`), modulo 2^32, each array times an
    odd number of its own. A flip of any one bit changes it. Integers: no order of summation and no mesh does."""
    total = jnp.zeros((), jnp.uint32)
    for number, leaf in enumerate(jax.tree.leaves(params)):
        words = {2: jnp.uint16, 4: jnp.uint32}[leaf.dtype.itemsize]
        bits = jax.lax.bitcast_convert_type(leaf, words).astype(jnp.uint32) ^ jnp.uint32(turn)
        total += jnp.sum(bits, dtype=jnp.uint32) * jnp.uint32(2 * number + 1)
    return total


@dataclasses.dataclass(frozen=True)
class WeightCheck:
    """The weights as a step finds them: how many are not finite, and whether they are those that were written."""

    not_finite: jax.Array
    intact: jax.Array

    @property
    def is_good(self) -> jax.Array:
        """Whether a step may be built on them."""
        return (self.not_finite == 0) & self.intact


def check_weights(state: "TrainState", norm: jax.Array) -> WeightCheck:
    """Checks the weights after the gradients are known, next to the update that reads them: changes in memory during
    the step are detected too. A state without a sentinel is not checked."""
    if state.sentinel is None:
        return WeightCheck(jnp.int32(0), jnp.bool_(True))
    never = (norm == -1.0).astype(jnp.uint32)  # 0, which no compiler knows before it has the norm: nothing moves ahead
    counts = [jnp.sum(~jnp.isfinite(leaf), dtype=jnp.int32) for leaf in jax.tree.leaves(state.params)]
    return WeightCheck(sum(counts, jnp.int32(0)), params_checksum(state.params, never) == state.sentinel)


def make_optimizer(config: TrainConfig) -> Any:
    """The optimizer that the run names."""
    decayed = models.weight_decay_mask(config.model)
    if config.optimizer.name == "adamw":
        return adamw(config.optimizer, decayed)
    return muon(config.optimizer, decayed, matrices=models.matrix_mask(config.model))


def rounding_seed_array(config: TrainConfig, mesh: Mesh) -> jax.Array:
    """The seed of the run's random bits as programs take it: uint32, on every device."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.make_array_from_callback((), everywhere, lambda _: np.uint32(config.rounding_seed))


def init_state(config: TrainConfig, seed: jax.Array, rounding_seed: jax.Array) -> TrainState:
    """A fresh state; jit it with `state_shardings` as out_shardings. Depends on the seed alone, on any mesh."""
    return state_from_params(config, models.init(config.model, site_key(step_key(seed, 0), "init")), rounding_seed)


def state_from_params(config: TrainConfig, params: Any, rounding_seed: jax.Array) -> TrainState:
    """The state of a run that begins with these weights."""
    if config.precision.noise_seed:
        params = perturb_weights(params, site_key(step_key(rounding_seed, 0), "twin"))
    scale = config.loss_scale.initial if config.loss_scale.mode == "dynamic" else 1.0
    scaler = {
        "scale": jnp.asarray(scale, jnp.float32),
        "good_steps": jnp.zeros((), jnp.int32),
        "skipped": jnp.zeros((), jnp.int32),
    }
    optimizer = make_optimizer(config).init(params)
    begun = jnp.zeros((), jnp.int32)
    return TrainState(
        begun, params, optimizer, scaler, rounding_seed, params_checksum(params), initial_amax_history(config)
    )


SEED = jax.ShapeDtypeStruct((), jnp.uint32)


def perturb_weights(params: Any, key: jax.Array) -> Any:
    """Every master weight a millionth larger or smaller, at random: below what bfloat16 can hold, and enough for two
    runs to part."""
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))
    signs = [jax.random.rademacher(k, leaf.shape, leaf.dtype) for k, leaf in zip(keys, leaves, strict=True)]
    moved = [leaf * (1 + PERTURBATION * sign) for leaf, sign in zip(leaves, signs, strict=True)]
    return jax.tree.unflatten(structure, moved)


def abstract_state(config: TrainConfig, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of the state: what a checkpoint is restored into, and what the planner compiles
    for."""
    shapes = jax.eval_shape(functools.partial(init_state, config), SEED, SEED)
    shardings = state_shardings(shapes, config, mesh)
    return jax.tree.map(lambda s, where: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where), shapes, shardings)


def state_shardings(shapes: TrainState, config: TrainConfig, mesh: Mesh) -> TrainState:
    """Moments lie where their parameters lie; scalars are replicated, explicitly (left alone they sit on one
    device)."""
    of_params = models.param_shardings(config.model, mesh)
    everywhere = NamedSharding(mesh, PartitionSpec())
    places = dict(jax.tree_util.tree_leaves_with_path(of_params))

    def place(path: Any, _: Any) -> NamedSharding:
        ends = (path[start:] for start in range(len(path)))  # a moment's path ends as its parameter's
        return next((places[end] for end in ends if end in places), everywhere)

    optimizer = jax.tree_util.tree_map_with_path(place, shapes.optimizer)
    scaler = dict.fromkeys(shapes.scaler, everywhere)
    delayed = jax.tree.map(lambda _: everywhere, shapes.delayed)
    return TrainState(everywhere, of_params, optimizer, scaler, everywhere, everywhere, delayed)


def create_state(config: TrainConfig, mesh: Mesh, params: Any = None) -> TrainState:
    """A fresh state on the mesh, initialised in place: no device ever holds more than its shard. `params`, if given,
    are the weights to begin with; their memory is taken over.
    """
    make = functools.partial(init_state, config)
    where = state_shardings(jax.eval_shape(make, SEED, SEED), config, mesh)
    rounding = np.uint32(config.rounding_seed)
    if params is None:
        return jax.jit(make, out_shardings=where)(np.uint32(config.seed), rounding)
    begin = functools.partial(state_from_params, config)
    return jax.jit(begin, out_shardings=where, donate_argnums=0)(params, rounding)


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
