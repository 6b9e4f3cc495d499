"""The radar on healthy weights and on planted defects. Oracle: what was planted; the recipe's definition.

All defects with twenty seeds each, and sixty healthy runs: docs/evidence/radar_defects.json. Here each is planted in
one linear, and those that change no operand in a run."""

import contextlib
import dataclasses
import functools
import json
import math
import re
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from defects import (
    DEFECTS,
    carrier_unlike_codes,
    large_results,
    same_bits,
    same_bits_of_roles,
    same_key_every_microbatch,
    same_key_every_step,
    stale_amax,
)
from radar_model import CONFIG, HEALTHY_MODELS, MODEL, batch_of, tiny_config

from halfbyte import models
from halfbyte.evaluation import reference_operands
from halfbyte.evaluation.gemm_accuracy import (
    gain_against_reference,
    judge_linear,
    mismatch_fraction,
    reference_weight_operands,
    run_linear_gemms,
)
from halfbyte.evaluation.radar import (
    Radar,
    RadarProbe,
    RandomBitsCheck,
    judge_gemms,
    log_line,
    microbatch_key,
    subsample_batch,
)
from halfbyte.evaluation.step_replay import LinearCapture
from halfbyte.models import ModelContext
from halfbyte.recipes import recipe
from halfbyte.recipes.prng_keys import KEY_IMPL
from halfbyte.study.study_runs import radar_section
from halfbyte.train import resolve_policy, run_mesh, train_step
from halfbyte.train.train_state import StepSnapshot, TrainState, is_due

POLICY = "mlp/down"
RESOLVED = resolve_policy(MODEL, POLICY, recipe("nvfp4"))


def probe():
    jax.clear_caches()
    return RadarProbe(dataclasses.replace(CONFIG, recipe="nvfp4", policy=POLICY), RESOLVED, None)


@functools.cache
def params(seed):
    return jax.jit(lambda key: models.init(MODEL, key))(jax.random.key(seed))


def healthy_runs():
    """(weights, batch) that are healthy and look odd: loud channels, loud columns, one token."""
    plain, batch = params(0), batch_of(0, rows=2)
    layers = plain["layers"]
    norms = {g: {**layers[g], "norm": layers[g]["norm"].at[:, :1].multiply(100)} for g in layers}
    loud = jax.tree.map(lambda w: w.at[..., ::37].multiply(8) if w.ndim == 3 else w, layers)
    same = {name: jnp.full_like(v, 7) if name in ("tokens", "targets") else v for name, v in batch.items()}
    return [(plain, batch), ({**plain, "layers": norms}, batch), ({**plain, "layers": loud}, batch), (plain, same)]


@pytest.mark.slow
def test_healthy_runs_of_any_look_raise_no_alarm_and_a_wrong_scale_does_that_changes_no_number():
    """One program, which asks at every call how many times too large an amax is: compiling it is what a probe costs."""
    times = np.float32(1)
    with stale_amax(lambda: jax.pure_callback(lambda: times, jax.ShapeDtypeStruct((), jnp.float32))):
        radar = probe()
        for weights, batch in healthy_runs():
            gemms, alarms = judge_gemms(radar.gemms(weights, batch, microbatch_key(0, 0)))
            assert not alarms and {g["gemm"] for g in gemms} == {"fprop", "dgrad", "wgrad", "dw"}
            assert all(g["gain"] == pytest.approx(g["recipe_gain"], abs=1e-3) for g in gemms)
        times = np.float32(8)
        gemms, alarms = judge_gemms(radar.gemms(params(0), batch_of(0, rows=2), microbatch_key(0, 0)))
    assert all(g["gain"] == pytest.approx(g["recipe_gain"], abs=1e-3) for g in gemms)
    assert [text.split(":")[0] for text in alarms] == ["fprop", "dgrad", "wgrad"]


ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def linear():
    """x, w and gradients of 1e-6, as a run has them."""
    keys = jax.random.split(jax.random.key(0), 4)
    x, dy = (jax.random.normal(key, (64, 64), jnp.bfloat16) for key in keys[:2])
    w = jax.random.normal(keys[2], (64, 64), jnp.float32)
    return LinearCapture("", recipe("nvfp4"), x, w, dy * 1e-6, w, keys[3], keys[3], None, w)


@pytest.fixture(scope="module")
def right(linear):
    return jax.jit(reference_operands.compute_reference_operands)(linear)


@pytest.mark.slow(fast_cases=["demo-nvfp4-mlp"])
@pytest.mark.parametrize("kind", HEALTHY_MODELS, ids="-".join)
def test_healthy_models_raise_no_alarm(kind):
    """Three looks at each of twenty models; docs/evidence/radar_healthy.json has more."""
    config = tiny_config(*kind)
    radar = RadarProbe(config, resolve_policy(config.model, config.policy, recipe(config.recipe)), None)
    init = jax.jit(lambda key: models.init(config.model, key))
    for seed in range(3):
        gemms, alarms = judge_gemms(
            radar.gemms(init(jax.random.key(seed)), batch_of(seed, rows=2), microbatch_key(seed, seed))
        )
        assert gemms and not alarms and not radar.bits(seed, seed)["alarm"]


def test_page_states_false_alarms_of_the_evidence():
    """Oracle: the recorded looks, and the bound that no alarm in n looks leaves at 5%: 1 - 0.05^(1/n)."""
    found = json.loads((ROOT / "docs/evidence/radar_healthy.json").read_text())
    rows, looks = found["models"], found["looks"]
    assert set(rows) <= {" ".join(kind) for kind in HEALTHY_MODELS}
    assert looks == sum(row["looks"] for row in rows.values())
    assert found["alarms"] == sum(len(row["alarms"]) for row in rows.values())
    page = " ".join((ROOT / "docs/radar.md").read_text().split())
    said = f"**False alarms**: {found['alarms']} in {looks:,} looks at {len(rows)} healthy models"
    assert f"{said} (one-sided 95% bound {100 * (1 - 0.05 ** (1 / looks)):.2f}%;" in page
    nearest = max(row["largest_correlation_over_limit"] for row in rows.values())
    furthest = max(row["largest_deviation_of_a_mean_gain"] for row in rows.values())
    assert f"correlation was {nearest:.2f} of its threshold" in page and f"from 1 differed by {furthest:.1e}." in page


OF_A_WEIGHT = {"weights with 30% of the neighbour row", "the neighbour's tile scale", "16 columns left unquantized"}
OF_WGRAD = {"blocks across sequences", "weight gradients in blocks of 32", "Hadamard left out"}
NEW = list(DEFECTS)[6:14]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["healthy", *NEW])
def test_operands_that_are_not_the_recipes_are_seen_and_no_others(name, linear, right):
    with DEFECTS.get(name, contextlib.nullcontext)():
        found = jax.jit(lambda given: run_linear_gemms(given, backend="auto")[0])(linear)  # no GEMM is compiled
    wrong = {role for role in right if mismatch_fraction(found[role], right[role]) > 0}
    if name in OF_A_WEIGHT:
        expected = {"fprop_w", "dgrad_w"}
    elif name in OF_WGRAD:
        expected = {"wgrad_x", "wgrad_dy"}
    else:
        expected = {"dgrad_dy", "wgrad_dy"} if "stochastic" in name else set() if name == "healthy" else set(right)
    assert wrong == expected


@pytest.mark.slow
def test_a_carrier_that_its_codes_do_not_stand_for_is_seen(linear, right):
    with carrier_unlike_codes():
        found = jax.jit(reference_weight_operands)(linear)
    assert all(mismatch_fraction(found[role], right[role]) > 0 for role in ("fprop_w", "dgrad_w"))


SHARED_BITS = {
    same_bits: ("layer 0 mlp/down", "layer 1 mlp/down"),
    same_bits_of_roles: ("mlp/down dgrad_dy", "mlp/down wgrad_dy"),
    same_key_every_step: ("step +0 layer", "step +1 layer"),
}


@pytest.mark.parametrize("defect", SHARED_BITS)
def test_shared_bits_are_seen_in_the_bits(defect):
    """Also if run and reference share the wrong key, so that no operand differs."""
    healthy = probe().bits(0, 0)
    assert not healthy["alarm"] and healthy["pairs"] == 8 * 7 / 2  # 2 layers, 2 roles, 2 steps
    with defect():
        found = probe().bits(0, 0)
    assert found["alarm"] and found["largest"] == pytest.approx(1.0, abs=1e-3)
    assert all(text in name for text, name in zip(SHARED_BITS[defect], found["between"], strict=True))


def test_shared_bits_of_microbatches_are_seen():
    config = dataclasses.replace(CONFIG, recipe="nvfp4", policy=POLICY, accumulate=2)
    assert not RadarProbe(config, RESOLVED, None).bits(0, 0)["alarm"]
    with same_key_every_microbatch():
        found = RadarProbe(config, RESOLVED, None).bits(0, 0)
    assert found["alarm"] and any("second microbatch" in name for name in found["between"])


def test_streams_of_experts_are_compared():
    """Every expert derives its own streams: the derivation is planted with a key that all experts share."""
    model = tiny_config("moe-demo", "nvfp4", "mlp").model
    context = ModelContext(policy=resolve_policy(model, "mlp", recipe("nvfp4")))
    step = {"step": microbatch_key(0, 0)}
    assert not RandomBitsCheck(model, context).run(step)["alarm"]
    with mock.patch.object(jax.random, "fold_in", lambda key, number: key):
        found = RandomBitsCheck(model, context).run(step)
    assert found["alarm"]


def test_train_step_takes_the_keys_that_the_radar_compares():
    """Oracle: the key that reaches the gradient of the real train step, at two steps."""
    config = dataclasses.replace(CONFIG, recipe="nvfp4", policy=POLICY)
    seen = []

    class Reached(Exception):
        """Ends the step once the key is there."""

    def capture(*given, key, scale):
        seen.append(jax.random.key_data(key))
        raise Reached

    with mock.patch.object(train_step, "loss_and_grads", capture):
        step = train_step.make_train_step(config, RESOLVED, None)
        for finished in (0, 7):
            state = TrainState(jnp.int32(finished), None, None, {"scale": jnp.float32(1)}, jnp.uint32(3), None)
            with pytest.raises(Reached):
                step(state, None)
            expected = jax.random.key_data(train_step.step_inputs(state)["key"])
            assert (seen[-1] == expected).all()
            first = jax.random.fold_in(jax.random.wrap_key_data(seen[-1], impl=KEY_IMPL), 0)
            assert (jax.random.key_data(first) == jax.random.key_data(microbatch_key(3, finished))).all()
    assert (seen[0] != seen[1]).any()


def test_results_half_a_percent_too_large_are_seen_in_two_linears(linear):
    """The gains of fprop and dgrad, rounded to bfloat16, and of wgrad; healthy ones raise no alarm."""
    linears = [linear, dataclasses.replace(linear, x=linear.x[::-1], dy=linear.dy[::-1])]

    def rows():
        jax.clear_caches()
        judge = jax.jit(lambda given: judge_linear(given, backend="auto"))
        numbers = [jax.device_get(judge(given)) for given in linears]
        kinds = ("fprop", "dgrad", "wgrad")
        return [gemm(gemm=kind, **{k: float(v) for k, v in n[kind].items()}) for n in numbers for kind in kinds]

    assert judge_gemms(rows())[1] == []
    with large_results():
        marked, alarms = judge_gemms(rows())
    assert not any(row["alarm"] for row in marked) and max(row["error"] for row in marked) < 1
    assert {"fprop", "dgrad"} <= {text.split(":")[0] for text in alarms}
    assert all(re.search(r"are 1\.00(49|5[01])", text) for text in alarms)


@pytest.mark.slow
def test_results_half_a_percent_too_large_are_seen_in_the_mean_gain():
    """No element is beyond its tolerance, and no operand differs: only the mean over GEMMs shows it."""
    with large_results():
        gemms, alarms = judge_gemms(probe().gemms(params(0), batch_of(0, rows=2), microbatch_key(0, 0)))
    assert not any(g["alarm"] for g in gemms) and max(g["error"] for g in gemms) < 1
    assert {"fprop", "dgrad"} <= {text.split(":")[0] for text in alarms}
    assert all("in the mean" in text and re.search(r"are 1\.00(49|5[01])", text) for text in alarms)


@pytest.mark.parametrize("shape", [(128, 64), (16, 256)])
@pytest.mark.parametrize("noise", ["elements", "equal rows", "one column"])
def test_gain_against_reference_has_its_stated_spread(shape, noise):
    """Over 300 draws of results rounded to bfloat16 the gain deviates from 1 by the stated deviation or less, also if
    tokens are equal or one feature has all the power."""
    r = np.random.default_rng(0).normal(size=(300, *shape)).astype(np.float32)
    if noise == "equal rows":
        r = np.broadcast_to(r[:, :1], r.shape)
    if noise == "one column":
        r = r * np.where(np.arange(shape[1]) == 3, np.float32(1e3), np.float32(1))
    compare = jax.jit(jax.vmap(gain_against_reference))
    found = {name: np.asarray(values) for name, values in compare(jnp.asarray(r, jnp.bfloat16), jnp.asarray(r)).items()}
    assert np.sqrt(np.mean((found["reference_gain"] - 1) ** 2)) < np.mean(found["reference_gain_sd"])
    assert np.all(found["reference_gain_sd"] < 2.0**-8), "one independent element has sqrt(2 / 3) of this"
    large = compare(jnp.asarray(r) * 1.005, jnp.asarray(r))
    np.testing.assert_allclose(large["reference_gain"], 1.005, atol=1e-5)


def test_gain_of_results_that_are_zero_is_one():
    found = gain_against_reference(jnp.zeros((16, 16)), jnp.zeros((16, 16)))
    assert float(found["reference_gain"]) == 1.0 and math.isfinite(float(found["reference_gain_sd"]))


def test_mean_gain_alarm_by_hand():
    """16 GEMMs with a deviation of 0.0008 each: the mean has 0.0002, and 4.89 of them are exceeded on either side in
    1e-6 of looks; 2^-10 is added."""
    bound = 2**-10 + 4.8916 * 0.0002
    near, far = ([gemm(reference_gain=1 - at, reference_gain_sd=0.0008)] * 16 for at in (bound - 1e-6, bound + 1e-6))
    assert judge_gemms(near)[1] == []
    (text,) = judge_gemms(far)[1]
    assert text.startswith("wgrad: results of 16 GEMMs are 0.9980 times what nvfp4 gives")
    bad = gemm(reference_gain=math.nan, reference_gain_sd=math.nan, gain=math.nan)
    assert len(judge_gemms([bad])[1]) == 1  # its own alarm, which names it


def gemm(**numbers):
    told = {"gain": 0.99, "snr_db": 20.0, "recipe_gain": 0.99, "recipe_snr_db": 20.0, "error": 0.4, "wrong": 0.0}
    return {"layer": 3, "site": "mlp/down", "gemm": "wgrad", "recipe": "nvfp4"} | told | numbers


def test_alarms_by_hand():
    assert judge_gemms([gemm()])[1] == [] and "no alarm" in log_line(3, [gemm()], [])
    for wrong in ({"error": 1.1}, {"wrong": 1e-6}, {"gain": math.nan}, {"error": math.nan}):
        marked, alarms = judge_gemms([gemm(), gemm(**wrong)])
        assert [g["alarm"] for g in marked] == [False, True] and "layer 3 mlp/down" in alarms[0]
        assert "no alarm" not in log_line(3, marked, alarms)


def test_the_report_says_what_was_not_judged_and_what_is_the_recipes_own_doing():
    poor = {"seed": 0, "step": 1, "alarms": [], "gemms": judge_gemms([gemm(gain=0.68, recipe_gain=0.68)])[0]}
    shown = radar_section([{"name": "broken", "radar": [poor]}])
    assert "NOT JUDGED" not in shown and "gains of 0.680" in shown
    blind = {"layer": 0, "site": "mlp/down", "gemm": "wgrad", "gain": 0.68, "snr_db": 3.0, "alarm": False, "band": None}
    old = {"seed": 0, "step": 1, "alarms": [], "gemms": [blind]}
    assert "1 of 1 GEMMs were NOT JUDGED" in radar_section([{"name": "broken", "radar": [old]}])
    refused = {"seed": 0, "step": 1, "alarms": [], "gemms": [], "not_judged": "<why>"}
    assert "NOT JUDGED: &lt;why&gt;" in radar_section([{"name": "broken", "radar": [refused]}])


def test_a_probe_that_cannot_be_made_says_so_and_stops_nothing(tmp_path, monkeypatch):
    def refuse(*given):
        raise ValueError("128 tokens at least")

    monkeypatch.setattr(RadarProbe, "gemms", refuse)
    mesh = run_mesh(dataclasses.replace(CONFIG, mesh="data=1"), jax.devices()[:1])
    lines = Radar(1, tmp_path).observe(StepSnapshot(5, CONFIG, RESOLVED, mesh, None, None))
    assert len(lines) == 1 and "NOT JUDGED, 128 tokens at least" in lines[0]
    assert json.loads((tmp_path / "radar.jsonl").read_text())["not_judged"] == "128 tokens at least"


def test_a_link_in_the_place_of_the_record_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "radar.jsonl").symlink_to(victim)
    with pytest.raises(ValueError, match="symbolic link"):
        Radar(1, tmp_path)._write({"step": 1})
    assert victim.read_text() == "mine"


@pytest.mark.slow
def test_a_part_of_the_batch():
    assert subsample_batch(batch_of(0), 128)["tokens"].shape == (2, 64)
    assert subsample_batch(batch_of(0), 32)["tokens"].shape == (1, 32)
    rows = {"tokens": jnp.zeros((64, 100), jnp.int32)}
    assert subsample_batch(rows, 2048)["tokens"].shape == (16, 100)  # 20 rows would be 62.5 blocks
    assert subsample_batch({"tokens": jnp.zeros((3, 10), jnp.int32)}, 20)["tokens"].shape == (3, 10)


def test_observers_are_due_before_the_first_step_and_then_every_so_often(tmp_path):
    radar = Radar(4, tmp_path)
    assert [step for step in range(1, 10) if is_due(radar, step)] == [1, 5, 9]


def test_nothing_is_looked_at_where_nothing_is_quantized(tmp_path):
    plain = resolve_policy(MODEL, "mlp", recipe("bf16"))
    moment = StepSnapshot(1, CONFIG, plain, run_mesh(dataclasses.replace(CONFIG, mesh="data=8")), None, None)
    assert Radar(1, tmp_path).observe(moment) == [] and not list(tmp_path.iterdir())


def test_the_record_is_json(tmp_path):
    radar = Radar(1, tmp_path)
    radar._write({"gain": math.nan, "list": [math.inf, 1.0]})
    assert json.loads((tmp_path / "radar.jsonl").read_text()) == {"gain": None, "list": [None, 1.0]}
