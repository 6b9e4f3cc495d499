"""The league: the order of many candidates, and the rule that drops some. Oracle: the gaps that were put in."""

import json
import re

import pytest
from fakes import fake_parity, plan_of, rate

from halfbyte.cli.main import main
from halfbyte.cli.study_flags import print_study_table
from halfbyte.recipes import recipe_names
from halfbyte.study import runner
from halfbyte.study.analysis import analyse_study
from halfbyte.study.control_arms import pairwise_comparison, ranking, shifted_twin
from halfbyte.study.equivalence_test import SIGNIFICANCE_LEVEL, EquivalenceMargin, paired_t_interval
from halfbyte.study.study_plan import load_plan
from halfbyte.study.study_report import rank_rows, write_report

NAMES = ("nvfp4", "mxfp4", "fp8", "mxfp8")
PUT_IN = {"bf16": 0.0, "nvfp4": 0.02, "mxfp4": 0.06, "fp8": 0.002, "mxfp8": 0.004, "bf16-twin": 0.001,
          "control-fp4_one_scale": 0.4}  # fmt: skip


def test_the_order_its_intervals_and_the_places_that_are_known(tmp_path):
    data = analyse_study(fake_parity(tmp_path, plan_of(candidates=NAMES), gaps=PUT_IN, noise=2e-5), tmp_path)
    found = {row["arm"]: row for row in data["ranking"]}
    assert list(found) == ["fp8", "mxfp8", "nvfp4", "mxfp4"]
    assert [row["places"] for row in found.values()] == [[1, 1], [2, 2], [3, 3], [4, 4]]
    gaps = list(data["arms"][1]["gaps"].values())
    assert found["nvfp4"]["high"] == pytest.approx(paired_t_interval(gaps, 1 - 0.1 / 4).high)


def test_places_that_noise_leaves_open_and_single_runs():
    gaps = {"a": {0: 0.1, 1: 0.3, 2: 0.2}, "b": {0: 0.3, 1: 0.1, 2: 0.25}, "c": {0: 9.1, 1: 9.3, 2: 9.2}}
    assert [(row["arm"], row["places"]) for row in ranking(gaps, of=3, costs={})] == [
        ("a", [1, 2]), ("b", [1, 2]), ("c", [3, 3]),
    ]  # fmt: skip
    single = ranking({name: {0: found[0]} for name, found in gaps.items()}, of=3, costs={})
    assert [row["places"] for row in single] == [[1, 3]] * 3 and single[0]["low"] is None
    lost = ranking(gaps | {"a": gaps["a"] | {1: float("inf")}, "d": {0: float("inf")}}, of=4, costs={})
    assert [(row["arm"], row["diverged"]) for row in lost] == [("b", 0), ("c", 0), ("a", 1), ("d", 1)]
    many = ranking(gaps, of=40, costs={})  # the others were dropped, and still count
    assert many[0]["high"] > ranking(gaps, of=3, costs={})[0]["high"]


@pytest.mark.slow
@pytest.mark.parametrize("names, ranked", [(NAMES[:1], ["nvfp4"]), (NAMES[:2], ["nvfp4", "mxfp4"])])
def test_one_or_two_recipes_are_ranked_on_the_page(tmp_path, capsys, names, ranked):
    plan = fake_parity(tmp_path, plan_of(candidates=names, seeds=2), gaps=PUT_IN)
    data = analyse_study(plan, tmp_path)
    text = write_report(plan, tmp_path, data)["html"].read_text()
    assert ">Ranking<" in text and [row[1] for row in rank_rows(data)] == ranked
    assert {row[3] for row in rank_rows(data)} == {"not known over 2"}
    print_study_table(data)
    assert ("its place may be" in capsys.readouterr().out) == (len(names) > 1)  # one alone is in the table above


def test_a_league_as_typed_is_interrupted_resumed_and_shared_by_hosts(tmp_path, monkeypatch, capfd):
    out, trained = tmp_path / "l", []
    fake = rate.invented(lambda arm, seed: 3 * (1 + PUT_IN[arm] + 0.001 * seed))

    def train(config, folder, **options):
        if len(trained) == 3:
            trained.append(None)
            raise KeyboardInterrupt
        trained.append((config.steps, folder.parent.name, config.seed))
        return fake(config, folder, **options)

    def league(*flags):
        return main(["league", "--recipes", ",".join(NAMES), "--steps", "6", "--data", "synthetic", "--radar", "-1",
                     "--out", str(out), *flags])  # fmt: skip

    monkeypatch.setattr(runner, "train", train)
    assert league() == 75 and len(trained) == 4
    assert [league("--host", host) for host in ("0/2", "1/2")] == [0, 0]
    capfd.readouterr()
    assert league("--host", "0/2", "--json") == 0
    found = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert {row["arm"] for row in found["ranking"]} == set(NAMES) and found["complete"]
    begun = [job for job in trained if job]
    assert len(begun) == len(set(begun)) == 7 * 3 and {steps for steps, *_ in begun} == {6}
    assert load_plan(out).base.policy == "all_linear"


SAME = {"nvfp4_1d_weights": "it is nvfp4_no_2d by another name"}
WIDE = SAME | dict.fromkeys(("quartet2", "tetrajet2"), "layers/attention/k")  # blocks of 128, and k has 64 outputs
OF_EXPERTS = dict.fromkeys(("nvfp4_row", "nvfp4_remainder", "halfbyte"), "for experts: fprop")
OF_EXPERTS |= {"fp8_delayed": "for experts: its scales"}


@pytest.mark.slow(fast_cases=["moe-demo-without1"])
@pytest.mark.parametrize("model, without", [("demo", WIDE), ("moe-demo", WIDE | OF_EXPERTS)])
def test_the_field_is_every_preset_that_the_model_allows(tmp_path, monkeypatch, capfd, model, without):
    """What is named and cannot run is an error, before the first arm is trained."""
    monkeypatch.setattr(runner, "train", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(["league", "--model", model, "--steps", "4", "--out", str(tmp_path / "all")]) == 75
    said = " ".join(capfd.readouterr().out.split())
    assert all(re.search(rf"\b{name} is left out: (recipe {name} )?{why}", said) for name, why in without.items())
    arms = {arm.name for arm in load_plan(tmp_path / "all").arms}
    assert arms == {*recipe_names(), "bf16-twin", "control-fp4_one_scale"} - {*without, "fp4_one_scale"}
    field = ["--recipes", "nvfp4,quartet2", "--steps", "4", "--out", str(tmp_path / "two")]
    assert main(["league", "--model", model, *field]) == 2
    said = " ".join(capfd.readouterr().err.split())
    assert "arm 'quartet2' cannot run: layers/attention/k" in said and not (tmp_path / "two").exists()


@pytest.mark.parametrize("flags, message", [
    (["--recipes", "nvfp5"], "no recipe named"),
    (["--screen", "3"], "--screen was removed; name the recipes with --recipes"),
])  # fmt: skip
def test_bad_input_exits_2(tmp_path, capfd, flags, message):
    assert main(["league", "--recipes", "nvfp4", "--steps", "6", "--out", str(tmp_path / "l"), *flags]) == 2
    assert message in " ".join(capfd.readouterr().err.split()) and not (tmp_path / "l").exists()


def test_pairs_of_a_league_share_the_significance_level():
    """Four recipes are six pairs: a pair that differs at 5% alone, and not at 5% / 6, leaves its order open."""
    gaps = {"nvfp4": {0: 0.00, 1: 0.02, 2: 0.01}, "fp8": {0: 0.10, 1: 0.13, 2: 0.07}, "mxfp4": {}, "mxfp8": {}}
    pair = [gaps["nvfp4"][seed] - gaps["fp8"][seed] for seed in range(3)]
    high = {pairs: paired_t_interval(pair, 1 - 2 * SIGNIFICANCE_LEVEL / pairs).high for pairs in (1, 3, 6)}
    assert high[1] < high[3] < 0 < high[6]
    places = {row["arm"]: row["places"] for row in ranking(gaps, of=4, costs={})}
    assert places == {"nvfp4": [1, 2], "fp8": [1, 2]}
    assert [row["places"] for row in ranking(gaps, of=2, costs={})] == [[1, 1], [2, 2]]


def test_comparisons_with_the_first_share_the_significance_level():
    gaps = {"nvfp4": {0: 0.00, 1: 0.02, 2: 0.01}, "fp8": {0: 0.10, 1: 0.16, 2: 0.07}, "mxfp4": {0: 1.0}}
    (line,) = pairwise_comparison(["nvfp4", "fp8"], gaps, "%")
    assert "+0.100%, 90% interval over 3 seeds" in line and line.endswith(": told apart")
    line = pairwise_comparison(["nvfp4", "fp8", "mxfp4"], gaps, "%")[0]
    assert "95% interval over 3 seeds" in line


def test_shifted_twin_has_gaps_of_twice_the_margin():
    assert shifted_twin({3: 0.1, 5: -0.2}, EquivalenceMargin(0.5, relative=True)) == {3: 1.1, 5: 0.8}
