"""The stored vectors are what golden files and the NumPy oracle say, and a quantizer that is wrong does not pass.

Oracles: *golden* for NVFP4, the independent definitions of selftest_vectors.py for the rest.
"""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from halfbyte.formats import QTensor, quantize, selftest

_spec = importlib.util.spec_from_file_location("selftest_vectors", Path(__file__).with_name("selftest_vectors.py"))
oracle = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(oracle)


def small_file(path, *groups):
    """A vector file of some groups only; the cheap ones compile in half a second."""
    with np.load(selftest.VECTORS) as stored:
        np.savez(path, **{name: stored[name] for name in stored.files if name.partition("/")[0] in groups})
    return path


def test_the_stored_vectors_are_the_oracles():
    made = oracle.make()
    with np.load(selftest.VECTORS) as stored:
        assert set(stored.files) == set(made)
        for name in stored.files:
            np.testing.assert_array_equal(stored[name], made[name], err_msg=name)


def test_the_oracle_agrees_with_the_outside_stochastic_table():
    table = np.load(oracle.GOLDEN / "sr_software_e2m1.npz")
    numbers = ~np.isnan(table["x"])  # the oracle is not for NaN
    x = np.broadcast_to(table["x"][numbers, None], (numbers.sum(), 256))
    codes = oracle.stochastic_e2m1(x, np.broadcast_to(table["rbits8"].astype(np.uint8), x.shape))
    # The table folds a negative zero to zero.
    np.testing.assert_array_equal(
        np.where(codes == 8, 0, codes), np.where(table["codes"] == 8, 0, table["codes"])[numbers]
    )


@pytest.mark.slow
def test_every_quantizer_passes_here():
    checks = selftest.self_test()
    assert {check.name for check in checks} == {name.partition("/")[0] for name in oracle.make()}
    assert [check for check in checks if not check.passed] == []
    assert sum(check.num_compared for check in checks) > 150_000


@pytest.mark.parametrize("field", ["codes", "scales", "amax"])
def test_one_wrong_bit_is_found_and_named(tmp_path, field):
    path = small_file(tmp_path / "v.npz", "mxfp8")
    arrays = dict(np.load(path))
    arrays[f"mxfp8/{field}"].reshape(4, -1)[2, -1] ^= 1
    np.savez(path, **arrays)
    (check,) = selftest.self_test(path)
    assert not check.passed
    assert check.mismatches == 1
    assert field in check.first_mismatch and "outlier" in check.first_mismatch


def test_a_broken_quantizer_does_not_pass(tmp_path, monkeypatch):
    def rounds_to_zero(x, fmt, **options):
        made = quantize(x, fmt, **options)
        return QTensor(made.codes * 0, made.scales, made.amax, made.format, made.block)

    monkeypatch.setattr(selftest, "quantize", rounds_to_zero)
    (check,) = selftest.self_test(small_file(tmp_path / "v.npz", "fp8"))
    assert not check.passed


def test_vectors_that_cannot_be_read_do_not_pass(tmp_path):
    damaged = tmp_path / "damaged.npz"
    damaged.write_bytes(selftest.VECTORS.read_bytes()[:1000])
    for path in (damaged, tmp_path / "missing.npz"):
        (check,) = selftest.self_test(path)
        assert not check.passed
        assert "cannot be read" in check.what
