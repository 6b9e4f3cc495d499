"""`halfbyte doctor`: says what is here, and exits with 3 when a quantizer is wrong."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest

from halfbyte.cli import doctor, hardware_acceptance
from halfbyte.cli.main import main
from halfbyte.devices import DEVICES, TENSOR_CORE_FORMATS
from halfbyte.formats import selftest


@pytest.fixture
def few_vectors(tmp_path, monkeypatch):
    """One cheap group; the whole file is run by tests/formats/test_selftest.py."""
    path = tmp_path / "vectors.npz"
    with np.load(selftest.VECTORS) as stored:
        np.savez(path, **{name: stored[name] for name in stored.files if name.startswith("mxfp4/")})
    monkeypatch.setattr(selftest, "VECTORS", path)
    return path


def test_healthy(few_vectors, capfd):
    assert main(["doctor", "--json"]) == 0
    out, err = capfd.readouterr()
    data = json.loads(out)
    assert data["passed"] is True
    assert data["versions"]["jax"]
    assert [check["name"] for check in data["checks"]] == ["mxfp4"]
    assert {row["format"] for row in data["formats"]} == {"bf16", "fp8", "mxfp8", "mxfp4", "nvfp4"}
    for words in ("Devices", "Formats", "Self-test", "all 1 quantizers give the stored bits here"):
        assert words in err


@pytest.mark.parametrize(
    "device, native", [("cpu", {"bf16"}), ("h200", {"bf16", "fp8"}), ("gb300", set(TENSOR_CORE_FORMATS) - {"mxfp4"})]
)
def test_what_is_native_where(device, native):
    rows = doctor.format_rows({"table": DEVICES[device]})
    assert {row["format"] for row in rows if row["training"] == "native"} == native
    assert all(row["training"] in ("native", "emulated, exact") and row["backend"] for row in rows)


def test_every_gemm_says_who_multiplies_and_who_made_its_operands():
    rows = {row["format"]: row for row in doctor.format_rows({"table": DEVICES["h200"]})}
    assert (rows["nvfp4"]["backend"], rows["nvfp4"]["operands"]) == ("fused", "fused")
    assert {name: gemm["multiplied_by"] for name, gemm in rows["nvfp4"]["gemms"].items()} == {
        "fprop": "fused", "dgrad": "fused", "wgrad": "fused",
    }  # fmt: skip
    assert rows["mxfp4"]["gemms"]["wgrad"]["multiplied_by"] == "xla"


@pytest.mark.slow
def test_a_corrupt_vector_exits_3(few_vectors, capfd):
    arrays = dict(np.load(few_vectors))
    arrays["mxfp4/codes"][0, 3, 5] ^= 1
    np.savez(few_vectors, **arrays)
    assert main(["doctor"]) == 3
    out = capfd.readouterr().out
    assert "FAIL: 1 differ; first codes[3, 5] of plain" in out
    assert "1 of 1 did not pass" in out


def test_a_broken_quantizer_exits_3(few_vectors, capfd, monkeypatch):
    right = selftest.quantize
    monkeypatch.setattr(selftest, "quantize", lambda x, fmt, **options: right(x * x.dtype.type(0), fmt, **options))
    assert main(["doctor", "--json"]) == 3
    assert json.loads(capfd.readouterr().out)["passed"] is False


def test_unreadable_vectors_exit_3(few_vectors, capfd):
    few_vectors.unlink()
    assert main(["doctor"]) == 3
    assert "cannot be read" in capfd.readouterr().out


ENTRY = re.compile(r"^- (.*?)(?=^- |^## |\Z)", re.MULTILINE | re.DOTALL)


def test_every_entry_of_unverified_names_its_line():
    text = (Path(__file__).parents[2] / "docs" / "unverified.md").read_text(encoding="utf-8")
    named = [re.findall(r"Line: `([\w-]+)`\.", entry) for entry in ENTRY.findall(text)]
    missing = [entry[:60] for entry, names in zip(ENTRY.findall(text), named, strict=True) if len(names) != 1]
    assert not missing, f"name a line of halfbyte.cli.hardware_acceptance, as 'Line: `name`.', in: {missing}"
    assert sorted(names[0] for names in named) == sorted(line.name for line in hardware_acceptance.ACCEPTANCE_ITEMS)
    assert all((line.check is None) == bool(line.manual_command) for line in hardware_acceptance.ACCEPTANCE_ITEMS)


def quick_lines(monkeypatch, *names):
    monkeypatch.setattr(
        hardware_acceptance,
        "ACCEPTANCE_ITEMS",
        [line for line in hardware_acceptance.ACCEPTANCE_ITEMS if line.name in names],
    )


def test_acceptance_without_a_gpu_says_what_is_missing(few_vectors, tmp_path, capfd, monkeypatch):
    quick_lines(monkeypatch, "mesh-mock", "device-peak", "native-gemms", "faults")
    monkeypatch.setattr(hardware_acceptance, "visible_gpus", list)
    out = tmp_path / "answers.json"
    assert main(["doctor", "--accept", "--out", str(out)]) == 0
    shown = capfd.readouterr().out
    found = {line["name"]: (line["outcome"], line["figure"]) for line in json.loads(out.read_text())["acceptance"]}
    assert found["mesh-mock"] == ("not possible here", "needs 2 NVIDIA GPUs, here 0")
    assert found["native-gemms"] == ("not possible here", "cpu has no NVFP4 units")
    assert found["faults"] == ("by hand", "make faults && make soak")
    assert "[1/4] mesh-mock: not possible here" in shown and "answers: " in shown


def test_a_missed_line_exits_3(few_vectors, tmp_path, capfd, monkeypatch):
    wrong = dataclasses.replace(
        hardware_acceptance.ACCEPTANCE_ITEMS[4], check=lambda gpus: hardware_acceptance.CheckOutcome("missed", "0.5x")
    )
    broken = dataclasses.replace(hardware_acceptance.ACCEPTANCE_ITEMS[5], check=lambda gpus: int("x"))
    monkeypatch.setattr(hardware_acceptance, "ACCEPTANCE_ITEMS", [wrong, broken])
    out = tmp_path / "answers.json"
    assert main(["doctor", "--accept", "--out", str(out), "--json"]) == 3
    lines = json.loads(capfd.readouterr().out)["acceptance"]
    assert [line["outcome"] for line in lines] == ["missed", "missed"]
    assert lines[1]["figure"].startswith("ValueError: invalid literal")


@pytest.mark.parametrize("mocked, outcome", [(80.0, "held"), (130.0, "missed")])
def test_a_mocked_step_is_compared_with_a_real_one(monkeypatch, mocked, outcome):
    asked = []

    def rows(*arguments):
        asked.append(arguments)
        return [{"recipe": "bf16", "milliseconds": mocked if "--mock-gpus" in arguments else 100.0}]

    monkeypatch.setattr(hardware_acceptance, "bench_rows", rows)
    found = hardware_acceptance.check_mock_against_real(["NVIDIA H200"] * 8)
    assert found.outcome == outcome and f"bf16 {100 / mocked:.3f}x" in found.figure
    assert "fsdp=8" in asked[0] and asked[1][-2:] == ("--mock-gpus", "8")


@pytest.mark.parametrize("serial, outcome", [(110.0, "held"), (90.0, "missed")])
def test_flags_are_compared(monkeypatch, serial, outcome):
    times = {"recommended": 100.0, "four": 105.0, "serial": serial, "none": 120.0}

    def rows(*arguments):
        return [{"recipe": "bf16", "milliseconds": 100.0}, {"recipe": "nvfp4", "milliseconds": times[arguments[-1]]}]

    monkeypatch.setattr(hardware_acceptance, "bench_rows", rows)
    found = hardware_acceptance.check_overlap_flags(["NVIDIA H200"] * 8)
    assert found.outcome == outcome
    assert f"nvfp4: recommended 100.0 ms, four 105.0 ms, serial {serial:.1f}" in found.figure
