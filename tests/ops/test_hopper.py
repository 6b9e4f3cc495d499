"""Programs for Hopper, compiled on a machine without a GPU: which GEMMs they hold. Oracle: the program's own text."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import halfbyte as hb
from halfbyte import devices, ops
from halfbyte.ops.backends import fp8

pytestmark = [pytest.mark.cuda_compiler, pytest.mark.slow]
H200 = devices.device_by_name("h200")
CALL = re.compile(r'= \((bf16|f32)\[[\d,]+\].*custom_call_target="__cublas\$lt\$matmul\$f8"')


def on_h200(*shapes):
    """Arrays on one H200, of which the first is bfloat16."""
    mesh = topologies.make_mesh(devices.topology(H200, hosts=1, per_host=1), (1,), ("fsdp",))
    dtypes = [jnp.bfloat16] + [jnp.float32] * (len(shapes) - 1)
    return [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]


def program(fn, *shapes, options=None):
    """The optimized text of fn and of its gradients for one H200; the first argument is bfloat16."""
    arguments = on_h200(*shapes)

    def loss(*args):
        return jnp.sum(fn(*args).astype(jnp.float32) ** 2)

    with ops.compile_for(H200), fp8.fuse_scales_into_gemm():
        lowered = jax.jit(jax.grad(loss, tuple(range(len(shapes))))).lower(*arguments)
    return lowered.compile(compiler_options=options).as_text()


def linear(x, w):
    return hb.qdot(x, w, recipe=hb.recipe("fp8"))


def test_three_8_bit_gemms_take_their_scales_and_write_what_is_read() -> None:
    text = program(linear, (256, 128), (128, 256), options=fp8.COMPILER_OPTIONS)
    assert sorted(CALL.findall(text)) == ["bf16", "bf16", "f32"]
    assert not fp8.unexpected_fp8_gemms(text)
    assert " transpose(" not in text


def test_jit_gives_somebody_elses_step_the_same_gemms() -> None:
    """Its weight is cast to bf16, and so is the gradient that its linear gives back."""

    def loss(w, x):
        return jnp.sum((x @ w.astype(jnp.bfloat16)).astype(jnp.float32) ** 2)

    x, w = on_h200((256, 128), (128, 256))
    with ops.compile_for(H200):
        step = hb.jit(jax.grad(hb.apply_recipe(loss, "fp8", show=None), (0, 1)), "fp8")
        text = step.lower(w, x).compile().as_text()
    assert CALL.findall(text) == ["bf16"] * 3 and not fp8.unexpected_fp8_gemms(text)


def test_without_its_options_a_gemm_that_was_given_its_scales_is_found_out() -> None:
    assert fp8.unexpected_fp8_gemms(program(linear, (256, 128), (128, 256)))
