"""Oracle: the corner points of each schedule, by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from halfbyte.train import OptimizerConfig, learning_rate_schedule


def rates(steps=100, **options):
    schedule = learning_rate_schedule(OptimizerConfig(learning_rate=1.0, **options), steps)
    return np.array([float(schedule(jnp.int32(step))) for step in range(steps)])


def test_constant_rate_without_warmup_and_of_one_step():
    assert np.all(rates(schedule="constant", warmup=0) == 1.0)
    assert rates(steps=1, warmup=0.02)[0] == pytest.approx(1.0)


def test_cosine():
    r = rates(schedule="cosine", warmup=10, final=0.1)
    assert r[0] == pytest.approx(0.1)
    assert r[8] == pytest.approx(0.9) and r[9] == pytest.approx(1.0)
    assert r[10] == pytest.approx(1.0)
    assert r[-1] == pytest.approx(0.1)
    assert np.all(np.diff(r[10:]) < 0)
    assert r[10 + 89 // 2] == pytest.approx(0.55, abs=0.01)


def test_wsd():
    r = rates(schedule="wsd", warmup=0.1, decay=0.2, final=0.0)
    assert r[0] == pytest.approx(0.1)
    assert np.all(r[9:80] == 1.0)
    assert r[-1] == pytest.approx(0.0, abs=1e-7)
    assert np.all(np.diff(r[82:]) < 0)
    assert np.all(r >= 0)


def test_warmup_longer_than_the_run():
    assert np.all(np.diff(rates(steps=10, warmup=10)) > 0)  # a run may be warm-up only
    with pytest.raises(ValueError, match=r"optimizer\.warmup of 200 steps"):
        learning_rate_schedule(OptimizerConfig(warmup=200), 100)
