"""Norms of a loop's layers by kernels, which read x where it lies in a stack. Oracle: the layers without a loop, whose
norms keep x themselves, every bit.
"""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfbyte import models
from halfbyte.kernels import rms_norm as norm
from halfbyte.kernels.mosaic_launch import StackSlice
from halfbyte.models import LlamaConfig, llama
from halfbyte.models.model_context import LayerContext
from halfbyte.ops.rms_norm_vjp import rms_norm
from halfbyte.recipes import policy, recipe

CFG = LlamaConfig("wide", vocab_size=64, embed=1024, mlp=128, layers=2, heads=2, kv_heads=1, head_dim=128, max_seq=64)
TOKENS = (1, 32)
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


# What a norm's result is made into in passes that norm; the rest compiles sooner in bf16.
LIGHT = dataclasses.replace(recipe("bf16"), name="light", fprop_x=recipe("nvfp4").fprop_x)


def compiled(fn):
    return jax.jit(fn, compiler_options=QUICKLY)


def traced(fn):
    return functools.partial(jax.eval_shape, fn)


def step(chosen, run=compiled, **how):
    """Loss and gradients, and of each call of the norm's backward kernel whether it read x in a stack."""
    resolved = policy("mlp", chosen).resolve(models.linear_sites(CFG), CFG.layers)
    ctx = models.ModelContext(policy=resolved, key=jax.random.key(3), attention="xla", **how)
    params = jax.jit(lambda key: models.init(CFG, key))(jax.random.key(0))
    rows = np.random.default_rng(0).integers(0, CFG.vocab_size, (2, *TOKENS))
    batch = {name: jnp.asarray(each, jnp.int32) for name, each in zip(("tokens", "targets"), rows, strict=True)}
    found = jax.value_and_grad(lambda p: models.loss(CFG, p, batch, ctx)[0])
    with mock.patch.object(norm, "rms_norm_backward", wraps=norm.rms_norm_backward) as backward:
        made = run(found)(params)
    return made, [isinstance(call.args[0], StackSlice) for call in backward.call_args_list]


@pytest.mark.slow
@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("chosen", [recipe("bf16"), LIGHT], ids=lambda chosen: chosen.name)
def test_loop_has_the_bits_of_layers_without_one(chosen):
    """Quantized, the norm before the MLP is part of the passes that do it, in the loop as well."""
    looped, in_stack = step(chosen, stacked=True)
    unrolled, alone = step(chosen, unroll=CFG.layers)
    assert in_stack == [True, True] and alone and not any(alone)
    for a, b in zip(jax.tree.leaves(looped), jax.tree.leaves(unrolled), strict=True):
        np.testing.assert_array_equal(a, b)


def forked():
    """x as it goes on and its norm for q, k and v, in a block of layers without a loop."""
    x, scale = jnp.ones((*TOKENS, CFG.embed), jnp.bfloat16), jnp.linspace(0.5, 2, CFG.embed)
    here = LayerContext(models.ModelContext(unroll=CFG.layers), models.param_specs(CFG), {}, {})
    return x, scale, *llama.norm_fanout(CFG, x, {"norm": scale}, here, ("attention", llama.QKV))


@pytest.mark.usefixtures("h200")
def test_kernels_have_one_result_for_each_reader():
    assert len(forked()[-1]) == len(llama.QKV)


@pytest.mark.slow
def test_without_kernels_it_is_the_norm_itself():
    x, scale, through, h = forked()
    assert through is x and len(h) == 1
    np.testing.assert_array_equal(h[0], rms_norm(x, scale, CFG.norm_eps))


@pytest.mark.slow
@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("how", [{}, {"stacked": True, "remat": "quantized"}], ids=["no stacks", "remat"])
def test_where_a_loop_has_no_stacks_of_its_own_norms_are_xlas(how):
    assert step(recipe("bf16"), traced, **how)[1] == []
