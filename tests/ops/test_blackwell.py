"""Programs for Blackwell, compiled on a machine without a GPU: which GEMMs they hold. What they gather, and one linear:
program/test_blackwell_program.py.

Oracle: the optimized program's own text. A native block-scaled GEMM is a call of `__cudnn$blockScaledDot`; any other
GEMM is a `dot`, a cuBLAS call or a Triton GEMM fusion. Compiled, not executed: docs/unverified.md.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
import test_stacks

import halfbyte as hb
from halfbyte import devices, ops

pytestmark = [pytest.mark.cuda_compiler, pytest.mark.slow]

NVFP4 = hb.recipe("nvfp4")
KEY = jax.random.key(0)
TOKENS, WIDTH, HIDDEN = 256, 128, 256
OTHER_GEMM = re.compile(r'\bdot\(|__cublas|__triton\w*gemm|custom_call_target="[^"]*(?:gemm|matmul)')


def nonlinear_loss(fn):
    """fprop is dead code under a loss that is linear in y."""
    return lambda *args: jnp.sum(fn(*args).astype(jnp.float32) ** 2)


def linear(x, w, **options):
    return hb.qdot(x, w, recipe=NVFP4, key=KEY, **options)


def mlp(x, gate, up, down):
    return hb.mlp(x, gate, up, down, recipe=NVFP4, key=KEY)


def program(fn, device, shapes):
    """The optimized text of value_and_grad of a loss of fn, with respect to all arguments; x is bfloat16."""
    topology = devices.topology(devices.device_by_name(device), hosts=1, per_host=1)
    place = jax.sharding.SingleDeviceSharding(topology.devices[0])
    dtypes = [jnp.bfloat16] + [jnp.float32] * (len(shapes) - 1)
    arguments = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=place) for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    with ops.compile_for(devices.device_by_name(device)):
        lowered = jax.jit(jax.value_and_grad(nonlinear_loss(fn), tuple(range(len(shapes))))).lower(*arguments)
    return lowered.compile().as_text()


def native_gemms(text):
    return text.count('custom_call_target="__cudnn$blockScaledDot"')


LINEAR = ((TOKENS, WIDTH), (WIDTH, HIDDEN))
MLP = ((TOKENS, WIDTH), (WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))


def test_the_mlp_is_nine_native_gemms_and_no_other():
    """GB300: bench/test_405b.py."""
    text = program(mlp, "b200", MLP)
    assert native_gemms(text) == 9
    assert not OTHER_GEMM.search(text)


def test_a_loop_of_layers_copies_no_product():
    """g and u of each, which kernels write and read in the loop's stacks; with their maxima, as codes. Hopper:
    test_stacks.py.
    """
    found, product = (
        test_stacks.moved("nvfp4", devices.device_by_name("b200")),
        2 * test_stacks.TOKENS * test_stacks.HIDDEN * 2,
    )
    assert found["slice"] < 3 * product, found
    assert found["update"] + found["fill"] < 4 * product, found


def test_a_hopper_program_has_none():
    # Not by our own GEMM: Mosaic assembles all kernels of a process for the first target that it meets.
    text = program(functools.partial(linear, backend="emulated"), "h100", LINEAR)
    assert native_gemms(text) == 0
    assert OTHER_GEMM.search(text)  # and the pattern above is not blind
