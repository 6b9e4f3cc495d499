"""OsciReset: which weights are set, when, and that nothing of it is lost.

Oracles: `oscillation_oracle`, written from the authors' text; one device; a run that nobody interrupted.
"""

import dataclasses
import functools
import io
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import oscillation_oracle
import pytest
from rich.console import Console
from tiny import MODEL, ONE_LINEAR, tiny

from halfbyte.devices import device
from halfbyte.train import PrecisionConfig, abstract_state, check, create_state, loop, phases, run_mesh, train
from halfbyte.train.oscillation import RESET, compile_hook, due
from halfbyte.train.precision import with_fallback
from halfbyte.train.state import bit_sum

WIDE = dataclasses.replace(MODEL, embed=64, mlp=128)
AS_RULED = PrecisionConfig(reset_at=8, reset_every=8, reset_over=5, reset_ratio=8)  # 8, then 9 to 13; 14 sets
RULES = {"nvfp4": functools.partial(oscillation_oracle.nvfp4, tile=16)}
RULES |= {
    "nvfp4_1d_weights": functools.partial(oscillation_oracle.nvfp4, tile=1),
    "tetrajet2": oscillation_oracle.tetra,
}


def swinging(config, recipe):
    return tiny(model=WIDE, recipe=recipe, policy=f"{ONE_LINEAR}; layers[-1:]=bf16", steps=24, precision=config)


def same(a, b):
    """Whether two results have the same weights."""
    pairs = zip(jax.tree.leaves(a.params), jax.tree.leaves(b.params), strict=True)
    return all(np.array_equal(x, y) for x, y in pairs)


def weights(step):
    """Of layers [2, 128, 64]: most move a little each step, some swing about where a code ends."""
    random = np.random.default_rng(7)
    base = random.normal(size=(2, 128, 64)).astype(np.float32)
    quarter = random.random(base.shape)
    swing = np.where(quarter < 0.3, 1e-3, 0) * (-1) ** step + np.where(quarter > 0.9, 0, 1e-5) * step
    return (base * (1 + swing)).astype(np.float32)


def hooked(config, devices=1, mesh=""):
    """(the layers' weights after each step as the hook leaves them, the last state) of a run whose update of step n
    gives `weights(n)`."""
    config = dataclasses.replace(config, mesh=mesh)
    on = run_mesh(config, jax.devices("cpu")[:devices])
    resolved, state, found = phases(config)[0].resolved(config), create_state(config, on), []
    programs = {}
    for step in range(1, config.steps + 1):
        where = state.params["layers"]["mlp"]["down"].sharding
        mlp = {**state.params["layers"]["mlp"], "down": jax.device_put(weights(step), where)}
        params = {**state.params, "layers": {**state.params["layers"], "mlp": mlp}}
        state = dataclasses.replace(state, params=params, sentinel=jax.jit(bit_sum)(params))
        what = due(config, step)
        if what is not None:
            if what not in programs:
                programs[what] = compile_hook(config, resolved, on, what, state)
            state, _ = programs[what](state)
            assert int(state.sentinel) == int(jax.jit(bit_sum)(state.params))
        found.append(np.asarray(state.params["layers"]["mlp"]["down"]))
    return found, state


@functools.cache
def hooked_alone(name):
    return hooked(swinging(AS_RULED, name))


@pytest.mark.slow(fast_cases=["nvfp4_1d_weights"])
@pytest.mark.parametrize("name", RULES)
def test_the_weights_that_swing_are_set_and_no_others(name):
    config = swinging(AS_RULED, name)
    found, _ = hooked_alone(name)
    rule = oscillation_oracle.OsciReset(RULES[name], start=8, period=8, iters=5, threshold=8)
    count = []
    for step, ours in enumerate(found, 1):
        want = rule.after(step, weights(step)[0])
        np.testing.assert_array_equal(ours[0], want, err_msg=str(step))
        np.testing.assert_array_equal(ours[1], weights(step)[1])  # in bf16
        count.append(int((want != weights(step)[0]).sum()))
    assert [step for step, n in enumerate(count, 1) if n] == [14, 22] and max(count) < 0.3 * want.size
    assert [step for step in range(1, 25) if due(config, step) == RESET] == [14, 22]


@pytest.mark.slow
def test_no_mesh_changes_a_bit():
    (alone, state), (spread, on_mesh) = hooked_alone("nvfp4"), hooked(swinging(AS_RULED, "nvfp4"), 8, "fsdp=4,tensor=2")
    np.testing.assert_array_equal(spread, alone)
    for one, other in zip(jax.tree.leaves(on_mesh.oscillation), jax.tree.leaves(state.oscillation), strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.sharding == on_mesh.params["layers"]["mlp"]["down"].sharding


SHORT = tiny(
    recipe="nvfp4", policy=ONE_LINEAR, steps=8,
    precision=PrecisionConfig(reset_at=2, reset_every=5, reset_over=3, reset_ratio=1.25),
)  # fmt: skip
WITHOUT = dataclasses.replace(SHORT, precision=PrecisionConfig())


def trained(config, directory, **how):
    """(the result, what was said) of a run."""
    out = io.StringIO()
    result = train(config, directory, console=Console(file=out, width=100), **how)
    return result, out.getvalue()


@pytest.fixture(scope="module")
def stopped(one_device, tmp_path_factory):
    """stopped(name): the directory of a run with it that has ended after 4 steps, inside of a period, between two of
    its sums; a copy for each who goes on from there."""
    kept = tmp_path_factory.mktemp("stopped")
    trained(SHORT, kept / "first", until=4)
    return lambda name: shutil.copytree(kept / "first", kept / name)


@pytest.fixture(scope="module")
def ended(stopped):
    """(the result, what was said) of a run that has ended it after 4 steps, before any weight was set."""
    return trained(WITHOUT, stopped("ended"), allow_change=True)


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_a_resumed_run_is_the_same_run_and_sets_weights(stopped, ended, tmp_path):
    whole, said = trained(SHORT, tmp_path)
    assert "OSCIRESET after step 6: " in said and "OSCIRESET after step 5" not in said
    resumed, _ = trained(SHORT, stopped("resumed"))
    assert same(whole, resumed) and whole.loss == resumed.loss and not same(whole, ended[0])


SWITCHED = {"switch_at": 12, "switch_to": "bf16"}


def test_a_phase_without_codes_is_left_alone_and_a_period_that_it_cuts_too():
    """Periods begin after 4, 12 and 20 steps and set weights 6 steps later; bf16 from the 13th, or up to the 12th."""
    ruled = dataclasses.replace(AS_RULED, reset_at=4)
    away = swinging(dataclasses.replace(ruled, **SWITCHED), "nvfp4")
    back = swinging(dataclasses.replace(ruled, **SWITCHED | {"switch_to": "nvfp4"}), "bf16")
    steps = range(1, 25)
    assert [step for step in steps if due(away, step)] == [4, 5, 6, 7, 8, 9, 10, 12]
    assert [step for step in steps if due(back, step)] == [20, 21, 22, 23, 24]
    # a run that has fallen back to bf16 after 6 steps is one that quantizes nothing from there on
    fallen = with_fallback(phases(swinging(ruled, "nvfp4")), 6, "bf16")
    assert [step for step in steps if due(swinging(ruled, "nvfp4"), step, fallen)] == [4, 5, 6]


@pytest.mark.parametrize("at, first", [(4, "are set onto one"), (8, "none is quantized through a period")])
def test_the_manifest_says_in_which_phase_no_weights_are_set(at, first):
    config = swinging(dataclasses.replace(AS_RULED, reset_at=at, **SWITCHED), "nvfp4")
    mesh = run_mesh(config, jax.devices("cpu")[:1])
    found = check(config, mesh, seq=config.seq, device=device("cpu"), memory=None)
    assert first in found.manifests[0].hook and "in this phase, which quantizes none" in found.manifests[1].hook
    assert abstract_state(config, mesh).oscillation is not None  # as its checkpoints have it


def test_the_loop_asks_for_the_phases_that_it_runs():
    """Nothing but these is touched after a step of a phase without codes: no hook is compiled, and none is run."""
    config = swinging(dataclasses.replace(AS_RULED, reset_at=4), "nvfp4")
    fallen = with_fallback(phases(config), 6, "bf16")
    for step in range(7, 25):
        loop.Loop._after_the_update(SimpleNamespace(config=config, step=step, phases=fallen))


def test_a_run_without_it_has_nothing_of_it():
    mesh = run_mesh(tiny(), jax.devices("cpu")[:1])
    state = abstract_state(tiny(recipe="nvfp4"), mesh)
    assert state.oscillation is None and set(state.items()["progress"]) == {"step", "scaler"}
    assert due(tiny(), 5) is None


EXPERTS = {"model": dataclasses.replace(MODEL, experts=4, experts_per_token=2, norm_topk=True), "policy": "experts"}


@pytest.mark.parametrize(
    "changes, said",
    [
        (EXPERTS, "serves dense linears"),
        ({"recipe": "fp8_delayed"}, "not the weight's own doing"),
        ({"recipe": "nvfp4_shared_scales"}, "not the weight's own doing"),
        ({"recipe": "nvfp4_sr_everywhere"}, "not the weight's own doing"),
        ({"recipe": "nvfp4_rht_everywhere"}, "not the weight's own doing"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_with_a_way_out(changes, said):
    config = dataclasses.replace(swinging(AS_RULED, "nvfp4"), **changes)
    with pytest.raises(ValueError, match=said):
        abstract_state(config, run_mesh(config, jax.devices("cpu")[:1]))


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"recipe": "bf16"}, "quantize no weight"),
        ({"precision": dataclasses.replace(AS_RULED, reset_at=20)}, "before the first weights could be set"),
        ({}, "are set onto one"),
    ],
    ids=str,
)
def test_a_run_that_has_no_weights_to_set_says_so_and_goes_on_without(changes, said):
    """The bf16 run beside another, or a short round of a league."""
    config = dataclasses.replace(swinging(AS_RULED, "nvfp4"), **changes)
    mesh = run_mesh(config, jax.devices("cpu")[:1])
    found = check(config, mesh, seq=config.seq, device=device("cpu"), memory=None)
    assert any(said in remark for remark in found.remarks) and said in found.manifests[0].hook
    assert (abstract_state(config, mesh).oscillation is None) == bool(changes)


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_a_run_may_begin_or_end_it_where_a_change_is_allowed(ended, tmp_path):
    """With what a period begins with, and without."""
    trained(WITHOUT, tmp_path, until=4)
    _, begun = trained(SHORT, tmp_path, allow_change=True)
    assert "OSCIRESET after step 6: " in begun and "OSCIRESET" not in ended[1]


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"reset_at": -1.0}, "reset_at must be 0"),
        ({"reset_ratio": 1.0}, "above 1"),
        ({"reset_over": 0}, "reset_over must be 1"),
        ({"reset_every": 51}, "reset_every must be 52"),
    ],
)
def test_fields_that_mean_nothing_are_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        PrecisionConfig(**fields)
