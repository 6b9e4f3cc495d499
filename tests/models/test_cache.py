"""Oracle: the whole sequence through `apply`, without a cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfbyte import models

FLOAT = models.ModelContext(compute_dtype=jnp.float32)


@pytest.mark.slow(fast_cases=["ctx1-0.05"])
@pytest.mark.parametrize(
    "ctx, atol", [(FLOAT, 2e-5), (models.ModelContext(), 0.05)]
)  # bf16: logits of size 1 to 4, a few roundings
def test_decoding_equals_the_whole_sequence(tiny, tiny_params, packed_batch, ctx, atol):
    tokens = packed_batch["tokens"][:, :12]
    lengths = jnp.asarray([6, 3, 6, 1], jnp.int32)
    whole = np.asarray(jax.jit(lambda p: models.apply(tiny, p, {"tokens": tokens}, ctx))(tiny_params))
    rows = np.arange(4)

    read = jax.jit(lambda p, t, n: models.prefill(tiny, p, t, n, ctx, size=16))
    decode = jax.jit(lambda p, c, t: models.decode_step(tiny, p, c, t, ctx))
    logits, cache = read(tiny_params, tokens[:, :6], lengths)
    np.testing.assert_allclose(logits, whole[rows, np.asarray(lengths) - 1], atol=atol)
    for step in range(5):
        at = np.asarray(lengths) + step
        logits, cache = decode(tiny_params, cache, jnp.asarray(np.asarray(tokens)[rows, at]))
        np.testing.assert_allclose(logits, whole[rows, at], atol=atol)
    assert np.array_equal(cache.lengths, lengths + 5)


@pytest.mark.slow
def test_shapes_and_dtypes(tiny, tiny_params):
    _, cache = jax.eval_shape(
        lambda p, t: models.prefill(tiny, p, t, size=8), tiny_params, jnp.zeros((2, 6), jnp.int32)
    )
    assert cache.k.shape == cache.v.shape == (2, 2, 8, 2, 16) and cache.lengths.shape == (2,)
    logits, after = jax.eval_shape(
        lambda p, c, t: models.decode_step(tiny, p, c, t), tiny_params, cache, jnp.zeros(2, jnp.int32)
    )
    assert logits.shape == (2, 96) and logits.dtype == jnp.float32
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), cache)


def test_cache_smaller_than_the_prompt_is_refused(tiny, tiny_params):
    with pytest.raises(ValueError, match="size 4 cannot hold a prompt of 6"):
        models.prefill(tiny, tiny_params, jnp.zeros((1, 6), jnp.int32), size=4)
