"""The radar on healthy weights and on planted defects. Oracle: what was planted; the recipe's definition.

All fourteen defects with twenty seeds each, and sixty healthy runs: docs/evidence/radar_defects.json. Here each is
planted in one linear, and the one that changes no number in a run."""

import contextlib
import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from defects import DEFECTS, carrier_unlike_codes, same_bits, stale_amax
from radar_model import CONFIG, MODEL, batch_of

from halfbyte import models
from halfbyte.diagnosis import definition
from halfbyte.diagnosis.radar import Probe, Radar, judged, part_of, step_of, summary
from halfbyte.diagnosis.replay import Linear
from halfbyte.diagnosis.truth import differing, run_linear, unpacked_weights
from halfbyte.parity.radar_view import radar_section
from halfbyte.recipe import recipe
from halfbyte.train import resolve, run_mesh
from halfbyte.train.observing import Moment, due

POLICY = "mlp/down"
RESOLVED = resolve(MODEL, POLICY, recipe("nvfp4"))


def probe():
    jax.clear_caches()
    return Probe(dataclasses.replace(CONFIG, recipe="nvfp4", policy=POLICY), RESOLVED, None)


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
            gemms, alarms = judged(radar.gemms(weights, batch, step_of(0, 0)))
            assert not alarms and {g["gemm"] for g in gemms} == {"fprop", "dgrad", "wgrad", "dw"}
            assert all(g["gain"] == pytest.approx(g["recipe_gain"], abs=1e-3) for g in gemms)
        times = np.float32(8)
        gemms, alarms = judged(radar.gemms(params(0), batch_of(0, rows=2), step_of(0, 0)))
    assert all(g["gain"] == pytest.approx(g["recipe_gain"], abs=1e-3) for g in gemms)
    assert [text.split(":")[0] for text in alarms] == ["fprop", "dgrad", "wgrad"]


@pytest.fixture(scope="module")
def linear():
    """x, w and gradients of 1e-6, as a run has them."""
    keys = jax.random.split(jax.random.key(0), 4)
    x, dy = (jax.random.normal(key, (64, 64), jnp.bfloat16) for key in keys[:2])
    w = jax.random.normal(keys[2], (64, 64), jnp.float32)
    return Linear("", recipe("nvfp4"), x, w, dy * 1e-6, w, keys[3], keys[3], None, w)


@pytest.fixture(scope="module")
def right(linear):
    return jax.jit(definition.operands)(linear)


OF_A_WEIGHT = {"weights with 30% of the neighbour row", "the neighbour's tile scale", "16 columns left unquantized"}
OF_WGRAD = {"blocks across sequences", "weight gradients in blocks of 32", "Hadamard left out"}
NEW = list(DEFECTS)[6:]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["healthy", *NEW])
def test_operands_that_are_not_the_recipes_are_seen_and_no_others(name, linear, right):
    with DEFECTS.get(name, contextlib.nullcontext)():
        found = jax.jit(lambda given: run_linear(given, backend="auto")[0])(linear)  # no GEMM is compiled
    wrong = {role for role in right if differing(found[role], right[role]) > 0}
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
        found = jax.jit(unpacked_weights)(linear)
    assert all(differing(found[role], right[role]) > 0 for role in ("fprop_w", "dgrad_w"))


@pytest.mark.slow
def test_shared_bits_are_seen_in_the_bits():
    assert not probe().bits(0, 0)["alarm"]
    with same_bits():
        found = probe().bits(0, 0)
    assert found["alarm"] and found["largest"] == pytest.approx(1.0, abs=1e-3)
    assert "layer 0" in found["between"][0] and "layer 1" in found["between"][1]


def gemm(**numbers):
    told = {"gain": 0.99, "snr_db": 20.0, "recipe_gain": 0.99, "recipe_snr_db": 20.0, "error": 0.4, "wrong": 0.0}
    return {"layer": 3, "site": "mlp/down", "gemm": "wgrad", "recipe": "nvfp4", **told, **numbers}


def test_alarms_by_hand():
    assert judged([gemm()])[1] == [] and "no alarm" in summary(3, [gemm()], [])
    for wrong in ({"error": 1.1}, {"wrong": 1e-6}, {"gain": math.nan}, {"error": math.nan}):
        marked, alarms = judged([gemm(), gemm(**wrong)])
        assert [g["alarm"] for g in marked] == [False, True] and "layer 3 mlp/down" in alarms[0]
        assert "no alarm" not in summary(3, marked, alarms)


def test_the_report_says_what_was_not_judged_and_what_is_the_recipes_own_doing():
    poor = {"seed": 0, "step": 1, "alarms": [], "gemms": judged([gemm(gain=0.68, recipe_gain=0.68)])[0]}
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

    monkeypatch.setattr(Probe, "gemms", refuse)
    mesh = run_mesh(dataclasses.replace(CONFIG, mesh="data=1"), jax.devices()[:1])
    lines = Radar(1, tmp_path).observe(Moment(5, CONFIG, RESOLVED, mesh, None, None))
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
    assert part_of(batch_of(0), 128)["tokens"].shape == (2, 64)
    assert part_of(batch_of(0), 32)["tokens"].shape == (1, 32)
    rows = {"tokens": jnp.zeros((64, 100), jnp.int32)}
    assert part_of(rows, 2048)["tokens"].shape == (16, 100)  # 20 rows would be 62.5 blocks
    assert part_of({"tokens": jnp.zeros((3, 10), jnp.int32)}, 20)["tokens"].shape == (3, 10)


def test_observers_are_due_before_the_first_step_and_then_every_so_often(tmp_path):
    radar = Radar(4, tmp_path)
    assert [step for step in range(1, 10) if due(radar, step)] == [1, 5, 9]


def test_nothing_is_looked_at_where_nothing_is_quantized(tmp_path):
    plain = resolve(MODEL, "mlp", recipe("bf16"))
    moment = Moment(1, CONFIG, plain, run_mesh(dataclasses.replace(CONFIG, mesh="data=8")), None, None)
    assert Radar(1, tmp_path).observe(moment) == [] and not list(tmp_path.iterdir())


def test_the_record_is_json(tmp_path):
    radar = Radar(1, tmp_path)
    radar._write({"gain": math.nan, "list": [math.inf, 1.0]})
    assert json.loads((tmp_path / "radar.jsonl").read_text()) == {"gain": None, "list": [None, 1.0]}
