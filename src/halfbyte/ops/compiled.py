"""`jit` for programs with recipes: traced, compiled and read as the backends want it that take part.

XLA's options belong to a whole program, so a function inside cannot set them. `halfbyte train` compiles its own step
with them; this is the same for somebody's own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
from jax.stages import Compiled, Lowered

from halfbyte.ops.backends import Backend, serving
from halfbyte.ops.problem import target
from halfbyte.recipe import Policy, Recipe, as_recipe

# XLA's dynamic-slice fusion computes a GEMM whose result is both read at once and stacked for the backward pass twice:
# 8% of a step.
GPU_OPTIONS = {"xla_gpu_enable_dynamic_slice_fusion": False}


def refuse_strays(backends: Iterable[Backend], lowered: Lowered, compiled: Compiled) -> None:
    """Raises where a GEMM of one of the backends became something else than its call, which may round its scales."""
    for backend in backends:
        strays = backend.strays(lowered, compiled)
        if strays:
            raise RuntimeError(
                f"XLA compiled {len(strays)} GEMMs of the {backend.name} backend as something else; use the backend "
                f"carrier and report this line: {strays[0][:300]}"
            )


@contextlib.contextmanager
def tracing(backends: Iterable[Backend]) -> Iterator[None]:
    """What is traced inside will be compiled with the backends' options."""
    with contextlib.ExitStack() as stack:
        for backend in backends:
            stack.enter_context(backend.tracing())
        yield


def jit(fn: Callable[..., Any], recipe: Policy | Recipe | str, **options: Any) -> Callable[..., Any]:
    """`jax.jit(fn, **options)` for a function that uses `recipe`, or the recipes of a policy, compiled for a GPU as
    `halfbyte train` compiles its step.

    FP8 GEMMs take their scales themselves and write what is read, and XLA tries no
    Triton GEMM in their place, which is most of the time it takes to compile. Each program is read once; a GEMM that
    became something else is an error. On other devices it is `jax.jit`.
    """
    recipes = [r.recipe for r in recipe.rules if r.recipe] if isinstance(recipe, Policy) else [as_recipe(recipe, "jit")]
    backends = serving(recipes)
    if target().platform != "cuda":
        return jax.jit(fn, **options)
    own = functools.reduce(lambda a, b: a | dict(b.compiler_options), backends, dict[str, Any](GPU_OPTIONS))
    jitted = jax.jit(fn, compiler_options=own | (options.pop("compiler_options", None) or {}), **options)
    seen = set[Any]()

    def lower(*args: Any, **kwargs: Any) -> Any:
        with tracing(backends):
            return jitted.lower(*args, **kwargs)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        kind = tree, tuple((x.shape, x.dtype) if hasattr(x, "shape") else x for x in leaves)
        with tracing(backends):
            if kind not in seen:  # the call below finds what was compiled here
                lowered = lower(*args, **kwargs)
                refuse_strays(backends, lowered, lowered.compile())
                seen.add(kind)
            return jitted(*args, **kwargs)

    call.lower = lower  # type: ignore[attr-defined]
    return call
