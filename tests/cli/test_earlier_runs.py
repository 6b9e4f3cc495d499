"""A run directory that an earlier version wrote goes on, is evaluated at its end, verified and exported.

`runs/e649e66.tar.xz`: four NVFP4 steps by the command of commit e649e66 (one layer, synthetic data, JAX 0.10.2, no
report), which sealed its config alone. LOSSES are those of two steps more by that commit's own resume.
"""

import json
import tarfile
from pathlib import Path

import pytest

from halfbyte.cli.main import main
from halfbyte.interchange import Folder

pytestmark = pytest.mark.usefixtures("one_device")

KEPT = Path(__file__).with_name("runs") / "e649e66.tar.xz"
LOSSES, VALIDATION = (4.2258076667785645, 4.187419891357422), 4.205428123474121


@pytest.fixture
def run(tmp_path):
    with tarfile.open(KEPT) as archive:
        archive.extractall(tmp_path / "run", filter="data")
    return tmp_path / "run"


@pytest.mark.slow
def test_it_resumes_where_its_own_version_would(run, capfd):
    assert main(["train", "--run-dir", str(run), "--steps", "6", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    fifth, sixth = (line["loss"] for line in lines if line.get("step", 0) > 4 and "grad_norm" in line)
    assert fifth == pytest.approx(LOSSES[0], rel=1e-5)  # of the weights that were read; another machine sums otherwise
    assert (sixth, found["validation"]["all"]) == pytest.approx((LOSSES[1], VALIDATION), rel=1e-3)


def test_it_is_verified_and_exported(run, tmp_path):
    assert main(["verify", str(run)]) == 0
    assert main(["export", str(run), "--out", str(tmp_path / "hf")]) == 0
    with Folder(tmp_path / "hf") as exported:
        assert exported.read("model.layers.0.mlp.down_proj.weight").shape == (32, 32)
