"""`bench --flags` and `--mock-gpus`: what is set, what is printed. Oracle: devices written here."""

import os

import pytest

from halfbyte import distributed
from halfbyte.cli.bench import Args, prepare_environment
from halfbyte.cli.main import main
from halfbyte.devices import xla_flags
from halfbyte.plan import step_timing


def row(config, **_) -> step_timing.StepMeasurement:
    return step_timing.StepMeasurement(config.recipe, "mlp", config.remat, "", milliseconds=10.0, loss=3.0)


def test_a_measurement_says_which_settings_it_ran_under(monkeypatch, capsys):
    monkeypatch.setattr(xla_flags, "visible_gpus", lambda: ["NVIDIA H200"])
    for name in ("XLA_FLAGS", *(setting.name for setting in xla_flags.recommended_flags("NVIDIA H200", several=False))):
        monkeypatch.setenv(name, "")  # put back afterwards
        monkeypatch.delenv(name)
    monkeypatch.setattr(distributed, "initialize_distributed", lambda config, say: None)
    _, settings = prepare_environment(Args("demo"))
    held = {each["name"]: each["value"] for each in settings if each["value"] is not None}
    flags = os.environ["XLA_FLAGS"].split()
    assert sorted(f"--{name}={value}" for name, value in held.items() if name.startswith("xla_")) == sorted(flags)
    assert None not in [each["value"] for each in settings]  # this XLA knows them all


@pytest.mark.parametrize("flags", ["fastest", "recommended,none", "all"])
def test_flags_is_one_set_that_exists(flags, capsys):
    assert main(["bench", "demo", "--flags", flags]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert f"no set of XLA flags is called '{flags}'" in shown and "once per set" in shown


def test_every_line_of_a_mocked_measurement_says_compute_only(monkeypatch, capsys):
    monkeypatch.setattr(xla_flags, "visible_gpus", list)
    monkeypatch.setattr(
        distributed,
        "mock_gpu_topology",
        lambda count, environ, gpu: distributed.MockedDevices(count, "compute only", mocked=True),
    )
    monkeypatch.setattr(distributed, "check_mock", lambda mock: None)
    monkeypatch.setattr(step_timing, "measure_step", row)
    assert main(["bench", "demo", "--recipes", "bf16", "--mock-gpus", "8", "--mesh", "fsdp=8"]) == 0
    out = capsys.readouterr().out
    assert "mostly zeros" in out
    lines = [line for line in out.splitlines() if any(word.isalpha() for word in line.split())]
    telling = [line for line in lines if "recipe" not in line and "GEMM" not in line]  # but for the table's head
    assert len(telling) >= 3 and all("compute only" in line for line in telling)


def test_a_mocked_row_has_no_loss():
    assert step_timing.as_compute_only(step_timing.StepMeasurement("bf16", "mlp", "none", "", loss=3.0)).loss is None


def test_without_a_gpu_the_devices_of_the_cpu_are_measured_and_said(monkeypatch, capsys):
    monkeypatch.setattr(xla_flags, "visible_gpus", list)
    monkeypatch.setattr(step_timing, "measure_step", row)
    assert main(["bench", "demo", "--recipes", "bf16", "--mock-gpus", "8", "--mesh", "fsdp=8"]) == 0
    assert "8 CPU devices, nothing mocked" in capsys.readouterr().out
