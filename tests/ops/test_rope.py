"""Oracles: rotation by complex multiplication in float64, and the frequency tables of `transformers`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfbyte.ops.rope import RopeScaling, apply_rope, rope_cos_sin, rope_frequencies


@pytest.mark.slow
def test_turns_pairs_by_the_angle_of_their_position():
    frequencies = rope_frequencies(8, theta=100.0)
    positions = jnp.asarray([[0, 1, 5, 1000]], jnp.int32)
    x = jax.random.normal(jax.random.key(0), (1, 4, 3, 8))
    ours = np.asarray(apply_rope(x, rope_cos_sin(positions, frequencies)))
    pairs = np.asarray(x[..., :4], np.float64) + 1j * np.asarray(x[..., 4:], np.float64)
    turned = pairs * np.exp(1j * np.asarray(positions)[..., None, None] * 100.0 ** (-np.arange(4) / 4))
    exact = np.concatenate([turned.real, turned.imag], -1)
    np.testing.assert_allclose(ours, exact, atol=2e-4)  # 1000 radians in float32: 6e-5 of angle


@pytest.mark.slow
def test_scores_depend_on_the_distance_alone():
    frequencies = rope_frequencies(16, theta=10_000.0)
    q, k = jax.random.normal(jax.random.key(1), (2, 1, 1, 1, 16))

    def score(i, j):
        at = [apply_rope(x, rope_cos_sin(jnp.full((1, 1), p, jnp.int32), frequencies)) for x, p in ((q, i), (k, j))]
        return float(jnp.vdot(*at))

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("scaling", [None, RopeScaling(8.0), RopeScaling(32.0, 1.0, 4.0, 8192)])
def test_frequencies_equal_those_of_transformers(scaling):
    pytest.importorskip("torch", reason="needs the extra `interop`")
    transformers = pytest.importorskip("transformers", reason="needs the extra `interop`")
    rope = {"rope_type": "default", "rope_theta": 500_000.0}
    if scaling is not None:
        rope |= {"rope_type": "llama3", "factor": scaling.factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope |= {"original_max_position_embeddings": 8192}
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=2, head_dim=128, max_position_embeddings=131072, rope_parameters=rope
    )
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).inv_freq.numpy()
    np.testing.assert_allclose(rope_frequencies(128, theta=500_000.0, scaling=scaling), theirs, rtol=1e-6)


@pytest.mark.slow
def test_dtype_is_kept():
    tables = rope_cos_sin(jnp.zeros((1, 2), jnp.int32), rope_frequencies(8, theta=1e4))
    assert apply_rope(jnp.ones((1, 2, 1, 8), jnp.bfloat16), tables).dtype == jnp.bfloat16


@pytest.mark.parametrize("fields", [{"factor": 0.5}, {"factor": 8.0, "low_freq_factor": 4.0}])
def test_impossible_scaling_is_refused(fields):
    with pytest.raises(ValueError, match="rope_scaling"):
        RopeScaling(**fields)
