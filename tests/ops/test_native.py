"""The native passes: the bytes that cuDNN reads, by kernels that are interpreted on a CPU and compiled on a GPU.

Oracle: the definition's operands, laid out by XLA (`TILED`), byte for byte; and for what a GEMM owes the kernels, the
same kernels over numbers that were multiplied and rounded before.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from instruments import quick

from halfbyte import devices, ops
from halfbyte.ops.backends import native
from halfbyte.ops.backends.native import TILED, NativePasses
from halfbyte.ops.gemms import finish
from halfbyte.ops.operand import BlockScaled, Owed
from halfbyte.ops.passes import XLA, request
from halfbyte.ops.shards import Shards
from halfbyte.recipe import recipe

NVFP4 = recipe("nvfp4")
KEY = jax.random.key(5)
PASSES = NativePasses(interpret=jax.default_backend() != "gpu")
B200 = devices.device("b200")
X, G, U, DH = (jax.random.normal(jax.random.key(i), (2, 16, 128), jnp.float32).astype(jnp.bfloat16) for i in range(4))
OWED = [jnp.float32(m) for m in (1.2345678, 1.9999, 1.0)]


def compiled(fn, *args):
    """fn(*args) under jit."""
    return jax.jit(fn, compiler_options=quick if PASSES.interpret else None)(*args)


def same(found, expected) -> None:
    for a, b in zip(found, expected, strict=True):
        assert isinstance(a, BlockScaled) and isinstance(b, BlockScaled)
        assert (a.policy, a.shape, a.axis) == (b.policy, b.shape, b.axis)
        np.testing.assert_array_equal(np.asarray(a.codes), np.asarray(b.codes))
        np.testing.assert_array_equal(np.asarray(a.scales), np.asarray(b.scales))
        assert float(a.factor) == float(b.factor)


@pytest.mark.parametrize("roles", [("fprop_x", "wgrad_x"), ("dgrad_dy", "wgrad_dy"), ("fprop_x",)])
def test_operands_are_the_definitions_bytes(roles) -> None:
    requests = [request(NVFP4, role, KEY) for role in roles]
    same(*(compiled(lambda x, p=p: p.quantize(x, requests), X) for p in (PASSES, TILED)))


def test_a_residual_is_what_wgrad_reads() -> None:
    wanted = [request(NVFP4, "fprop_x", KEY), request(NVFP4, "wgrad_x", KEY)]
    kept = [wanted[0], dataclasses.replace(wanted[1], kept=True)]
    (_, read), (_, residual) = (compiled(lambda x, r=r: PASSES.quantize(x, r), X) for r in (wanted, kept))
    same([PASSES.load(residual, NVFP4.wgrad_x)], [read])


def test_a_weight_is_the_definitions_bytes_in_both_orders() -> None:
    w = jax.random.normal(jax.random.key(1), (128, 128), jnp.float32)

    def operands(passes):
        packed = passes.weight(w, NVFP4.fprop_w, axis=-2, key=None)
        made = [passes.load_weight(packed, NVFP4.fprop_w, axis=axis) for axis in (-1, -2)]
        return [native.block_scaled(o, axis) for o, axis in zip(made, (-1, -2), strict=True)]

    same(*(compiled(lambda p=p: operands(p)) for p in (PASSES, XLA)))


@pytest.mark.parametrize("axis", [-1, -2])
def test_a_weight_whose_outputs_are_gathered_is_put_in_order_first(axis) -> None:
    """Four devices as a mapped axis; their parts, ordered and gathered, are the whole weight's bytes."""
    w = jax.random.normal(jax.random.key(1), (64, 256), jnp.float32)
    codes = XLA.weight(w, NVFP4.fprop_w, axis=-2, key=None)
    parts = [jnp.stack(jnp.split(a, 4, axis=1)) for a in (codes.packed, codes.scales)]
    shards = Shards(stored=((), ("devices",)))

    def gathered(packed, scales):
        part = dataclasses.replace(codes, packed=packed, scales=scales)
        made = PASSES.gather_weight(part, NVFP4.fprop_w, axis=axis, shards=shards)
        return made.codes, made.scales, made.shape

    found = jax.vmap(gathered, axis_name="devices", out_axes=(0, 0, None))(*parts)
    want = PASSES.load_weight(codes, NVFP4.fprop_w, axis=axis)
    assert found[2] == want.shape == (64, 256)
    for device in range(4):
        np.testing.assert_array_equal(found[0][device], want.codes)
        np.testing.assert_array_equal(found[1][device], want.scales)
    assert PASSES.gather_weight(codes, NVFP4.fprop_w, axis=axis, shards=Shards()) is None


def paid(tensors):
    """The tensors as they are when nothing is owed to them any more."""
    return [finish(t.astype(jnp.float32), m, jnp.dtype(jnp.bfloat16)) for t, m in zip(tensors, OWED, strict=False)]


def test_a_gated_pass_applies_what_a_gemm_owes_it() -> None:
    requests = [request(NVFP4, "fprop_x", KEY)]
    owing = [Owed(t, m) for t, m in zip((G, U), OWED, strict=False)]
    found = PASSES.activate(*owing, requests)
    same(found, PASSES.activate(*paid((G, U)), requests))
    assert not np.array_equal(found[0].codes, PASSES.activate(G, U, requests)[0].codes)


def test_the_backward_pass_applies_what_gemms_owe_it() -> None:
    dy = [request(NVFP4, role, KEY) for role in ("dgrad_dy", "wgrad_dy")]
    asked = dy, dy, [request(NVFP4, "wgrad_x", KEY)]
    owing = [Owed(t, m) for t, m in zip((G, U, DH), OWED, strict=True)]
    for a, b in zip(
        PASSES.activate_backward(*owing, *asked), PASSES.activate_backward(*paid((G, U, DH)), *asked), strict=True
    ):
        same(a, b)


def problem(**changes):
    given = {"tokens": 256, "inputs": 256, "outputs": 512, "device": B200} | changes
    return ops.Problem(NVFP4, **given)


@pytest.mark.parametrize(
    "changes, passes, reason",
    [
        ({}, "native", None),
        ({"inputs": 96}, "native", None),
        ({"sharded": True}, "xla", "sharded by the compiler"),
        ({"dtype": "float32"}, "xla", "bfloat16 activations"),
    ],
)
def test_a_choice_says_who_makes_the_operands_and_why(changes, passes, reason) -> None:
    case = problem(**changes)
    choice = ops.choose("auto", case)
    assert choice.name == "native" and choice.maker("fprop_x") == passes
    assert choice.passes is (XLA if changes.get("sharded") else native.NATIVE if passes == "native" else TILED)
    said = ops.passed_over(case, "native")
    assert said == {} if reason is None else reason in said["native kernels"]


def test_an_old_cudnn_is_given_no_factor(monkeypatch) -> None:
    monkeypatch.setattr(native, "cudnn_version", lambda device: (9, 12, 0))
    assert ops.choose("auto", problem()).passes is XLA
    assert "cuDNN 9.12.0 leaves the factors" in ops.passed_over(problem(), "native")["native kernels"]


SCOPED = '%dot = f32[8,8] {call}, metadata={{op_name="jit(f)/block_scaled_call/dot_general"}}'


@pytest.mark.parametrize("call", ["dot(%a, %b)", 'custom-call(%a), custom_call_target="__cublas$gemm"'])
def test_a_gemm_that_is_not_native_is_a_stray(call) -> None:
    native_call = SCOPED.format(call='custom-call(%a), custom_call_target="__cudnn$blockScaledDot"')
    assert native.stray_gemms(native_call) == []
    assert len(native.stray_gemms(f"{native_call}\n  {SCOPED.format(call=call)}")) == 1
