"""Models with experts. Oracles: published sizes, a router in NumPy's float64, refusals by name."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfbyte import models
from halfbyte.checkpoint import CheckpointManager
from halfbyte.devices import lookup
from halfbyte.distributed import make_mesh
from halfbyte.models import llama, model_context, moe
from halfbyte.ops import moe_dispatch
from halfbyte.ops.moe_dispatch import route, update_router_bias
from halfbyte.recipes import policy, recipe
from halfbyte.train import preflight, run_presets
from halfbyte.train.manifest_entries import manifest_table
from halfbyte.train.precision_manifest import build_precision_manifest
from halfbyte.train.train_state import TrainState, abstract_state, create_state
from halfbyte.train.train_step import make_train_step

TINY = models.preset("moe-demo").replace(name="tiny", layers=2, embed=64, mlp=32, vocab_size=128, heads=2, kv_heads=1)
NOT_NORMALISED = {"norm_topk": False, "joint_qk_norm": True}  # as OLMoE
DEEPSEEK = {"router": "sigmoid", "shared_experts": 2}  # what of DeepSeek-V3's layer is not Qwen3-MoE's
PUBLISHED = {  # all, and those that a token passes: as Hugging Face counts the releases, as their authors say
    "olmoe-1b-7b": (6_919_161_856, 1.3e9),
    "qwen3-30b-a3b": (30_532_122_624, 3.3e9),
    "mixtral-8x7b": (46_702_792_704, 12.9e9),
    "qwen3-235b-a22b": (235_093_634_560, 22.2e9),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name):
    cfg, (every, active) = models.preset(name), PUBLISHED[name]
    assert models.count_params(cfg) == every
    assert models.count_active_params(cfg) == pytest.approx(active, rel=0.02)
    shares = models.flops_by_component(cfg, 4096)  # 6 FLOPs a weight that a token passes
    assert shares["mlp"] == 6.0 * cfg.layers * 3 * cfg.embed * cfg.mlp * cfg.experts_per_token
    assert shares["router"] == 6.0 * cfg.layers * cfg.embed * cfg.experts


@pytest.mark.parametrize("name", ["experts", "mlp", "all_linear"])
def test_policies_quantize_experts_and_never_the_router(name):
    resolved = policy(name, "nvfp4").resolve(models.linear_sites(TINY), TINY.layers)
    quantized = {path for path, made in resolved.segments[0].recipes.items() if made.quantized}
    assert {path for path in quantized if "mlp" in path} == {f"layers/mlp/expert_{n}" for n in ("gate", "up", "down")}
    assert any("attention" in path for path in quantized) == (name == "all_linear")
    with pytest.raises(ValueError, match="experts"):
        policy("experts", "nvfp4").resolve(models.linear_sites(models.preset("demo")), 4)


@pytest.mark.parametrize("name", ["experts", "mlp", "all_linear"])
def test_shared_experts_are_linears_of_the_mlp(name):
    """A policy of experts leaves them in bf16; parameters, FLOPs and the manifest know them."""
    cfg, shared = TINY.replace(**DEEPSEEK), {f"layers/mlp/shared_{n}" for n in ("gate", "up", "down")}
    found = policy(name, "nvfp4").resolve(models.linear_sites(cfg), cfg.layers)
    quantized = {path for path, made in found.segments[0].recipes.items() if made.quantized}
    assert quantized & shared == (shared if name != "experts" else set())
    width = cfg.layers * 3 * cfg.embed * 2 * cfg.mlp
    more = models.count_params(cfg) - models.count_params(TINY)
    assert more == width + cfg.layers * cfg.experts  # and a bias for each expert
    assert models.flops_by_component(cfg, 32)["mlp"] - models.flops_by_component(TINY, 32)["mlp"] == 6.0 * width
    device = lookup(jax.devices("cpu")[0])
    made = build_precision_manifest(
        dataclasses.replace(config(), model=cfg, policy=name, mesh="data=1"),
        found,
        recipe("nvfp4"),
        seq=32,
        device=device,
    )
    sites = {site.path: site for site in made.sites if site.path in shared}
    assert set(sites) == shared and all(site.backend != "tiles" for site in sites.values())
    assert {site.recipe for site in sites.values()} == {"bf16" if name == "experts" else "nvfp4"}


@pytest.mark.slow
@pytest.mark.parametrize("normalise", [True, False])
def test_layer_of_experts_is_that_of_float64(normalise):
    """Route, pass each token's experts, weigh, add up. Two
    experts' logits differ by 2^-12 of their size: in bfloat16 they are the same, and the first is taken.
    """
    random, cfg = np.random.default_rng(3), TINY.replace(**({} if normalise else NOT_NORMALISED))
    shapes = {"router": (64, 8), "expert_gate": (8, 64, 32), "expert_up": (8, 64, 32), "expert_down": (8, 32, 64)}
    weights = {name: random.normal(size=shape) / 8 for name, shape in shapes.items()}
    weights["router"][:, 5] = weights["router"][:, 2] * (1 + 2.0**-12)
    weights, h = jax.tree.map(np.float32, weights), random.normal(size=(2, 16, 64)).astype(np.float32)
    here = model_context.LayerContext(model_context.DEFAULT_CONTEXT, {}, resolved("bf16").segments[0].recipes, {})
    made = jax.jit(lambda *given: moe.moe_mlp(cfg, *given, here))(weights, h)
    router, gate, up, down = (weights[name].astype(np.float64) for name in shapes)
    x = h.reshape(-1, 64).astype(np.float64)
    p = np.exp(x @ router)
    p /= p.sum(1, keepdims=True)
    kept = p * (p >= np.sort(p, 1)[:, -2:-1])  # two a token
    g = np.einsum("td,edf->tef", x, gate)
    each = np.einsum("tef,efd->ted", g / (1 + np.exp(-g)) * np.einsum("td,edf->tef", x, up), down)
    expected = np.einsum("te,ted->td", kept / kept.sum(1, keepdims=True) if normalise else kept, each)
    np.testing.assert_allclose(np.asarray(made).reshape(-1, 64), expected, atol=1e-5)


@pytest.mark.slow
def test_sigmoid_router_chooses_by_bias_and_weighs_without():
    """Experts are chosen by score and bias, weighed by score alone; what all tokens share is added. Oracle: float64."""
    random, cfg = np.random.default_rng(5), TINY.replace(**DEEPSEEK)
    specs = {name: spec for name, spec in models.param_specs(cfg)["layers"]["mlp"].items() if name != "norm"}
    weights = {n: (random.normal(size=spec.shape[1:]) / 8).astype(np.float32) for n, spec in specs.items()}
    weights["router_bias"] = np.linspace(0.6, -0.6, 8).astype(np.float32)  # changes most choices
    ones, h = np.ones(64, np.float32), random.normal(size=(2, 16, 64)).astype(np.float32)
    recipes = policy("mlp", "bf16").resolve(models.linear_sites(cfg), cfg.layers).segments[0].recipes
    here = model_context.LayerContext(model_context.DEFAULT_CONTEXT, models.param_specs(cfg), recipes, {})
    made = jax.jit(lambda w, h: llama.mlp_block(cfg, w, llama.apply_norm(cfg, h, ones), here))(weights, h)

    wide = {name: value.astype(np.float64) for name, value in weights.items()}
    x = h.reshape(-1, 64).astype(np.float64)
    x /= np.sqrt((x**2).mean(1, keepdims=True) + cfg.norm_eps)

    def mlp(gate, up, down):
        g = x @ gate
        return (g / (1 + np.exp(-g)) * (x @ up)) @ down

    p = 1 / (1 + np.exp(-x @ wide["router"]))
    by = p + wide["router_bias"]
    chosen = by >= np.sort(by, 1)[:, -2:-1]
    assert (chosen != (p >= np.sort(p, 1)[:, -2:-1])).any(1).mean() > 0.5
    kept = p * chosen / (p * chosen).sum(1, keepdims=True)
    each = np.stack([mlp(*(wide[f"expert_{n}"][e] for n in ("gate", "up", "down"))) for e in range(8)], 1)
    expected = np.einsum("te,ted->td", kept, each) + mlp(*(wide[f"shared_{n}"] for n in ("gate", "up", "down")))
    np.testing.assert_allclose(np.asarray(made).reshape(-1, 64), expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("normalise", [False, True])
def test_softmax_router_has_the_gradient_of_its_formula(normalise):
    """Of weights and both losses. Oracle: differences of float64 NumPy, the choice held fast."""
    random = np.random.default_rng(0)
    logits, pull = random.normal(size=(6, 5)), random.normal(size=(6, 2))
    chosen = np.argsort(-logits, axis=-1)[:, :2]
    shares = np.bincount(chosen.reshape(-1), minlength=5) / chosen.size

    def formula(logits):
        sums = np.exp(logits).sum(-1, keepdims=True)
        p = np.exp(logits) / sums
        weights = np.take_along_axis(p, chosen, -1)
        weights = weights / weights.sum(-1, keepdims=True) if normalise else weights
        return (weights * pull).sum() + 5 * (shares * p.mean(0)).sum() + (np.log(sums) ** 2).mean()

    def ours(logits):
        found = route(logits, 2, normalise=normalise)
        return jnp.sum(found.weights * jnp.float32(pull)) + found.load.balance + found.load.z

    steps = 1e-5 * np.eye(logits.size).reshape(-1, *logits.shape)
    want = [(formula(logits + step) - formula(logits - step)) / 2e-5 for step in steps]
    value, grads = jax.jit(jax.value_and_grad(ours))(jnp.float32(logits))
    assert float(value) == pytest.approx(formula(logits), rel=1e-5)
    np.testing.assert_allclose(grads.reshape(-1), want, atol=1e-5)
    found = route(jnp.float32(logits), 2, normalise=normalise)
    assert np.array_equal(found.experts, chosen)
    assert np.array_equal(found.load.counts, np.bincount(chosen.reshape(-1), minlength=5))


def test_router_bias_evens_the_load_without_a_gradient():
    """A router that sends half of all pairs to one expert: after a few hundred moves no expert has a tenth too many.
    Scores that are all zero choose and weigh without a NaN."""
    random = np.random.default_rng(0)
    x, router = random.normal(size=(512, 16)), random.normal(size=(16, 8)) / 4
    x[:, 0], router[0, 3] = 1, 2.5
    logits, bias = moe_dispatch.router_logits(jnp.float32(x), jnp.float32(router)), np.zeros(8, np.float32)
    choose = jax.jit(lambda bias: route(logits, 2, normalise=True, bias=bias).load.counts.astype(jnp.float32))
    move = jax.jit(lambda bias, load: update_router_bias(bias, load, 0.005))
    first = np.asarray(choose(bias))
    for _ in range(300):
        load = np.asarray(choose(bias))
        moved = np.asarray(move(bias, load))
        assert np.array_equal(np.sign(moved - bias), np.sign(load.mean() - load))
        bias = moved
    assert first.max() > 3 * first.mean() and np.abs(np.asarray(choose(bias)) / first.mean() - 1).max() < 0.1
    params = {"layers": {"mlp": {"router_bias": np.zeros((1, 2), np.float32)}}}
    moved = moe.update_router_biases(params, jnp.float32([[3, 1]]), 0.5)["layers"]["mlp"]["router_bias"]
    assert moved.tolist() == [[-0.5, 0.5]]  # fewer tokens for the expert that has most
    weights = jax.grad(lambda bias: route(logits, 2, normalise=True, bias=bias).weights.sum())
    assert not np.any(jax.jit(weights)(bias))
    none = jax.jit(lambda logits: route(logits, 2, normalise=True, bias=bias))(jnp.full((4, 8), -200.0))
    assert not np.any(none.weights) and np.isfinite(none.load.balance)


def config(**changes):
    return dataclasses.replace(
        run_presets.run_config("moe-demo"), model=TINY, batch=2, seq=32, accumulate=2, steps=20, **changes
    )


def resolved(name):
    return policy("experts", recipe(name)).resolve(models.linear_sites(TINY), TINY.layers)


@pytest.mark.slow
def test_step_learns_and_reports_the_load_of_experts(quick_compiles, tmp_path):
    """Microbatches add up: both losses of the routers are means over all scored tokens. The bias of a sigmoid router
    moves by its rate alone, has moments of zero, and goes on from a checkpoint bit for bit."""
    model, mesh = TINY.replace(**DEEPSEEK), make_mesh({}, jax.devices("cpu")[:1])
    chosen = dataclasses.replace(config(balance_rate=0.125), model=model)
    plan = policy("experts", "bf16").resolve(models.linear_sites(model), model.layers)
    step = jax.jit(make_train_step(chosen, plan, mesh))
    tokens = jax.random.randint(jax.random.key(1), (2, 33), 0, 128)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segments": jnp.zeros((2, 32), jnp.int32)}
    batch["positions"] = jnp.broadcast_to(jnp.arange(32, dtype=jnp.int32), (2, 32))
    state, losses, biases, store = create_state(chosen, mesh), [], [], CheckpointManager(tmp_path)
    for number in range(8):
        if number == 5:
            assert store.save(5, state.items(), extra={}) and store.wait()
        biases.append(np.asarray(state.params["layers"]["mlp"]["router_bias"]))
        state, found = step(state, batch)
        losses.append(float(found["loss"]))
    assert losses[-1] < losses[0] - 0.5
    moves = np.diff(biases, axis=0) / 0.125
    assert not np.any(biases[0]) and set(np.unique(moves)) <= {-1, 0, 1} and np.all(np.any(moves, axis=(1, 2)))
    moments = [
        leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state.optimizer) if "router_bias" in str(path)
    ]
    assert len(moments) == 2 and not np.any(moments)
    back = TrainState.from_items(store.restore(5, abstract_state(chosen, mesh).items()).items, seed=state.seed)
    for _ in range(3):
        back, _ = step(back, batch)
    assert all(map(np.array_equal, jax.tree.leaves(back), jax.tree.leaves(state)))
    store.close()
    quantized = policy("mlp", "nvfp4").resolve(models.linear_sites(model), model.layers)
    jax.eval_shape(make_train_step(chosen, quantized, mesh), state, batch)  # to compile it costs a minute
    assert 0.9 < float(found["balance_loss"]) < 8 and float(found["router_z_loss"]) > 0
    assert 0 <= float(found["emptiest_expert"]) < 1 < float(found["fullest_expert"]) <= 4


def test_manifest_names_the_backend_of_experts():
    device = lookup(jax.devices("cpu")[0])
    made = build_precision_manifest(config(), resolved("nvfp4"), recipe("nvfp4"), seq=32, device=device)
    found = next(site for site in made.sites if site.path == "layers/mlp/expert_up")
    assert (found.tokens, found.k, found.n, found.backend) == (2 * 32, 64, 32, "tiles")
    assert {gemm.multiplied_by for gemm in found.gemms.values()} == {"xla"}
    assert "router" in str(manifest_table(made).caption)
    other = dataclasses.replace(config(), precision=dataclasses.replace(config().precision, backend="native"))
    with pytest.raises(ValueError, match="experts"):
        build_precision_manifest(other, resolved("nvfp4"), recipe("nvfp4"), seq=32, device=device)


def test_unsupported_expert_configs_are_refused_by_name():
    devices = jax.devices()[:2]
    mesh, how = make_mesh({"expert": 2}, devices), {"seq": 32, "device": lookup(devices[0]), "memory": None}
    for field in ("radar", "telemetry"):
        with pytest.raises(ValueError, match="on a mesh"):
            preflight.run_preflight(dataclasses.replace(config(), accumulate=1, **{field: 10}), mesh, **how)
    with pytest.raises(ValueError, match="experts_per_token"):
        TINY.replace(experts_per_token=9)
    with pytest.raises(ValueError, match="262,144 experts"):  # a config.json may say anything
        TINY.replace(layers=10_000, experts=65_536)
    with pytest.raises(ValueError, match="norm_topk"):
        TINY.replace(qk_norm=False, norm_topk=False)
    dense = models.preset("demo")
    for cfg, changes, said in (
        (TINY, {"router": "topk"}, "softmax, sigmoid"), (TINY, {"shared_experts": -1}, "shared_experts"),
        (dense, {"router": "sigmoid"}, "experts"), (dense, {"shared_experts": 1}, "experts"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            cfg.replace(**changes)
    with pytest.raises(ValueError, match="balance_rate"):
        config(balance_rate=-0.1)
