"""Oracle: the text and the numbers of devices, by hand. Racks are made of devices that exist in name only."""

from dataclasses import dataclass

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from halfbyte.distributed import (
    DEFAULT_MESH_AXES,
    axis_size,
    default_shape,
    make_mesh,
    mesh_to_text,
    parse_mesh,
    total_axis_sizes,
)
from halfbyte.distributed.mesh import check_slice_crossing, create_hybrid_device_order, slice_size


def test_parse_and_format_are_inverse():
    assert parse_mesh("tensor=2, fsdp=4") == {"fsdp": 4, "tensor": 2}
    assert parse_mesh("") == {}
    assert mesh_to_text(parse_mesh("tensor=2,fsdp=4,data=1")) == "fsdp=4,tensor=2"


def test_bad_mesh_text_is_refused():
    for text, message in (
        ("fsdp", "not AXIS=SIZE"), ("fsdp=0", "not AXIS=SIZE"), ("fsdp=-2", "not AXIS=SIZE"),
        ("fsdp=²", "not AXIS=SIZE"),
        ("fsdp=2,fsdp=4", "given twice"), ("dcn.data=2,dcn.data=4", "given twice"),
        ("tensr=2", "did you mean 'tensor'"), ("dcn.tensr=2", "did you mean 'tensor'"),
        ("pipeline=2", "the axes are data, fsdp, expert, context, tensor"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            parse_mesh(text)


def test_mesh_has_every_axis_and_tensor_varies_fastest():
    cpus = jax.devices("cpu")
    mesh = make_mesh({"fsdp": 4, "tensor": 2}, cpus)
    assert mesh.axis_names == DEFAULT_MESH_AXES and mesh.shape["context"] == 1
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert list(mesh.devices[0, 0, 0]) == cpus[:2]
    assert axis_size(mesh, ("fsdp", "tensor")) == 8 and axis_size(None, "fsdp") == 1
    assert make_mesh({"data": 8}, np.asarray(cpus)).devices.shape == (8, 1, 1, 1)


def test_mesh_of_another_size_than_the_devices_is_refused():
    with pytest.raises(ValueError, match="fsdp=3 needs 3 devices, but there are 8"):
        make_mesh({"fsdp": 3}, jax.devices("cpu"))


@dataclass(frozen=True, order=True)
class Fake:
    """What of a device tells where it is."""

    id: int
    process_index: int
    slice_index: int = 0
    device_kind: str = "NVIDIA GB300"
    platform: str = "gpu"


def racks(count, size, *, per_host=4, by_slice=True, kind="NVIDIA GB300"):
    """`count` racks of `size` devices; JAX knows them as slices, or as one."""
    return [Fake(i, i // per_host, i // size if by_slice else 0, device_kind=kind) for i in range(count * size)]


def test_dcn_axes_come_first():
    shape = parse_mesh("fsdp=16,tensor=4,dcn.data=128")
    assert list(shape.items()) == [("dcn.data", 128), ("fsdp", 16), ("tensor", 4)]
    assert mesh_to_text(shape) == "dcn.data=128,fsdp=16,tensor=4"
    assert total_axis_sizes(parse_mesh("dcn.data=2,data=3,tensor=4")) == {"data": 6, "tensor": 4}


@pytest.mark.parametrize("by_slice, per_host", [(True, 4), (False, 64), (False, 4)])
def test_rack_is_one_index_along_its_dcn_axis(by_slice, per_host):
    """Whether JAX knows racks, knows them as processes, or knows hosts only, neighbours of which make a rack."""
    devices = racks(2, 64, by_slice=by_slice, per_host=per_host)
    found = create_hybrid_device_order(parse_mesh("dcn.data=2,fsdp=16,tensor=4"), DEFAULT_MESH_AXES, devices[::-1])
    assert found.shape == (2, 16, 1, 4)
    assert [{device.id // 64 for device in rack.flat} for rack in found] == [{0}, {1}]
    assert all(len({device.process_index for device in group}) == 1 for group in found.reshape(-1, 4))


def test_axis_may_be_within_and_across_slices():
    found = create_hybrid_device_order(parse_mesh("dcn.fsdp=2,fsdp=4"), DEFAULT_MESH_AXES, racks(2, 4))
    assert [device.id for device in found.flat] == list(range(8)) and found.shape == (1, 8, 1, 1)


def test_missing_slices_are_refused():
    with pytest.raises(ValueError, match="dcn.data=3 needs 3 slices, and these devices are 2 slices and 32 processes"):
        create_hybrid_device_order(parse_mesh("dcn.data=3,fsdp=16"), DEFAULT_MESH_AXES, racks(2, 64))
    with pytest.raises(ValueError, match="dcn.data=2 needs 2 slices, and these devices are 1 slice and 1 process;"):
        make_mesh({"dcn.data": 2, "fsdp": 4}, jax.devices("cpu"))


@pytest.mark.parametrize("text, devices, advice", [
    ("fsdp=32,tensor=4", racks(2, 64), "fsdp=32 would leave a slice of 72.*dcn.fsdp=2,fsdp=16,tensor=4 is the same"),
    ("fsdp=32", racks(4, 8, kind="NVIDIA H200"), "slice of 8 .*dcn.fsdp=4,fsdp=8 is the same.*dcn.data=4,fsdp=8 "),
    ("tensor=4", racks(2, 2, kind="something new"), "tensor=4 would leave a slice of 2 .*dcn.tensor=2,tensor=2 "),
])  # fmt: skip
def test_axis_that_crosses_racks_unnamed_is_refused(text, devices, advice):
    with pytest.raises(ValueError, match=advice):
        check_slice_crossing(parse_mesh(text), DEFAULT_MESH_AXES, slice_size(devices))
    assert check_slice_crossing(parse_mesh(text), DEFAULT_MESH_AXES, slice_size(jax.devices("cpu"))) is None


def test_default_mesh_names_its_dcn_axis():
    assert default_shape(jax.devices("cpu")) == {"fsdp": 8}
    assert default_shape(racks(4, 8, kind="NVIDIA H200")) == {"dcn.fsdp": 4, "fsdp": 8}
    assert default_shape(racks(1, 64)) == {"fsdp": 64}
