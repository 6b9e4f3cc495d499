"""dot_general. Oracle: `lax.dot_general` for shapes, `qdot` written by hand for numbers, and the set of all keys for
random bits.

Where only keys or shapes matter, `qdot` is replaced by a plain matmul that shows its key: compiling the real one
takes seconds.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import halfbyte.ops.adapters.dot_general
from halfbyte.ops import dot_general, qdot
from halfbyte.recipes import recipe, site_key, step_key

pytestmark = pytest.mark.usefixtures("quick_code")
NVFP4, NO_SR, BF16 = recipe("nvfp4"), recipe("nvfp4_no_sr"), recipe("bf16")
KEY = step_key(0, 3)
LAST_FIRST = (((1,), (0,)), ((), ()))


@pytest.fixture
def shown_keys(monkeypatch):
    """qdot(x, w, key) -> zeros plus a number made from the key's words, so that results show which key was used."""

    def fake(x, w, *, recipe, key=None, out_dtype=None, **_):
        words = jax.random.key_data(key)
        return jnp.zeros((*x.shape[:-1], w.shape[-1]), jnp.float32) + (words[0] ^ words[1]).astype(jnp.float32)

    monkeypatch.setattr(halfbyte.ops.adapters.dot_general, "qdot", fake)


@pytest.fixture
def plain_qdot(monkeypatch):
    """qdot as a plain matmul in the asked dtype."""

    def fake(x, w, *, recipe, out_dtype=None, **_):
        y = lax.dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return y.astype(out_dtype or x.dtype)

    monkeypatch.setattr(halfbyte.ops.adapters.dot_general, "qdot", fake)


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@pytest.mark.slow
def test_the_same_bits_as_qdot_by_hand():
    x, w = normal(0, 2, 16, 32), normal(1, 32, 16)
    dot = dot_general(NVFP4, key=KEY, site="up")

    def ours(x, w):
        return jnp.sum(jnp.sin(dot(x, w, (((2,), (0,)), ((), ())))))

    def by_hand(x, w):
        return jnp.sum(jnp.sin(qdot(x, w, recipe=NVFP4, key=site_key(KEY, "up"))))

    both = jax.jit(
        lambda x, w: [jax.value_and_grad(f, argnums=(0, 1))(x, w) for f in (ours, by_hand)],
        compiler_options={
            "xla_backend_optimization_level": 0
        },  # compiling is most of the time, and no number depends on it
    )
    jax.tree.map(np.testing.assert_array_equal, *both(x, w))


# [batch, seq, embed] x [embed, heads, head_dim], [.., heads, head_dim] x [heads, head_dim, embed], and dims that lie
# elsewhere.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("lhs", "rhs", "dims"),
    [
        ((3, 5, 8), (8, 2, 4), ((2,), (0,))),
        ((3, 5, 2, 4), (2, 4, 8), ((2, 3), (0, 1))),
        ((3, 5, 2, 4), (4, 2, 8), ((2, 3), (1, 0))),
        ((8, 5), (6, 8), ((0,), (1,))),
        ((8,), (8, 4), ((0,), (0,))),
        ((3, 8), (8,), ((1,), (0,))),
    ],
)
def test_every_contraction_without_batch_dims_has_the_shape_and_order_of_lax(plain_qdot, lhs, rhs, dims):
    a, b = normal(0, *lhs), normal(1, *rhs)
    numbers = (dims, ((), ()))
    np.testing.assert_allclose(dot_general(BF16)(a, b, numbers), lax.dot_general(a, b, numbers), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("lhs", [jnp.bfloat16, jnp.float32, jnp.float16])
@pytest.mark.parametrize("preferred", [None, jnp.float32, jnp.bfloat16])
def test_the_result_has_the_preferred_type(lhs, preferred):
    x, w = normal(0, 16, 16, dtype=lhs), normal(1, 16, 16, dtype=lhs)
    shape = jax.eval_shape(lambda x, w: dot_general(BF16)(x, w, LAST_FIRST, preferred_element_type=preferred), x, w)
    assert shape.dtype == (preferred or lhs)


def test_a_preferred_float32_is_not_rounded_to_bfloat16_on_the_way():
    x, w = normal(0, 16, 16, dtype=jnp.bfloat16), normal(1, 16, 16, dtype=jnp.bfloat16)
    y = jax.jit(lambda x, w: dot_general(BF16)(x, w, LAST_FIRST, preferred_element_type=jnp.float32))(x, w)
    np.testing.assert_allclose(y, np.asarray(x, np.float64) @ np.asarray(w, np.float64), rtol=1e-5, atol=1e-5)


def test_batch_dims_are_an_error_unless_declared_and_the_record_says_what_ran():
    q, k = normal(0, 2, 4, 8), normal(1, 2, 4, 8)
    scores = (((2,), (2,)), ((0,), (0,)))
    with pytest.raises(ValueError, match=r"at scores: .*it has batch dims.*say other='plain'"):
        dot_general(NO_SR, site="scores")(q, k, scores)
    dot = dot_general(NO_SR, site="scores", other="plain")
    np.testing.assert_array_equal(dot(q, k, scores), lax.dot_general(q, k, scores))
    (call,) = dot.calls
    assert str(call) == "scores: [2, 4, 8] x [2, 4, 8] plain: it has batch dims, so no operand is a single weight"


def test_bad_arguments():
    with pytest.raises(ValueError, match="rounds stochastically and needs key="):
        dot_general(NVFP4)
    with pytest.raises(ValueError, match="other must be one of error, plain, got 'maybe'"):
        dot_general(NO_SR, other="maybe")
    with pytest.raises(TypeError, match="recipe must be a Recipe or a recipe's name, got 4"):
        dot_general(4)
    with pytest.raises(ValueError, match="weight must be one of right, left, got 'up'"):
        dot_general("nvfp4_no_sr", weight="up")
    x, w = normal(0, 16, 16), normal(1, 16, 16)
    with pytest.raises(ValueError, match="with a plain key every call needs a site"):
        dot_general(NVFP4, key=KEY)(x, w, LAST_FIRST)
    with pytest.raises(ValueError, match="names a Linen rng stream, but no Linen layer is being called"):
        dot_general(NVFP4, key="quantize")(x, w, LAST_FIRST)


class Block(nn.Module):
    dot: object

    @nn.compact
    def __call__(self, x, _=None):
        first = nn.Dense(4, dot_general=self.dot, use_bias=False)(x)
        second = nn.Dense(4, dot_general=self.dot, use_bias=False)(x)
        return x, jnp.stack([first[0, 0], second[0, 0]])


X = jnp.ones((2, 4))


def linen_keys(model, dot, key=KEY):
    params = jax.eval_shape(model.init, {"params": KEY, "quantize": KEY}, X)
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), params)
    return np.asarray(model.apply(params, X, rngs={"quantize": key})[1]).ravel().tolist()


@pytest.mark.slow
@pytest.mark.parametrize("key", ["quantize", KEY], ids=["stream", "plain key"])
def test_linen_layers_have_their_paths_for_sites(shown_keys, key):
    dot = dot_general(NVFP4, key=key)
    keys = linen_keys(Block(dot), dot)
    assert len(set(keys)) == 2
    assert {call.site for call in dot.calls} == {"Dense_0", "Dense_1"}
    if not isinstance(key, str):
        words = [jax.random.key_data(site_key(KEY, site)) for site in ("Dense_0", "Dense_1")]
        assert keys == [float(np.float32(int(w[0] ^ w[1]))) for w in words]


@pytest.mark.slow
def test_a_linen_stream_gives_other_bits_at_another_step(shown_keys):
    dot = dot_general(NVFP4, key="quantize")
    model = Block(dot)
    assert not set(linen_keys(model, dot, step_key(0, 1))) & set(linen_keys(model, dot, step_key(0, 2)))
    assert linen_keys(model, dot, step_key(0, 1)) == linen_keys(model, dot, step_key(0, 1))


def test_a_function_is_read_at_each_call(shown_keys):
    class Own(nn.Module):
        @nn.compact
        def __call__(self, x):
            dot = dot_general(NVFP4, key=lambda: self.make_rng("quantize"))
            layer = nn.Dense(4, dot_general=dot, use_bias=False)
            return x, jnp.stack([layer(x)[0, 0], layer(x)[0, 0]])  # one layer, called twice

    assert len(set(linen_keys(Own(), None))) == 2


def scanned(dot):
    layers = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True, "quantize": True}, length=3)
    return layers(dot)


@pytest.mark.slow
def test_scanned_linen_layers_have_different_bits(shown_keys):
    dot = dot_general(NVFP4, key="quantize")
    assert len(set(linen_keys(scanned(dot), dot))) == 6


def test_a_plain_key_inside_a_scan_is_refused(shown_keys):
    dot = dot_general(NVFP4, key=KEY)
    with pytest.raises(ValueError, match=r"the same in every iteration of the scan .* pass key='NAME'"):
        linen_keys(scanned(dot), dot)


@pytest.mark.parametrize("key", ["quantize", KEY], ids=["stream", "plain key"])
def test_rematerialised_linen_layers_have_different_bits(shown_keys, key):
    dot = dot_general(NVFP4, key=key)
    assert len(set(linen_keys(nn.remat(Block)(dot), dot))) == 2


@pytest.mark.slow
def test_linen_attention_projections(plain_qdot):
    dot = dot_general(NO_SR)
    attention = nn.MultiHeadDotProductAttention(num_heads=2, qkv_dot_general=dot, out_dot_general=dot)
    x = normal(0, 2, 4, 8)
    params = attention.init(jax.random.key(0), x)
    plain = nn.MultiHeadDotProductAttention(num_heads=2).apply(params, x)
    np.testing.assert_allclose(attention.apply(params, x), plain, rtol=1e-5, atol=1e-5)
    assert {call.site for call in dot.calls} == {"query", "key", "value", "out"}


class TwoLayers(nnx.Module):
    def __init__(self, dot, rngs):
        self.a = nnx.Linear(4, 4, dot_general=dot, use_bias=False, rngs=rngs)
        self.b = nnx.Linear(4, 4, dot_general=dot, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return jnp.stack([self.a(x)[0, 0], self.b(x)[0, 0]])


def test_an_nnx_stream_is_state_of_the_model_and_counts_inside_jit(shown_keys):
    rngs = nnx.Rngs(params=0, quantize=1)
    model = TwoLayers(dot_general(NVFP4, key=rngs.quantize), rngs)
    step = nnx.jit(lambda model, x: model(x))
    keys = np.concatenate([step(model, X), step(model, X), step(model, X)]).tolist()
    assert len(set(keys)) == 6
    assert model.a.dot_general.key.count[...] == 6


def test_a_named_site_keeps_the_record_and_changes_the_bits(shown_keys):
    dot = dot_general(NVFP4, key=KEY)
    up, down = dot.at("up"), dot.at("down")
    assert up(X, jnp.ones((4, 4)), LAST_FIRST)[0, 0] != down(X, jnp.ones((4, 4)), LAST_FIRST)[0, 0]
    assert [str(call) for call in dot.calls] == ["up: [2, 4] x [4, 4] in nvfp4", "down: [2, 4] x [4, 4] in nvfp4"]


def test_it_is_a_pytree_of_its_key():
    dot = dot_general(NVFP4, key=KEY, site="up")
    leaves, tree = jax.tree.flatten(dot)
    assert leaves == [KEY] and jax.tree.unflatten(tree, leaves).site == "up"
    assert jax.tree.leaves(dot_general(NVFP4, key=lambda: KEY)) == []
