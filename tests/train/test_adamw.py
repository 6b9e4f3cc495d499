"""Oracle: AdamW written out in NumPy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfbyte.train import OptimizerConfig, adamw, apply_updates, clip_by_norm, global_norm


def reference(params, grads, config, rate, mask):
    m = {name: np.zeros_like(value) for name, value in params.items()}
    v = {name: np.zeros_like(value) for name, value in params.items()}
    for count, step_grads in enumerate(grads, start=1):
        for name, g in step_grads.items():
            m[name] = config.b1 * m[name] + (1 - config.b1) * g
            v[name] = config.b2 * v[name] + (1 - config.b2) * g**2
            update = m[name] / (1 - config.b1**count) / (np.sqrt(v[name] / (1 - config.b2**count)) + config.eps)
            params[name] = params[name] - rate * (update + config.weight_decay * mask[name] * params[name])
    return params


def test_five_steps_with_a_decay_mask():
    rng = np.random.default_rng(0)
    config, mask = OptimizerConfig(weight_decay=0.3), {"w": True, "norm": False}
    start = {"w": rng.normal(size=(5, 4)), "norm": rng.normal(size=4)}
    grads = [{name: rng.normal(size=value.shape) for name, value in start.items()} for _ in range(5)]
    tx = adamw(config, mask)
    params = {name: jnp.asarray(value, jnp.float32) for name, value in start.items()}
    state = tx.init(params)

    @jax.jit
    def step(params, state, g):
        updates, state = tx.update(g, state, params)
        return apply_updates(params, updates, jnp.float32(0.01)), state

    for g in grads:
        params, state = step(params, state, {name: jnp.asarray(value, jnp.float32) for name, value in g.items()})
    expected = reference(dict(start), grads, config, 0.01, mask)
    for name in start:  # five float32 updates of size 0.01: a few ulps of 1
        np.testing.assert_allclose(np.asarray(params[name]), expected[name], atol=2e-6)


@pytest.mark.slow
def test_state_dtypes():
    params = {"w": jnp.ones((3, 2), jnp.float32)}
    adam = adamw(OptimizerConfig(mu_dtype="bfloat16", nu_dtype="bfloat16"), {"w": True})
    _, state = adam.update(params, adam.init(params), params)
    assert state[0].mu["w"].dtype == jnp.bfloat16
    assert state[0].nu["w"].dtype == jnp.bfloat16
    wide = adamw(OptimizerConfig(), {"w": True}).init(params)
    assert wide[0].mu["w"].dtype == jnp.float32
    assert wide[0].nu["w"].dtype == jnp.float32


def test_clip():
    grads = {"a": jnp.full((4,), 3.0), "b": jnp.full((4, 4), 2.0)}
    norm = global_norm(grads)
    assert float(norm) == pytest.approx(10.0)
    assert float(global_norm(clip_by_norm(grads, norm, 1.0))) == pytest.approx(1.0, rel=1e-6)
    untouched = clip_by_norm(grads, norm, 20.0)
    assert np.array_equal(untouched["a"], grads["a"])
    assert clip_by_norm(grads, norm, 0.0) is grads


@pytest.mark.parametrize(
    ("field", "value"),
    [("learning_rate", 0.0), ("b2", 1.0), ("schedule", "linear"), ("mu_dtype", "float16"), ("final", 2.0)],
)
def test_bad_values_name_the_field(field, value):
    with pytest.raises(ValueError, match=f"optimizer.{field} must be"):
        OptimizerConfig(**{field: value})
