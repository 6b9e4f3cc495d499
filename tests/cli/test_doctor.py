"""`halfbyte doctor`: says what is here, and exits with 3 when a quantizer is wrong."""

import json

import numpy as np
import pytest

from halfbyte.cli import doctor
from halfbyte.cli.main import main
from halfbyte.devices import DEVICES, UNITS
from halfbyte.formats import selftest


@pytest.fixture
def few_vectors(tmp_path):
    """One cheap group; the whole file is run by tests/formats/test_selftest.py."""
    path = tmp_path / "vectors.npz"
    with np.load(selftest.VECTORS) as stored:
        np.savez(path, **{name: stored[name] for name in stored.files if name.startswith("mxfp4/")})
    return path


def test_healthy(few_vectors, capfd):
    assert main(["doctor", "--vectors", str(few_vectors), "--json"]) == 0
    out, err = capfd.readouterr()
    data = json.loads(out)
    assert data["passed"] is True
    assert data["versions"]["jax"]
    assert [check["name"] for check in data["checks"]] == ["mxfp4"]
    assert {row["format"] for row in data["formats"]} == {"bf16", "fp8", "mxfp8", "mxfp4", "nvfp4"}
    for words in ("Devices", "Formats", "Self-test", "all 1 quantizers give the stored bits here"):
        assert words in err


@pytest.mark.parametrize("device, native", [("cpu", {"bf16"}), ("h200", {"bf16", "fp8"}), ("gb300", set(UNITS))])
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


def test_a_corrupt_vector_exits_3(few_vectors, capfd):
    arrays = dict(np.load(few_vectors))
    arrays["mxfp4/codes"][0, 3, 5] ^= 1
    np.savez(few_vectors, **arrays)
    assert main(["doctor", "--vectors", str(few_vectors)]) == 3
    out = capfd.readouterr().out
    assert "FAIL: 1 differ; first codes[3, 5] of plain" in out
    assert "1 of 1 did not pass" in out


def test_a_broken_quantizer_exits_3(few_vectors, capfd, monkeypatch):
    right = selftest.quantize
    monkeypatch.setattr(selftest, "quantize", lambda x, fmt, **options: right(x * x.dtype.type(0), fmt, **options))
    assert main(["doctor", "--vectors", str(few_vectors), "--json"]) == 3
    assert json.loads(capfd.readouterr().out)["passed"] is False


def test_unreadable_vectors_exit_3(tmp_path, capfd):
    assert main(["doctor", "--vectors", str(tmp_path / "none.npz")]) == 3
    assert "cannot be read" in capfd.readouterr().out
