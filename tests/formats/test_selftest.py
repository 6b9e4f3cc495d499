"""The stored vectors are what golden files and the NumPy oracle say, and a quantizer that is wrong does not pass.

Oracles: *golden* for NVFP4, `oracle_table` for the rest.
"""

import numpy as np
import oracle_table as table
import pytest
import selftest_vectors

from halfbyte.formats import QTensor, quantize, selftest


def small_file(path, *groups):
    """A vector file of some groups only; the cheap ones compile in half a second."""
    with np.load(selftest.VECTORS) as stored:
        np.savez(path, **{name: stored[name] for name in stored.files if name.partition("/")[0] in groups})
    return path


def test_stored_vectors_equal_golden_and_table():
    made = selftest_vectors.make()
    with np.load(selftest.VECTORS) as stored:
        assert set(stored.files) == set(made)
        for name in stored.files:
            np.testing.assert_array_equal(stored[name], made[name], err_msg=name)


def test_oracle_equals_outside_stochastic_table():
    stored = np.load(selftest_vectors.GOLDEN / "sr_software_e2m1.npz")
    x = np.broadcast_to(stored["x"][:, None], (stored["x"].size, 256))
    codes = table.encode(x, "E2M1", "stochastic", np.broadcast_to(stored["rbits8"].astype(np.uint8), x.shape))
    number = ~np.isnan(stored["x"])
    # The stored table folds a negative zero to zero.
    made, theirs = (np.where(c == 8, 0, c)[number] for c in (codes, stored["codes"]))
    np.testing.assert_array_equal(made, theirs)


@pytest.mark.slow
def test_self_test_of_every_quantizer_passes():
    checks = selftest.self_test()
    assert {check.name for check in checks} == {name.partition("/")[0] for name in selftest_vectors.make()}
    assert [check for check in checks if not check.passed] == []
    assert sum(check.num_compared for check in checks) > 150_000


@pytest.mark.parametrize("field", ["codes", "scales", "amax"])
def test_self_test_names_one_wrong_bit(tmp_path, field):
    path = small_file(tmp_path / "v.npz", "mxfp8")
    arrays = dict(np.load(path))
    arrays[f"mxfp8/{field}"].reshape(4, -1)[2, -1] ^= 1
    np.savez(path, **arrays)
    (check,) = selftest.self_test(path)
    assert not check.passed
    assert check.mismatches == 1
    assert field in check.first_mismatch and "outlier" in check.first_mismatch


def test_self_test_of_broken_quantizer_fails(tmp_path, monkeypatch):
    def rounds_to_zero(x, fmt, **options):
        made = quantize(x, fmt, **options)
        return QTensor(made.codes * 0, made.scales, made.amax, made.format, made.block)

    monkeypatch.setattr(selftest, "quantize", rounds_to_zero)
    (check,) = selftest.self_test(small_file(tmp_path / "v.npz", "fp8"))
    assert not check.passed


def test_self_test_of_unreadable_vectors_fails(tmp_path):
    damaged = tmp_path / "damaged.npz"
    damaged.write_bytes(selftest.VECTORS.read_bytes()[:1000])
    for path in (damaged, tmp_path / "missing.npz"):
        (check,) = selftest.self_test(path)
        assert not check.passed
        assert "cannot be read" in check.what
