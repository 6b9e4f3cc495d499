"""A small step compiled for GPUs that are not here, by the command. Oracle: the model's own FLOPs, what FSDP sends."""

import json
import sys

import pytest

import halfbyte.plan.compiled_step  # noqa: F401 (the module is changed below)
from halfbyte.cli.main import main

pytestmark = pytest.mark.slow

MODULE = sys.modules["halfbyte.plan.compiled_step"]
STEP = "plan demo --device h200 --count 2 --layers 1 --seq 128 --batch 4 --recipe bf16 --json".split()


@pytest.mark.cuda_compiler
def test_the_command_compiles_reads_and_keeps(capfd, monkeypatch, tmp_path):
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path))
    code = main(STEP)
    out, err = capfd.readouterr()
    assert code == 0, err
    first, row = json.loads(out), json.loads(out)["recipes"]["bf16"]
    assert "compiling demo in bf16" in err and row["compiled"] and row["fits"] and not row["problems"]
    assert row["gemm_flops"] == pytest.approx(row["gemm_flops_needed"], rel=0.02)
    assert {each["format"] for each in row["gemms"]} == {"bf16"}
    sent = {each["kind"] for each in row["collectives"] if each["axes"] == ["fsdp"]}
    assert "all-gather" in sent and {"reduce-scatter", "all-reduce"} & sent
    assert {"optimizer", "loss"} <= set(row["bytes_by_purpose"]) and row["step_time_s"] > 0

    monkeypatch.setattr(MODULE, "profile_compiled_step", lambda *step: pytest.fail("compiled again"))
    assert main(STEP) == 0 and json.loads(capfd.readouterr().out) == first
