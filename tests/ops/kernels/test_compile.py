"""Every quantize kernel compiles for Hopper and Blackwell, the GEMM for Hopper, with no GPU at hand."""

import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from kernel_programs import compiled, compiled_choosing, compiled_codes, compiled_experts, hidden, shapes, topology_of

from halfbyte import devices, ops
from halfbyte import kernels as K
from halfbyte.recipes import recipe

pytestmark = [pytest.mark.cuda_compiler, pytest.mark.slow]


def linear(x, w, dy, key):
    """The passes of one linear, forward and backward."""
    x_row, x_column = K.compute_tensor_scales(*K.partial_amax(x))
    (w_scale,) = K.compute_tensor_scales(K.weight_partial_amax(w))
    dy_row, dy_column = K.compute_tensor_scales(*K.partial_amax(dy))
    carriers = K.quantize_tiled(x, rows=K.RowwiseOperand(x_row), columns=K.ColumnwiseOperand(x_column, packed=True))
    gradients = K.quantize_tiled(dy, rows=K.RowwiseOperand(dy_row, key), columns=K.ColumnwiseOperand(dy_column, key))
    return (
        carriers[0],
        K.unpack_tiled(*carriers[1:]),
        K.quantize_weight_kernel(w, w_scale),
        K.pack_weight_kernel(w, w_scale),
        gradients,
    )


def test_passes_compile_for_blackwell():
    """For Hopper: below under `qdot`, and in the step of bench/test_placement.py, whose weights travel packed."""
    like = shapes(topology_of("gb300"))
    x, key = like(256, 512), like(2, dtype=jnp.uint32)
    text = compiled(linear, "gb300", x, like(512, 512, dtype=jnp.float32), like(256, 512), key)
    assert text.count("__gpu$xla.gpu.triton") >= 8


def test_passes_that_choose_compile():
    """For Blackwell: test_block_scaled_gemms.py and test_blackwell_codes.py."""
    compiled_choosing("h200", ("squared", "absolute", "expected"))


def three_linears(x, w, dy, seed):
    """q, k, v of one x, each on its own line, with their gradients."""
    key, nvfp4 = jax.random.key(seed), recipe("nvfp4")

    def project(x, w):
        q = ops.qdot(x, w, recipe=nvfp4, key=key)
        k = ops.qdot(x, w + 1, recipe=nvfp4, key=key)
        v = ops.qdot(x, w + 2, recipe=nvfp4, key=key)
        return q, k, v

    y, pull = jax.vjp(project, x, w)
    return y, pull((dy, dy + 1, dy + 2))


def test_an_input_of_three_linears_is_quantized_once():
    like = shapes(topology_of("h200"))
    args = like(256, 512), like(512, 512, dtype=jnp.float32), like(256, 512), like(dtype=jnp.uint32)
    with ops.compile_for(devices.device_by_name("h200")):
        text = compiled(three_linears, "h200", *args)
    names = Counter(re.findall(r'gpu.triton".*?, name = "(\w+)"', text))
    assert names["quantize_rows_columns_hadamard_packed"] == names["unpack"] == 1
    assert names["quantize_rows_stochastic_columns_stochastic_hadamard"] == 3  # dy of each
    assert names["maxima"] == 4


def one_linear(x, w, dy, seed):
    y, pull = jax.vjp(lambda x, w: ops.qdot(x, w, recipe=recipe("nvfp4"), key=jax.random.key(seed)), x, w)
    return y, pull(dy)


def test_a_width_that_no_tile_divides_is_served_by_kernels():
    like = shapes(topology_of("h200"))
    args = like(1024, 512), like(512, 1376, dtype=jnp.float32), like(1024, 1376), like(dtype=jnp.uint32)
    with ops.compile_for(devices.device_by_name("h200")):
        text = compiled(one_linear, "h200", *args)
    names = re.findall(r'op_name="[^"]*?/(\w+)/mpmd_map', text)
    assert names.count("gemm") == 3 and "__cublas" not in text
    assert {"maxima", "weight_maxima", "quantize_weight"} <= set(names)
    assert "quantize_rows_stochastic_columns_stochastic_hadamard" in names


def test_forward_operands_are_quantized_once_more_by_kernels():
    """`halfbyte` on an H200: x in two pieces, a column of its first; in the backward pass W along both axes."""
    like = shapes(topology_of("h200"))

    def program(x, w, dy, seed):
        key = jax.random.key(seed)
        y, pull = jax.vjp(lambda x, w: ops.qdot(x, w, recipe=recipe("halfbyte"), key=key), x, w)
        return y, pull(dy)

    args = like(1024, 512), like(512, 512, dtype=jnp.float32), like(1024, 512), like(dtype=jnp.uint32)
    with ops.compile_for(devices.device_by_name("h200")):
        text = compiled(program, "h200", *args)
    names = Counter(re.findall(r'gpu.triton".*?, name = "(\w+)"', text))
    assert names["maxima"] == 4  # of x, of what its operand stands for, of what it leaves over, of dy
    assert names["quantize_rows_squared"] == 2 and names["quantize_columns_hadamard_packed_squared"] == 1
    assert names["weight_maxima"] == names["quantize_weight_columns"] == 2 and names["quantize_weight_rows"] == 1
    assert re.findall(r'op_name="[^"]*?/(\w+)/mpmd_map', text).count("gemm") == 4 and "__cublas" not in text


def test_no_pass_over_a_tensor_of_quartet2_is_left_to_xla():
    """On an H200: of x a row and a column, of dy both, of W the column, and in the backward pass the row of it."""
    like = shapes(topology_of("h200"))

    def program(x, w, dy, seed):
        key = jax.random.key(seed)
        y, pull = jax.vjp(lambda x, w: ops.qdot(x, w, recipe=recipe("quartet2"), key=key), x, w)
        return y, pull(dy)

    args = like(1024, 512), like(512, 512, dtype=jnp.float32), like(1024, 512), like(dtype=jnp.uint32)
    with ops.compile_for(devices.device_by_name("h200")):
        text = compiled(program, "h200", *args)
    names = Counter(re.findall(r'gpu.triton".*?, name = "(\w+)"', text))
    assert names["maxima"] == names["quantize_rows_squared"] == names["quantize_weight_columns"] == names["unpack"] == 1
    assert text.count('custom_call_target="mosaic_gpu_v2"') == 11  # three GEMMs; maxima and operand of four in runs
    made = re.findall(r"= \w+\[([\d,]*)\]\S* (?:fusion|copy|transpose|reduce|convert)\(", text)
    assert made and all(math.prod(map(int, filter(None, m.split(",")))) <= 128 for m in made)


def test_experts_are_served_by_kernels():
    """Three grouped GEMMs, each tensor quantized in one pass with a table of scales; no loop over tiles multiplies."""
    text = compiled_experts("h200")
    kernels = Counter(re.findall(r'gpu.triton".*?, name = "(\w+)"', text))
    assert kernels["quantize_rows_columns_hadamard"] == 1 and kernels["quantize_weight"] == 1
    assert kernels["quantize_rows_stochastic_columns_stochastic_hadamard"] == 1
    assert re.findall(r'op_name="[^"]*?/(\w+)/mpmd_map', text).count("gemm") == 3
    assert not re.search(r"__cublas|gemm_fusion| dot\(", text)


def test_carriers_of_an_odd_width_compile():
    like = shapes(topology_of("h200"))
    text = compiled(hidden, "h200", *[like(256, 331)] * 3, like(2, dtype=jnp.uint32))
    assert text.count('custom_call_target="mosaic_gpu_v2"') >= 4 and "swiglu_backward" in text


def test_codes_compile():
    """For Blackwell: test_blackwell_codes.py."""
    assert compiled_codes("h200").count('custom_call_target="mosaic_gpu_v2"') == 3


@pytest.mark.parametrize("layout", ["nn", "nt", "tn"])
def test_gemm_of_any_width_compiles_for_hopper(layout):
    like = shapes(topology_of("h200"))
    m, n, k = 1376, 528, 10944
    a, b = like(*((k, m) if layout == "tn" else (m, k))), like(*((n, k) if layout == "nt" else (k, n)))
    scale = like(8, dtype=jnp.float32)
    assert "mosaic_gpu" in compiled(lambda a, b, s, t: K.matmul(a, b, s, t, layout=layout), "h200", a, b, scale, scale)


@pytest.mark.parametrize("layout", ["nn", "nt", "tn"])
def test_gemm_compiles_for_hopper(layout):
    like = shapes(topology_of("h200"))
    a, b = like(512, 512), like(512, 512)
    scale = like(8, dtype=jnp.float32)
    assert "mosaic_gpu" in compiled(lambda a, b, s, t: K.matmul(a, b, s, t, layout=layout), "h200", a, b, scale, scale)
