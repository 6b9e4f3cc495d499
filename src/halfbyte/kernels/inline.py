"""Inline PTX with any number of results inside a Pallas Triton kernel.

JAX's own `elementwise_inline_asm` takes a list of results but lowers one: the dialect returns all of them in one list,
which the rule wraps in another. The primitive here lowers through the same rule and flattens what comes back.
"""

import sys
from collections.abc import Sequence
from typing import Any

import jax
from jax._src.pallas.triton import lowering as triton_lowering
from jax._src.pallas.triton import primitives as triton_primitives
from jax.extend import core

# MLIR's bindings look for a dialect's module by its name, at each of its types until they find one. Triton's lies
# elsewhere, and the kernels of a step meet four thousand of its types: a second, in which nothing is found. A JAX that
# has it under another name is as slow as before.
if (dialect := getattr(triton_lowering, "tt_dialect", None)) is not None:
    sys.modules.setdefault("jaxlib.mlir.dialects.tt", dialect)

inline_ptx_p = core.Primitive("inline_ptx")
inline_ptx_p.multiple_results = True


def inline_ptx(
    asm: str, args: Sequence[jax.Array], *, constraints: str, pack: int, results: Sequence[jax.ShapeDtypeStruct]
) -> list[jax.Array]:
    """The results of `asm`, run once for each `pack` neighbouring elements of a lane."""
    return inline_ptx_p.bind(*args, asm=asm, constraints=constraints, pack=pack, result_shape_dtypes=tuple(results))


@inline_ptx_p.def_abstract_eval
def _abstract_eval(*avals: Any, result_shape_dtypes: tuple[jax.ShapeDtypeStruct, ...], **_: Any) -> list[Any]:
    shapes = {aval.shape for aval in avals}
    if len(shapes) != 1:
        raise ValueError(f"inline PTX needs operands of one shape, got {sorted(shapes)}")
    return [avals[0].update(shape=s.shape, dtype=s.dtype) for s in result_shape_dtypes]


@triton_lowering.register_lowering(inline_ptx_p)
def _lower(ctx: Any, *args: Any, **params: Any) -> list[Any]:
    rule = triton_lowering.triton_lowering_rules[triton_primitives.elementwise_inline_asm_p]
    results: Any = rule(ctx, *args, **params)
    flat: list[Any] = []
    for result in results:
        flat += list(result) if hasattr(result, "__len__") else [result]
    return flat
