"""Two programs for few and for many rows. Oracle: the one for all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfbyte.ops.moe_dispatch import apply_with_capacity

ALL, SOME = 12, 5


def run(rows, weights, rest):
    """A row for each, whose gradient reads rows, weights and what is made of both; zero from `rest` on."""
    made = jnp.sin(rows @ weights[0]) * rows
    return jnp.where(jnp.arange(rows.shape[0])[:, None] < rest, made, 0)


@pytest.mark.slow(fast_cases=["6"])
@pytest.mark.parametrize("count", [0, 4, SOME, SOME + 1, ALL])
def test_which_program_runs_changes_no_result_and_no_gradient(count):
    random = np.random.default_rng(0)
    rows, w, dy = (jnp.asarray(random.normal(size=shape), jnp.float32) for shape in ((ALL, 3), (3, 3), (ALL, 3)))

    @jax.jit
    def both(rows, w, dy, count):
        made = []
        for through in (run, lambda rows, weights, rest: apply_with_capacity(run, SOME, rows, weights, rest, count)):
            y, pull = jax.vjp(lambda rows, w: through(rows, (w,), count), rows, w)  # noqa: B023
            made.append((y, *pull(dy)))
        return made

    theirs, ours = both(rows, w, dy, jnp.int32(count))
    for name, a, b in zip(("y", "drows", "dw"), theirs, ours, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6, err_msg=name)
    assert not count or np.abs(ours[0]).max() > 0


def test_few_rows_are_not_computed_in_room_for_all():
    """With rows behind them that would spoil everything: they are never read."""
    rows = jnp.full((ALL, 3), jnp.nan).at[:SOME].set(1.0)
    y = apply_with_capacity(
        lambda rows, weights, rest: rows * weights[0], SOME, rows, (jnp.float32(2),), None, jnp.int32(SOME)
    )
    np.testing.assert_array_equal(y, np.where(np.arange(ALL)[:, None] < SOME, 2.0, 0.0) * np.ones((1, 3)))
