"""Whether the operands that a backend hands to its GEMMs are the definition's, bit for bit, inside jit on this device.

The definition makes every operand in a program of its own, so that nothing is fused with it.
"""

import functools

import jax
import jax.numpy as jnp

from halfbyte import ops
from halfbyte.ops.operand import Operand
from halfbyte.ops.passes import XLA, Ask, XlaPasses, ask
from halfbyte.ops.weight import CONTRACTED, quantize_weight, weight_operand
from halfbyte.recipe import Recipe


def operands_agree(chosen: Recipe, *, tokens: int = 256, features: int = 512) -> dict[str, bool]:
    """Backend -> whether the operands it hands to its GEMMs equal the definition's, bit for bit, inside jit, here."""
    x, dy, w = (
        jax.random.normal(jax.random.key(seed), (rows, features), jnp.float32).astype(dtype)
        for seed, rows, dtype in ((1, tokens, jnp.bfloat16), (2, tokens, jnp.bfloat16), (3, features, jnp.float32))
    )
    problem = ops.Problem(chosen, tokens, features, features, device=ops.target())
    serving = [backend for backend in ops.BACKENDS.values() if backend.unsupported(problem) is None]
    right = definition(chosen, x, dy, w)
    counts = {passes: differing(chosen, passes, x, dy, w, right) for passes in {b.passes for b in serving}}
    return {backend.name: counts[backend.passes] == 0 for backend in serving}


def definition(chosen: Recipe, x: jax.Array, dy: jax.Array, w: jax.Array) -> list[Operand]:
    """The six operands of a linear's x, dy and w, made one a program, so that nothing is fused with them."""
    tensors = [(tensor, a) for tensor, asks in _asks(chosen, x, dy) for a in asks]
    made = [jax.jit(functools.partial(XLA.quantize, asks=[a]))(tensor)[0] for tensor, a in tensors]
    return made + _weights(chosen, XLA, w)


def differing(
    chosen: Recipe, passes: XlaPasses, x: jax.Array, dy: jax.Array, w: jax.Array, right: list[Operand]
) -> int:
    """How many numbers, tensor scales included, of the six operands that `passes` make differ from `right`, those of
    the definition.
    """
    found = []
    for tensor, asks in _asks(chosen, x, dy):
        found += jax.jit(functools.partial(passes.quantize, asks=asks))(tensor)
    return sum(_distance(a, b) for a, b in zip(found + _weights(chosen, passes, w), right, strict=True))


def _asks(chosen: Recipe, x: jax.Array, dy: jax.Array) -> list[tuple[jax.Array, list[Ask]]]:
    pairs = ((x, ("fprop_x", "wgrad_x")), (dy, ("dgrad_dy", "wgrad_dy")))
    return [(tensor, [ask(chosen, role, jax.random.key(2)) for role in roles]) for tensor, roles in pairs]


def _weights(chosen: Recipe, passes: XlaPasses, w: jax.Array) -> list[Operand]:
    return [jax.jit(functools.partial(_weight, chosen, role, passes))(w) for role in CONTRACTED]


def _weight(chosen: Recipe, role: str, passes: XlaPasses, w: jax.Array) -> Operand:
    return weight_operand(quantize_weight(w, recipe=chosen, key=jax.random.key(2), passes=passes), role)


def _distance(found: Operand, right: Operand) -> int:
    """How many numbers differ, in every order in which `found` has them."""
    want = right.values().astype(jnp.float32)
    orders = [found.values()] if found.turned is None else [found.values(), found.turned.T]
    count = sum(int(jnp.sum(order.astype(jnp.float32) != want)) for order in orders)
    if found.decode_scale is None or right.decode_scale is None:
        return count + (found.decode_scale is not right.decode_scale)
    return count + (float(found.decode_scale) != float(right.decode_scale))
