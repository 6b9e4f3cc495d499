"""Whether the operands that a backend hands to its GEMMs are the definition's, bit for bit, inside jit on this device.

The definition makes every operand in a program of its own, so that nothing is fused with it.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from halfbyte import ops
from halfbyte.kernels.stacks import Layer
from halfbyte.ops.activation import SILU, Activation
from halfbyte.ops.linear import quantize_part, weight_operand
from halfbyte.ops.mlp import fused_passes
from halfbyte.ops.operand import EightBit, Operand
from halfbyte.ops.passes import XLA, GatedPasses, Passes, Request, request
from halfbyte.ops.weight import CONTRACTED
from halfbyte.recipe import Recipe

from .native_gemms import SelfTestFailed

EPS = 1e-5  # of a norm


def operands_agree(chosen: Recipe, *, tokens: int = 256, features: int = 512) -> dict[str, bool]:
    """Backend -> whether the operands it hands to its GEMMs equal the definition's, bit for bit, inside jit, here."""
    x, dy, w = (
        jax.random.normal(jax.random.key(seed), (rows, features), jnp.float32).astype(dtype)
        for seed, rows, dtype in ((1, tokens, jnp.bfloat16), (2, tokens, jnp.bfloat16), (3, features, jnp.float32))
    )
    problem = ops.Problem(chosen, tokens, features, features, device=ops.target())
    serving = [backend for backend in ops.BACKENDS.values() if backend.unable(problem) is None]
    right = definition(chosen, x, dy, w)
    choices = {backend.name: ops.choose(backend.name, problem) for backend in serving}
    makers = {name: (choice.passes, choice.for_weight) for name, choice in choices.items()}
    counts = {
        (passes, for_weight): differing(chosen, passes, for_weight, x, dy, w, right)
        + differing_in_stacks(chosen, passes, x, dy)
        for passes, for_weight in set(makers.values())
    }
    return {name: counts[made] == 0 for name, made in makers.items()}


def definition(chosen: Recipe, x: jax.Array, dy: jax.Array, w: jax.Array) -> list[Operand]:
    """The six operands of a linear's x, dy and w, made one a program, so that nothing is fused with them."""
    tensors = [(tensor, a) for tensor, requests in _requests(chosen, x, dy) for a in requests]
    made = [jax.jit(functools.partial(XLA.quantize, requests=[a]))(tensor)[0] for tensor, a in tensors]
    return made + _weights(chosen, XLA, w, packed=True)


def differing(
    chosen: Recipe, passes: Passes, for_weight: Passes, x: jax.Array, dy: jax.Array, w: jax.Array, right: list[Operand]
) -> int:
    """How many numbers, tensor scales included, of the six operands that `passes` and `for_weight` make differ from
    `right`, those of the definition; of weights as they are multiplied where they are made, and as they travel.
    """
    found = []
    for tensor, requests in _requests(chosen, x, dy):
        found += jax.jit(functools.partial(passes.quantize, requests=requests))(tensor)
    weights = [_weights(chosen, for_weight, w, packed=packed) for packed in (False, True)]
    wanted = [*right, *right[len(found) :]]
    return sum(distance(a, b) for a, b in zip([*found, *weights[0], *weights[1]], wanted, strict=True))


def differing_in_stacks(chosen: Recipe, passes: Passes, x: jax.Array, dy: jax.Array, *, layers: int = 3) -> int:
    """How many numbers of a gated MLP's backward operands, with g and u read inside the stacks of a loop's layers,
    differ from those of the same arrays alone, and how many of the stacks themselves, which the forward pass writes; 0
    for passes that never do. The other layers are 7.
    """
    if not isinstance(passes, GatedPasses) or not passes.keeps_in_stacks:
        return 0
    if passes.unfused(SILU, [chosen] * 3) is not None:
        return 0
    (_, of_h), (_, of_d) = _requests(chosen, x, dy)

    @jax.jit
    def made(g: jax.Array | Layer, u: jax.Array | Layer, dh: jax.Array) -> list[Operand]:
        return [operand for one in passes.activate_backward(g, u, dh, of_d, of_d, of_h[1:]) for operand in one]

    @jax.jit
    def written(g: jax.Array, u: jax.Array, into: list[Layer]) -> tuple[jax.Array, ...]:
        return passes.activate_into(g, u, of_h[:1], into)[1]

    at, others = jnp.int32(layers - 1), jnp.full((layers, *x.shape), 7, x.dtype)
    stacks = written(x, dy, [Layer(others, at)] * 2)
    wrong = sum(int(jnp.sum(s != others.at[at].set(a))) for s, a in zip(stacks, (x, dy), strict=True))
    found = made(*(Layer(stack, at) for stack in stacks), x)
    return wrong + sum(distance(a, b) for a, b in zip(found, made(x, dy, x), strict=True))


def check_stacks(
    recipes: Sequence[Recipe], backend: str, activation: Activation, *, tokens: int = 256, features: int = 512
) -> bool:
    """Whether `backend` keeps gate's and up's results of looped layers in stacks here, under the recipes of gate, up
    and down. Raises SelfTestFailed where what it writes and reads there is not the layer, bit for bit.
    """
    problems = [ops.Problem(chosen, tokens, features, features, device=ops.target()) for chosen in recipes]
    passes = fused_passes([ops.choose(backend, problem).passes for problem in problems], activation, recipes)
    if passes is None or not passes.keeps_in_stacks:
        return False
    x, dy = (jax.random.normal(jax.random.key(seed), (tokens, features), jnp.bfloat16) for seed in (1, 2))
    wrong = sum(differing_in_stacks(chosen, passes, x, dy) for chosen in dict.fromkeys(recipes))
    if wrong:
        names = ", ".join(dict.fromkeys(chosen.name for chosen in recipes))
        raise SelfTestFailed(
            f"self-test of {backend} under {names} failed: {wrong} numbers of a layer that its kernels write "
            "into a loop's stack, or read there, differ from the layer alone; train with --remat quantized, which "
            "keeps nothing there, and report this device"
        )
    return True


def _requests(chosen: Recipe, x: jax.Array, dy: jax.Array) -> list[tuple[jax.Array, list[Request]]]:
    pairs = ((x, ("fprop_x", "wgrad_x")), (dy, ("dgrad_dy", "wgrad_dy")))
    return [(tensor, [request(chosen, role, jax.random.key(2)) for role in roles]) for tensor, roles in pairs]


def _weights(chosen: Recipe, passes: Passes, w: jax.Array, *, packed: bool) -> list[Operand]:
    """For fprop and dgrad; read where it lies among those of other layers, if these passes do that."""
    given = Layer(jnp.stack([-2 * w, w]), jnp.int32(1)) if passes.reads_stacks and not packed else w

    def operand(w: jax.Array | Layer, role: str) -> Operand:
        made = quantize_part(w, chosen, jax.random.key(2), passes=passes, packed=packed)
        return weight_operand(made, role)

    return [jax.jit(operand, static_argnums=1)(given, role) for role in CONTRACTED]


def distance(found: Operand, right: Operand) -> int:
    """How many numbers differ, in every order in which `found` has them."""
    want = right.values().astype(jnp.float32)
    orders = [found.values()]
    if isinstance(found, EightBit) and found.rows is not None and found.transposed is not None:
        orders.append(found.transposed.T)
    count = sum(int(jnp.sum(order.astype(jnp.float32) != want)) for order in orders)
    if found.factor is None or right.factor is None:
        return count + (found.factor is not right.factor)
    return count + int(jnp.sum(found.factor != right.factor))  # one for the tensor, or one a row
