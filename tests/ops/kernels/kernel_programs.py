"""Kernels compiled for a device that is not here."""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp

from halfbyte import devices, formats, ops
from halfbyte import kernels as K
from halfbyte.kernels.tensor_scale_kernel import DECODE

RULES = {  # as the oracle names them
    "plain": formats.NVFP4.scale,
    "1716": formats.NVFP4_1716.scale,
    "squared": formats.NVFP4_46_MSE.scale,
    "absolute": formats.NVFP4_46_MAE.scale,
    "expected": formats.NVFP4_46_SR.scale,
}


def again(x, w, key):
    """Forward operands by four over six, and what is made of the numbers that they stand for: of x's row the packed
    column, and one by chance; of w along k that along n.
    """
    rule, top = {"rule": RULES["squared"]}, RULES["squared"].tensor_amax_target(formats.E2M1)
    row = K.compute_tensor_scale(K.partial_amax(x, hadamard=False)[0], top=top)
    (x_row,), x_alpha = K.quantize_tiled(x, rows=K.RowwiseOperand(row, **rule)), row[DECODE][None]
    column = K.compute_tensor_scale(K.partial_amax(x_row, deferred_alpha=x_alpha)[1], top=top)
    packed = K.quantize_tiled(x_row, columns=K.ColumnwiseOperand(column, packed=True, deferred_alpha=x_alpha, **rule))
    drawn = K.quantize_tiled(
        x_row, columns=K.ColumnwiseOperand(column, key, rounding="midpoint", deferred_alpha=x_alpha, **rule)
    )
    scale = K.compute_tensor_scale(K.weight_partial_amax(w), top=top)
    w_column, w_alpha = K.quantize_weight_kernel(w, scale, axis=-2, **rule), scale[DECODE][None]
    scale = K.compute_tensor_scale(K.weight_partial_amax(w_column, deferred_alpha=w_alpha), top=top)
    w_row = K.quantize_weight_kernel(w_column, scale, axis=-1, deferred_alpha=w_alpha, **rule)
    return x_row, *packed, *drawn, w_column, w_row


def quartet2(x, w, key, signs):
    """Quartet II's operands: x's row, packed the column of what that stands for, both of x as a gradient; w's column,
    and the row of what that stands for.
    """
    forward, backward = formats.NVFP4_QUARTET.scale, formats.NVFP4_EDEN.scale
    how = {"rule": forward, "rounding": "away"}

    def runs(a, axis, source=None, **more):
        of = {"axis": axis, "forward": None if source is None else K.ms_eden.ForwardOperand(source, **how)}
        scale = K.compute_tensor_scale(K.ms_eden.eden_partial_amax(a, signs, **of), top=K.amax_target(backward))
        return K.ms_eden.eden_quantize(a, signs, K.ms_eden.EdenQuantization(scale, key, backward), **of, **more)

    row, column = K.compute_tensor_scales(
        K.partial_amax(x, hadamard=False)[0], K.weight_partial_amax(w), top=K.amax_target(forward)
    )
    x_made = (
        *K.quantize_tiled(x, rows=K.RowwiseOperand(row, **how)),
        *runs(x, -2, row, packed=True),
        *runs(x, -1),
        *runs(x, -2),
    )
    return *x_made, K.quantize_weight_kernel(w, column, axis=-2, **how), *runs(w, -1, column)


# The assembler reads every instruction and optimizes none, which is half of its time; whole steps are compiled as they
# are in bench/.
QUICK = {"xla_gpu_disable_gpuasm_optimizations": True}


def compiled(fn, device, *args):
    """The text of fn's program for a device that is not here."""
    with devices.pallas_lowering_device(devices.device_by_name(device)):
        return jax.jit(fn, compiler_options=QUICK).lower(*args).compile().as_text()


def shapes(topology):
    place = jax.sharding.SingleDeviceSharding(topology.devices[0])

    def like(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    return like


def topology_of(name):
    return devices.topology(devices.device_by_name(name), hosts=1, per_host=1)


def hidden(g, u, d, key):
    """SwiGLU's passes, forward and backward."""
    h_row, h_column = K.compute_tensor_scales(*K.swiglu_forward_amax(g, u))
    scales = K.compute_tensor_scales(*K.swiglu_backward_amax(g, u, d))
    dg = K.RowwiseOperand(scales[0], key), K.ColumnwiseOperand(scales[1], key)
    du = K.RowwiseOperand(scales[2], key), K.ColumnwiseOperand(scales[3], key)
    forward = K.swiglu_quantize_forward(g, u, rows=K.RowwiseOperand(h_row))
    return forward, K.swiglu_quantize_backward(g, u, d, dg=dg, du=du, h=K.ColumnwiseOperand(h_column))


def codes(x, g, u, d, scale, key):
    """Every pass that writes what a block-scaled GEMM reads."""
    order = K.ScaleLayout.TILED
    row, column = (
        K.RowwiseOperand(scale, key, code_scale_layout=order),
        K.ColumnwiseOperand(scale, key, code_scale_layout=order),
    )
    forward = K.swiglu_quantize_forward(
        g,
        u,
        rows=K.RowwiseOperand(scale, code_scale_layout=order),
        columns=K.ColumnwiseOperand(scale, code_scale_layout=order),
    )
    backward = K.swiglu_quantize_backward(g, u, d, dg=(row, column), du=(row, column), h=column)
    return K.quantize_tiled(x, rows=row, columns=column), forward, backward


def choosing(measures, x, w, g, u, d, scale, key):
    """Every pass under a rule with two candidates, by each of these measures; codes by the squared error."""
    made = []
    for name in measures:
        rule, drawn = {"rule": RULES[name]}, {"rule": RULES[name], "rounding": "midpoint"}
        row, column = K.RowwiseOperand(scale, key, **drawn), K.ColumnwiseOperand(scale, key, **drawn)
        made += [
            K.quantize_tiled(x, rows=K.RowwiseOperand(scale, **rule)),
            K.quantize_tiled(
                x, rows=K.RowwiseOperand(scale, **rule), columns=K.ColumnwiseOperand(scale, packed=True, **rule)
            ),
            K.quantize_tiled(x, rows=row, columns=column),
            K.swiglu_quantize_forward(g, u, rows=K.RowwiseOperand(scale, **rule)),
            K.swiglu_quantize_backward(
                g, u, d, dg=(row, column), du=(row, column), h=K.ColumnwiseOperand(scale, **rule)
            ),
            *(K.quantize_weight_kernel(w, scale, axis=axis, **rule) for axis in (-1, -2)),
        ]
    codes = {"rule": RULES["squared"], "code_scale_layout": K.ScaleLayout.TILED}
    return made, K.quantize_tiled(x, rows=K.RowwiseOperand(scale, **codes), columns=K.ColumnwiseOperand(scale, **codes))


def compiled_choosing(name, measures):
    """Each measure is compiled for Hopper and for one Blackwell, each Blackwell with one measure or two."""
    like = shapes(topology_of(name))
    x, scale, key = like(256, 512), like(8, dtype=jnp.float32), like(2, dtype=jnp.uint32)
    given = x, like(256, 512, dtype=jnp.float32), x, x, x, scale, key
    text = compiled(functools.partial(choosing, measures), name, *given)
    assert text.count("__gpu$xla.gpu.triton") == 6 * len(measures)
    assert text.count('custom_call_target="mosaic_gpu_v2"') == len(measures) + 1  # SwiGLU's backward pass, and codes


def experts(x, w, dy, counts, seed):
    """A grouped linear, forward and backward."""
    key = jax.random.key(seed)
    y, pull = jax.vjp(lambda x, w: ops.grouped_qdot(x, w, counts, recipe="nvfp4", key=key), x, w)
    return y, pull(dy)


def compiled_experts(name):
    like = shapes(topology_of(name))
    args = like(1024, 256), like(4, 256, 384, dtype=jnp.float32), like(1024, 384)
    with ops.compile_for(devices.device_by_name(name)):
        return compiled(experts, name, *args, like(4, dtype=jnp.int32), like(dtype=jnp.uint32))


def blackwell_experts(name, target, folder, monkeypatch):
    """Three launches of our GEMM with block scales, each tensor quantized to codes in one pass after that for its
    maxima, nothing else that multiplies; and in the assembler's own words."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(folder))
    text = compiled_experts(name)
    made = Counter(re.findall(r'gpu.triton".*?, name = "(\w+)"', text))
    assert made == {"maxima": 2, "weight_maxima": 1, "pack_weight": 1}
    launched = re.findall(r'custom-call\(.*op_name="[^"]*?/(\w+)/mpmd_map', text)
    passes = (
        "quantize_rows_codes_columns_hadamard_codes",
        "quantize_rows_stochastic_codes_columns_stochastic_hadamard_codes",
    )
    assert Counter(launched) == {"gemm": 3, **dict.fromkeys(passes, 1)}
    assert not re.search(r"__cublas|__cudnn|gemm_fusion| dot\(", text)
    written = [file.read_text() for file in folder.glob("gemm*.ptx")]
    assert written and all(f".target {target}" in ptx for ptx in written)
    assert all("tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::4X" in ptx for ptx in written)


def compiled_codes(name):
    like = shapes(topology_of(name))
    g, scale, key = like(256, 1376), like(8, dtype=jnp.float32), like(2, dtype=jnp.uint32)
    return compiled(codes, name, like(256, 512), g, g, g, scale, key)
