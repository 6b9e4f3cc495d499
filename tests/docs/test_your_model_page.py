"""The examples of docs/your-model.md run as they are printed. Oracle: the sites that each of them has."""

import contextlib
import io
import re
from pathlib import Path

import jax
import pytest

from halfbyte.recipes import policy, recipe

pytestmark = pytest.mark.usefixtures("quick_code")
PAGE = (Path(__file__).parents[2] / "docs" / "your-model.md").read_text(encoding="utf-8")
SAYS = {
    "Plain JAX": "block_1/up layers 1..1  [16, 32] x [32, 64]  -> nvfp4",
    "Linen": "up: [16, 32] x [32, 64] in nvfp4\ndown: [16, 64] x [64, 32] in nvfp4",
    "NNX": "2 dots replaced, 0 left",
    "Equinox": "3 dots replaced, 0 left",
    "haliax and Levanter": "1 dots replaced, 0 left",
    "Haiku": "2 dots replaced, 0 left",
    "Under FSDP": "2 dots replaced, 0 left",
    "Random bits": "(32, 32)",
}


def block(heading):
    return re.search(r"```python\n(.*?)```", PAGE.partition(f"## {heading}\n")[2], re.S)[1]


@pytest.mark.slow
def test_examples_print_their_sites():
    printed = {}
    for heading in SAYS:
        if "haliax" in heading and not hasattr(jax.core, "is_constant_dim"):
            continue  # haliax 1.4.dev453 needs it, and JAX 0.11 has removed it
        output = io.StringIO()
        defaults = jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")
        with contextlib.redirect_stdout(output), defaults[0], defaults[1]:
            exec(compile(block(heading), heading, "exec"), {"__name__": "example"})
        printed[heading] = output.getvalue()
    assert len(printed) >= len(SAYS) - 1
    assert {heading: text for heading, text in printed.items() if SAYS[heading] not in text} == {}


def test_recipe_of_ten_lines_is_one(tmp_path):
    lines = block("A recipe of your own")
    assert len(lines.splitlines()) <= 10
    (tmp_path / "mine.py").write_text(lines)
    half = recipe(f"{tmp_path}/mine.py:half")
    assert half.fprop_w.format.quantized and not half.wgrad_dy.format.quantized
    made = policy(f"{tmp_path}/mine.py:last_layers", half)
    assert made.resolve(["layers/mlp/up"], 4).recipe_at("layers/mlp/up", 3) == half
