"""Bad input: the error says which operand, which number, and what to do. Nothing is compiled."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import halfbyte as hb

NVFP4 = hb.recipe("nvfp4")


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def forward(x, w, **options):
    return jax.eval_shape(lambda x, w: hb.qdot(x, w, **{"recipe": NVFP4, "key": jax.random.key(0)} | options), x, w)


def train(x, w, **options):
    def loss(x, w):
        return hb.qdot(x, w, **{"recipe": NVFP4, "key": jax.random.key(0)} | options).astype(jnp.float32).sum()

    return jax.eval_shape(jax.grad(loss, (0, 1)), x, w)


@pytest.mark.parametrize(
    "recipe, inputs, outputs, message",
    [
        ("nvfp4", 24, 32, "fprop sums over 24 inputs, and fprop_x .* needs a multiple of 16; pad the inputs"),
        ("nvfp4", 32, 24, "nvfp4 needs a multiple of 16 along its blocked axis, got 24 .*; pad that axis"),
        ("mxfp8", 48, 32, "fprop sums over 48 inputs, and fprop_x .* needs a multiple of 32; pad the inputs"),
        ("mxfp4", 32, 48, "mxfp4 needs a multiple of 32 along its blocked axis, got 48 .*; pad that axis"),
    ],
)
def test_a_width_that_the_format_cannot_block(recipe, inputs, outputs, message):
    with pytest.raises(ValueError, match=f"{message}.* in the layer policy"):
        forward(array(64, inputs), array(inputs, outputs, dtype=jnp.float32), recipe=hb.recipe(recipe))


@pytest.mark.slow
@pytest.mark.parametrize("recipe, tokens, block", [("nvfp4", 40, 16), ("mxfp8", 48, 32)])
def test_tokens_that_wgrad_cannot_block(recipe, tokens, block):
    """The forward pass alone does not care."""
    x, w, chosen = array(tokens, 64), array(64, 32, dtype=jnp.float32), hb.recipe(recipe)
    assert forward(x, w, recipe=chosen).shape == (tokens, 32)
    with pytest.raises(ValueError, match=f"recipe {recipe}: wgrad sums over {tokens} tokens.*multiple of {block}.*pad"):
        train(x, w, recipe=chosen)


def test_a_hadamard_transform_on_one_operand_only():
    one_sided = dataclasses.replace(NVFP4.wgrad_dy, hadamard=False)
    with pytest.raises(ValueError, match="wgrad_x.hadamard=True and wgrad_dy.hadamard=False; set both or neither"):
        dataclasses.replace(NVFP4, wgrad_dy=one_sided)


def test_stochastic_rounding_without_a_key():
    x, w = array(64, 64), array(64, 32, dtype=jnp.float32)
    assert forward(x, w, key=None).shape == (64, 32)  # fprop rounds to nearest
    with pytest.raises(ValueError, match="needs a key; pass key="):
        train(x, w, key=None)


def test_dtypes_and_shapes_that_do_not_fit():
    w = array(64, 32, dtype=jnp.float32)
    with pytest.raises(TypeError, match="bfloat16 or float32, got x of float16"):
        forward(array(64, 64, dtype=jnp.float16), w)
    with pytest.raises(ValueError, match=r"got x \(64, 48\) and w \(64, 32\)"):
        forward(array(64, 48), w)
    with pytest.raises(ValueError, match=r"got x \(64, 64\) and w \(2, 64, 32\)"):
        forward(array(64, 64), array(2, 64, 32, dtype=jnp.float32))


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int32, jnp.bool, jnp.complex64])
@pytest.mark.parametrize("recipe", ["nvfp4", "bf16"])
@pytest.mark.parametrize("asked, name, run", [
    ("qdot", "w", lambda x, w, how: hb.qdot(x, w, recipe=how)),
    ("grouped_qdot", "w", lambda x, w, how: hb.grouped_qdot(x, w[None], [64], recipe=how)),
    ("mlp", "up", lambda x, w, how: hb.mlp(x, jnp.ones(w.shape), w, w.T, recipe=how)),
    ("quantize_weight", "w", lambda x, w, how: hb.quantize_weight(w, recipe=how)),
])  # fmt: skip
def test_weights_that_are_not_in_floating_point(asked, name, run, recipe, dtype):
    message = f"{asked} takes weights in floating point.*got {name} of {jnp.dtype(dtype)}; convert with astype"
    with pytest.raises(TypeError, match=message):
        jax.eval_shape(lambda x, w: run(x, w, recipe), array(64, 64), array(64, 32, dtype=dtype))


def test_a_weight_quantized_under_another_recipe():
    def run(x, w):
        return hb.qdot(x, hb.quantize_weight(w, recipe=NVFP4), recipe=hb.recipe("mxfp8"))

    with pytest.raises(ValueError, match="under recipe nvfp4, qdot was asked for mxfp8; quantize the weight again"):
        jax.eval_shape(run, array(64, 64), array(64, 32, dtype=jnp.float32))


def mlp(x=(2, 32, 64), gate=(64, 96), up=(64, 96), down=(96, 64), dtype=jnp.bfloat16, **options):
    weights = (array(*shape, dtype=jnp.float32) for shape in (gate, up, down))
    options = {"recipe": NVFP4, "key": jax.random.key(0)} | options
    return jax.eval_shape(lambda *a: hb.mlp(*a, **options), array(*x, dtype=dtype), *weights)


def test_the_mlp_names_what_does_not_fit():
    assert mlp().shape == (2, 32, 64)
    with pytest.raises(ValueError, match="residuals must be one of operands, input, got 'lean'"):
        mlp(residuals="lean")
    with pytest.raises(ValueError, match="one each for gate, up, down; got gate, up"):
        mlp(recipe={"gate": NVFP4, "up": NVFP4})
    with pytest.raises(TypeError, match="bfloat16 or float32, got x of float16"):
        mlp(dtype=jnp.float16)
    with pytest.raises(ValueError, match=r"gate \(64, 96\), up \(64, 80\)"):
        mlp(up=(64, 80))
    with pytest.raises(ValueError, match=r"x \(2, 32, 48\)"):
        mlp(x=(2, 32, 48))
    with pytest.raises(ValueError, match=r"down \(96, 48\)"):
        mlp(down=(96, 48))


def test_the_mlp_takes_only_weights_of_its_recipe():
    def run(x, gate, up, down):
        gate = hb.quantize_weight(gate, recipe=hb.recipe("mxfp8"))
        return hb.mlp(x, gate, up, down, recipe=NVFP4, key=jax.random.key(0))

    shapes = [array(*s, dtype=jnp.float32) for s in ((64, 96), (64, 96), (96, 64))]
    with pytest.raises(ValueError, match="gate.*made under recipe mxfp8.*nvfp4"):
        jax.eval_shape(run, array(32, 64), *shapes)
