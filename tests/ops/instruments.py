"""Instruments: what the GEMMs of a running program are given, how often a program quantizes, and what the kernels of
SwiGLU compute before they quantize it."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from halfbyte.kernels import swiglu_quantize
from halfbyte.kernels.mosaic_launch import LaunchConfig, launch_flat
from halfbyte.kernels.row_access import lane_position, load_rows, program_grid, store_rows
from halfbyte.ops.backends import BACKENDS
from halfbyte.ops.gemm_problem import apply_epilogue, gemm_alpha

# LLVM's optimizer is off: half the compilation time, for tests of what is traced rather than of what is compiled.
quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@dataclasses.dataclass(frozen=True)
class Seen:
    """One GEMM at run time: its operands' carriers and decode scales, and float32 `result` before the last rounding."""

    left: np.ndarray
    right: np.ndarray
    factor: np.ndarray
    result: np.ndarray


@contextlib.contextmanager
def watched(name: str) -> Iterator[dict[str, Seen]]:
    """While it lasts, programs that are traced note each GEMM that backend `name`, or `emulated` for it, multiplies."""
    seen: dict[str, Seen] = {}
    real = {each: BACKENDS[each] for each in {name, "emulated", "reference"}}
    for each in real.values():
        BACKENDS[each.name] = _noting(each, seen)
    try:
        yield seen
        jax.effects_barrier()
    finally:
        BACKENDS.update(real)


def _noting(real, seen: dict[str, Seen]):
    """The backend, with its GEMMs noted."""

    def note(gemm, left, right, factor, result):
        # Copies: the buffers of a callback's arguments belong to the program.
        seen[gemm] = Seen(*(np.array(a, np.float64) for a in (left, right)), np.array(factor), np.array(result))

    def multiply(gemm, left, right, dtype):
        exact = real.gemm(gemm, left, right, jnp.dtype(jnp.float32))
        factor = gemm_alpha(left, right)
        factor = jnp.float32(1) if factor is None else factor
        operands = (o.values().astype(jnp.float32) for o in (left, right))
        jax.debug.callback(functools.partial(note, gemm.name), *operands, factor, exact)
        return apply_epilogue(exact, None, dtype)

    return dataclasses.replace(real, gemm=multiply)


def equations(jaxpr) -> Iterator[tuple]:
    """(equation, how often it runs) of a jaxpr and of all that it calls; a scan's body counts once an iteration."""
    for eqn in jaxpr.eqns:
        yield eqn, 1
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for inner in _bodies(eqn):
            for found, count in equations(inner):
                yield found, count * times


def _bodies(eqn) -> Iterator:
    for param in jax.tree.leaves(list(eqn.params.values())):
        inner = getattr(param, "jaxpr", param)
        if hasattr(inner, "eqns"):
            yield inner


def quantizations(fn, *args) -> int:
    """How many NVFP4 tensors `fn(*args)` quantizes: each finds its scales in one call of the same jitted function.

    A call without arguments is a constant of it that a scan has moved out of its body.
    """
    closed = jax.make_jaxpr(fn)(*args)
    return sum(n for eqn, n in equations(closed.jaxpr) if eqn.params.get("name") == "_two_level" and eqn.invars)


def activation(g: jax.Array, u: jax.Array, dh: jax.Array) -> tuple[jax.Array, ...]:
    """dg, du and h, bf16, as the fused passes compute them: a kernel of their own body that stores what it makes."""
    tokens, width = g.shape
    grid = program_grid(tokens, width, 4)

    def body(m):
        at = lane_position(m, tokens, width, grid)
        given = [row for i in range(3) for row in load_rows(m, i, at, 2)]
        for number, rows in enumerate(swiglu_quantize.swiglu_backward_tile(m, given), 3):
            store_rows(m, number, at, rows, 2)

    outputs = [jax.ShapeDtypeStruct(g.shape, jnp.bfloat16)] * 3
    count = grid[0] * grid[1]
    return tuple(
        launch_flat(body, [g, u, dh], outputs, programs=count, lanes=LaunchConfig(4), name="swiglu_activation")
    )
