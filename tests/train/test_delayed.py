"""Delayed scaling in the trainer: what a run remembers, and that it is kept.

Oracles: the rule in NumPy over what each step has seen; the weights that a step began with; a run that nobody
interrupted; one device.
"""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest

import halfbyte as hb
from halfbyte.checkpoint import CheckpointManager, CheckpointStructureError
from halfbyte.io.dataclass_json import to_dict
from halfbyte.models import linear_sites
from halfbyte.recipes import recipe_to_text
from halfbyte.train import (
    PrecisionConfig,
    abstract_state,
    create_state,
    jit_train_step,
    open_batch_source,
    phases,
    run_mesh,
)
from halfbyte.train.batch_source import make_global_batch
from halfbyte.train.resume import resume_or_initialize
from halfbyte.train.train_state import TrainState
from tiny import MODEL, ONE_LINEAR, tiny

SHORT = recipe_to_text(dataclasses.replace(hb.recipe("fp8_delayed"), name="short", amax_history_len=4))
MODEL_64 = dataclasses.replace(MODEL, embed=64, mlp=128)
RUN = tiny(model=MODEL_64, recipe=SHORT, policy="all_linear; layers[-1:]=bf16")
SITES = [path for path in linear_sites(MODEL_64) if path.startswith("layers/")]
QUANTIZED = 0  # the layer; the other one is left in bf16


@functools.cache
def prepared(config, devices):
    mesh = run_mesh(config, jax.devices("cpu")[:devices])
    return mesh, jit_train_step(config, phases(config)[0].resolved(config), mesh)


def some_rows(config, mesh, count):
    loader = open_batch_source(config).loader(mesh)
    found = [next(loader) for _ in range(count)]
    loader.close()
    return found


def run(config, devices=1, *, state=None, first=0, steps=6):
    """The states after steps `first` to `steps`, on the host, beginning with the first's; their losses; the last."""
    mesh, step = prepared(config, devices)
    state = create_state(config, mesh) if state is None else state
    states, losses = [jax.device_get(state)], []
    for batch in some_rows(config, mesh, steps)[first:]:
        state, metrics = step(state, make_global_batch(batch, mesh, batch=config.batch))
        states.append(jax.device_get(state))
        losses.append(float(metrics["loss"]))
    return states, losses, state


def matrix(state, path):
    _, group, name = path.split("/")
    return np.asarray(state.params["layers"][group][name][QUANTIZED])


@functools.cache
def alone():
    return run(RUN)


def test_first_step_writes_its_amaxes_into_the_history():
    """Of the one linear that is quantized; oracle: the weights that the step began with."""
    config = dataclasses.replace(RUN, policy=ONE_LINEAR)
    (begun, ended), losses, _ = run(config, steps=1)
    seen, down = ended.delayed["history"][-1], SITES.index("layers/mlp/down")
    assert np.isfinite(losses).all() and not begun.delayed["history"].any() and not ended.delayed["history"][:-1].any()
    assert seen[QUANTIZED, down, 1] == np.abs(matrix(begun, "layers/mlp/down")).max()
    assert (seen[QUANTIZED, down] > 0).all() and not np.delete(seen, down, 1).any()


@pytest.mark.slow
def test_six_steps_remember_what_the_rule_says():
    states, losses, _ = alone()
    before = np.zeros((4, *states[0].delayed["amaxes"].shape), np.float32), states[0].delayed["amaxes"]
    assert np.isfinite(losses).all() and not before[1].any()
    for begun, ended in itertools.pairwise(states):
        seen = ended.delayed["history"][-1]
        for at, path in enumerate(SITES):
            assert seen[QUANTIZED, at, 1] == np.abs(matrix(begun, path)).max(), path
        assert (seen[QUANTIZED, : len(SITES)] > 0).all() and not seen[1].any() and not seen[:, len(SITES) :].any()
        window = np.concatenate([before[0][1:], seen[None]])
        largest = window.max(0)
        before = window, np.where(largest > 0, largest, before[1])
        np.testing.assert_array_equal(ended.delayed["history"], window)
        np.testing.assert_array_equal(ended.delayed["amaxes"], before[1])
    q, k, v = (ended.delayed["history"][:, QUANTIZED, SITES.index(f"layers/attention/{name}")] for name in "qkv")
    np.testing.assert_array_equal(q[:, 0], k[:, 0])  # one x
    np.testing.assert_array_equal(q[:, 0], v[:, 0])


@pytest.mark.slow
def test_step_computes_with_the_delayed_scale():
    mesh, step = prepared(RUN, 1)
    (batch,) = (make_global_batch(rows, mesh, batch=RUN.batch) for rows in some_rows(RUN, mesh, 1))
    losses = []
    for amax in (0.0, 448.0, 2.0**-6):  # nothing seen is a scale of 1; far too small a maximum saturates
        state = create_state(RUN, mesh)
        before = jax.tree.map(lambda a, amax=amax: a + amax, state.delayed)
        losses.append(float(step(dataclasses.replace(state, delayed=before), batch)[1]["loss"]))
    own = alone()[1][0]
    assert losses[0] == own and losses[2] != own
    assert abs(losses[1] - own) < 1e-6  # 448 / 448 is 1 too; only dy's scale is another, which no loss sees


@pytest.mark.slow
def test_resumed_delayed_run_equals_the_whole_one(tmp_path):
    states, losses, _ = alone()
    mesh, store = prepared(RUN, 1)[0], CheckpointManager(tmp_path)
    stopped = run(RUN, steps=3)[2]
    assert store.save(3, stopped.items(), extra={}) and store.wait()
    back = TrainState.from_items(store.restore(3, abstract_state(RUN, mesh).items()).items, seed=stopped.seed)
    again, later, _ = run(RUN, state=back, first=3)
    assert later == losses[3:]
    for one, other in zip(jax.tree.leaves(again[-1]), jax.tree.leaves(states[-1]), strict=True):
        np.testing.assert_array_equal(one, other)
    other_run = abstract_state(dataclasses.replace(RUN, recipe="fp8"), mesh).items()
    with pytest.raises(CheckpointStructureError, match="history"):  # never a run that forgets
        store.restore(3, other_run)
    store.close()


def other(**changes):
    return dataclasses.replace(RUN, **changes)


LONGER = recipe_to_text(dataclasses.replace(hb.recipe("fp8_delayed"), name="longer", amax_history_len=6))


@pytest.mark.slow(fast_cases=["another length"])
@pytest.mark.parametrize(
    "before, after, history",
    [
        (RUN, other(recipe="bf16"), None),
        (other(recipe="bf16"), RUN, (4, 0.0)),
        (RUN, other(recipe=LONGER), (6, 0.0)),
        (RUN, other(z_loss=1e-4), (4, 2.0)),
    ],
    ids=["out", "in", "another length", "the same"],
)
def test_allowed_change_drops_or_restarts_the_history(tmp_path, before, after, history):
    """A history of the same length is kept."""
    mesh, store = run_mesh(RUN, jax.devices("cpu")[:1]), CheckpointManager(tmp_path)
    state = create_state(before, mesh)
    state = dataclasses.replace(state, delayed=jax.tree.map(lambda a: a + 2, state.delayed))
    extra = {"config": to_dict(before), "data": {"next_index": 3}, "data_set": "synthetic"}
    assert store.save(3, state.items(), extra=extra) and store.wait()
    begun = functools.partial(resume_or_initialize, after, mesh, store, content="synthetic", say=lambda text: None)
    with pytest.raises(ValueError, match=r"another configuration|does not fit|history"):
        begun(allow=False)
    found, wanted = begun(allow=True).state, abstract_state(after, mesh)
    store.close()
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, shaped in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (one.shape, one.dtype, one.sharding) == (shaped.shape, shaped.dtype, shaped.sharding)
    assert (found.delayed is None) == (history is None)
    if history:
        length, value = history
        assert len(found.delayed["history"]) == length
        assert all(np.array_equal(leaf, np.full(leaf.shape, value)) for leaf in found.delayed.values())


ONE = dataclasses.replace(RUN, policy=ONE_LINEAR)


@functools.cache
def one_alone():
    return run(ONE, steps=3)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes, devices",
    [
        ({"mesh": "data=2,fsdp=2,tensor=2", "accumulate": 2}, 8),  # each place of `data` adds up its own gradients
        ({"remat": "quantized", "unroll": 0}, 1),
    ],
    ids=str,
)
def test_mesh_accumulation_and_remat_see_the_same_amaxes(changes, devices):
    """To the tolerance of sums in another order; what was seen of weights before the first update, to the bit."""
    found, want = run(dataclasses.replace(ONE, **changes), devices, steps=3)[0], one_alone()
    np.testing.assert_array_equal(found[1].delayed["history"][-1][..., 1], want[1].delayed["history"][-1][..., 1])
    for one, other in itertools.islice(zip(found, want, strict=True), 1, None):
        # bfloat16 has 8 bits; dy is that of a mean over all tokens of the step, whatever microbatch they are in
        np.testing.assert_allclose(one.delayed["history"][-1], other.delayed["history"][-1], rtol=0.05, atol=0)


@pytest.mark.slow
def test_skipped_step_leaves_the_history():
    mesh, step = prepared(RUN, 1)
    first, second = (make_global_batch(batch, mesh, batch=RUN.batch) for batch in some_rows(RUN, mesh, 2))
    state = step(create_state(RUN, mesh), first)[0]
    kept = jax.device_get(state.delayed)
    broken = dataclasses.replace(state, scaler=state.scaler | {"scale": state.scaler["scale"] * np.inf})
    after, metrics = step(broken, second)
    assert metrics["skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, after.delayed, kept)


def test_run_without_delayed_scaling_has_no_history():
    mesh = run_mesh(tiny(), jax.devices("cpu")[:1])
    state = abstract_state(tiny(recipe="fp8"), mesh)
    assert state.delayed is None and set(state.items()["progress"]) == {"step", "scaler"}


def test_half_a_switch_and_unequal_lengths_are_refused():
    half = PrecisionConfig(switch_at=3, switch_part="forward")
    with pytest.raises(ValueError, match="all three tensors"):
        phases(tiny(recipe="fp8_delayed", precision=half))
    mesh = run_mesh(RUN, jax.devices("cpu")[:1])
    with pytest.raises(ValueError, match=r"one length of history, got recipes with \[4, 1024\]"):
        create_state(dataclasses.replace(RUN, policy="all_linear; layers[-1:]=fp8_delayed"), mesh)
