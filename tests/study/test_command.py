"""`halfbyte parity` as typed, on a tiny model that is really trained. Oracle: the same command without interruption,
and what the plan says."""

import dataclasses
import json

import pytest
from fakes import BASE, fake_parity

from halfbyte.cli.main import main
from halfbyte.io import dataclass_json
from halfbyte.study import runner
from halfbyte.train import CheckpointConfig, DivergedError, OptimizerConfig


@pytest.fixture(autouse=True, scope="module")
def _quick(one_cache, one_device):
    """Compiling is most of what these tests cost."""


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    small = dataclasses.replace(
        BASE,
        model=BASE.model.replace(layers=1),
        policy="mlp/down",  # one linear: what is quantized is most of what is compiled
        steps=6,
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup=1, schedule="constant"),
        checkpoint=CheckpointConfig(every=2),
    )
    path = tmp_path_factory.mktemp("config") / "tiny.json"
    dataclass_json.save_config(small, path)
    return path


def parity(config_file, out, *flags):
    return main(["parity", str(config_file), "--candidates", "nvfp4", "--out", str(out), "--radar", "-1", *flags])


def losses(out, arm, seed):
    lines = (out / "arms" / arm / f"seed-{seed}" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.slow
def test_a_whole_parity(config_file, tmp_path, monkeypatch, capfd, one_cache):
    """Interrupted after two runs, resumed with a diverging arm, then judged: every run once, in pairs."""
    real, calls = runner.train, []

    def interrupted(config, folder, **options):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(folder)
        return real(config, folder, **options)

    out = tmp_path / "p"
    monkeypatch.setattr(runner, "train", interrupted)
    assert parity(config_file, out, "--seeds", "1", "--steps", "6") == 75
    said = capfd.readouterr().out
    assert "stopped by SIGINT with 2 of 4 runs done; the same command goes on" in said
    assert "INCOMPLETE: 2 of 4 runs" in (out / "report.html").read_text()

    def diverging(config, folder, **options):
        result = real(config, folder, **options)
        if "control" in str(folder):
            raise DivergedError("step 6: loss nan")
        return result

    monkeypatch.setattr(runner, "train", diverging)
    assert parity(config_file, out, "--seeds", "1", "--steps", "6") == 3
    said = capfd.readouterr().out
    assert "2 of 4 runs are done already" in said and "DIVERGED at step 6; the other runs go on" in said
    assert said.count("VERDICT:") == 1 and "single run: no interval over seeds" in said
    assert "emulated" in said.split("Scope:")[1]
    # Paired: the first loss of every arm is that of the same weights on the same batch, but for rounding.
    first = [losses(out, arm, 0)[0] for arm in ("bf16", "nvfp4", "bf16-twin")]
    assert max(first) - min(first) < 0.05
    assert losses(out, "bf16", 0) != losses(out, "bf16-twin", 0)
    plan = json.loads((out / "plan.json").read_text())
    assert plan["margin"] == "0.5%" and plan["base"]["steps"] == 6

    assert parity(config_file, out, "--seeds", "1", "--steps", "6", "--margin", "1%") == 2
    assert "was planned with margin 0.5%" in " ".join(capfd.readouterr().err.split())
    assert main(["parity", str(config_file), "--out", str(out), "--report", "--json"]) == 3
    found = json.loads(capfd.readouterr().out)
    assert found["complete"] and found["controls"]["broken"]["word"] == "FAIL"
    assert set(one_cache) == {out / "compiled"}


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--margin", "0%"], "larger than 0"),
        (["--margin", "0.5"], "with its unit"),
        (["--seeds", "0"], "seeds must be 1 or more"),
        (["--looks", "2"], "looks must be rising"),
        (["--looks", "three"], "numbers of seeds"),
        (["--steps", "5", "--tokens", "5"], "not both"),
        (["--baseline", "bf17"], "no recipe named"),
        (["--candidates", "bf16"], "'bf16' is the baseline itself"),
        (["--host", "2/2"], "INDEX/HOSTS"),
        (["--within", "12"], "must be a time"),
        (["--branch"], "--branch was removed"),
    ],
)
def test_bad_input_exits_2(config_file, tmp_path, capfd, flags, message):
    import re

    assert parity(config_file, tmp_path / "p", *flags) == 2
    assert re.search(message, " ".join(capfd.readouterr().err.split()))
    assert not (tmp_path / "p" / "plan.json").exists()


def test_arms_that_differ_in_more_than_the_recipe_are_refused(config_file, tmp_path, capfd):
    arms = tmp_path / "arms.json"
    arms.write_text('{"wide": {"recipe": "nvfp4", "batch": 16}}')
    assert parity(config_file, tmp_path / "p", "--arms", str(arms)) == 2
    assert "changes batch" in " ".join(capfd.readouterr().err.split())


def test_a_report_without_a_plan_is_refused(config_file, tmp_path, capfd):
    assert parity(config_file, tmp_path / "p", "--report") == 2
    assert "holds no plan.json" in " ".join(capfd.readouterr().err.split())


@pytest.mark.slow
@pytest.mark.parametrize("typed", [["parity", "CONFIG"], ["league", "--model", "CONFIG", "--recipes", "nvfp4,mxfp4"]])
def test_an_edited_plan_is_refused_and_one_without_a_seal_is_said(typed, config_file, tmp_path, capfd):
    """A margin that is changed after the runs turns verdicts round; an earlier version's plan says nothing of edits."""
    typed = [str(config_file) if word == "CONFIG" else word for word in typed]
    fake_parity(tmp_path / "p")
    command, file = [*typed, "--out", str(tmp_path / "p"), "--report"], tmp_path / "p" / "plan.json"
    codes = [main([*command, "--json"])]
    assert json.loads(capfd.readouterr().out)["notes"] == []

    stored = json.loads(file.read_text())
    file.write_text(json.dumps(stored | {"margin": "5%"}))
    for again in (command, command[:-1]):
        assert main(again) == 2
        assert "plan.json was changed after it was written" in " ".join(capfd.readouterr().err.split())
    file.write_text(json.dumps({name: value for name, value in stored.items() if name != "seal"} | {"version": 2}))
    codes.append(main([*command, "--json"]))
    (note,) = json.loads(capfd.readouterr().out)["notes"]
    assert "plan.json has no seal" in note and codes[0] == codes[1] != 2
    assert note in (tmp_path / "p" / "report.md").read_text()


@pytest.mark.slow
def test_a_recipe_of_ones_own_is_judged_and_goes_on_while_its_file_is_the_same(
    config_file, tmp_path, monkeypatch, capfd
):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "train", interrupted)
    file = tmp_path / "mine.py"
    file.write_text("import halfbyte as hb\nhalf = hb.recipe('nvfp4_no_sr')\n")
    typed = ["parity", str(config_file), "--candidates", f"nvfp4,{file}:half", "--out", str(tmp_path / "p")]
    assert [main(typed), main(typed)] == [75, 75]
    arms = json.loads((tmp_path / "p" / "plan.json").read_text())["arms"]
    assert arms[2]["name"] == "mine-py-half" and arms[2]["changes"]["recipe"].startswith(f"{file}:half@")
    file.write_text("import halfbyte as hb\nhalf = hb.recipe('mxfp4')\n")
    assert main(typed) == 2 and "the file has changed since" in " ".join(capfd.readouterr().err.split())
