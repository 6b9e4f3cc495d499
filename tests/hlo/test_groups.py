"""Replica groups in each way XLA writes them. Oracle: groups and axes written by hand."""

import pytest

from halfbyte.hlo import HloParseError, mesh_axes_of_groups, parse_replica_groups
from halfbyte.hlo.collective_ops import Collective
from halfbyte.hlo.hlo_text import HloArray

MESH = {"data": 2, "fsdp": 2, "context": 1, "tensor": 2}  # device = 4 data + 2 fsdp + tensor


@pytest.mark.parametrize(
    "text, groups, axes",
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", ((0, 1), (2, 3), (4, 5), (6, 7)), ("tensor",)),
        ("[4,2]<=[8]", ((0, 1), (2, 3), (4, 5), (6, 7)), ("tensor",)),
        ("[4,2]<=[2,2,2]T(0,2,1)", ((0, 2), (1, 3), (4, 6), (5, 7)), ("fsdp",)),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7)), ("data",)),
        ("[2,4]<=[4,2]T(1,0)", ((0, 2, 4, 6), (1, 3, 5, 7)), ("data", "fsdp")),
        ("[1,8]<=[8]", ((0, 1, 2, 3, 4, 5, 6, 7),), ("data", "fsdp", "tensor")),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", ((0, 2, 4, 6), (1, 3, 5, 7)), ("data", "fsdp")),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_1'}", ((0, 1), (2, 3), (4, 5), (6, 7)), ("tensor",)),
        ("mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7)), ("fsdp",)),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", ((0, 2, 4, 6), (1, 3, 5, 7)), ("data", "fsdp")),
        ("mesh['a'=4,'b'=2], device_ids=([0,4,1,5,2,6,3,7]) {'b'}", ((0, 4), (1, 5), (2, 6), (3, 7)), ("data",)),
        ("mesh['a'=8] {'a':(1)4}", ((0, 2, 4, 6), (1, 3, 5, 7)), ("data", "fsdp")),
    ],
)
def test_groups_and_their_axes(text, groups, axes):
    found = parse_replica_groups(f", channel_id=1, replica_groups={text}, dimensions={{0}}")
    assert found is not None
    assert sorted(map(sorted, found)) == sorted(map(list, groups))
    assert mesh_axes_of_groups(found, MESH) == axes


def test_a_permutation_joins_the_devices_it_links():
    found = parse_replica_groups("source_target_pairs={{0,2},{2,0},{1,3},{3,1},{4,6},{6,4},{5,7},{7,5}}")
    assert found is not None and mesh_axes_of_groups(found, MESH) == ("fsdp",)


def test_what_is_over_no_axis_or_not_understood_is_an_error():
    with pytest.raises(HloParseError, match="over no axes of data=2,fsdp=2,context=1,tensor=2"):
        mesh_axes_of_groups(((0, 3), (1, 2), (4, 7), (5, 6)), MESH)
    with pytest.raises(HloParseError, match="cannot read the replica groups"):
        parse_replica_groups(", replica_groups=something")
    with pytest.raises(HloParseError, match="cannot read the order of 4 devices"):
        parse_replica_groups(", replica_groups=mesh['a'=4], device_ids=([1,0,3]) {'a'}")
    with pytest.raises(HloParseError, match="cannot read the devices of a mesh"):
        parse_replica_groups(", replica_groups=mesh['a'=4], turned {'a'}")
    assert parse_replica_groups(", replica_groups={}") is None
    assert parse_replica_groups(", source_target_pairs={}") == ()


def test_permutation_chain_joins_all_devices_into_one_group():
    found = parse_replica_groups("source_target_pairs={{0,1},{2,3},{0,2}}")
    assert [sorted(group) for group in found] == [[0, 1, 2, 3]]


def test_ragged_all_to_all_sends_the_smaller_of_its_buffers():
    """The output buffer has room for every row of every device."""
    sent, room = HloArray("bf16", (64, 128)), HloArray("bf16", (256, 128))
    for arrays in ((sent, room), (room, sent)):
        call = Collective(None, "ragged-all-to-all", arrays, 4, ("fsdp",), asynchronous=True, execution_count=1)
        assert call.array_bytes_per_call == 64 * 128 * 2
