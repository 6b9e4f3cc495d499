"""Oracle: the text and the numbers of devices, by hand."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from halfbyte.sharding import AXES, axis_size, format_mesh, make_mesh, parse_mesh


def test_parse_and_format_are_inverse():
    assert parse_mesh("tensor=2, fsdp=4") == {"fsdp": 4, "tensor": 2}
    assert parse_mesh("") == {}
    assert format_mesh(parse_mesh("tensor=2,fsdp=4,data=1")) == "fsdp=4,tensor=2"


@pytest.mark.parametrize(
    "text, message",
    [
        ("fsdp", "not AXIS=SIZE"),
        ("fsdp=0", "not AXIS=SIZE"),
        ("fsdp=-2", "not AXIS=SIZE"),
        ("fsdp=2,fsdp=4", "given twice"),
        ("tensr=2", "did you mean 'tensor'"),
        ("pipeline=2", "the axes are data, fsdp, context, tensor"),
    ],
)
def test_bad_text_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_mesh(text)


def test_mesh_has_every_axis_and_tensor_varies_fastest():
    cpus = jax.devices("cpu")
    mesh = make_mesh({"fsdp": 4, "tensor": 2}, cpus)
    assert mesh.axis_names == AXES and mesh.shape["context"] == 1
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert list(mesh.devices[0, 0, 0]) == cpus[:2]
    assert axis_size(mesh, ("fsdp", "tensor")) == 8 and axis_size(None, "fsdp") == 1


def test_devices_may_come_in_an_array():
    cpus = np.asarray(jax.devices("cpu"))
    assert make_mesh({"data": 8}, cpus).devices.shape == (8, 1, 1, 1)


def test_a_product_that_is_not_the_device_count_is_refused():
    with pytest.raises(ValueError, match="fsdp=3 needs 3 devices, but there are 8"):
        make_mesh({"fsdp": 3}, jax.devices("cpu"))
