"""Oracles: optax.contrib.muon for matrices, optax.adamw for the rest; one device for meshes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from halfbyte import models
from halfbyte.checkpoint import named_leaves
from halfbyte.io.dataclass_json import to_dict
from halfbyte.models import LlamaConfig
from halfbyte.plan import analytic_step
from halfbyte.train import OptimizerConfig, TrainConfig, apply_updates, run_mesh
from halfbyte.train.resume import guarded_changes
from halfbyte.train.train_state import abstract_state, make_optimizer

MODEL = LlamaConfig(
    name="tiny", vocab_size=64, embed=64, mlp=128, layers=2, heads=4, kv_heads=2, head_dim=16, max_seq=64
)
CONFIG = TrainConfig(
    name="tiny", model=MODEL, data="synthetic", recipe="bf16", steps=4, batch=8, seq=32,
    optimizer=OptimizerConfig(name="muon", learning_rate=1e-2, warmup=1),
)  # fmt: skip
EIGHT = "data=2,fsdp=2,tensor=2"


@pytest.fixture(autouse=True, scope="module")
def _quick(quick_compiles):
    """Compiling is most of what these tests cost."""


def three_updates(mesh_text, devices):
    """(weights after three updates by gradients that are the same everywhere, the moments) on a mesh."""
    config = dataclasses.replace(CONFIG, mesh=mesh_text)
    where = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(config, run_mesh(config, devices)))
    transform, start = make_optimizer(config), first_weights()
    params, moments = jax.device_put((start, transform.init(start)), (where.params, where.optimizer))

    @jax.jit
    def step(params, moments, grads):
        updates, moments = transform.update(grads, moments, params)
        return apply_updates(params, updates, jnp.float32(0.01)), moments

    for grads in gradients(start):
        params, moments = step(params, moments, jax.device_put(grads, where.params))
    return params, moments


@pytest.fixture(scope="module")
def alone():
    return three_updates("", jax.devices("cpu")[:1])[0]


def first_weights():
    return jax.tree.map(lambda p: np.full(p.shape, 0.5, np.float32), models.abstract_params(MODEL))


def gradients(params):
    for seed in range(3):
        rng = np.random.default_rng(seed)
        yield jax.tree.map(lambda p, rng=rng: rng.normal(size=p.shape).astype(np.float32), params)


@pytest.mark.slow
def test_matrices_are_optax_muon_and_the_rest_optax_adamw(alone):
    config, start = CONFIG.optimizer, first_weights()
    dims = optax.contrib.MuonDimensionNumbers(-2, -1)
    decay = {"weight_decay": config.weight_decay}
    theirs = optax.contrib.muon(
        0.01, muon_weight_dimension_numbers=lambda p: jax.tree.map(lambda _: dims, p), consistent_rms=0.2, **decay
    )
    plain = optax.adamw(0.01, b1=config.b1, b2=config.b2, mask=models.weight_decay_mask(MODEL), **decay)
    expected = {True: start["layers"], False: start}
    states = {True: theirs.init(start["layers"]), False: plain.init(start)}
    with jax.numpy_dtype_promotion("standard"):
        for grads in gradients(start):
            for by_muon, transform in ((True, theirs), (False, plain)):
                g, old = (grads["layers"] if by_muon else grads), expected[by_muon]
                updates, states[by_muon] = jax.jit(transform.update)(g, states[by_muon], old)
                expected[by_muon] = optax.apply_updates(old, updates)
    matrices = models.flatten_specs(models.matrix_mask(MODEL))
    assert sorted(path for path, matrix in matrices.items() if not matrix) == [
        "embed", "final_norm", "head", "layers/attention/norm", "layers/mlp/norm"
    ]  # fmt: skip
    both = {True: models.flatten_specs({"layers": expected[True]}), False: models.flatten_specs(expected[False])}
    for path, found in models.flatten_specs(
        alone
    ).items():  # the rate is a product here, a sum there: an ulp of a weight
        np.testing.assert_allclose(found, both[matrices[path]][path], rtol=0, atol=1e-6, err_msg=path)


@pytest.mark.slow
def test_mesh_changes_the_order_of_sums_alone(alone):
    found, moments = three_updates(EIGHT, jax.devices("cpu"))
    for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6)  # of updates of 0.01: float32 sums in another order
    gate = moments[0].inner_states["muon"].inner_state.mu["layers"]["mlp"]["gate"]
    assert gate.sharding.is_equivalent_to(found["layers"]["mlp"]["gate"].sharding, gate.ndim)


def test_muon_saves_moments_and_refuses_another_optimizer():
    """train/test_resume.py kills a run by Muon, and holds the resumed one against an unbroken one."""
    config = dataclasses.replace(CONFIG, mesh="")
    saved = abstract_state(config, run_mesh(config, jax.devices("cpu")[:1])).items()
    assert any("/mu/layers/mlp/gate" in name for name in named_leaves(saved["optimizer"]))
    other = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, name="adamw"))
    assert "optimizer.name: muon -> adamw" in guarded_changes(to_dict(config), other)


def test_plan_counts_one_moment_of_a_matrix():
    config = dataclasses.replace(CONFIG, mesh="")
    held = jax.tree.leaves(abstract_state(config, run_mesh(config, jax.devices("cpu")[:1])).optimizer)
    counted = analytic_step.analytic_memory(config)["optimizer"]
    assert sum(leaf.size * 4 for leaf in held if leaf.ndim > 1 or leaf.size > 3) == counted
