"""Residuals in stacks. Oracles: the same loop with residuals of its own, bit for bit; and the bytes that eight H200
move to no purpose, read from the program of a loop of three small layers.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from step_traffic import moves, traffic_of_launches

import halfbyte as hb
from halfbyte import devices, hlo, ops
from halfbyte.distributed import make_mesh
from halfbyte.hlo.memory_traffic import data_movement_kind
from halfbyte.kernels.mosaic_launch import StackSlice, return_as_cotangent
from halfbyte.ops.backends import fp8
from halfbyte.ops.linear_sharding import empty_sharded_stack
from halfbyte.ops.mlp import GatedActivationConfig

pytestmark = pytest.mark.slow

LAYERS = 3
H200 = devices.device_by_name("h200")
CUT = {"gate": P("fsdp"), "up": P("fsdp"), "down": P(None, "fsdp")}


def layers(mesh, recipe, stacked, x, weights):
    """x after LAYERS residual MLPs whose weights are [LAYERS, ...]."""
    placements = {name: ops.Placement(mesh, P("fsdp"), cut, P("fsdp")) for name, cut in CUT.items()}
    shape = (*x.shape[:-1], weights["gate"].shape[-1])
    lies = {"mesh": mesh, "spec": P("fsdp")}
    stacks = tuple(empty_sharded_stack(LAYERS, shape, x.dtype, **lies) for _ in range(2)) if stacked else None

    def body(carry, layer):
        (x, stacks), (w, number) = carry, layer
        options = {"recipe": recipe, "key": jax.random.fold_in(jax.random.key(1), number)}
        ws = tuple(w[name] for name in CUT)
        if stacks is None:
            return (x + ops.mlp(x, *ws, placements=placements, **options), None), None
        execution = ops.ExecutionConfig(placements=tuple(placements.values()))
        y, (*stacks, _) = ops.mlp_with_stacked_residuals(x, ws, (*stacks, number), execution=execution, **options)
        return (x + y, tuple(stacks)), None

    (x, stacks), _ = lax.scan(body, (x, stacks), (weights, jnp.arange(LAYERS)))
    return x if stacks is None else return_as_cotangent(x, stacks)


def gradients(mesh, recipe, stacked, x, weights):
    def loss(x, weights):
        return jnp.sum(layers(mesh, recipe, stacked, x, weights).astype(jnp.float32) ** 2)

    return jax.grad(loss, (0, 1))(x, weights)


# What is made of the product in both directions, and rounded by chance; the rest compiles sooner in bf16.
QUANTIZED = {role: getattr(hb.recipe("nvfp4_no_rht"), role) for role in ("fprop_x", "wgrad_x", "dgrad_dy")}
LIGHT = dataclasses.replace(hb.recipe("bf16"), name="light", **QUANTIZED)


def test_a_loop_with_stacks_has_the_gradients_of_one_without(monkeypatch):
    """On the CPU no kernel would read them in place: the op is told that one does."""
    monkeypatch.setattr(
        GatedActivationConfig, "uses_stacked_residuals", lambda middle, linears, place: place is not None
    )
    mesh = make_mesh({"fsdp": 4}, jax.devices("cpu")[:4])
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(4, 16, 64)), jnp.bfloat16)
    shapes = {"gate": (64, 128), "up": (64, 128), "down": (128, 64)}
    weights = {name: jnp.asarray(rng.normal(size=(LAYERS, *s)) / 16, jnp.float32) for name, s in shapes.items()}
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    own, stacked = (
        jax.jit(functools.partial(gradients, mesh, LIGHT, kept), compiler_options=options)(x, weights)
        for kept in (False, True)
    )
    assert float(jnp.abs(own[1]["gate"]).max()) > 0
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), own, stacked)


def test_stacks_that_no_kernel_keeps_anything_in_are_not_held():
    mesh = make_mesh({"fsdp": 4}, jax.devices("cpu")[:4])
    like = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    weights = {"gate": like((LAYERS, 64, 128)), "up": like((LAYERS, 64, 128)), "down": like((LAYERS, 128, 64))}
    own, stacked = (
        jax.jit(functools.partial(gradients, mesh, "bf16", kept)).lower(like((4, 256, 64), dtype=jnp.bfloat16), weights)
        for kept in (False, True)
    )
    own, stacked = (lowered.compile().memory_analysis().temp_size_in_bytes for lowered in (own, stacked))
    assert stacked == own


SIZE, TOKENS, EMBED, HIDDEN = 8, 1024, 512, 1024  # tokens and sizes of one device's GEMMs


def moved(recipe, device=H200):
    """Bytes that each of eight devices moves in a step, by kind."""
    mesh = make_mesh({"fsdp": SIZE}, np.asarray(devices.topology(device, hosts=1, per_host=SIZE).devices))

    def like(shape, dtype, *spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    x = like((SIZE, TOKENS, EMBED), jnp.bfloat16, "fsdp")
    shapes = {"gate": (EMBED, HIDDEN), "up": (EMBED, HIDDEN), "down": (HIDDEN, EMBED)}
    weights = {name: like((LAYERS, *s), jnp.float32, None, *CUT[name]) for name, s in shapes.items()}
    options = {"xla_gpu_enable_dynamic_slice_fusion": False, **(fp8.COMPILER_OPTIONS if recipe == "fp8" else {})}
    with ops.compile_for(device), devices.target_cudnn(), fp8.fuse_scales_into_gemm():
        run = jax.jit(functools.partial(gradients, mesh, recipe, True), compiler_options=options)
        text = run.lower(x, weights).compile().as_text()
    return {kind: each.total for kind, each in moves(hlo.parse_hlo(text)).items()}


@pytest.mark.cuda_compiler
@pytest.mark.parametrize("recipe", ["bf16", "nvfp4", "fp8"])
def test_a_step_copies_no_layer_fills_no_stack_and_transposes_no_gradient(recipe):
    """A layer's product, copied, is 4.2 MB read and written; so is the whole gradient of a weight, transposed. There
    are six and three of them. Weights that are cut along a contraction are transposed as they are gathered, in codes.
    """
    found = moved(recipe)
    product, gradient, code = 2 * TOKENS * HIDDEN * 2, 2 * EMBED * HIDDEN * 4, 2 * EMBED * HIDDEN
    gathered = {"bf16": 0, "nvfp4": 2 * LAYERS * code * 9 // 16, "fp8": 3 * LAYERS * code}[recipe]
    assert found["transpose"] < gathered + gradient, found
    if recipe != "bf16":  # whose slices of g and u are part of XLA's own fusions, or copies, as it likes
        assert found["slice"] < 3 * product, found
        assert found["update"] + found["fill"] < 4 * product, found  # 9 more if they were copied into filled stacks


@pytest.mark.parametrize("recipe", ["nvfp4", "quartet2"])
def test_a_loops_weights_are_not_copied_for_the_kernels(recipe) -> None:
    """Compiled for an H200: no kernel reads a slice, which XLA would write first."""
    device = devices.topology(H200, hosts=1, per_host=1).devices[0]

    def like(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.SingleDeviceSharding(device))

    def loss(stack, x, stacked):
        def body(x, layer):
            w, number = layer
            key = jax.random.fold_in(jax.random.key(1), number)
            lies = (StackSlice(lax.stop_gradient(stack), number),) if stacked else None
            execution = ops.ExecutionConfig("fused", stack_slices=lies)
            return ops.qdots(x, [w], recipes=[hb.recipe(recipe)], keys=[key], execution=execution)[0], None

        return lax.scan(body, x, (stack, jnp.arange(3)))[0].astype(jnp.float32).sum()

    def copied(stacked):
        with ops.compile_for(H200):
            step = jax.jit(jax.grad(functools.partial(loss, stacked=stacked)), compiler_options=ops.GPU_OPTIONS)
            text = step.lower(like(3, 256, 256, dtype=jnp.float32), like(512, 256)).compile().as_text()
        read = hlo.parse_hlo(text)
        slices = [
            (at.instruction, each)
            for at, each in traffic_of_launches(read)
            if data_movement_kind(read, at.instruction) == "slice"
        ]
        return sum(each.total for found, each in slices if found.results[0].dtype == "f32")  # what x left is in codes

    assert copied(True) < 1000  # scales
    if recipe == "nvfp4":  # what counts them is not blind
        assert copied(False) >= 2 * 3 * 256 * 256 * 4  # read and written
