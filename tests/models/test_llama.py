"""Oracles: the model itself, run another way (a document alone, one device, no remat, one segment); statistics."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfbyte import models, ops
from halfbyte.devices import device_by_name
from halfbyte.distributed import make_mesh, parse_mesh
from halfbyte.recipes import Policy, Rule, policy, recipe, step_key

FLOAT = models.ModelContext(compute_dtype=jnp.float32)


def with_gradients(cfg, ctx):
    return jax.jit(jax.value_and_grad(lambda params, batch: models.loss(cfg, params, batch, ctx)[0]))


def worst(ours, exact):
    """The largest difference of any leaf, relative to that leaf's largest element."""
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(exact), strict=True)
    pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs]
    return max(np.abs(a - b).max() / np.abs(b).max() for a, b in pairs)


def distance(ours, exact):
    """The norm of the difference of two trees, relative to the second's."""
    pairs = list(zip(jax.tree.leaves(ours), jax.tree.leaves(exact), strict=True))
    return np.sqrt(sum(np.sum(np.square(a - b)) for a, b in pairs) / sum(np.sum(np.square(b)) for _, b in pairs))


@pytest.fixture(scope="module")
def exact(tiny, tiny_params, packed_batch):
    """Loss and gradients on one device in float32."""
    return with_gradients(tiny, FLOAT)(tiny_params, packed_batch)


@pytest.mark.slow(fast_cases=["True"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_initial_loss(qk_norm):
    """ln(vocab) + half the variance of the logits: what targets that the model knows nothing of cost on average."""
    # tied is the harder case: the head has seen the input
    cfg = models.preset("demo").replace(tied=True, layers=2, qk_norm=qk_norm)
    random = np.random.default_rng(1)
    tokens, targets = (jnp.asarray(random.integers(0, cfg.vocab_size, (8, 64)), jnp.int32) for _ in range(2))

    @jax.jit
    def run(key):
        params, batch = models.init(cfg, key), {"tokens": tokens, "targets": targets}
        return models.loss(cfg, params, batch)[0], jnp.var(models.apply(cfg, params, batch), axis=-1).mean()

    loss, variance = run(jax.random.key(2))
    assert float(variance) == pytest.approx(1.0, rel=0.1)
    assert float(loss) == pytest.approx(np.log(cfg.vocab_size) + float(variance) / 2, rel=0.02)


def test_loss_is_the_mean_nll_of_scored_tokens(tiny, tiny_params, packed_batch):
    @jax.jit
    def run(params, batch):
        logits = jax.nn.log_softmax(models.apply(tiny, params, batch, FLOAT))
        return (
            logits,
            models.token_nll(tiny, params, batch, FLOAT),
            models.loss(tiny, params, batch, FLOAT, z_loss=1e-2),
        )

    logp, each, (total, aux) = run(tiny_params, packed_batch)
    targets = np.asarray(packed_batch["targets"])
    nll = -np.take_along_axis(np.asarray(logp), np.maximum(targets, 0)[..., None], -1)[..., 0] * (targets >= 0)
    np.testing.assert_allclose(each, nll, atol=1e-5)
    assert float(aux["tokens"]) == (targets >= 0).sum()
    assert float(aux["nll"]) == pytest.approx(nll.sum() / (targets >= 0).sum(), rel=1e-6)
    assert float(total) == pytest.approx(float(aux["nll"] + aux["z_loss"]), rel=1e-6) and float(aux["z_loss"]) > 0


def stepping(cfg, made, **how):
    """A function (params, batch, step) -> loss and gradients with the MLPs in recipe `made`."""
    resolved = policy("mlp", made).resolve(models.linear_sites(cfg), cfg.layers)

    @jax.jit
    def run(params, batch, step):
        ctx = models.ModelContext(policy=resolved, key=step_key(0, step), **how)
        return jax.value_and_grad(lambda p: models.loss(cfg, p, batch, ctx)[0])(params)

    return run


@pytest.mark.slow
def test_unrolled_layers_equal_the_loop(tiny, tiny_params, packed_batch):
    """Of each layer its weights and its random bits: dy is rounded by chance, the rest compiles sooner in bf16."""
    made = dataclasses.replace(recipe("bf16"), name="dy", dgrad_dy=recipe("nvfp4").dgrad_dy)
    looping = stepping(tiny, made)
    loop, other = (looping(tiny_params, packed_batch, step) for step in (0, 1))
    flat = stepping(tiny, made, unroll=tiny.layers)(tiny_params, packed_batch, 0)
    assert float(flat[0]) == pytest.approx(float(loop[0]), rel=1e-4)
    assert distance(flat[1], loop[1]) < 0.02 < distance(other[1], loop[1]) / 2


@pytest.mark.parametrize("backend, name", [("fp8", "fp8"), ("fused", "nvfp4")])
def test_backend_that_serves_only_some_linears_may_be_named(backend, name):
    """Policy `mlp` leaves attention's linears in bf16, which neither backend knows."""
    cfg = models.LlamaConfig(
        name="divisible", vocab_size=256, embed=128, mlp=256, layers=2, heads=2, kv_heads=2, head_dim=64, max_seq=128
    )
    chosen = policy("mlp", recipe(name)).resolve(models.linear_sites(cfg), cfg.layers)
    ctx = models.ModelContext(policy=chosen, key=step_key(0, 0), backend=backend, attention="xla")
    params = jax.eval_shape(functools.partial(models.init, cfg), jax.random.key(0))
    batch = dict.fromkeys(("tokens", "targets"), jax.ShapeDtypeStruct((2, 128), jnp.int32))
    with ops.compile_for(device_by_name("h200")):
        found = jax.eval_shape(jax.grad(lambda p, b: models.loss(cfg, p, b, ctx)[0]), params, batch)
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, params)


def test_packed_document_has_the_logits_of_one_alone(tiny, tiny_params, packed_batch):
    run = jax.jit(functools.partial(models.apply, tiny, ctx=FLOAT))
    together = run(tiny_params, packed_batch)
    tokens = np.zeros((4, 32), np.int32)
    tokens[0, :15] = np.asarray(packed_batch["tokens"])[0, 13:28]
    positions = np.tile(np.arange(32, dtype=np.int32), (4, 1))
    batch = {"tokens": tokens, "targets": tokens, "positions": positions, "segments": np.ones((4, 32), np.int32)}
    alone = run(tiny_params, batch)
    np.testing.assert_allclose(np.asarray(together)[0, 13:28], np.asarray(alone)[0, :15], atol=2e-5)


@pytest.mark.slow
def test_bf16_is_near_float32(exact, rounded):
    (loss, grads), (exact_loss, exact_grads) = rounded, exact
    assert float(loss) == pytest.approx(float(exact_loss), rel=2e-3)
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    assert distance(grads, exact_grads) < 0.03  # some twenty roundings of 2^-9 between a weight and the loss


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=2,fsdp=2,tensor=2", "fsdp=2,tensor=2,context=2"])
def test_meshes_agree_with_one_device(tiny, tiny_params, packed_batch, exact, mesh):
    mesh = make_mesh(parse_mesh(mesh), jax.devices("cpu"))
    params = jax.device_put(tiny_params, models.param_shardings(tiny, mesh))
    ctx = models.ModelContext(mesh=mesh, compute_dtype=jnp.float32)
    loss, grads = with_gradients(tiny, ctx)(params, packed_batch)
    assert float(loss) == pytest.approx(float(exact[0]), rel=1e-6)
    assert worst(grads, exact[1]) < 1e-5  # float32 sums in another order
    placed = jax.tree.map(
        lambda g, s: g.sharding.is_equivalent_to(s, g.ndim), grads, models.param_shardings(tiny, mesh)
    )
    assert jax.tree.all(placed), placed


@pytest.fixture(scope="module")
def rounded(tiny, tiny_params, packed_batch):
    """Loss and gradients in bf16."""
    return with_gradients(tiny, models.ModelContext())(tiny_params, packed_batch)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["dots", "full", "quantized"])
def test_remat_changes_nothing_but_memory(tiny, tiny_params, packed_batch, rounded, remat):
    again = with_gradients(tiny, models.ModelContext(remat=remat))(tiny_params, packed_batch)
    assert float(again[0]) == float(rounded[0])
    assert (
        distance(again[1], rounded[1]) < 0.01
    )  # XLA may skip a rounding to bf16 where it fuses what it computes again


@pytest.fixture(scope="module")
def quantized(tiny):
    """A function (params, batch, step) -> loss and gradients under NVFP4."""
    return stepping(tiny, recipe("nvfp4"))


@pytest.fixture(scope="module")
def quantized_once(tiny_params, packed_batch, quantized):
    """Loss and gradients of step 0."""
    return quantized(tiny_params, packed_batch, 0)


@pytest.mark.slow
def test_nvfp4_is_near_float32_and_its_bits_depend_on_step(tiny_params, packed_batch, exact, quantized, quantized_once):
    loss, grads = quantized_once
    assert float(loss) == pytest.approx(float(exact[0]), rel=0.05) and float(loss) != float(exact[0])
    again, other = (quantized(tiny_params, packed_batch, step) for step in (0, 1))
    assert worst(again, (loss, grads)) == 0.0
    assert float(other[0]) == float(loss)  # the forward pass rounds to nearest
    assert distance(other[1], grads) > 0.1


@pytest.mark.slow
def test_segments_do_not_change_the_model(tiny, tiny_params, packed_batch, exact):
    """Two rules with the same numerics under two names make two scans; the result is that of one."""
    other = recipe("bf16").__class__(**{**recipe("bf16").operands(), "name": "bf16 too"})
    split = Policy("split", (Rule("layers/mlp/*", other, layers=(1, 2)),)).resolve(
        models.linear_sites(tiny), tiny.layers
    )
    assert [(s.start, s.stop) for s in split.segments] == [(0, 1), (1, 2)]
    ctx = models.ModelContext(policy=split, compute_dtype=jnp.float32)
    loss, grads = with_gradients(tiny, ctx)(tiny_params, packed_batch)
    assert float(loss) == pytest.approx(float(exact[0]), rel=1e-6)
    assert worst(grads, exact[1]) < 1e-5


def test_unsupported_context_is_refused(tiny, tiny_params, packed_batch):
    sites = models.linear_sites(tiny)
    other, everything = policy("mlp", recipe("nvfp4")), Policy("everything", (Rule("*", recipe("nvfp4")),))
    with pytest.raises(ValueError, match="resolved for 5 layers, but tiny has 2"):
        models.loss(tiny, tiny_params, packed_batch, models.ModelContext(policy=other.resolve(sites, 5)))
    with pytest.raises(ValueError, match="head would be quantized"):
        models.ModelContext(policy=everything.resolve(sites, tiny.layers))
    with pytest.raises(ValueError, match="remat must be one of none, dots, full, quantized"):
        models.ModelContext(remat="some")


@pytest.mark.slow
def test_remat_orders_memory(tiny, packed_batch):
    """Of what the backward pass keeps beyond parameters and batch."""
    params, kept = models.abstract_params(tiny), {}
    for remat in ("none", "dots", "full"):
        ctx = models.ModelContext(remat=remat)
        run = lambda p, ctx=ctx: jax.vjp(lambda p: models.loss(tiny, p, packed_batch, ctx)[0], p)[1]  # noqa: E731
        kept[remat] = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(run, params)))
    assert kept["full"] < kept["dots"] < kept["none"]
