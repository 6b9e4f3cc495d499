"""Self-test of operands: a backend's operands against the reference, bit for bit, inside jit on this device.

The reference computes every operand in a program of its own, so that nothing is fused with it. Tensors sharded over a
mesh are compared as well: random bits depend on an element's global index, tensor scales on the amax of all shards. All
tests use the passes that a run on these devices would use, kernels included.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from halfbyte.kernels.mosaic_launch import StackSlice
from halfbyte.ops.activation import SILU, Activation
from halfbyte.ops.backends import BACKENDS, choose_backend
from halfbyte.ops.gemm_problem import LinearProblem, target_device
from halfbyte.ops.linear import quantize_weight_shard, weight_operand
from halfbyte.ops.mlp import shared_gated_passes
from halfbyte.ops.operand import Fp8Operand, Operand
from halfbyte.ops.quantize_passes import XLA_PASSES, GatedQuantizePasses, OperandSpec, QuantizePasses, operand_spec
from halfbyte.ops.quantized_weight import CONTRACTED_WEIGHT_AXIS
from halfbyte.ops.selftest_gemms import SelfTestFailed
from halfbyte.recipes import Recipe

EPS = 1e-5  # of a norm


AXIS = "devices"


MESH_ROLES = (("fprop_x", "wgrad_x"), ("dgrad_dy", "wgrad_dy"))


def backends_match_reference(chosen: Recipe, *, tokens: int = 256, features: int = 512) -> dict[str, bool]:
    """Returns backend -> whether the operands of its GEMMs equal the reference, bit for bit, on this device."""
    x, dy, w = (
        jax.random.normal(jax.random.key(seed), (rows, features), jnp.float32).astype(dtype)
        for seed, rows, dtype in ((1, tokens, jnp.bfloat16), (2, tokens, jnp.bfloat16), (3, features, jnp.float32))
    )
    problem = LinearProblem(chosen, tokens, features, features, device=target_device())
    serving = [backend for backend in BACKENDS.values() if backend.unsupported_reason(problem) is None]
    right = selftest_reference_operands(chosen, x, dy, w)
    choices = {backend.name: choose_backend(backend.name, problem) for backend in serving}
    passes_of = {name: (choice.passes, choice.weight_quantize_passes) for name, choice in choices.items()}
    counts = {
        (passes, for_weight): count_mismatches(chosen, passes, for_weight, x, dy, w, right)
        + count_stacked_mismatches(chosen, passes, x, dy)
        for passes, for_weight in set(passes_of.values())
    }
    return {name: counts[pair] == 0 for name, pair in passes_of.items()}


def stacked_residuals_match_reference(
    recipes: Sequence[Recipe], backend: str, activation: Activation, *, tokens: int = 256, features: int = 512
) -> bool:
    """Returns True if `backend` saves the results of gate and up in stacks under the recipes of gate, up and down.

    Raises SelfTestFailed if the layer that it writes or reads there differs in any bit from a separate layer.
    """
    problems = [LinearProblem(chosen, tokens, features, features, device=target_device()) for chosen in recipes]
    passes = shared_gated_passes([choose_backend(backend, problem).passes for problem in problems], activation, recipes)
    if passes is None or not passes.supports_stacked_residuals:
        return False
    x, dy = (jax.random.normal(jax.random.key(seed), (tokens, features), jnp.bfloat16) for seed in (1, 2))
    wrong = sum(count_stacked_mismatches(chosen, passes, x, dy) for chosen in dict.fromkeys(recipes))
    if wrong:
        names = ", ".join(dict.fromkeys(chosen.name for chosen in recipes))
        raise SelfTestFailed(
            f"self-test of {backend} under {names} failed: {wrong} numbers of a layer that its kernels write "
            "into a loop's stack, or read there, differ from the layer alone; train with --remat quantized, which "
            "keeps nothing there, and report this device"
        )
    return True


def mesh_operand_mismatches(chosen: Recipe, devices: Sequence[Any], *, features: int = 512) -> dict[str, int]:
    """Returns how many values of the operands of x and dy differ if x and dy are sharded over tokens and over features.

    The reference is one device with a program for each operand. The amax of each tensor is in its last corner, so only
    one shard has it.
    """
    count = len(devices)
    tokens = 128 * count
    x, dy = (_tensor(seed, tokens, features * count) for seed in (1, 2))
    right = selftest_reference_operands(chosen, x, dy, jnp.zeros((features * count, 16), jnp.float32))[:4]
    expected = [np.asarray(operand.values().astype(jnp.float32)) for operand in right]
    differing = {}
    for name, spec in (("tokens", PartitionSpec(AXIS)), ("features", PartitionSpec(None, AXIS))):
        pairs = zip(_on_mesh(chosen, devices, spec, x, dy), expected, strict=True)
        differing[name] = sum(int(np.sum(a != b)) for a, b in pairs)
    return differing


def selftest_reference_operands(chosen: Recipe, x: jax.Array, dy: jax.Array, w: jax.Array) -> list[Operand]:
    """Returns the six operands of x, dy and w, each from a program of its own, so that nothing is fused with it."""
    requests = [(tensor, spec) for tensor, specs in _requests(chosen, x, dy) for spec in specs]
    operands = [jax.jit(functools.partial(XLA_PASSES.quantize, specs=[spec]))(tensor)[0] for tensor, spec in requests]
    return operands + _weights(chosen, XLA_PASSES, w, packed=True)


def count_mismatches(
    chosen: Recipe,
    passes: QuantizePasses,
    for_weight: QuantizePasses,
    x: jax.Array,
    dy: jax.Array,
    w: jax.Array,
    right: list[Operand],
) -> int:
    """Returns how many values, tensor scales included, of the six operands differ from the reference `right`.

    `passes` quantize x and dy, `for_weight` the weight, both unpacked and packed (as it is all-gathered).
    """
    operands = []
    for tensor, specs in _requests(chosen, x, dy):
        operands += jax.jit(functools.partial(passes.quantize, specs=specs))(tensor)
    weights = [_weights(chosen, for_weight, w, packed=packed) for packed in (False, True)]
    expected = [*right, *right[len(operands) :]]
    return sum(hamming_distance(a, b) for a, b in zip([*operands, *weights[0], *weights[1]], expected, strict=True))


def count_stacked_mismatches(
    chosen: Recipe, passes: QuantizePasses, x: jax.Array, dy: jax.Array, *, layers: int = 3
) -> int:
    """Returns how many values differ between stacked and separate residuals g and u of a gated MLP.

    Counts the backward operands, with g and u read from a stack of layers, and the stacks that the forward pass
    writes, whose other layers are 7. 0 for passes without stacked residuals.
    """
    if not isinstance(passes, GatedQuantizePasses) or not passes.supports_stacked_residuals:
        return 0
    if passes.unsupported_activation_fusion(SILU, [chosen] * 3) is not None:
        return 0
    (_, h_specs), (_, d_specs) = _requests(chosen, x, dy)

    @jax.jit
    def backward_operands(g: jax.Array | StackSlice, u: jax.Array | StackSlice, dh: jax.Array) -> list[Operand]:
        return [
            operand
            for operands in passes.activate_backward(g, u, dh, d_specs, d_specs, h_specs[1:])
            for operand in operands
        ]

    @jax.jit
    def write_stacks(g: jax.Array, u: jax.Array, into: list[StackSlice]) -> tuple[jax.Array, ...]:
        return passes.activate_to_stacks(g, u, h_specs[:1], into)[1]

    layer, others = jnp.int32(layers - 1), jnp.full((layers, *x.shape), 7, x.dtype)
    stacks = write_stacks(x, dy, [StackSlice(others, layer)] * 2)
    wrong = sum(int(jnp.sum(s != others.at[layer].set(a))) for s, a in zip(stacks, (x, dy), strict=True))
    operands = backward_operands(*(StackSlice(stack, layer) for stack in stacks), x)
    return wrong + sum(hamming_distance(a, b) for a, b in zip(operands, backward_operands(x, dy, x), strict=True))


def hamming_distance(found: Operand, right: Operand) -> int:
    """Returns how many values differ, in both orders if an FP8 operand has both."""
    expected = right.values().astype(jnp.float32)
    orders = [found.values()]
    if isinstance(found, Fp8Operand) and found.as_stored is not None and found.transposed is not None:
        orders.append(found.transposed.T)
    count = sum(int(jnp.sum(order.astype(jnp.float32) != expected)) for order in orders)
    if found.decode_scale is None or right.decode_scale is None:
        return count + (found.decode_scale is not right.decode_scale)
    return count + int(jnp.sum(found.decode_scale != right.decode_scale))  # per tensor or per row


def _requests(chosen: Recipe, x: jax.Array, dy: jax.Array) -> list[tuple[jax.Array, list[OperandSpec]]]:
    pairs = ((x, ("fprop_x", "wgrad_x")), (dy, ("dgrad_dy", "wgrad_dy")))
    return [(tensor, [operand_spec(chosen, role, jax.random.key(2)) for role in roles]) for tensor, roles in pairs]


def _weights(chosen: Recipe, passes: QuantizePasses, w: jax.Array, *, packed: bool) -> list[Operand]:
    """Returns the weight operands of fprop and dgrad; read from a stack of layers if the passes support it."""
    weight = StackSlice(jnp.stack([-2 * w, w]), jnp.int32(1)) if passes.reads_stacks and not packed else w

    def operand(w: jax.Array | StackSlice, role: str) -> Operand:
        quantized = quantize_weight_shard(w, chosen, jax.random.key(2), passes=passes, packed=packed)
        return weight_operand(quantized, role)

    return [jax.jit(operand, static_argnums=1)(weight, role) for role in CONTRACTED_WEIGHT_AXIS]


def _tensor(seed: int, tokens: int, features: int) -> jax.Array:
    values = jax.random.normal(jax.random.key(seed), (tokens, features), jnp.float32)
    return values.at[-1, -1].set(30.0).astype(jnp.bfloat16)


def _on_mesh(
    chosen: Recipe, devices: Sequence[Any], spec: PartitionSpec, x: jax.Array, dy: jax.Array
) -> list[np.ndarray]:
    mesh = Mesh(np.array(devices, dtype=object), (AXIS,))
    dim_axes = tuple((AXIS,) if entry == AXIS else () for entry in (*spec, None)[:2])
    tokens, features = (size // (len(devices) if axes else 1) for size, axes in zip(x.shape, dim_axes, strict=True))
    problem = LinearProblem(chosen, tokens, features, features, device=target_device(), partitioned_by_xla=True)
    passes = choose_backend("auto", problem).passes

    def make(x: jax.Array, dy: jax.Array) -> list[jax.Array]:
        values = []
        for tensor, roles in zip((x, dy), MESH_ROLES, strict=True):
            specs = [operand_spec(chosen, role, jax.random.key(2), cut=dim_axes) for role in roles]
            values += [operand.values().astype(jnp.float32) for operand in passes.quantize(tensor, specs)]
        return values

    mapped = jax.shard_map(make, mesh=mesh, in_specs=(spec, spec), out_specs=[spec] * 4, check_vma=False)
    return [np.asarray(values) for values in jax.jit(mapped)(*(np.asarray(tensor) for tensor in (x, dy)))]
