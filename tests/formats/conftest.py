"""What the tests of the formats share."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("formats", "oracle")]


@pytest.fixture
def golden_count(record_property):
    """Notes that `arrays` arrays of a golden file were compared; the sum is printed at the end of the run."""
    return lambda file, arrays: record_property("golden", [file, arrays])


@pytest.fixture(scope="session")
def hard_tensors():
    """float32 [cases, 64, 64]: ordinary numbers, and those that break quantizers; finite."""
    rng = np.random.default_rng(11)
    shape = (64, 64)
    normal = rng.standard_normal(shape)
    bits = rng.integers(0, 0x7F80_0000, shape).astype(np.uint32) | (rng.integers(0, 2, shape).astype(np.uint32) << 31)
    ties = rng.choice([0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6], shape) * rng.choice([-1, 1], shape)
    ties[:, ::16] = 6 * 448 * np.exp2(rng.integers(-8, 1, (64, 4)))
    cases = [
        normal,
        normal * 3e-4,
        normal * np.exp2(rng.integers(-20, 20, shape)),
        normal * np.exp2(np.repeat(rng.integers(-140, 100, (64, 4)), 16, 1)),  # blocks far apart
        bits.view(np.float32),  # every exponent
        ties,
        normal * 2.0**-126,  # around the smallest normal number
        normal * 2.0**-140,  # subnormal
        normal * 1e38 / np.abs(normal).max(),
        np.where(rng.random(shape) < 0.001, 1e4, normal * 1e-3),  # outliers
        np.zeros(shape),
        -np.zeros(shape),
    ]
    return np.stack(cases).astype(np.float32)
