"""OsciReset: weights that swing between two codes are set onto one (TetraJet-v2, arXiv 2510.27527).

Late in a run a weight may lie at the edge between two codes: tiny updates turn its code to and fro, and what the GEMMs
read moves much further than the weight does. From step `precision.reset_at` on, in every period of `reset_every` steps:

    after step 0 of the period            both sums are zero
    after steps 1 to n = `reset_over`     D += |Q(w) - Q(w')|,  d += |w - w'|,  w' the weight of the step before
    after step n + 1                      w := Q(w)  where  D >= `reset_ratio` d  and  d > 0

Q(w) is what fprop's operand of the whole weight stands for. A layer that is not quantized has Q(w) = w, and is never
set; a phase that quantizes none is left alone, and so is the rest of a period that such a phase has cut. Moments stay
as they are. It is a program of its own, which the loop runs after a step: a step's own is none other
for it. What it remembers, w', d and D, lies where the weights lie, and in the checkpoints.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from halfbyte import models
from halfbyte.optim import span
from halfbyte.recipe import Resolved

from .config import TrainConfig
from .precision import Phase, phases

BEGIN, TRACK, RESET = "begin", "track", "reset"
NAME, KEPT = "oscillation", ("last", "moved", "rounded")  # as a state and its checkpoints have it
Hook = Callable[[Any], tuple[Any, jax.Array]]


def first_step(config: TrainConfig) -> int | None:
    """The step after which the first period begins; None for a run without, `idle` says why."""
    return None if not config.precision.reset_at or idle(config) else _start(config)


def _start(config: TrainConfig) -> int:
    return max(1, span(config.precision.reset_at, config.steps))


def idle(config: TrainConfig) -> str | None:
    """Why a run with `precision.reset_at` sets no weights: it ends too early, or quantizes none, as the bf16 run beside
    another; ValueError where no weight alone decides Q(w).
    """
    start, first = _start(config), config.precision.reset_over + 1
    if start + first > config.steps:
        return (
            f"it begins after step {start}, and the run ends at step {config.steps}, before the first weights could be "
            f"set ({first} steps later)"
        )
    return None if looked_at(config) else "the run's recipe and policy quantize no weight"


def says(config: TrainConfig, resolved: Resolved | None = None) -> str | None:
    """What becomes of `precision.reset_at` in this run, or in one phase of it, in a sentence; None for a run
    without."""
    if not config.precision.reset_at:
        return None
    if why := idle(config):
        return f"precision.reset_at: no weights will be set, {why}"
    if resolved is not None and not quantizes(config, resolved):
        return "precision.reset_at: no weights will be set in this phase, which quantizes none"
    start, every = _start(config), config.precision.reset_every
    first = start + config.precision.reset_over + 1
    if all(due(config, step) is None for step in range(first, config.steps + 1, every)):
        return f"precision.reset_at: no weights will be set, none is quantized through a period from step {start} on"
    return f"weights that swing between two codes are set onto one, every {every} steps from step {start} on"


@functools.lru_cache(maxsize=8)
def looked_at(config: TrainConfig) -> frozenset[str]:
    """The paths of the weights that some phase quantizes."""
    return frozenset(path for phase in phases(config) for path in sites(config, phase.resolved(config)))


def quantizes(config: TrainConfig, resolved: Resolved) -> bool:
    """Whether a weight that is looked at is quantized in this phase."""
    found = (segment.recipes.get(path) for segment in resolved.segments for path in looked_at(config))
    return any(made is not None and made.fprop_w.format.quantized for made in found)


@functools.lru_cache(maxsize=8)
def _has_codes(config: TrainConfig, phase: Phase) -> bool:
    return quantizes(config, phase.resolved(config))


def due(config: TrainConfig, step: int, now: Sequence[Phase] = ()) -> str | None:
    """What is to be done after this step of a run whose phases are those of `now`, or of its config."""
    start = first_step(config)
    if start is None or step < start:
        return None
    at, n = (step - start) % config.precision.reset_every, config.precision.reset_over
    if at > n + 1:
        return None
    of_period = [phase for phase in now or phases(config) if phase.start < step and phase.stop >= step - at]
    if not all(_has_codes(config, phase) for phase in of_period):
        return None
    return BEGIN if at == 0 else TRACK if at <= n else RESET


def sites(config: TrainConfig, resolved: Resolved) -> list[str]:
    """The paths of the weights that some layer quantizes for fprop; ValueError where no weight alone decides Q(w)."""
    found = []
    for path, spec in models.declared(config.model).items():
        recipes = [segment.recipes[path] for segment in resolved.segments if path in segment.recipes]
        quantized = [made for made in recipes if made.fprop_w.format.quantized]
        if quantized and spec.kind == "experts":
            raise ValueError(
                f"precision.reset_at serves dense linears, and {path} is a weight of experts, quantized where it is "
                "multiplied; leave experts in bf16 (--policy), or set it to 0"
            )
        for made in quantized:
            if made.fprop_w.stochastic or made.fprop_w.hadamard or made.history or made.shared_scales:
                raise ValueError(
                    f"precision.reset_at sets a weight to what its code stands for, which under recipe {made.name!r} "
                    "is not the weight's own doing (fprop_w by chance or Hadamard-transformed, a history, or "
                    "shared_scales); take a recipe without these, or set it to 0"
                )
        found += [path] if quantized else []
    return found


def nothing_moved(config: TrainConfig, params: Any) -> Any:
    """What a run begins with: `last` w', `moved` d and `rounded` D of these weights; None for a run without."""
    if first_step(config) is None:
        return None
    every, paths = models.flatten(params), looked_at(config)
    zeros = models.nest({path: jnp.zeros_like(every[path]) for path in every if path in paths})
    return dict.fromkeys(KEPT, zeros)


def as_stored(params: Any, names: Iterable[str]) -> Any:
    """What a checkpoint remembers, in the shapes of `params`, by the names of its leaves; None if nothing."""
    first = f"{NAME}/{KEPT[0]}/"
    paths, every = [name.removeprefix(first) for name in names if name.startswith(first)], models.flatten(params)
    return dict.fromkeys(KEPT, models.nest({path: every[path] for path in paths})) if paths else None


def as_wanted(config: TrainConfig, params: Any, found: Any) -> Any:
    """What a run goes on with that had `found` before its config was changed: the same where it looks at the same
    weights, else nothing, or what a period begins with.
    """
    wanted = frozenset[str]() if first_step(config) is None else looked_at(config)
    if wanted == frozenset(models.flatten(found["last"]) if found else ()):
        return found
    if not wanted:
        return None
    every = {path: leaf for path, leaf in models.flatten(params).items() if path in wanted}
    still = models.nest({path: jax.device_put(jnp.zeros_like(leaf), leaf.sharding) for path, leaf in every.items()})
    last = models.nest({path: jnp.copy(leaf) for path, leaf in every.items()})
    return {"last": last, "moved": still, "rounded": jax.tree.map(jnp.copy, still)}


def make_hook(config: TrainConfig, resolved: Resolved, mesh: Mesh, what: str) -> Hook:
    """state -> (state, the share of the weights that were set): what is `due` after a step of this phase."""
    rounded = functools.partial(models.rounded_weights, config.model, resolved=resolved, mesh=mesh)
    ratio = config.precision.reset_ratio

    def hook(state: Any) -> tuple[Any, jax.Array]:
        before, every = state.oscillation, models.flatten(state.params)
        now = models.nest({path: every[path] for path in models.flatten(before["last"])})
        if what == BEGIN:
            zeros = jax.tree.map(jnp.zeros_like, now)
            begun = {"last": now, "moved": zeros, "rounded": zeros}
            return dataclasses.replace(state, oscillation=begun), jnp.float32(0)
        onto = rounded(now)
        if what == TRACK:
            moved = jax.tree.map(_further, before["moved"], now, before["last"])
            there = jax.tree.map(_further, before["rounded"], onto, rounded(before["last"]))
            so_far = {"last": now, "moved": moved, "rounded": there}
            return dataclasses.replace(state, oscillation=so_far), jnp.float32(0)
        swings = jax.tree.map(lambda d, far: (far >= ratio * d) & (d > 0), before["moved"], before["rounded"])
        chosen = models.flatten(jax.tree.map(jnp.where, swings, onto, now))
        params = jax.lax.optimization_barrier(models.nest({**every, **chosen}))
        sizes = [leaf.size for leaf in jax.tree.leaves(swings)]
        set_now = jax.tree.map(lambda swings, onto, now: swings & (onto != now), swings, onto, now)
        count = sum(jnp.sum(leaf, dtype=jnp.float32) for leaf in jax.tree.leaves(set_now))
        return state.with_weights(params), count / sum(sizes)

    return hook


def _further(total: jax.Array, now: jax.Array, last: jax.Array) -> jax.Array:
    return total + jnp.abs(now - last)


def compile_hook(config: TrainConfig, resolved: Resolved, mesh: Mesh, what: str, state: Any) -> Any:
    """`make_hook` for states like this one: they are donated, and come back where they were."""
    where = jax.tree.map(lambda leaf: leaf.sharding, state), NamedSharding(mesh, PartitionSpec())
    hook = make_hook(config, resolved, mesh, what)
    return jax.jit(hook, donate_argnums=0, out_shardings=where).lower(state).compile()
