"""RMSNorm in the passes that quantize its result, interpreted: the bits of the separate kernels; and compiled."""

import re
from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest
from kernel_programs import RULES, compiled, shapes, topology_of

from halfbyte import kernels as K
from halfbyte.formats import E2M1
from halfbyte.kernels import norm, normed

EPS = 1e-5
KEYS = jnp.asarray(np.array([[0x12345678, 0x9ABCDEF0], [7, 11]], np.uint32))


def data(shape, kind="normal"):
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape) * np.exp2(rng.integers(-12, 12, shape) if kind == "wide" else 0)
    x[3] *= {"zero row": 0.0, "nan": np.nan, "overflow": 1e30}.get(kind, 1.0)
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(1 + 0.1 * rng.normal(size=shape[1]), jnp.float32)


def sides(tops, keys, packed, rule):
    """What training asks for in the forward pass (packed), and both by chance."""
    top = RULES[rule].top(E2M1)
    row, column = (K.tensor_scale(each, top=top) for each in tops)
    how = {"rule": RULES[rule], "rounding": "midpoint"}
    keys = (None, None) if packed else keys
    return {"rows": K.Rowwise(row, keys[0], **how), "columns": K.Columnwise(column, keys[1], packed=packed, **how)}


def separate(x, scale, keys, packed=True, rule="plain"):
    h, inverse = norm.forward(x, scale, eps=EPS)
    asked = sides(K.maxima(h), keys, packed, rule)
    return inverse, *(side.scale for side in asked.values()), *K.quantize(h, **asked)


def in_one(x, scale, keys, packed=True, rule="plain"):
    inverse, *tops = normed.statistics(x, scale, eps=EPS)
    asked = sides(tops, keys, packed, rule)
    return inverse, *(side.scale for side in asked.values()), *normed.quantize(x, inverse, scale, **asked)


def same(got, want):
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


@pytest.mark.slow
@pytest.mark.usefixtures("quick_code")
@pytest.mark.parametrize("shape", [(64, 2048), (32, 4096), (32, 5120), (32, 8192)], ids=str)
def test_the_bits_are_those_of_separate_passes(shape):
    x, scale = data(shape)
    with K.interpreted():
        same(in_one(x, scale, KEYS), separate(x, scale, KEYS))


@pytest.mark.slow
@pytest.mark.usefixtures("quick_code")
@pytest.mark.parametrize("kind", ["wide", "zero row", "nan", "overflow"])
@pytest.mark.parametrize("packed, rule", [(True, "plain"), (False, "plain"), (True, "squared")])
def test_whatever_is_read_and_asked_for(kind, packed, rule):
    x, scale = data((32, 1024), kind)
    with K.interpreted():
        same(in_one(x, scale, KEYS, packed, rule), separate(x, scale, KEYS, packed, rule))


@pytest.mark.slow
@pytest.mark.usefixtures("quick_code")
def test_one_operand_alone():
    x, scale = data((32, 1024))
    with K.interpreted():
        inverse, top, _ = normed.statistics(x, scale, eps=EPS)
        h = norm.forward(x, scale, eps=EPS)[0]
        row = K.Rowwise(K.tensor_scale(top))
        same(normed.quantize(x, inverse, scale, rows=row), K.quantize(h, rows=row))


def test_codes_are_refused():
    x, scale = data((32, 1024))
    row = K.Rowwise(jnp.ones(8), codes=K.ScaleOrder.PLAIN)
    with pytest.raises(ValueError, match="carriers"):
        normed.quantize(x, jnp.ones(32), scale, rows=row)


@pytest.mark.slow
@pytest.mark.cuda_compiler
def test_it_compiles():
    check_program("h200")


def check_program(name):
    """Compiles the quantize passes with the norm in them for the device `name`."""
    like = shapes(topology_of(name))
    key = like(2, 2, dtype=jnp.uint32)
    text = compiled(in_one, name, like(256, 4096), like(4096, dtype=jnp.float32), key)
    kernels = Counter(re.findall(r'gpu.triton".*?, name = "(\w+)"', text))
    assert kernels["norm_quantize_rows_columns_hadamard_packed"] == 1 and kernels["maxima"] == 0
    assert "rms_norm_maxima" in text and text.count('custom_call_target="mosaic_gpu') == 1
