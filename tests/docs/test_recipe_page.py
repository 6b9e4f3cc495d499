"""The examples of docs/recipe.md run as they are printed. Oracle: what the page says they print, and plain JAX for
their losses.
"""

import contextlib
import io
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfbyte.recipes import base_recipe, maxtext_aliases, recipe_names

pytestmark = pytest.mark.usefixtures("quick_code")
PAGE = (Path(__file__).parents[2] / "docs" / "recipe.md").read_text()


def example(heading):
    """The namespace and the output of the first Python block below a heading."""
    section = PAGE.partition(f"# {heading}\n")[2]
    code = re.search(r"```python\n(.*?)```", section, re.S).group(1)
    names, output = {"__name__": "example"}, io.StringIO()
    promotion = jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")  # a reader's defaults
    with contextlib.redirect_stdout(output), promotion[0], promotion[1]:
        exec(compile(code, heading, "exec"), names)
    return names, output.getvalue()


def close(value, plain):
    # 4-bit operands: the loss of a small random network moves by a few percent.
    np.testing.assert_allclose(value, plain, rtol=0.1)


def test_recipes_are_values():
    names, output = example("Recipes are values")
    assert output.splitlines() == [
        "nvfp4 1d stochastic hadamard",
        "dgrad_dy rounding stochastic rne",
        "wgrad_dy rounding stochastic rne",
    ]
    assert names["mixed"].fprop_w.format.name == "mxfp8" and names["mixed"].dgrad_w == names["nvfp4"].dgrad_w


def test_which_linears():
    _, output = example("Which linears: the policy")
    assert output.startswith("layers 0..1: bf16 (attention/q mlp/up), mxfp8 (mlp/down); layers 2..27: ")


@pytest.mark.slow
def test_flax_linen():
    names, output = example("Flax Linen")
    assert output == "up: [16, 32] x [32, 64] in nvfp4\ndown: [16, 64] x [64, 32] in nvfp4\n"
    plain = names["Mlp"](jax.lax.dot_general).apply(names["params"], names["x"])
    close(names["value"], jnp.mean((plain - names["x"]) ** 2))


@pytest.mark.slow
def test_equinox():
    names, output = example("Equinox, and any other function")
    printed = PAGE.partition("This one says:")[2].partition("```text\n")[2].partition("```")[0]
    assert output == printed
    close(names["value"], names["loss"](names["model"], names["x"]))


@pytest.mark.slow
def test_scan():
    names, _ = example("A scan over layers, with rules by layer")
    assert [(site.path, site.layers) for site in names["report"].replaced] == [
        ("layers/up", range(3)),
        ("layers/down", range(3)),
    ]
    close(names["value"], names["loss"](names["params"], names["x"]))


def test_recipes_are_in_the_table_with_their_base():
    rows = re.findall(r"^\| `(\w+)` \| (\w*) ?\| ", PAGE, re.M)
    assert sorted(rows) == sorted((name, base.name if (base := base_recipe(name)) else "") for name in recipe_names())
    assert all(f"`{alias}`" in PAGE for alias in maxtext_aliases())
