"""`bench --flags` and `--mock-gpus`: what is run, what is printed. Oracle: children and devices written here."""

import os
import sys

import pytest

from halfbyte import bench, launch
from halfbyte.bench.flag_sets import SetResult, measure_set, ratios
from halfbyte.cli.bench import Args, prepare
from halfbyte.cli.flags import words_of
from halfbyte.cli.main import main
from halfbyte.launch import supervise

CHILD = """
import json, sys
name = sys.argv[sys.argv.index("--flags") + 1]
if name == "none":
    sys.exit("Unknown flag in XLA_FLAGS")
rows = [{"recipe": "bf16", "remat": "none", "milliseconds": 80.0}]
held = {"xla_gpu_a": "true", "xla_gpu_b": None, "NCCL_X": "1"}
settings = [{"name": name, "value": value, "kept": name == "xla_gpu_a"} for name, value in held.items()]
print(json.dumps({"rows": rows, "settings": settings, "argv": sys.argv[1:]}))
"""


def row(config, **_) -> bench.Measured:
    return bench.Measured(config.recipe, "mlp", config.remat, "", milliseconds=10.0, loss=3.0)


def result(name: str, milliseconds: float) -> SetResult:
    return SetResult(name, ({"recipe": "bf16", "remat": "none", "milliseconds": milliseconds},))


def test_ratios_are_to_the_first_set():
    found = ratios([result("recommended", 100.0), result("none", 80.0), SetResult("broken", note="failed")])
    assert found == {("recommended", "bf16", "none"): 1.0, ("none", "bf16", "none"): 1.25}


@pytest.mark.slow
def test_a_set_is_measured_in_a_process_of_its_own_and_may_fail():
    command = [sys.executable, "-c", CHILD, "bench", "demo", "--seq", "32"]
    good, bad = measure_set("recommended", command), measure_set("none", command)
    assert good.rows[0]["milliseconds"] == 80.0
    assert good.circumstances["argv"] == ["bench", "demo", "--seq", "32", "--flags", "recommended", "--json"]
    assert bad.rows == () and "Unknown flag in XLA_FLAGS" in bad.note


def test_the_command_gives_its_children_its_own_flags():
    args = Args("llama3-8b", recipes="bf16", layers=16, mock_gpus=8, largest_batch=True, flags="all")
    flags = words_of(args, without=("flags", "out"))
    assert flags == "llama3-8b --recipes bf16 --layers 16 --largest-batch --mock-gpus 8".split()


def joined(shown: str) -> str:
    """The table's last column, its lines put together."""
    return " ".join(line.rstrip().rpartition("   ")[2].strip() for line in shown.splitlines())


def test_a_measurement_says_which_settings_it_ran_under(monkeypatch, capsys):
    monkeypatch.setattr(launch, "visible_gpus", lambda: ["NVIDIA H200"])
    for name in ("XLA_FLAGS", *(setting.name for setting in launch.recommended("NVIDIA H200", several=False))):
        monkeypatch.setenv(name, "")  # put back afterwards
        monkeypatch.delenv(name)
    monkeypatch.setattr(launch, "start", lambda config, say: None)
    _, settings = prepare(Args("demo"))
    held = {each["name"]: each["value"] for each in settings if each["value"] is not None}
    flags = os.environ["XLA_FLAGS"].split()
    assert sorted(f"--{name}={value}" for name, value in held.items() if name.startswith("xla_")) == sorted(flags)
    assert None not in [each["value"] for each in settings]  # this XLA knows them all


def test_the_table_of_sets(monkeypatch, capsys):
    monkeypatch.setattr(supervise, "ENTRY", (sys.executable, "-c", CHILD))
    monkeypatch.setattr(launch, "visible_gpus", lambda: ["NVIDIA H200"])
    assert main(["bench", "demo", "--flags", "recommended,none", "--mock-gpus", "8"]) == 3  # one set failed
    shown = capsys.readouterr().out
    assert "80.0" in shown and "1.000" in shown and "Unknown flag" in shown
    assert "a=true (yours), b LEFT OUT: unknown to this XLA" in joined(shown) and "NCCL" not in shown
    told = [line for line in shown.splitlines() if ("recommended" in line and "vs" not in line) or "none" in line]
    assert len(told) >= 4 and all("compute only" in line for line in told)


@pytest.mark.parametrize(
    "flags, match", [("recommended,none", "this machine has none"), ("fastest", "no set of flags is called fastest")]
)
def test_sets_need_a_gpu_and_a_name_that_exists(flags, match, monkeypatch, capsys):
    monkeypatch.setattr(launch, "visible_gpus", list)
    assert main(["bench", "demo", "--flags", flags]) == 2
    assert match in " ".join(capsys.readouterr().err.split())


def test_every_line_of_a_mocked_measurement_says_compute_only(monkeypatch, capsys):
    monkeypatch.setattr(launch, "visible_gpus", list)
    monkeypatch.setattr(
        launch, "mock_gpus", lambda count, environ, gpu: launch.Mock(count, "compute only", mocked=True)
    )
    monkeypatch.setattr(launch, "check_mock", lambda mock: None)
    monkeypatch.setattr(bench, "measure", row)
    assert main(["bench", "demo", "--recipes", "bf16", "--mock-gpus", "8", "--mesh", "fsdp=8"]) == 0
    out = capsys.readouterr().out
    assert "mostly zeros" in out
    lines = [line for line in out.splitlines() if any(word.isalpha() for word in line.split())]
    telling = [line for line in lines if "recipe" not in line and "GEMM" not in line]  # but for the table's head
    assert len(telling) >= 3 and all("compute only" in line for line in telling)


def test_a_mocked_row_has_no_loss():
    assert bench.without_communication(bench.Measured("bf16", "mlp", "none", "", loss=3.0)).loss is None


def test_without_a_gpu_the_devices_of_the_cpu_are_measured_and_said(monkeypatch, capsys):
    monkeypatch.setattr(launch, "visible_gpus", list)
    monkeypatch.setattr(bench, "measure", row)
    assert main(["bench", "demo", "--recipes", "bf16", "--mock-gpus", "8", "--mesh", "fsdp=8"]) == 0
    assert "8 CPU devices, nothing mocked" in capsys.readouterr().out
