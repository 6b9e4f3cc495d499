"""What the backward pass keeps, in bytes a token, counted from the leaves of the VJP itself. Nothing is compiled.

Bytes that do not grow with the tokens (weights and their codes, scales of a tensor, keys) cancel in the difference of
two sizes. docs/recipe.md prints the table that is computed here, and this test reads it there.
"""

import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import halfbyte as hb

RECIPE_PAGE = pathlib.Path(__file__).parents[2] / "docs" / "recipe.md"
WIDTH, HIDDEN = 4096, 14336  # Llama 3 8B
KEY = jax.random.key(0)


def kept_bytes(fn, tokens, *weights, dtype=jnp.bfloat16):
    """Bytes of the residuals of fn(x [1, tokens, WIDTH], *weights)."""
    arguments = [jax.ShapeDtypeStruct((1, tokens, WIDTH), dtype)]
    arguments += [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in weights]
    pullback = jax.eval_shape(lambda *a: jax.vjp(fn, *a)[1], *arguments)
    leaves = [leaf for leaf in jax.tree.leaves(pullback) if not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def bytes_per_token(fn, *weights):
    few, many = (kept_bytes(fn, tokens, *weights) for tokens in (1024, 2048))
    return (many - few) / 1024


def linear(name):
    fn = functools.partial(hb.qdot, recipe=hb.recipe(name), key=KEY)
    return bytes_per_token(fn, (WIDTH, HIDDEN))


def mlp(name, mode):
    fn = functools.partial(hb.mlp, recipe=hb.recipe(name), key=KEY, residuals=mode)
    return bytes_per_token(fn, (WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))


@pytest.mark.slow
def test_a_lone_linear_keeps_its_input_packed():
    assert linear("bf16") == 2 * WIDTH
    assert linear("nvfp4") == 4.5 / 8 * WIDTH
    assert linear("nvfp4") / linear("bf16") <= 0.29
    assert linear("mxfp8") == 8.25 / 8 * WIDTH
    assert linear("fp8") == WIDTH


def test_weights_are_kept_as_codes():
    """What does not grow with the tokens: 4 bits and a share of a tile's scale for each weight, and the scalars.

    `fused`, which auto takes on one GPU, keeps the tensor's scales and makes the carrier again: see test_fused.
    """
    fn = functools.partial(hb.qdot, recipe=hb.recipe("nvfp4"), key=KEY, backend="emulated")
    fixed = kept_bytes(fn, 1024, (WIDTH, HIDDEN)) - 1024 * linear("nvfp4")
    assert WIDTH * HIDDEN * (4 + 8 / 256) / 8 <= fixed <= WIDTH * HIDDEN * (4 + 8 / 256) / 8 + 64


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["operands", "input"])
def test_the_mlp_keeps_what_its_page_says(mode):
    expected = {
        ("bf16", "operands"): 2 * (WIDTH + 2 * HIDDEN),  # x, g, u
        ("nvfp4", "operands"): 4.5 / 8 * WIDTH + 2 * 2 * HIDDEN,  # x for wgrad, packed; g, u
        ("bf16", "input"): 2 * WIDTH,  # x
        ("nvfp4", "input"): 2 * WIDTH,
    }
    for name in ("bf16", "nvfp4"):
        assert mlp(name, mode) == expected[name, mode]


@pytest.mark.slow
def test_the_table_of_the_recipe_page():
    """Each row of the table: recipe, residuals, bytes per token, ratio to bf16 `operands`."""
    rows = re.findall(
        r"^\| (bf16|nvfp4) \| `(operands|input)` \|[^|]*\| ([\d,]+) \| ([\d.]+) \|$", RECIPE_PAGE.read_text(), re.M
    )
    assert len(rows) == 4, f"{RECIPE_PAGE.name} lost its table of residuals"
    for name, mode, size, ratio in rows:
        assert float(size.replace(",", "")) == mlp(name, mode)
        np.testing.assert_allclose(float(ratio), mlp(name, mode) / mlp("bf16", "operands"), atol=5e-4)
