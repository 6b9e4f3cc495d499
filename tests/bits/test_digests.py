"""Bits of the linears. Oracle: commit 8cfaecd, whose digests are in digests_8cfaecd.json."""

import json
import os
import subprocess
import sys
from pathlib import Path

import digests
import jax
import pytest

STORED = Path(__file__).with_name("digests_8cfaecd.json")
REMOVED = ("averis",)  # recipes that later commits removed on purpose


@pytest.mark.slow
def test_bits_are_those_of_8cfaecd(quick_environment):
    recorded = json.loads(STORED.read_text())["facts"]
    here = {"jax": jax.__version__, "cpu": os.uname().machine}
    if here != recorded:
        pytest.skip(f"digests were recorded on {recorded}, this is {here}: compare two commits by hand")
    command = [sys.executable, digests.__file__, "--compare", str(STORED), "--removed", ",".join(REMOVED)]
    done = subprocess.run(command, env=os.environ | quick_environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


def test_differences_name_case_and_leaf():
    old = {"a": {"y": "1", "d0": "2"}, "b": {"y": "3"}, "c": {"y": "4"}}
    new = {"a": {"y": "1", "d0": "5"}, "b": {"y": "3"}, "d": {"y": "6"}}
    assert list(digests.differences(old, new).values()) == ["differs: a: d0", "only in old: c", "only in new: d"]
    assert digests.differences(old, old) == {}


def test_digests_see_values_shapes_and_dtypes():
    """One bit, one axis and one dtype each change a digest."""
    x = digests.array(1, 2, 4)
    variants = [x, x.at[0, 0].set(-0.0), x.reshape(4, 2), x.astype("bfloat16")]
    seen = [digests.digests(lambda x: x, (each,), jit=False)["y"] for each in variants]
    assert len(set(seen)) == len(variants)
