"""The fused backend against the definition, bit for bit: interpreted on a CPU, compiled on a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from instruments import equations, quick

import halfbyte as hb
from halfbyte import devices, ops
from halfbyte.kernels.mosaic_launch import StackSlice
from halfbyte.ops.activation import SILU
from halfbyte.ops.backends import fused, kernel_support
from halfbyte.ops.backends.fused import FusedQuantizePasses
from halfbyte.ops.backends.native import NATIVE_PASSES
from halfbyte.ops.gemm_problem import GEMMS, LinearProblem
from halfbyte.ops.linear import QuantizedLinear, quantize_weight_shard
from halfbyte.ops.linear_plan import LinearPlan
from halfbyte.ops.linear_sharding import UNSHARDED
from halfbyte.ops.operand import SCALES_NAME, Operand
from halfbyte.ops.quantize_passes import XLA_PASSES, OperandSpec, operand_spec
from halfbyte.ops.quantized_weight import QWeight
from halfbyte.recipes import recipe

# Recipes share operands: programs of one text are compiled once.
pytestmark = pytest.mark.usefixtures("interpreted_without_gpu", "quick_compiles")

NVFP4, HALFBYTE, QUARTET2 = recipe("nvfp4"), recipe("halfbyte"), recipe("quartet2")
KEY = jax.random.key(5)
H200 = devices.device_by_name("h200")
PASSES = FusedQuantizePasses()
X = jax.random.normal(jax.random.key(0), (2, 16, 128), jnp.float32).astype(jnp.bfloat16)
RUNS = jax.random.normal(jax.random.key(0), (2, 128, 128), jnp.float32).astype(jnp.bfloat16)  # of 128 tokens


jitted = functools.partial(jax.jit, compiler_options=quick)


def same(found: Operand, expected: Operand) -> bool:
    a, b = (np.asarray(o.values().astype(jnp.float32)) for o in (found, expected))
    return bool((a == b).all()) and float(found.decode_scale) == float(expected.decode_scale)


PRESETS = (
    "nvfp4", "nvfp4_unbiased", "nvfp4_4over6_mse", "nvfp4_4over6_mae", "nvfp4_4over6_sr", "halfbyte", "quartet2",
)  # fmt: skip


OF_X = ("fprop_x", "wgrad_x"), ("fprop_x",)
OF_DY = (("dgrad_dy", "wgrad_dy"),)


@functools.cache
def operands(name, asked, passes):
    """x -> the operands of each roles that are asked for together; one program for all tests."""
    wanted = [[operand_spec(recipe(name), role, KEY) for role in roles] for roles in asked]
    return jitted(lambda x: [made for requests in wanted for made in passes.quantize(x, requests)])


@pytest.mark.slow(fast_cases=["asked1-nvfp4"])
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("asked", [OF_X, OF_DY])
def test_operands_equal_reference(name, asked) -> None:
    """Two of one tensor, and one alone; the definition makes the latter once for both."""
    x = RUNS if name == "quartet2" else X
    found, expected = (operands(name, asked, passes)(x) for passes in (PASSES, XLA_PASSES))
    assert len(found) == sum(map(len, asked)) and all(same(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.slow(fast_cases=["halfbyte"])
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_4over6_sr", "halfbyte", "quartet2"])
def test_operands_of_precomputed_amax_equal_reference(name) -> None:
    """Found for two, they serve one of them as well."""
    both, x = [operand_spec(recipe(name), role, KEY) for role in OF_X[0]], RUNS if name == "quartet2" else X
    asked = both[:1], both

    def by_maxima(x):
        maxima = PASSES.precompute_amax(x, both)
        return [made for requests in asked for made in PASSES.quantize_with_amax(x, requests, maxima)]

    row, column, _ = operands(name, OF_X, XLA_PASSES)(x)
    assert all(same(a, b) for a, b in zip(jitted(by_maxima)(x), (row, row, column), strict=True))


@pytest.mark.slow
def test_requantized_operand_quantizes_forward_operand_once() -> None:
    rows, again = (operand_spec(HALFBYTE, role, KEY) for role in ("fprop_x", "wgrad_x"))
    (found,), (expected,) = (jitted(functools.partial(p.quantize, specs=[again]))(X) for p in (PASSES, XLA_PASSES))
    assert same(found, expected)
    text = str(jax.make_jaxpr(lambda x: PASSES.quantize(x, [rows, again]))(X))
    assert text.count("name=quantize_rows_squared") == 1


@pytest.mark.slow(fast_cases=["halfbyte"])
@pytest.mark.parametrize("given", [HALFBYTE, QUARTET2], ids=lambda recipe: recipe.name)
def test_requantized_weight_rematerializes_from_master(given) -> None:
    w = jax.random.normal(jax.random.key(1), (128, 256), jnp.float32)
    problem = LinearProblem(given, 256, 128, 256, H200)
    choice = ops.choose_backend("fused", problem)
    made = jitted(lambda w: quantize_weight_shard(w, given, KEY, passes=choice.weight_quantize_passes, packed=False))(w)
    right = jitted(
        lambda w: XLA_PASSES.operand_from_residual(quantize_weight_shard(w, given, KEY).dgrad, given.dgrad_w)
    )(w)
    assert choice.weight_quantize_passes == PASSES and same(made.dgrad, right)
    made = dataclasses.replace(made, master=w)
    kept = QuantizedLinear(LinearPlan(problem, choice, UNSHARDED, "master"), made, KEY).to_residuals()
    assert sum(leaf.size for leaf in jax.tree.leaves(kept) if leaf is not w) <= 19  # the scales of both, and the key
    again = jitted(lambda kept, w: kept.rematerialize(depends_on=w).weight)(kept, w)
    assert same(again.fprop, made.fprop) and same(again.dgrad, made.dgrad)


def test_unsupported_requantized_operand_says_why() -> None:
    """Without the transform numbers are float32; h's operands are made of h; what travels is packed."""
    plain = {role: dataclasses.replace(getattr(HALFBYTE, role), hadamard=False) for role in ("wgrad_x", "wgrad_dy")}
    assert "forward" in kernel_support.nvfp4_format_mismatch(dataclasses.replace(HALFBYTE, **plain))
    assert "of h" in PASSES.unsupported_activation_fusion(SILU, [dataclasses.replace(HALFBYTE, remainder=False)] * 3)
    assert (
        ops.choose_backend(
            "fused", LinearProblem(HALFBYTE, 256, 128, 256, H200, weight_shards=(2, 1))
        ).weight_quantize_passes
        is XLA_PASSES
    )
    assert "dequantized" in NATIVE_PASSES.format_mismatch(HALFBYTE)
    mixed = dataclasses.replace(QUARTET2, fprop_x=HALFBYTE.fprop_x)
    assert (
        "wgrad_x" in kernel_support.nvfp4_format_mismatch(mixed)
        and kernel_support.nvfp4_format_mismatch(QUARTET2) is None
    )
    assert "128" in PASSES.unsupported_activation_fusion(SILU, [QUARTET2] * 3)
    assert (
        ops.choose_backend(
            "fused", LinearProblem(QUARTET2, 256, 128, 256, H200, weight_shards=(2, 1))
        ).weight_quantize_passes
        is XLA_PASSES
    )
    assert "multiple of 16 tokens" in PASSES.unsupported(LinearProblem(QUARTET2, 24, 128, 256, H200, training=False))


@pytest.mark.slow
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_quartet2_non_finite_tensor_gives_nan(bad) -> None:
    """Its row has the definition's numbers all the same."""
    x = RUNS.at[0, 3, 5].set(bad)
    found, expected = (operands("quartet2", OF_X, passes)(x) for passes in (PASSES, XLA_PASSES))
    assert all(np.isnan(float(o.decode_scale)) for o in (*found, *expected))
    a, b = (np.asarray(made[0].values().astype(jnp.float32)) for made in (found, expected))
    assert (a == b).all()


@pytest.mark.slow
@pytest.mark.parametrize("passes", [PASSES, XLA_PASSES], ids=["fused", "xla"])
def test_four_over_six_choice_is_scale_invariant(passes) -> None:
    """Where squares of its numbers leave float32's range the definition and the kernels choose as elsewhere."""
    chosen = jitted(
        lambda x: passes.quantize(x, [operand_spec(recipe("nvfp4_4over6_mse"), "fprop_x", KEY)])[0].values()
    )
    for size in (1e-30, 1e-19, 1e-5, 1e19, 1e30):
        power = 2.0 ** int(np.log2(size))
        assert bool((chosen(X) == chosen((X * power).astype(X.dtype))).all()), size


@pytest.mark.slow
@pytest.mark.parametrize("given", [NVFP4, QUARTET2], ids=lambda recipe: recipe.name)
def test_residual_operand_codes_match_reference(given) -> None:
    requests = [operand_spec(given, "fprop_x", KEY), operand_spec(given, "wgrad_x", KEY, kept=True)]

    def both(passes):
        kept = passes.quantize(RUNS, requests)[1]
        return kept, passes.operand_from_residual(kept, given.wgrad_x)

    (a, found), (b, expected) = (jitted(functools.partial(both, passes))() for passes in (PASSES, XLA_PASSES))
    assert (a.packed == b.packed).all() and (a.scales == b.scales).all() and a.amax == b.amax
    assert same(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])  # of a master, and of one that its owner casts
def test_weight_equals_reference(dtype) -> None:
    w = jax.random.normal(jax.random.key(1), (128, 256), dtype)
    assert (
        ops.choose_backend(
            "fused", LinearProblem(NVFP4, 256, 128, 256, H200, weight_dtype=w.dtype.name)
        ).weight_quantize_passes
        == PASSES
    )
    found = jitted(lambda w: PASSES.quantize_weight(w, OperandSpec(NVFP4.fprop_w, -2), packed=False))
    expected = jitted(
        lambda w: XLA_PASSES.operand_from_residual(
            XLA_PASSES.quantize_weight(w, OperandSpec(NVFP4.fprop_w, -2)), NVFP4.fprop_w
        )
    )
    assert same(found(w), expected(w))


@pytest.mark.slow
@pytest.mark.parametrize("name, width", [("nvfp4_1d_weights", 256), ("nvfp4_4over6_mae", 88)])  # of tiles, of none
def test_weight_in_1d_blocks_equals_reference(name, width) -> None:
    w = jax.random.normal(jax.random.key(1), (128, width), jnp.float32)
    given = recipe(name)
    assert ops.choose_backend("fused", LinearProblem(given, 256, 128, 256, H200)).weight_quantize_passes == PASSES
    for role, axis in (("fprop_w", -2), ("dgrad_w", -1)):
        if width % 16 and axis == -1:
            continue
        policy = getattr(given, role)

        def made(w, policy=policy, axis=axis):
            found = PASSES.quantize_weight(w, OperandSpec(policy, axis), packed=False)
            again = PASSES.rematerialize_weight(w, PASSES.weight_residual(found), OperandSpec(policy, axis))
            return (
                found,
                again,
                XLA_PASSES.operand_from_residual(XLA_PASSES.quantize_weight(w, OperandSpec(policy, axis)), policy),
            )

        found, again, right = jitted(made)(w)
        assert same(found, right)
        assert (again.array == found.array).all() and same(again, found)


def test_gathered_weight_in_1d_blocks_uses_xla_passes() -> None:
    problem = LinearProblem(recipe("nvfp4_4over6_mse"), 256, 128, 256, H200, weight_shards=(2, 1))
    assert ops.choose_backend("fused", problem).weight_quantize_passes.name == "xla"


@pytest.mark.slow
def test_gathered_weight_codes_match_reference() -> None:
    w = jax.random.normal(jax.random.key(1), (128, 256), jnp.float32).at[3, 5].set(-0.0)

    def both(passes, w):
        codes = passes.quantize_weight(w, OperandSpec(NVFP4.fprop_w, -2), packed=True)
        return codes, passes.load_packed_weight(codes, NVFP4.fprop_w, axis=-2)

    (a, found), (b, expected) = (jitted(functools.partial(both, passes))(w) for passes in (PASSES, XLA_PASSES))
    assert (a.packed == b.packed).all() and (a.scales == b.scales).all() and a.amax == b.amax
    assert same(found, expected)


@pytest.mark.slow
def test_weight_rematerializes_from_master_and_scales() -> None:
    w = jax.random.normal(jax.random.key(1), (128, 256), jnp.float32)
    made = QWeight(w, PASSES.quantize_weight(w, OperandSpec(NVFP4.fprop_w, -2), packed=False), None, NVFP4)
    problem = LinearProblem(NVFP4, 256, 128, 256, H200)
    kept = QuantizedLinear(
        LinearPlan(problem, ops.choose_backend("fused", problem), UNSHARDED, "master"), made, None
    ).to_residuals()
    assert kept.weight.master is w
    assert sum(leaf.size for leaf in jax.tree.leaves(kept) if leaf is not w) <= 9  # the scales, and one more float
    again = kept.rematerialize(depends_on=w).weight
    assert (again.fprop.array == made.fprop.array).all() and same(again.fprop, made.fprop)


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"device": devices.device_by_name("cpu")}, "NVIDIA"),
        ({"partitioned_by_xla": True}, "sharded"),
        ({"dtype": "float32"}, "bfloat16"),
        ({"recipe": recipe("mxfp4")}, "mxfp4"),
        ({"recipe": recipe("nvfp4_rht_everywhere")}, "Hadamard"),
        ({"tokens": 24}, "16"),
    ],
)
def test_fused_unsupported_problem_says_why(change, reason) -> None:
    given = {"recipe": NVFP4, "tokens": 256, "inputs": 256, "outputs": 512, "device": H200} | change
    assert reason in fused.BACKEND.unsupported_reason(LinearProblem(**given))


def test_fused_serves_nvfp4_on_hopper() -> None:
    problem = LinearProblem(NVFP4, 256, 256, 512, H200)
    assert fused.BACKEND.unsupported_reason(problem) is None
    assert [fused.fused_unsupported(problem, gemm) for gemm in GEMMS] == [None] * 3


def test_fused_serves_width_that_no_tile_divides() -> None:
    assert fused.BACKEND.unsupported_reason(LinearProblem(NVFP4, 256, 96, 1376, H200)) is None


@pytest.mark.slow
def test_weight_in_stack_slice_equals_plain_weight() -> None:
    """The same carrier, and the master kept as where it lies."""
    stack = jax.random.normal(jax.random.key(1), (3, 128, 256), jnp.float32)
    problem = LinearProblem(NVFP4, 256, 128, 256, H200)
    plan = LinearPlan(problem, ops.choose_backend("fused", problem), UNSHARDED, "master")

    def made(stack, number, layer):
        given = stack[number] if layer is None else layer
        w = dataclasses.replace(
            quantize_weight_shard(given, NVFP4, None, passes=PASSES, packed=False), master=stack[number]
        )
        kept = QuantizedLinear(plan, w, None, layer=layer).to_residuals()
        return kept.weight, w.fprop, kept.rematerialize(depends_on=stack).weight.fprop

    layer = StackSlice(stack, jnp.int32(1))
    (anchored, found, again), (sliced, expected, _) = (made(stack, 1, at) for at in (layer, None))
    assert same(found, expected) and same(again, expected)
    assert anchored.master is layer and sliced.master.shape == (128, 256)


MAXIMA = ("partial_amax", "weight_partial_amax")  # jitted functions, each of a launch
KEPT = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(SCALES_NAME))


def maxima(layer, *shapes) -> int:
    """How many tensors the program of an H200, traced, reads for their maxima: x and weights of these shapes."""
    x, *weights = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    x = jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)

    def loss(*arrays):
        return jnp.sum(jnp.tanh(layer(*arrays)).astype(jnp.float32))

    with ops.compile_for(H200):
        traced = jax.make_jaxpr(jax.grad(loss, tuple(range(1 + len(weights)))))(x, *weights)
    return sum(count for eqn, count in equations(traced.jaxpr) if eqn.params.get("name") in MAXIMA)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_4over6_mse", "fp8"])
def test_remat_with_saved_scales_reads_no_amax_again(name) -> None:
    """A layer that is made again from its input takes the maxima of no more tensors than one whose operands are kept,
    if its scales are."""

    def linear(x, w):
        return hb.qdot(x, w, recipe=name, key=KEY)

    shapes = (2, 1024, 512), (512, 512)
    assert 0 < maxima(linear, *shapes) == maxima(KEPT(linear), *shapes) < maxima(jax.checkpoint(linear), *shapes)


@pytest.mark.slow(fast_cases=["fp8"])
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_4over6_mse", "fp8"])
def test_remat_mlp_does_not_requantize_x(name) -> None:
    def gated(mode):
        return lambda x, *weights: ops.mlp(x, *weights, recipe=name, key=KEY, residuals=mode)

    shapes = (2, 1024, 512), (512, 1024), (512, 1024), (1024, 512)
    once = maxima(gated("operands"), *shapes)
    assert 0 < once == maxima(gated("input"), *shapes) == maxima(KEPT(gated("input")), *shapes)
    assert once < maxima(jax.checkpoint(gated("input")), *shapes)
