"""Where `ptxas` is looked for, and what a command prints without one. Oracle: files in a temporary folder."""

import sys

import pytest

from halfbyte.cli.main import main
from halfbyte.devices import check_cuda_compiler, compile_target, missing_cuda_compiler
from halfbyte.devices.compile_target import WHEELS, find_ptxas
from halfbyte.io.install_command import install_command


@pytest.fixture
def without_ptxas(monkeypatch, tmp_path):
    """No toolkit, no wheel and no PATH: a test adds the `ptxas` that it is about."""
    monkeypatch.setattr(compile_target, "TOOLKITS", ())
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    monkeypatch.setattr(compile_target, "find_spec", lambda name: None)
    assert find_ptxas({"PATH": ""}) is None


def make_ptxas(root):
    file = root / "bin" / "ptxas"
    file.parent.mkdir(parents=True)
    file.touch(mode=0o755)
    return file


@pytest.mark.parametrize("environ", ["PATH={}/bin", "CUDA_ROOT={}", "XLA_FLAGS=--a=1 --xla_gpu_cuda_data_dir={}"])
def test_ptxas_is_found_by_the_environment(without_ptxas, tmp_path, environ):
    file = make_ptxas(tmp_path / "toolkit")
    name, _, value = environ.format(tmp_path / "toolkit").partition("=")
    assert find_ptxas({"PATH": "", name: value}) == file


def test_ptxas_is_found_in_a_wheel(without_ptxas, monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setattr(compile_target, "TOOLKITS", ())
    for wheel in WHEELS:
        file = make_ptxas(tmp_path / wheel / "nvidia" / wheel)
        monkeypatch.setattr(sys, "path", [str(tmp_path / wheel)])
        assert find_ptxas({"PATH": ""}) == file


def test_ptxas_that_cannot_be_executed_is_skipped(without_ptxas, tmp_path):
    make_ptxas(tmp_path / "toolkit").chmod(0o644)
    assert find_ptxas({"PATH": "", "CUDA_ROOT": str(tmp_path / "toolkit")}) is None


@pytest.mark.parametrize("plugin, words", [(False, "CUDA compiler plugin"), (True, "assembler ptxas")])
def test_missing_compiler_is_named_with_a_remedy(without_ptxas, monkeypatch, tmp_path, capfd, plugin, words):
    monkeypatch.setattr(compile_target, "any_installed", lambda names: plugin)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path))
    assert words in missing_cuda_compiler() and install_command("plan") in missing_cuda_compiler()
    with pytest.raises(ValueError, match=words):
        check_cuda_compiler()
    # XLA would end the process with a segmentation fault.
    monkeypatch.setattr("halfbyte.plan.compiled_step.can_compile", lambda: True)
    assert main("plan demo --device b200 --count 1 --recipe bf16 --layers 1".split()) == 2
    assert words in " ".join(capfd.readouterr().err.split())
