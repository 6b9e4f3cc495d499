"""The radar on healthy weights and on planted defects. Oracle: what was planted; the bands were fixed from other seeds.

All six defects with twenty seeds each are in benchmarks/radar_defects.py; here are the two that differ most."""

import contextlib
import dataclasses
import json
import math

import jax
import pytest
from defects import gain_088, same_bits
from radar_bands import CONFIG, MODEL, batch_of

from halfbyte import models
from halfbyte.diagnosis.bands import bands, fit_bands, kind_of, of_mean, outside
from halfbyte.diagnosis.radar import Probe, Radar, judged, part_of, step_of, summary
from halfbyte.recipe import recipe
from halfbyte.train import resolve, run_mesh
from halfbyte.train.observing import Moment, due

POLICY = "mlp/down"
RESOLVED = resolve(MODEL, POLICY, recipe("nvfp4"))


def probe():
    jax.clear_caches()
    return Probe(dataclasses.replace(CONFIG, recipe="nvfp4", policy=POLICY), RESOLVED, None)


def params(seed):
    return models.init(MODEL, jax.random.key(seed))


@pytest.mark.slow
def test_healthy_runs_raise_no_alarm_and_a_gain_of_088_is_named_in_one_probe():
    for plant, wanted in ((contextlib.nullcontext, False), (gain_088, True)):
        with plant():
            radar = probe()
            for seed in range(6):
                gemms, alarms = judged(radar.gemms(params(seed), batch_of(seed), step_of(seed, 0)))
                assert bool(alarms) == wanted, alarms
                assert any(text.startswith("wgrad: mean gain 0.8") for text in alarms) == wanted
                assert {g["gemm"] for g in gemms} == {"fprop", "dgrad", "wgrad", "dw"}


@pytest.mark.slow
def test_shared_bits_are_seen_in_the_bits_and_in_no_gain():
    assert not probe().bits(0, 0)["alarm"]
    with same_bits():
        found = probe().bits(0, 0)
    assert found["alarm"] and found["largest"] == pytest.approx(1.0, abs=1e-3)
    assert "layer 0" in found["between"][0] and "layer 1" in found["between"][1]


def test_every_nvfp4_gemm_has_a_band():
    for gemm in ("fprop", "dgrad", "wgrad", "dw"):
        low, high = bands()[kind_of(gemm, recipe("nvfp4"))]
        assert 0.7 < low < 0.99 < high < 1.2


def test_bands_and_alarms_by_hand():
    healthy = [[{"kind": "wgrad a", "gain": g} for g in (0.99, 1.0, 1.01)] for _ in range(2)]
    fitted = fit_bands(healthy)
    assert fitted["wgrad a"] == pytest.approx((1.0 - 6 * 0.00894, 1.0 + 6 * 0.00894), abs=1e-3)
    assert of_mean(fitted["wgrad a"], 4) == pytest.approx((1.0 - 3 * 0.00894, 1.0 + 3 * 0.00894), abs=1e-3)
    assert of_mean(fitted["wgrad a"], 10_000) == pytest.approx((0.99, 1.01))
    assert not outside(5.0, None) and outside(math.nan, (0.9, 1.1))
    one = {"layer": 3, "site": "mlp/down", "gemm": "wgrad", "kind": "wgrad a"}
    marked, alarms = judged([{**one, "gain": 0.88}], fitted)
    assert marked[0]["alarm"] and "mean gain 0.8800" in alarms[0]
    assert judged([{**one, "gain": 1.0}], fitted)[1] == []
    assert judged([{**one, "kind": "unknown", "gain": 0.5}], fitted)[1] == []


def test_what_has_no_band_is_said_not_to_be_judged():
    gemms, _ = judged([{"kind": "wgrad a", "gain": 1.0}, {"kind": "wgrad b", "gain": 0.5}], {"wgrad a": (0.9, 1.1)})
    assert summary(3, gemms[:1], []) == "radar before step 3: 1 GEMMs, gains 1.000 to 1.000, no alarm"
    told = "no alarm; 1 of them NOT JUDGED, no band is known of wgrad b"
    assert summary(3, gemms, []).endswith(told) and "no alarm" not in summary(3, gemms, ["wgrad: mean gain"])


def test_a_link_in_the_place_of_the_record_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "radar.jsonl").symlink_to(victim)
    with pytest.raises(ValueError, match="symbolic link"):
        Radar(1, tmp_path)._write({"step": 1})
    assert victim.read_text() == "mine"


def test_a_part_of_the_batch():
    assert part_of(batch_of(0), 128)["tokens"].shape == (2, 64)
    assert part_of(batch_of(0), 16)["tokens"].shape == (1, 16)


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
