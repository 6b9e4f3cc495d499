"""Static configuration of linears: backend, sharding and residuals, fixed before tracing; and `jit` for such programs.

XLA options belong to a whole program, so an op cannot set them. `halfbyte train` compiles its step with the options of
its backends. `jit` does the same for a function of the caller.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.stages import Compiled, Lowered

from halfbyte.devices import Device
from halfbyte.kernels.mosaic_launch import StackSlice
from halfbyte.ops.backends import Backend, BackendChoice, backends_for, check_token_blocks, choose_backend
from halfbyte.ops.gemm_problem import LinearProblem, target_device
from halfbyte.ops.linear_sharding import UNSHARDED, LinearSharding, Placement, Sizes, num_shards
from halfbyte.ops.quantized_weight import Weight
from halfbyte.ops.trace_context import is_multi_device_program
from halfbyte.recipes import Policy, Recipe, as_recipe

WEIGHT_RESIDUALS = ("master", "codes")


# XLA's dynamic-slice fusion computes a GEMM twice if its result is both read at once and stacked for the backward
# pass: 8% of a step.
GPU_OPTIONS = {"xla_gpu_enable_dynamic_slice_fusion": False}


@dataclasses.dataclass(frozen=True)
class ExecutionConfig:
    """How linears are computed: backend, placement of each on a mesh, and what is saved of their weights.

    `partitioned_by_xla` without placements: XLA shards the arrays, so kernels that read arrays of one device are not
    used. `stack_slices`, on one device: the position of each weight in a stack of layers. Kernels read the weight there
    without the copy that a slice would be.
    """

    backend: str = "auto"
    placements: tuple[Placement, ...] | None = None
    weight_residual: str = "master"
    partitioned_by_xla: bool = False
    stack_slices: tuple[StackSlice | None, ...] | None = None

    def __post_init__(self) -> None:
        if self.weight_residual not in WEIGHT_RESIDUALS:
            raise ValueError(
                f"weight_residual must be one of {', '.join(WEIGHT_RESIDUALS)}, got {self.weight_residual!r}"
            )

    def slice_linears(self, first: int, last: int) -> "ExecutionConfig":
        """Returns the configuration of linears `first` to `last` - 1."""
        placements = None if self.placements is None else self.placements[first:last]
        layers = None if self.stack_slices is None else self.stack_slices[first:last]
        return dataclasses.replace(self, placements=placements, stack_slices=layers)

    def shards(self, count: int, ndim: int) -> tuple[LinearSharding, ...]:
        """Returns the shardings of `count` linears of an x with `ndim` dims."""
        return (UNSHARDED,) * count if self.placements is None else tuple(p.shards(ndim) for p in self.placements)


DEFAULT_EXECUTION = ExecutionConfig()


@dataclasses.dataclass(frozen=True)
class LinearPlan:
    """Static configuration of one linear, fixed before tracing."""

    problem: LinearProblem
    choice: BackendChoice
    sharding: LinearSharding
    weight_residual: str

    @property
    def recipe(self) -> Recipe:
        return self.problem.recipe

    @property
    def weight_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.problem.weight_dtype)


def linear_problem(
    x: jax.ShapeDtypeStruct, w: Weight | jax.ShapeDtypeStruct, recipe: Recipe,
    execution: ExecutionConfig = DEFAULT_EXECUTION, shards: LinearSharding = UNSHARDED, *,
    device: Device | None = None, sizes: Sizes | None = None,
) -> LinearProblem:  # fmt: skip
    """Returns the problem x [tokens..., inputs] times w: x as one device reads it, w, an array or a QWeight, as stored.

    `sizes` are those of the mesh axes outside a `shard_map`. `device` is by default the target of the program. The
    problem has only fprop if wgrad's blocks do not divide the tokens (the single token of a decoder).
    """
    weight_shards = num_shards(shards.weight_storage_axes[0], sizes), num_shards(shards.weight_storage_axes[1], sizes)
    problem = LinearProblem(
        recipe,
        math.prod(x.shape[:-1]),
        w.shape[0] * weight_shards[0],
        w.shape[1] * weight_shards[1],
        device or target_device(),
        dtype=x.dtype.name,
        weight_dtype=w.dtype.name,
        partitioned_by_xla=(execution.partitioned_by_xla and execution.placements is None) or is_multi_device_program(),
        weight_shards=weight_shards,
    )
    return problem if problem.block_mismatch_reason() is None else dataclasses.replace(problem, training=False)


def plan_linear(
    x: jax.ShapeDtypeStruct, w: Weight | jax.ShapeDtypeStruct, recipe: Recipe,
    execution: ExecutionConfig = DEFAULT_EXECUTION, shards: LinearSharding = UNSHARDED,
) -> LinearPlan:  # fmt: skip
    """Plans one linear of the program that is being traced; x and w as in `linear_problem`."""
    problem = linear_problem(x, w, recipe, execution, shards)
    return LinearPlan(problem, choose_backend(execution.backend, problem), shards, execution.weight_residual)


def plan_placed_linear(
    x: jax.ShapeDtypeStruct, w: jax.ShapeDtypeStruct, recipe: Recipe, execution: ExecutionConfig, device: Device
) -> LinearPlan:
    """Plans one linear of global x [batch, seq, inputs] and w [inputs, outputs] without tracing, as `device` runs it.

    Raises ValueError if no backend serves it, or if wgrad's blocks do not divide the tokens of one device.
    """
    (shards,) = execution.shards(1, x.ndim)
    sizes = {} if execution.placements is None else dict(execution.placements[0].mesh.shape)
    leading = shards.token_axes or ((),) * (x.ndim - 1)
    tokens = tuple(n // num_shards(axes, sizes) for n, axes in zip(x.shape[:-1], leading, strict=True))
    stored = tuple(n // num_shards(axes, sizes) for n, axes in zip(w.shape, shards.w, strict=True))
    local_x = jax.ShapeDtypeStruct((*tokens, x.shape[-1] // num_shards(shards.input_axes, sizes)), x.dtype)
    local_w = jax.ShapeDtypeStruct(stored, w.dtype)
    problem = linear_problem(local_x, local_w, recipe, execution, shards, device=device, sizes=sizes)
    check_token_blocks(problem)
    return LinearPlan(problem, choose_backend(execution.backend, problem), shards, execution.weight_residual)


def jit(fn: Callable[..., Any], recipe: Policy | Recipe | str, **options: Any) -> Callable[..., Any]:
    """Returns `jax.jit(fn, **options)` with the compiler options of the backends that serve `recipe`.

    `recipe` may be a policy, for all of its recipes. On a GPU it compiles as `halfbyte train` compiles its step: FP8
    GEMMs apply their scales themselves, and XLA autotunes no Triton GEMM in their place, which is most of the compile
    time. Each compiled program is checked once; it is an error if XLA replaced a GEMM. On other devices it is
    `jax.jit`.
    """
    recipes = [r.recipe for r in recipe.rules if r.recipe] if isinstance(recipe, Policy) else [as_recipe(recipe, "jit")]
    backends = backends_for(recipes)
    if target_device().platform != "cuda":
        return jax.jit(fn, **options)
    compiler_options = functools.reduce(
        lambda a, b: a | dict(b.compiler_options), backends, dict[str, Any](GPU_OPTIONS)
    )
    jitted = jax.jit(fn, compiler_options=compiler_options | (options.pop("compiler_options", None) or {}), **options)
    checked = set[Any]()

    def lower(*args: Any, **kwargs: Any) -> Any:
        with trace_with_backend_options(backends):
            return jitted.lower(*args, **kwargs)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        signature = tree, tuple((x.shape, x.dtype) if hasattr(x, "shape") else x for x in leaves)
        with trace_with_backend_options(backends):
            if signature not in checked:  # the call below reuses this compilation
                lowered = lower(*args, **kwargs)
                check_no_unexpected_gemms(backends, lowered, lowered.compile())
                checked.add(signature)
            return jitted(*args, **kwargs)

    call.lower = lower  # type: ignore[attr-defined]
    return call


@contextlib.contextmanager
def trace_with_backend_options(backends: Iterable[Backend]) -> Iterator[None]:
    """Traces with the trace contexts of these backends; for programs that are compiled with their options."""
    with contextlib.ExitStack() as stack:
        for backend in backends:
            stack.enter_context(backend.trace_context())
        yield


def check_no_unexpected_gemms(backends: Iterable[Backend], lowered: Lowered, compiled: Compiled) -> None:
    """Raises RuntimeError if XLA replaced a backend's GEMM call; the replacement may round its scales."""
    for backend in backends:
        unexpected = backend.unexpected_gemms(lowered, compiled)
        if unexpected:
            raise RuntimeError(
                f"XLA compiled {len(unexpected)} GEMMs of the {backend.name} backend as something else; use the "
                f"backend emulated and report this line: {unexpected[0][:300]}"
            )
