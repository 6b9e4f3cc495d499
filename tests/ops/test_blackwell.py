"""Programs for Blackwell, compiled on a machine without a GPU: which GEMMs they hold and what they gather.

Oracle: the optimized program's own text. A native block-scaled GEMM is a call of `__cudnn$blockScaledDot`; any other
GEMM is a `dot`, a cuBLAS call or a Triton GEMM fusion. Compiled, not executed: docs/unverified.md.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

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


def program(fn, device, shapes, *, mesh_shape=(1,), specs=None):
    """The optimized text of value_and_grad of a loss of fn, with respect to all arguments; x is bfloat16."""
    mesh = make_mesh(device, mesh_shape)
    dtypes = [jnp.bfloat16] + [jnp.float32] * (len(shapes) - 1)
    arguments = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in zip(shapes, dtypes, specs or [P()] * len(shapes), strict=True)
    ]
    with ops.compile_for(devices.device(device)):
        lowered = jax.jit(jax.value_and_grad(nonlinear_loss(fn), tuple(range(len(shapes))))).lower(*arguments)
    return lowered.compile().as_text()


@functools.cache
def make_mesh(device, shape):
    topology = devices.topology(devices.device(device), hosts=1, per_host=math.prod(shape))
    return topologies.make_mesh(topology, shape, ("fsdp",))


def native_gemms(text):
    return text.count('custom_call_target="__cudnn$blockScaledDot"')


LINEAR = ((TOKENS, WIDTH), (WIDTH, HIDDEN))
MLP = ((TOKENS, WIDTH), (WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))


def test_the_mlp_is_nine_native_gemms_and_no_other():
    """One linear is below, GB300 in bench/test_405b.py."""
    text = program(mlp, "b200", MLP)
    assert native_gemms(text) == 9
    assert not OTHER_GEMM.search(text)


def test_a_hopper_program_has_none():
    # Not by our own GEMM: Mosaic assembles all kernels of a process for the first target that it meets.
    text = program(functools.partial(linear, backend="carrier"), "h100", LINEAR)
    assert native_gemms(text) == 0
    assert OTHER_GEMM.search(text)  # and the pattern above is not blind


def gathered(text):
    """[(dtype, elements)] of what all-gathers give."""
    found = []
    for result in re.findall(r"= (.*?) all-gather(?:-start)?\(", text):
        arrays = re.findall(r"(\w+)\[([\d,]*)\]", result)
        # A start has (inputs, outputs).
        outputs = arrays[len(arrays) // 2 :] if f"{result} all-gather-start" in text else arrays
        found += [(dtype, math.prod(int(n) for n in dims.split(",") if n)) for dtype, dims in outputs]
    return found


def test_fsdp_gathers_four_bit_weights_once():
    """fprop and dgrad read one gather of bytes: 4 bits a weight and a byte a tile, 0.252x of one in bfloat16."""
    mesh = make_mesh("b200", (4,))
    placement = ops.Placement(mesh, P("fsdp"), P("fsdp"), P("fsdp"))
    shapes = ((1024, 512), (512, 1024))
    text = program(
        functools.partial(linear, placement=placement), "b200", shapes, mesh_shape=(4,), specs=(P("fsdp"),) * 2
    )
    assert native_gemms(text) == 3
    assert not OTHER_GEMM.search(text)
    arrays = gathered(text)
    assert {dtype for dtype, _ in arrays} == {"u8"}, arrays
    elements = math.prod(shapes[1])
    assert elements / 2 < sum(size for _, size in arrays) <= 0.3 * 2 * elements, arrays
    # The gradient comes home in shards, and the largest magnitudes of whole tensors are found together.
    assert "reduce-scatter" in text and re.search(r"s32\[\d*\]\S* all-reduce", text)
