"""Whether a person is told that a card stands idle. Oracle: the four cases, spelled out."""

import pytest

from halfbyte.devices.platform import idle_card


@pytest.mark.parametrize(
    "platform, driver, plugin, environ, words",
    [
        ("gpu", True, True, {}, None),
        ("cpu", False, True, {}, None),
        ("cpu", True, False, {}, "pip install 'halfbyte[cuda12]'"),
        ("cpu", True, True, {"JAX_PLATFORMS": "cpu"}, "as JAX_PLATFORMS=cpu says"),
        ("cpu", True, True, {}, "the driver is too old"),
    ],
)
def test_a_card_that_stands_idle_is_said(platform, driver, plugin, environ, words):
    said = idle_card(environ, platform, driver=lambda: driver, installed=lambda names: plugin)
    assert (said is None) if words is None else (words in said and "NVIDIA card is here" in said)
