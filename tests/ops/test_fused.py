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
from halfbyte.kernels.stacks import Layer
from halfbyte.ops.activation import SILU
from halfbyte.ops.backends import fused, served
from halfbyte.ops.backends.fused import FusedPasses
from halfbyte.ops.backends.native import NATIVE
from halfbyte.ops.execution import LinearPlan
from halfbyte.ops.gemms import GEMMS
from halfbyte.ops.linear import Linear, quantize_part
from halfbyte.ops.operand import SCALES, Operand
from halfbyte.ops.passes import XLA, Request, request
from halfbyte.ops.problem import Problem
from halfbyte.ops.shards import WHOLE
from halfbyte.ops.weight import QWeight
from halfbyte.recipe import recipe

# Recipes share operands: programs of one text are compiled once.
pytestmark = pytest.mark.usefixtures("interpreted_without_gpu", "quick_compiles")

NVFP4, HALFBYTE, QUARTET2 = recipe("nvfp4"), recipe("halfbyte"), recipe("quartet2")
KEY = jax.random.key(5)
H200 = devices.device("h200")
PASSES = FusedPasses()
X = jax.random.normal(jax.random.key(0), (2, 16, 128), jnp.float32).astype(jnp.bfloat16)
RUNS = jax.random.normal(jax.random.key(0), (2, 128, 128), jnp.float32).astype(jnp.bfloat16)  # of 128 tokens


jitted = functools.partial(jax.jit, compiler_options=quick)


def same(found: Operand, expected: Operand) -> bool:
    a, b = (np.asarray(o.values().astype(jnp.float32)) for o in (found, expected))
    return bool((a == b).all()) and float(found.factor) == float(expected.factor)


PRESETS = (
    "nvfp4", "nvfp4_unbiased", "nvfp4_4over6_mse", "nvfp4_4over6_mae", "nvfp4_4over6_sr", "halfbyte", "quartet2",
)  # fmt: skip


OF_X = ("fprop_x", "wgrad_x"), ("fprop_x",)
OF_DY = (("dgrad_dy", "wgrad_dy"),)


@functools.cache
def operands(name, asked, passes):
    """x -> the operands of each roles that are asked for together; one program for all tests."""
    wanted = [[request(recipe(name), role, KEY) for role in roles] for roles in asked]
    return jitted(lambda x: [made for requests in wanted for made in passes.quantize(x, requests)])


@pytest.mark.slow(fast_cases=["asked1-nvfp4"])
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("asked", [OF_X, OF_DY])
def test_operands_equal_the_definition(name, asked) -> None:
    """Two of one tensor, and one alone; the definition makes the latter once for both."""
    x = RUNS if name == "quartet2" else X
    found, expected = (operands(name, asked, passes)(x) for passes in (PASSES, XLA))
    assert len(found) == sum(map(len, asked)) and all(same(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.slow(fast_cases=["halfbyte", "quartet2"])
@pytest.mark.parametrize("name", PRESETS)
def test_operands_by_maxima_that_were_found_before_equal_the_definition(name) -> None:
    """Found for two, they serve one of them as well."""
    both, x = [request(recipe(name), role, KEY) for role in OF_X[0]], RUNS if name == "quartet2" else X
    asked = both[:1], both

    def by_maxima(x):
        maxima = PASSES.maxima(x, both)
        return [made for requests in asked for made in PASSES.quantize_by(x, requests, maxima)]

    row, column, _ = operands(name, OF_X, XLA)(x)
    assert all(same(a, b) for a, b in zip(jitted(by_maxima)(x), (row, row, column), strict=True))


@pytest.mark.slow
def test_a_forward_operand_that_nobody_asked_for_is_made_and_one_that_was_is_made_once() -> None:
    rows, again = (request(HALFBYTE, role, KEY) for role in ("fprop_x", "wgrad_x"))
    (found,), (expected,) = (jitted(functools.partial(p.quantize, requests=[again]))(X) for p in (PASSES, XLA))
    assert same(found, expected)
    text = str(jax.make_jaxpr(lambda x: PASSES.quantize(x, [rows, again]))(X))
    assert text.count("name=quantize_rows_squared") == 1


@pytest.mark.slow(fast_cases=["quartet2"])
@pytest.mark.parametrize("given", [HALFBYTE, QUARTET2], ids=str)
def test_a_forward_operand_of_a_weight_is_quantized_once_more_and_made_again_from_the_master(given) -> None:
    w = jax.random.normal(jax.random.key(1), (128, 256), jnp.float32)
    problem = Problem(given, 256, 128, 256, H200)
    choice = ops.choose("fused", problem)
    made = jitted(lambda w: quantize_part(w, given, KEY, passes=choice.for_weight, packed=False))(w)
    right = jitted(lambda w: XLA.load(quantize_part(w, given, KEY).dgrad, given.dgrad_w))(w)
    assert choice.for_weight == PASSES and same(made.dgrad, right)
    made = dataclasses.replace(made, anchor=w)
    kept = Linear(LinearPlan(problem, choice, WHOLE, "master"), made, KEY).kept()
    assert sum(leaf.size for leaf in jax.tree.leaves(kept) if leaf is not w) <= 19  # the scales of both, and the key
    again = jitted(lambda kept, w: kept.restored(after=w).weight)(kept, w)
    assert same(again.fprop, made.fprop) and same(again.dgrad, made.dgrad)


def test_what_it_does_not_make_of_a_forward_operand_is_said() -> None:
    """Without the transform numbers are float32; h's operands are made of h; what travels is packed."""
    plain = {role: dataclasses.replace(getattr(HALFBYTE, role), hadamard=False) for role in ("wgrad_x", "wgrad_dy")}
    assert "forward" in served.foreign(dataclasses.replace(HALFBYTE, **plain))
    assert "of h" in PASSES.unfused(SILU, [dataclasses.replace(HALFBYTE, remainder=False)] * 3)
    assert ops.choose("fused", Problem(HALFBYTE, 256, 128, 256, H200, parts=(2, 1))).for_weight is XLA
    assert "carrier" in NATIVE.foreign(HALFBYTE)
    mixed = dataclasses.replace(QUARTET2, fprop_x=HALFBYTE.fprop_x)
    assert "wgrad_x" in served.foreign(mixed) and served.foreign(QUARTET2) is None
    assert "128" in PASSES.unfused(SILU, [QUARTET2] * 3)
    assert ops.choose("fused", Problem(QUARTET2, 256, 128, 256, H200, parts=(2, 1))).for_weight is XLA
    assert "multiple of 16 tokens" in PASSES.unsupported(Problem(QUARTET2, 24, 128, 256, H200, training=False))


@pytest.mark.slow
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_tensor_of_quartet2_that_is_not_finite_gives_nan_as_the_definition_does(bad) -> None:
    """Its row has the definition's numbers all the same."""
    x = RUNS.at[0, 3, 5].set(bad)
    found, expected = (operands("quartet2", OF_X, passes)(x) for passes in (PASSES, XLA))
    assert all(np.isnan(float(o.factor)) for o in (*found, *expected))
    a, b = (np.asarray(made[0].values().astype(jnp.float32)) for made in (found, expected))
    assert (a == b).all()


@pytest.mark.slow
@pytest.mark.parametrize("passes", [PASSES, XLA], ids=["fused", "xla"])
def test_a_choice_does_not_depend_on_the_size_of_a_tensor(passes) -> None:
    """Where squares of its numbers leave float32's range the definition and the kernels choose as elsewhere."""
    chosen = jitted(lambda x: passes.quantize(x, [request(recipe("nvfp4_4over6_mse"), "fprop_x", KEY)])[0].values())
    for size in (1e-30, 1e-19, 1e-5, 1e19, 1e30):
        power = 2.0 ** int(np.log2(size))
        assert bool((chosen(X) == chosen((X * power).astype(X.dtype))).all()), size


@pytest.mark.slow
@pytest.mark.parametrize("given", [NVFP4, QUARTET2], ids=str)
def test_a_kept_operand_is_packed_as_the_definition_packs_it_and_loads_back(given) -> None:
    requests = [request(given, "fprop_x", KEY), request(given, "wgrad_x", KEY, kept=True)]

    def both(passes):
        kept = passes.quantize(RUNS, requests)[1]
        return kept, passes.load(kept, given.wgrad_x)

    (a, found), (b, expected) = (jitted(functools.partial(both, passes))() for passes in (PASSES, XLA))
    assert (a.packed == b.packed).all() and (a.scales == b.scales).all() and a.amax == b.amax
    assert same(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])  # of a master, and of one that its owner casts
def test_a_weight_equals_the_definition(dtype) -> None:
    w = jax.random.normal(jax.random.key(1), (128, 256), dtype)
    assert ops.choose("fused", Problem(NVFP4, 256, 128, 256, H200, weight_dtype=w.dtype.name)).for_weight == PASSES
    found = jitted(lambda w: PASSES.weight(w, Request(NVFP4.fprop_w, -2), packed=False))
    expected = jitted(lambda w: XLA.load(XLA.weight(w, Request(NVFP4.fprop_w, -2)), NVFP4.fprop_w))
    assert same(found(w), expected(w))


@pytest.mark.slow
@pytest.mark.parametrize("width", [256, 88])  # of tiles, and of none
@pytest.mark.parametrize("name", ["nvfp4_1d_weights", "nvfp4_4over6_mse", "nvfp4_4over6_mae"])
def test_a_weight_in_blocks_along_an_axis_equals_the_definition(name, width) -> None:
    w = jax.random.normal(jax.random.key(1), (128, width), jnp.float32)
    given = recipe(name)
    assert ops.choose("fused", Problem(given, 256, 128, 256, H200)).for_weight == PASSES
    for role, axis in (("fprop_w", -2), ("dgrad_w", -1)):
        if width % 16 and axis == -1:
            continue
        policy = getattr(given, role)

        def made(w, policy=policy, axis=axis):
            found = PASSES.weight(w, Request(policy, axis), packed=False)
            again = PASSES.remake_weight(w, PASSES.keep_weight(found), Request(policy, axis))
            return found, again, XLA.load(XLA.weight(w, Request(policy, axis)), policy)

        found, again, right = jitted(made)(w)
        assert same(found, right)
        assert (again.array == found.array).all() and same(again, found)


def test_a_weight_in_blocks_along_an_axis_that_travels_is_the_definitions() -> None:
    problem = Problem(recipe("nvfp4_4over6_mse"), 256, 128, 256, H200, parts=(2, 1))
    assert ops.choose("fused", problem).for_weight.name == "xla"


def test_a_weight_that_travels_is_packed_as_the_definition_packs_it_and_loads_back() -> None:
    w = jax.random.normal(jax.random.key(1), (128, 256), jnp.float32).at[3, 5].set(-0.0)

    def both(passes, w):
        codes = passes.weight(w, Request(NVFP4.fprop_w, -2), packed=True)
        return codes, passes.load_weight(codes, NVFP4.fprop_w, axis=-2)

    (a, found), (b, expected) = (jitted(functools.partial(both, passes))(w) for passes in (PASSES, XLA))
    assert (a.packed == b.packed).all() and (a.scales == b.scales).all() and a.amax == b.amax
    assert same(found, expected)


@pytest.mark.slow
def test_a_weight_is_made_again_from_its_master_and_its_scales() -> None:
    w = jax.random.normal(jax.random.key(1), (128, 256), jnp.float32)
    made = QWeight(w, PASSES.weight(w, Request(NVFP4.fprop_w, -2), packed=False), None, NVFP4)
    problem = Problem(NVFP4, 256, 128, 256, H200)
    kept = Linear(LinearPlan(problem, ops.choose("fused", problem), WHOLE, "master"), made, None).kept()
    assert kept.weight.anchor is w
    assert sum(leaf.size for leaf in jax.tree.leaves(kept) if leaf is not w) <= 9  # the scales, and one more float
    again = kept.restored(after=w).weight
    assert (again.fprop.array == made.fprop.array).all() and same(again.fprop, made.fprop)


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"device": devices.device("cpu")}, "NVIDIA"),
        ({"sharded": True}, "sharded"),
        ({"dtype": "float32"}, "bfloat16"),
        ({"recipe": recipe("mxfp4")}, "mxfp4"),
        ({"recipe": recipe("nvfp4_rht_everywhere")}, "Hadamard"),
        ({"tokens": 24}, "16"),
    ],
)
def test_it_says_why_it_cannot_serve(change, reason) -> None:
    given = {"recipe": NVFP4, "tokens": 256, "inputs": 256, "outputs": 512, "device": H200} | change
    assert reason in fused.BACKEND.unable(Problem(**given))


def test_it_serves_nvfp4_on_one_hopper_gpu() -> None:
    problem = Problem(NVFP4, 256, 256, 512, H200)
    assert fused.BACKEND.unable(problem) is None
    assert [fused.unsupported(problem, gemm) for gemm in GEMMS] == [None] * 3


def test_it_serves_widths_that_no_tile_divides() -> None:
    assert fused.BACKEND.unable(Problem(NVFP4, 256, 96, 1376, H200)) is None


@pytest.mark.slow
def test_a_weight_is_read_where_it_lies_among_those_of_other_layers() -> None:
    """The same carrier, and the master kept as where it lies."""
    stack = jax.random.normal(jax.random.key(1), (3, 128, 256), jnp.float32)
    problem = Problem(NVFP4, 256, 128, 256, H200)
    plan = LinearPlan(problem, ops.choose("fused", problem), WHOLE, "master")

    def made(stack, number, layer):
        given = stack[number] if layer is None else layer
        w = dataclasses.replace(quantize_part(given, NVFP4, None, passes=PASSES, packed=False), anchor=stack[number])
        kept = Linear(plan, w, None, layer=layer).kept()
        return kept.weight, w.fprop, kept.restored(after=stack).weight.fprop

    layer = Layer(stack, jnp.int32(1))
    (anchored, found, again), (sliced, expected, _) = (made(stack, 1, at) for at in (layer, None))
    assert same(found, expected) and same(again, expected)
    assert anchored.anchor is layer and sliced.anchor.shape == (128, 256)


MAXIMA = ("maxima", "weight_maxima")  # jitted functions, each of a launch
KEPT = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(SCALES))


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
def test_no_tensor_is_read_again_for_scales_that_are_kept(name) -> None:
    """A layer that is made again from its input takes the maxima of no more tensors than one whose operands are kept,
    if its scales are."""

    def linear(x, w):
        return hb.qdot(x, w, recipe=name, key=KEY)

    shapes = (2, 1024, 512), (512, 512)
    assert 0 < maxima(linear, *shapes) == maxima(KEPT(linear), *shapes) < maxima(jax.checkpoint(linear), *shapes)


@pytest.mark.slow(fast_cases=["fp8"])
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_4over6_mse", "fp8"])
def test_nor_is_the_x_of_an_mlp_that_makes_its_operands_again_itself(name) -> None:
    def gated(mode):
        return lambda x, *weights: ops.mlp(x, *weights, recipe=name, key=KEY, mode=mode)

    shapes = (2, 1024, 512), (512, 1024), (512, 1024), (1024, 512)
    once = maxima(gated("fast"), *shapes)
    assert 0 < once == maxima(gated("input"), *shapes) == maxima(KEPT(gated("input")), *shapes)
    assert once < maxima(jax.checkpoint(gated("input")), *shapes)
