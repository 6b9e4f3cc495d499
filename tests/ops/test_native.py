"""The native passes: the bytes that cuDNN reads, by kernels that are interpreted on a CPU and compiled on a GPU.

Oracle: the definition's operands, laid out by XLA (`TILED`), byte for byte; and for what a GEMM owes the kernels, the
same kernels over numbers that were multiplied and rounded before.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from instruments import activation, quick

from halfbyte import devices, ops
from halfbyte.formats import MXFP8_E5M2
from halfbyte.kernels.mosaic_launch import StackSlice
from halfbyte.ops.backends import cudnn_block_scaled, native
from halfbyte.ops.backends.mxfp8_passes import MXFP8_PASSES, Mxfp8QuantizePasses
from halfbyte.ops.backends.native import REFERENCE_NATIVE_PASSES, NativeQuantizePasses
from halfbyte.ops.gemm_problem import apply_epilogue
from halfbyte.ops.linear import quantize_weight_shard, weight_operand
from halfbyte.ops.linear_sharding import LinearSharding
from halfbyte.ops.operand import BlockScaledOperand, DeferredAlpha
from halfbyte.ops.quantize_passes import XLA_PASSES, OperandSpec, operand_spec
from halfbyte.ops.quantized_weight import CONTRACTED_WEIGHT_AXIS
from halfbyte.recipes import GRADIENT_ROLES, recipe

pytestmark = pytest.mark.usefixtures("interpreted_without_gpu")

NVFP4, MXFP8 = recipe("nvfp4"), recipe("mxfp8")
E5M2 = dataclasses.replace(MXFP8, **MXFP8.with_operands(GRADIENT_ROLES, format=MXFP8_E5M2))
KEY = jax.random.key(5)
PASSES = NativeQuantizePasses()
MX_PASSES = Mxfp8QuantizePasses()
B200 = devices.device_by_name("b200")
X, G, U, DH = (jax.random.normal(jax.random.key(i), (2, 16, 128), jnp.float32).astype(jnp.bfloat16) for i in range(4))
OWED = [jnp.float32(m) for m in (1.2345678, 1.9999, 1.0)]


def compiled(fn, *args):
    """fn(*args) under jit."""
    return jax.jit(fn, compiler_options=None if jax.default_backend() == "gpu" else quick)(*args)


def same(found, expected) -> None:
    for a, b in zip(found, expected, strict=True):
        assert isinstance(a, BlockScaledOperand) and isinstance(b, BlockScaledOperand)
        assert (a.policy, a.shape, a.axis) == (b.policy, b.shape, b.axis)
        np.testing.assert_array_equal(np.asarray(a.codes), np.asarray(b.codes))
        np.testing.assert_array_equal(np.asarray(a.scales), np.asarray(b.scales))
        np.testing.assert_array_equal(a.decode_scale, b.decode_scale)


@pytest.mark.slow
@pytest.mark.parametrize("roles", [("fprop_x", "wgrad_x"), ("dgrad_dy", "wgrad_dy")])
def test_native_operands_equal_reference_bytes(roles) -> None:
    requests = [operand_spec(NVFP4, role, KEY) for role in roles]
    same(*(compiled(lambda x, p=p: p.quantize(x, requests), X) for p in (PASSES, REFERENCE_NATIVE_PASSES)))


@pytest.mark.slow
def test_native_residual_is_what_wgrad_reads() -> None:
    wanted = [operand_spec(NVFP4, "fprop_x", KEY), operand_spec(NVFP4, "wgrad_x", KEY)]
    kept = [wanted[0], dataclasses.replace(wanted[1], as_residual=True)]
    (_, read), (_, residual) = (compiled(lambda x, r=r: PASSES.quantize(x, r), X) for r in (wanted, kept))
    same([PASSES.operand_from_residual(residual, NVFP4.wgrad_x)], [read])


@pytest.mark.slow
def test_native_weight_in_both_orders_equals_reference() -> None:
    w = jax.random.normal(jax.random.key(1), (128, 128), jnp.float32)

    def operands(passes):
        packed = passes.quantize_weight(w, OperandSpec(NVFP4.fprop_w, -2))
        made = [passes.load_packed_weight(packed, NVFP4.fprop_w, axis=axis) for axis in (-1, -2)]
        return [native.to_block_scaled(o, axis) for o, axis in zip(made, (-1, -2), strict=True)]

    same(*(compiled(lambda p=p: operands(p)) for p in (PASSES, XLA_PASSES)))


@pytest.mark.slow(fast_cases=["-2"])
@pytest.mark.parametrize("axis", [-1, -2])
def test_native_gathered_weight_is_in_order(axis) -> None:
    """Four devices as a mapped axis; their parts, ordered and gathered, are the whole weight's bytes."""
    w = jax.random.normal(jax.random.key(1), (64, 256), jnp.float32)
    codes = compiled(lambda: XLA_PASSES.quantize_weight(w, OperandSpec(NVFP4.fprop_w, -2)))
    parts = [np.stack(np.split(np.asarray(a), 4, axis=1)) for a in (codes.packed, codes.scales)]
    shards = LinearSharding(weight_storage_axes=((), ("devices",)))

    def gathered(packed, scales):
        part = dataclasses.replace(codes, packed=packed, scales=scales)
        made = PASSES.all_gather_weight(part, NVFP4.fprop_w, axis=axis, shards=shards)
        assert made.shape == (64, 256)
        return made.codes, made.scales

    found = compiled(jax.vmap(gathered, axis_name="devices"), *parts)
    want = compiled(lambda: PASSES.load_packed_weight(codes, NVFP4.fprop_w, axis=axis))
    assert want.shape == (64, 256)
    for device in range(4):
        np.testing.assert_array_equal(found[0][device], want.codes)
        np.testing.assert_array_equal(found[1][device], want.scales)
    assert PASSES.all_gather_weight(codes, NVFP4.fprop_w, axis=axis, shards=LinearSharding()) is None


MX_ROLES = ("fprop_x", "wgrad_x"), ("dgrad_dy", "wgrad_dy")


@pytest.mark.slow
@pytest.mark.parametrize("roles, bad", [(MX_ROLES[0], 0.0), (MX_ROLES[1], 0.0), (MX_ROLES[1], np.nan)], ids=str)
def test_mxfp8_operands_equal_reference_bytes(roles, bad) -> None:
    """Also of a tensor that is not finite, of which all that counts is the factor, NaN."""
    requests = [operand_spec(E5M2, role, KEY) for role in roles]
    x = X.reshape(1, 32, 128).at[0, 3, 7].add(jnp.bfloat16(bad))
    found, want = (compiled(lambda x, p=p: p.quantize(x, requests), x) for p in (MX_PASSES, REFERENCE_NATIVE_PASSES))
    if bad == 0:
        same(found, want)
    np.testing.assert_array_equal([o.decode_scale for o in found], [o.decode_scale for o in want])


def test_mxfp8_gated_activation_equals_its_tensors() -> None:
    dy, h = [operand_spec(MXFP8, role, KEY) for role in ("dgrad_dy", "wgrad_dy")], operand_spec(MXFP8, "fprop_x", KEY)
    kept = dataclasses.replace(operand_spec(MXFP8, "wgrad_x", KEY), as_residual=True)
    g, u, dh = (t.reshape(32, 128) for t in (G, U, DH))
    made = activation(g, u, dh)
    same(MX_PASSES.activate(g, u, [h]), MX_PASSES.quantize(made[2], [h]))
    found = MX_PASSES.activate_backward(g, u, dh, dy, dy, [kept])
    for a, tensor, asked in zip(found, made, (dy, dy, [kept]), strict=True):
        same(a, MX_PASSES.quantize(tensor, asked))
    assert MX_PASSES.operand_from_residual(found[2][0], MXFP8.wgrad_x) is found[2][0]


@pytest.mark.slow
@pytest.mark.parametrize("role", ["fprop_w", "dgrad_w"])
@pytest.mark.parametrize("dim", [0, 1])
def test_mxfp8_sharded_weight_is_gathered_in_order(role, dim) -> None:
    """Four devices as a mapped axis, whole weights as the definition quantizes them."""
    w = jax.random.normal(jax.random.key(1), (128, 256), jnp.float32)
    quantize = functools.partial(quantize_weight_shard, recipe=MXFP8, key=None, passes=MX_PASSES)
    parts = compiled(lambda parts: jax.lax.map(quantize, parts), np.stack(np.split(np.asarray(w), 4, axis=dim)))
    shards = LinearSharding(weight_storage_axes=tuple(("devices",) if i == dim else () for i in (0, 1)))

    def gathered(part):
        made = weight_operand(part, role, shards, MX_PASSES)
        shapes.append(made.shape)
        return made.codes, made.scales, made.decode_scale

    def whole():
        made = weight_operand(quantize_weight_shard(w, MXFP8, None), role, passes=XLA_PASSES)
        return native.to_block_scaled(made, CONTRACTED_WEIGHT_AXIS[role])

    shapes: list[tuple[int, ...]] = []
    found, want = compiled(jax.vmap(gathered, axis_name="devices"), parts), compiled(whole)
    assert {*shapes} == {want.shape}
    for array, expected in zip(found, (want.codes, want.scales, want.decode_scale), strict=True):
        np.testing.assert_array_equal(array, np.broadcast_to(expected, array.shape))


def paid(tensors):
    """The tensors as they are when nothing is owed to them any more."""
    return [
        apply_epilogue(t.astype(jnp.float32), m, jnp.dtype(jnp.bfloat16)) for t, m in zip(tensors, OWED, strict=False)
    ]


@pytest.mark.slow
def test_native_forward_pass_applies_deferred_alpha() -> None:
    requests = [operand_spec(NVFP4, "fprop_x", KEY)]
    owing = [DeferredAlpha(t, m) for t, m in zip((G, U), OWED, strict=False)]
    found = PASSES.activate(*owing, requests)
    same(found, PASSES.activate(*paid((G, U)), requests))
    assert not np.array_equal(found[0].codes, PASSES.activate(G, U, requests)[0].codes)


@pytest.mark.slow
def test_native_backward_pass_applies_deferred_alpha() -> None:
    dy = [operand_spec(NVFP4, role, KEY) for role in ("dgrad_dy", "wgrad_dy")]
    asked = dy, dy, [operand_spec(NVFP4, "wgrad_x", KEY)]
    owing = [DeferredAlpha(t, m) for t, m in zip((G, U, DH), OWED, strict=True)]
    for a, b in zip(
        PASSES.activate_backward(*owing, *asked), PASSES.activate_backward(*paid((G, U, DH)), *asked), strict=True
    ):
        same(a, b)


@pytest.mark.slow
def test_native_pass_reads_and_writes_stack_slices() -> None:
    """In the second of three layers, beside numbers that nobody may read; what is owed to them stays owed."""
    ahead, dy = (
        [operand_spec(NVFP4, "fprop_x", KEY)],
        [operand_spec(NVFP4, role, KEY) for role in ("dgrad_dy", "wgrad_dy")],
    )
    asked = dy, dy, [operand_spec(NVFP4, "wgrad_x", KEY)]
    unread = [jnp.full((3, *G.shape), jnp.nan, jnp.bfloat16)] * 2
    owing = [DeferredAlpha(t, m) for t, m in zip((G, U, DH), OWED, strict=True)]

    def both(g, u, dh, *stacks):
        made, stacks = PASSES.activate_to_stacks(g, u, ahead, [StackSlice(s, jnp.int32(1)) for s in stacks])
        lies = [DeferredAlpha(StackSlice(s, jnp.int32(1)), t.alpha) for s, t in zip(stacks, (g, u), strict=True)]
        return made, stacks, PASSES.activate_backward(*lies, dh, *asked)

    made, stacks, gradients = compiled(both, *owing, *unread)
    same(made, PASSES.activate(*owing[:2], ahead))
    for found, want in zip(gradients, PASSES.activate_backward(*owing, *asked), strict=True):
        same(found, want)
    for stack, array in zip(stacks, (G, U), strict=True):
        np.testing.assert_array_equal(stack[1], array)
        assert np.isnan(stack[::2]).all()


def problem(recipe=NVFP4, **changes):
    given = {"tokens": 256, "inputs": 256, "outputs": 512, "device": B200} | changes
    return ops.LinearProblem(recipe, **given)


@pytest.mark.parametrize(
    "changes, passes, reason",
    [
        ({}, "native", None),
        ({"inputs": 96}, "native", None),
        ({"partitioned_by_xla": True}, "xla", "sharded by the compiler"),
        ({"dtype": "float32"}, "xla", "bfloat16 activations"),
    ],
)
def test_native_choice_states_passes_and_reason(changes, passes, reason) -> None:
    case = problem(**changes)
    choice, mx = (ops.choose_backend("auto", dataclasses.replace(case, recipe=r)) for r in (NVFP4, MXFP8))
    assert choice.name == "native" and choice.operand_passes("fprop_x") == passes
    assert mx.name == "native" and mx.operand_passes("dgrad_dy") == mx.operand_passes("fprop_w") == passes
    assert mx.passes is (
        XLA_PASSES
        if changes.get("partitioned_by_xla")
        else MXFP8_PASSES
        if passes == "native"
        else REFERENCE_NATIVE_PASSES
    )
    assert ops.rejected_backends(dataclasses.replace(case, recipe=MXFP8), "native") == ops.rejected_backends(
        case, "native"
    )
    assert choice.passes is (
        XLA_PASSES
        if changes.get("partitioned_by_xla")
        else native.NATIVE_PASSES
        if passes == "native"
        else REFERENCE_NATIVE_PASSES
    )
    said = ops.rejected_backends(case, "native")
    assert said == {} if reason is None else reason in said["native kernels"]


def test_mxfp8_of_other_rules_uses_xla_passes() -> None:
    """The kernels round scales up; floor's operands are another format's, and a blend's are of two."""
    for name in ("mxfp8_floor", "nvfp4+mxfp8_backward"):
        choice = ops.choose_backend("auto", problem(recipe(name)))
        assert (choice.name, choice.passes) == ("native", REFERENCE_NATIVE_PASSES)
        assert "native kernels" in ops.rejected_backends(problem(recipe(name)), "native")


def test_old_cudnn_gets_no_factor(monkeypatch) -> None:
    monkeypatch.setattr(cudnn_block_scaled, "cudnn_version", lambda device: (9, 12, 0))
    assert ops.choose_backend("auto", problem()).passes is XLA_PASSES
    assert "cuDNN 9.12.0 leaves the factors" in ops.rejected_backends(problem(), "native")["native kernels"]


SCOPED = '%dot = f32[8,8] {call}, metadata={{op_name="jit(f)/block_scaled_call/dot_general"}}'


@pytest.mark.parametrize("call", ["dot(%a, %b)", 'custom-call(%a), custom_call_target="__cublas$gemm"'])
def test_unexpected_native_gemm_is_found(call) -> None:
    native_call = SCOPED.format(call='custom-call(%a), custom_call_target="__cudnn$blockScaledDot"')
    assert native.unexpected_native_gemms(native_call) == []
    assert len(native.unexpected_native_gemms(f"{native_call}\n  {SCOPED.format(call=call)}")) == 1
