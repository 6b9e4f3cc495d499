"""What the tests of the formats share."""

import pytest


@pytest.fixture
def golden_count(record_property):
    """Notes that `arrays` arrays of a golden file were compared; the sum is printed at the end of the run."""
    return lambda file, arrays: record_property("golden", [file, arrays])
