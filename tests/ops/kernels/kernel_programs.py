"""Kernels compiled for a device that is not here."""

import functools

import jax
import jax.numpy as jnp

from halfbyte import devices, formats
from halfbyte import kernels as K
from halfbyte.kernels.scale import DECODE

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
    rule, top = {"rule": RULES["squared"]}, RULES["squared"].top(formats.E2M1)
    row = K.tensor_scale(K.maxima(x, hadamard=False)[0], top=top)
    (x_row,), x_owed = K.quantize(x, rows=K.Rowwise(row, **rule)), row[DECODE][None]
    column = K.tensor_scale(K.maxima(x_row, owed=x_owed)[1], top=top)
    packed = K.quantize(x_row, columns=K.Columnwise(column, packed=True, owed=x_owed, **rule))
    drawn = K.quantize(x_row, columns=K.Columnwise(column, key, rounding="midpoint", owed=x_owed, **rule))
    scale = K.tensor_scale(K.weight_maxima(w), top=top)
    w_column, w_owed = K.quantize_weight(w, scale, axis=-2, **rule), scale[DECODE][None]
    scale = K.tensor_scale(K.weight_maxima(w_column, owed=w_owed), top=top)
    return x_row, *packed, *drawn, w_column, K.quantize_weight(w_column, scale, axis=-1, owed=w_owed, **rule)


def compiled(fn, device, *args):
    """The text of fn's program for a device that is not here."""
    with devices.lowering_for(devices.device(device)):
        return jax.jit(fn).lower(*args).compile().as_text()


def shapes(topology):
    place = jax.sharding.SingleDeviceSharding(topology.devices[0])

    def like(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    return like


def topology_of(name):
    return devices.topology(devices.device(name), hosts=1, per_host=1)


def codes(x, g, u, d, scale, key):
    """Every pass that writes what a block-scaled GEMM reads."""
    order = K.ScaleOrder.TILED
    row, column = K.Rowwise(scale, key, codes=order), K.Columnwise(scale, key, codes=order)
    forward = K.quantize_forward(g, u, rows=K.Rowwise(scale, codes=order), columns=K.Columnwise(scale, codes=order))
    backward = K.quantize_backward(g, u, d, dg=(row, column), du=(row, column), h=column)
    return K.quantize(x, rows=row, columns=column), forward, backward


def choosing(measures, x, w, g, u, d, scale, key):
    """Every pass under a rule with two candidates, by each of these measures; codes by the squared error."""
    made = []
    for name in measures:
        rule, drawn = {"rule": RULES[name]}, {"rule": RULES[name], "rounding": "midpoint"}
        row, column = K.Rowwise(scale, key, **drawn), K.Columnwise(scale, key, **drawn)
        made += [
            K.quantize(x, rows=K.Rowwise(scale, **rule)),
            K.quantize(x, rows=K.Rowwise(scale, **rule), columns=K.Columnwise(scale, packed=True, **rule)),
            K.quantize(x, rows=row, columns=column),
            K.quantize_forward(g, u, rows=K.Rowwise(scale, **rule)),
            K.quantize_backward(g, u, d, dg=(row, column), du=(row, column), h=K.Columnwise(scale, **rule)),
            *(K.quantize_weight(w, scale, axis=axis, **rule) for axis in (-1, -2)),
        ]
    codes = {"rule": RULES["squared"], "codes": K.ScaleOrder.TILED}
    return made, K.quantize(x, rows=K.Rowwise(scale, **codes), columns=K.Columnwise(scale, **codes))


def compiled_choosing(name, measures):
    like = shapes(topology_of(name))
    x, scale, key = like(256, 512), like(8, dtype=jnp.float32), like(2, dtype=jnp.uint32)
    return compiled(
        functools.partial(choosing, measures), name, x, like(256, 512, dtype=jnp.float32), x, x, x, scale, key
    )


def compiled_codes(name):
    like = shapes(topology_of(name))
    g, scale, key = like(256, 1376), like(8, dtype=jnp.float32), like(2, dtype=jnp.uint32)
    return compiled(codes, name, like(256, 512), g, g, g, scale, key)
