"""Oracle: the same loss from whole logits, in float32, differentiated by JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfbyte.distributed import make_mesh, parse_mesh
from halfbyte.ops.cross_entropy import LossSharding, cross_entropy, per_token_nll

pytestmark = pytest.mark.usefixtures("quick_code")
BATCH, SEQ, WIDTH, VOCAB = 4, 24, 32, 96


@pytest.fixture(autouse=True, scope="module")
def _float32_products():
    """On a GPU float32 GEMMs are TF32 unless asked; comparisons to the last digits need real ones."""
    with jax.default_matmul_precision("float32"):
        yield


def naive(hidden, head, targets, z_loss, cap=None):
    logits = jnp.dot(hidden, head.astype(hidden.dtype), preferred_element_type=jnp.float32)
    logits = logits if cap is None else cap * jnp.tanh(logits / cap)
    lse = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    return jnp.sum(jnp.where(targets >= 0, lse - picked + z_loss * lse**2, 0.0))


def inputs(dtype=jnp.float32):
    random = np.random.default_rng(3)
    targets = random.integers(-1, VOCAB, (BATCH, SEQ))
    targets[0, :5] = -1
    hidden, head = random.normal(size=(BATCH, SEQ, WIDTH)), 0.3 * random.normal(size=(WIDTH, VOCAB))
    return jnp.asarray(hidden, dtype), jnp.asarray(head, jnp.float32), jnp.asarray(targets, jnp.int32)


def test_no_logits_are_made_of_padding_where_chunks_can_be_even():
    """Qwen3's vocabulary leaves room for 1,664 tokens, which do not divide 4,096."""
    shapes = [jax.ShapeDtypeStruct(s, t) for s, t in (((1, 4096, 16), jnp.bfloat16), ((16, 151_936), jnp.float32))]
    traced = jax.make_jaxpr(cross_entropy)(*shapes, jax.ShapeDtypeStruct((1, 4096), jnp.int32))
    assert "f32[1024,151936]" in str(traced) and "f32[1664,151936]" not in str(traced)


def with_gradients(run):
    return jax.jit(jax.value_and_grad(run, argnums=(0, 1)))


# one chunk; three whole ones; a last one that is padded, and logits (of about 1.7) under a cap
@pytest.mark.slow(fast_cases=["40-0.01-2.0"])
@pytest.mark.parametrize("chunk, z_loss, cap", [(None, 1e-2, None), (32, 0.0, None), (40, 1e-2, 2.0)])
def test_value_and_gradients(chunk, z_loss, cap):
    hidden, head, targets = inputs()
    how = {"z_loss": z_loss, "chunk": chunk, "cap": cap}
    ours, (dh, dw) = with_gradients(lambda h, w: cross_entropy(h, w, targets, **how)[0] / 7)(hidden, head)
    exact, (eh, ew) = with_gradients(lambda h, w: naive(h, w, targets, z_loss, cap) / 7)(hidden, head)
    assert float(ours) == pytest.approx(float(exact), rel=1e-6)
    np.testing.assert_allclose(dh, eh, atol=1e-6)
    np.testing.assert_allclose(dw, ew, atol=1e-5)  # sums over 96 tokens


@pytest.mark.slow
def test_bf16_hidden_states_and_a_float32_head():
    hidden, head, targets = inputs(jnp.bfloat16)
    _, (dh, dw) = with_gradients(lambda h, w: cross_entropy(h, w, targets, chunk=32)[0])(hidden, head)
    _, (eh, ew) = with_gradients(lambda h, w: naive(h, w, targets, 0.0))(
        hidden.astype(jnp.float32), head.astype(jnp.bfloat16).astype(jnp.float32)
    )
    assert (dh.dtype, dw.dtype) == (jnp.bfloat16, jnp.float32)
    for ours, exact in ((dh, eh), (dw, ew)):  # dlogits are rounded to bf16 (2^-9 each), then averaged over the sum
        assert np.abs(np.asarray(ours, np.float32) - exact).max() <= 2**-7 * np.abs(exact).max()


@pytest.mark.slow
def test_counts_and_ignores():
    hidden, head, targets = inputs()
    run = jax.jit(lambda targets: cross_entropy(hidden, head, targets, z_loss=1e-3))
    _, aux = run(targets)
    assert float(aux["tokens"]) == np.sum(np.asarray(targets) >= 0)
    assert float(aux["nll_sum"]) == pytest.approx(float(naive(hidden, head, targets, 0.0)), rel=1e-6)
    total, aux = run(jnp.full_like(targets, -1))
    assert float(total) == 0.0 and float(aux["tokens"]) == 0.0
    dh = jax.jit(jax.grad(lambda h: cross_entropy(h, head, targets)[0]))(hidden)
    assert np.abs(np.asarray(dh)[0, :5]).max() == 0.0


def test_no_gradient_flows_through_aux():
    hidden, head, targets = inputs()
    dh = jax.jit(jax.grad(lambda h: cross_entropy(h, head, targets)[1]["nll_sum"]))(hidden)
    assert np.abs(dh).max() == 0.0


@pytest.mark.slow
def test_token_nll_adds_up():
    hidden, head, targets = inputs()
    each = np.asarray(jax.jit(lambda h: per_token_nll(h, head, targets, chunk=40))(hidden))
    assert each.shape == targets.shape and np.abs(each[np.asarray(targets) < 0]).max() == 0.0
    assert float(each.sum()) == pytest.approx(float(naive(hidden, head, targets, 0.0)), rel=1e-6)


def test_whole_logits_never_exist():
    hidden, head, targets = inputs()
    step = jax.grad(lambda h, w: cross_entropy(h, w, targets, chunk=16)[0], argnums=(0, 1))
    text = str(jax.make_jaxpr(step)(hidden, head))
    assert f"f32[16,{VOCAB}]" in text
    for shape in (f"{BATCH * SEQ},{VOCAB}", f"{BATCH},{SEQ},{VOCAB}", f"{SEQ * BATCH // 16},16,{VOCAB}"):
        assert f"[{shape}]" not in text


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp=4,tensor=2", "data=2,context=2,tensor=2"])
def test_on_a_mesh(mesh):
    mesh = make_mesh(parse_mesh(mesh), jax.devices("cpu"))
    hidden, head, targets = inputs()

    def run(h, w, mesh=None):
        return cross_entropy(h, w, targets, z_loss=1e-2, chunk=8, spread=LossSharding(mesh))[0]

    single = with_gradients(run)(hidden, head)
    spread = with_gradients(lambda *a: run(*a, mesh=mesh))(hidden, head)
    for a, b in zip(jax.tree.leaves(single), jax.tree.leaves(spread), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    each = jax.jit(lambda h, w: per_token_nll(h, w, targets, spread=LossSharding(mesh)))(hidden, head)
    assert float(each.sum()) == pytest.approx(float(naive(hidden, head, targets, 0.0)), rel=1e-6)


def test_shapes_that_do_not_fit_are_refused():
    hidden, head, targets = inputs()
    with pytest.raises(ValueError, match="do not fit"):
        cross_entropy(hidden, head.T, targets)
    over = LossSharding(make_mesh({"fsdp": 2, "tensor": 4}, jax.devices("cpu")))
    with pytest.raises(ValueError, match="vocab_size is 90, which tensor=4 does not divide"):
        cross_entropy(hidden, head[:, :90], targets, spread=over)
