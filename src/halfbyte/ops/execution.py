"""What is settled of linears before they are traced: how they are computed, and the plan of each."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from halfbyte.kernels.stacks import Layer
from halfbyte.ops.backends import Choice, choose
from halfbyte.ops.problem import Problem, target
from halfbyte.ops.shards import WHOLE, Placement, Shards, size_of
from halfbyte.ops.surroundings import several_devices
from halfbyte.ops.weight import Weight
from halfbyte.recipe import Recipe

WEIGHTS_KEPT = ("master", "codes")


@dataclasses.dataclass(frozen=True)
class Execution:
    """How linears are computed, beside what: who serves them, how each lies on a mesh, what is kept of their weights.

    `sharded` without placements: the compiler lays the arrays out over several devices, and kernels, which read one
    device's, are left out. `layers`, on one device: where each weight lies among those of other layers; kernels read it
    there, where a slice would be a copy for them.
    """

    backend: str = "auto"
    placements: tuple[Placement, ...] | None = None
    weights_kept: str = "master"
    sharded: bool = False
    layers: tuple[Layer | None, ...] | None = None

    def __post_init__(self) -> None:
        if self.weights_kept not in WEIGHTS_KEPT:
            raise ValueError(f"weights_kept must be one of {', '.join(WEIGHTS_KEPT)}, got {self.weights_kept!r}")

    def part(self, first: int, last: int) -> "Execution":
        """Of the linears from `first` to before `last` alone."""
        placements = None if self.placements is None else self.placements[first:last]
        layers = None if self.layers is None else self.layers[first:last]
        return dataclasses.replace(self, placements=placements, layers=layers)

    def shards(self, count: int, ndim: int) -> tuple[Shards, ...]:
        """How `count` linears of an x of `ndim` dims are cut."""
        return (WHOLE,) * count if self.placements is None else tuple(p.shards(ndim) for p in self.placements)


ALONE = Execution()


@dataclasses.dataclass(frozen=True)
class LinearPlan:
    """What is settled before tracing."""

    problem: Problem
    choice: Choice
    shards: Shards
    weights_kept: str

    @property
    def recipe(self) -> Recipe:
        return self.problem.recipe

    @property
    def weight_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.problem.weight_dtype)


def plan_linear(
    x: jax.ShapeDtypeStruct, w: Weight | jax.ShapeDtypeStruct, recipe: Recipe, execution: Execution = ALONE,
    shards: Shards = WHOLE,
) -> LinearPlan:  # fmt: skip
    """The plan of x [tokens..., inputs], as it is inside, times w, an array or a QWeight as it rests.

    It asks for all three GEMMs, or for fprop alone if the tokens cannot be blocked for wgrad (a decoder's single token,
    say).
    """
    parts = size_of(shards.stored[0]), size_of(shards.stored[1])
    problem = Problem(
        recipe,
        math.prod(x.shape[:-1]),
        w.shape[0] * parts[0],
        w.shape[1] * parts[1],
        target(),
        dtype=x.dtype.name,
        weight_dtype=w.dtype.name,
        sharded=(execution.sharded and execution.placements is None) or several_devices(),
        parts=parts,
    )
    if problem.unblockable() is not None:
        problem = dataclasses.replace(problem, training=False)
    return LinearPlan(problem, choose(execution.backend, problem), shards, execution.weights_kept)
