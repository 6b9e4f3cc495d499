"""How long a collective takes. Oracle: bytes counted by hand, rates of XLA's table and of a network card."""

import pytest

from halfbyte.devices import device_by_name
from halfbyte.hlo.collective_ops import network_bytes
from halfbyte.plan.cluster_model import ACHIEVED_FRACTION, COLLECTIVE_LATENCY_S, DeviceRates

H200 = DeviceRates(device_by_name("h200"), {"bf16": 1e15}, memory=1e12, own_kernel_bandwidth=1e12)
GB, CARD = 1e9, 50e9 * ACHIEVED_FRACTION
NEAR, FAR = COLLECTIVE_LATENCY_S["nvlink"], COLLECTIVE_LATENCY_S["network"] * (1 + 1 / 4)  # of two domains


@pytest.mark.parametrize("kind", ["all-to-all", "ragged-all-to-all"])
def test_all_to_all_sends_half_of_own_rows_to_the_other_board(kind):
    """Two boards of 8: of a device's own gigabyte 500 MB leave through its own card, whatever the others send."""
    assert H200.collective_seconds(kind, GB, 8, 2) == (pytest.approx(0.5 * GB / CARD + FAR), "network")


def test_ring_over_two_boards_crosses_with_15_of_16_parts():
    """A ring over 16 carries 15/16 of the array over each link; eight cards share the link between the boards."""
    seconds, link = H200.collective_seconds("all-gather", GB, 8, 2)
    assert link == "network" and seconds == pytest.approx(15 / 16 * GB / 8 / CARD + FAR)


@pytest.mark.parametrize("kind, at_8", [("all-gather", 402e9), ("reduce-scatter", 376e9), ("all-reduce", 230e9)])
@pytest.mark.parametrize("group, share", [(8, 7 / 8), (4, 3 / 4), (2, 1 / 2)])
def test_small_group_sends_a_smaller_part_of_the_array(kind, at_8, group, share):
    """Links are as fast for 2 as for 8: of a pair half of the array is sent, of 8 devices 7/8."""
    seconds, link = H200.collective_seconds(kind, GB, group, 1)
    assert link == "nvlink" and seconds == pytest.approx(GB / at_8 * share / (7 / 8) + NEAR)


@pytest.mark.parametrize("kind, inner, outer, sent", [
    ("all-gather", 1, 2, GB / 2), ("all-reduce", 1, 4, 2 * 3 / 4 * GB), ("reduce-scatter", 64, 2, 127 / 128 * GB / 64),
    ("all-to-all", 64, 2, GB / 2), ("collective-permute", 8, 2, GB),
])  # fmt: skip
def test_bytes_that_a_card_sends(kind, inner, outer, sent):
    assert network_bytes(kind, GB, inner, outer) == pytest.approx(sent)
