"""First use of a public name inside `jax.jit`, in a process of its own. Oracle: a counter in the traced function."""

import subprocess
import sys

import pytest

PROGRAM = """
import halfbyte as hb
import jax, jax.numpy as jnp
from halfbyte.recipes import step_key
traced = []
@jax.jit
def step(w, x):
    traced.append(1)
    {line}
for _ in range(2):
    jax.block_until_ready(step(jnp.ones((16, 16)), jnp.ones((16, 16))))
print("traced", len(traced))
"""


@pytest.mark.slow(fast_cases=["apply_recipe"])
@pytest.mark.parametrize(
    "line",
    [
        "return hb.apply_recipe(lambda w, x: x @ w, 'nvfp4', key=step_key(0, 0), show=None)(w, x)",
        "return hb.qdot(x, w, recipe='nvfp4', key=step_key(0, 0))",
    ],
    ids=["apply_recipe", "qdot"],
)
def test_first_use_inside_jit_traces_once(line):
    """An import that adds to JAX's trace context makes JAX trace and compile the program again at its next call."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(line=line)], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["traced 1"], done.stderr[-2000:]
