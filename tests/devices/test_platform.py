"""Whether a person is told that a card stands idle, and nothing about one that nobody has. Oracle: the cases, spelled
out; what a command writes to stderr."""

import os
import subprocess
import sys

import pytest

from halfbyte.devices import compile_target as asked


@pytest.mark.parametrize(
    "platform, driver, plugin, environ, words",
    [
        ("gpu", True, True, {}, None),
        ("cpu", False, True, {}, None),
        ("cpu", True, False, {}, "[cuda12]'"),
        ("cpu", True, True, {"JAX_PLATFORMS": "cpu"}, "as JAX_PLATFORMS=cpu says"),
        ("cpu", True, True, {}, "the driver is too old"),
    ],
)
def test_unused_gpu_is_reported(monkeypatch, platform, driver, plugin, environ, words):
    monkeypatch.setattr(asked, "has_nvidia_driver", lambda: driver)
    monkeypatch.setattr(asked, "any_installed", lambda names: plugin)
    said = asked.unused_gpu_hint(environ, platform)
    assert (said is None) if words is None else (words in said and "NVIDIA card is here" in said)


@pytest.mark.cuda_compiler
def test_compiler_without_a_gpu_prints_nothing():
    command = [sys.executable, "-c", "from halfbyte.cli.main import entry; entry()", "recipes", "nvfp4"]
    environ = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert done.stderr == ""
