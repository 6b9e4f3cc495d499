"""Kernels compiled for a device that is not here."""

import jax
import jax.numpy as jnp

from halfbyte import devices
from halfbyte import kernels as K


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


def compiled_codes(name):
    like = shapes(topology_of(name))
    g, scale, key = like(256, 1376), like(8, dtype=jnp.float32), like(2, dtype=jnp.uint32)
    return compiled(codes, name, like(256, 512), g, g, g, scale, key)
