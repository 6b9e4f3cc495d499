"""Where `ptxas` is looked for, and what a command prints without one. Oracle: files in a temporary folder, and
processes from which every `ptxas` of the machine is hidden."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from halfbyte.devices import check_cuda_compiler, compile_target, missing_cuda_compiler
from halfbyte.devices.compile_target import TOOLKITS, WHEELS, find_ptxas
from halfbyte.io.install_command import install_command

PLAN = ["plan", "demo", "--device", "b200", "--count", "1", "--recipe", "bf16", "--layers", "1"]
COMPILE = """
import os
from halfbyte.devices import device_by_name as device, topology
from halfbyte.devices.compile_target import force_cpu_without_gpu as settle_platform
settle_platform(os.environ)
import jax, jax.numpy as jnp
place = jax.sharding.SingleDeviceSharding(topology(device("b200"), hosts=1, per_host=1).devices[0])
x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16, sharding=place)
print(len(jax.jit(lambda x: jnp.tanh(x @ x)).lower(x).compile().as_text()))
"""


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
def test_missing_compiler_is_named_with_a_remedy(without_ptxas, monkeypatch, plugin, words):
    monkeypatch.setattr(compile_target, "any_installed", lambda names: plugin)
    monkeypatch.setenv("PATH", "")
    assert words in missing_cuda_compiler() and install_command("plan") in missing_cuda_compiler()
    with pytest.raises(ValueError, match=words):
        check_cuda_compiler()


def wheel_folders():
    """`nvidia` folders of this environment with a `ptxas`."""
    folders = {Path(entry, "nvidia", wheel) for entry in sys.path for wheel in WHEELS}
    return sorted(str(folder) for folder in folders if (folder / "bin" / "ptxas").exists())


def run_hiding(folders, command, cache):
    """Runs `command` in a mount namespace in which `folders` are empty and no `ptxas` in PATH can be executed."""
    unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("needs a mount namespace, which this machine does not allow")
    empty, nothing = cache / "empty", cache / "nothing"
    empty.mkdir(parents=True)
    nothing.touch(mode=0o644)
    in_path = {file for entry in os.environ["PATH"].split(":") if (file := Path(entry, "ptxas")).exists()}
    mounts = {**dict.fromkeys(map(str, in_path), nothing), **dict.fromkeys(folders, empty)}
    script = "".join(f"mount --bind {source} {target} && " for target, source in mounts.items()) + 'exec "$@"'
    environ = {name: value for name, value in os.environ.items() if name not in ("CUDA_ROOT", "XLA_FLAGS")}
    environ["HALFBYTE_CACHE"] = str(cache)
    return subprocess.run(
        [*unshare, "sh", "-c", script, "sh", sys.executable, *command],
        env=environ, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


@pytest.mark.cuda_compiler
def test_plan_without_ptxas_names_what_to_install(tmp_path):
    """XLA would end the process with a segmentation fault."""
    hidden = [folder for folder in TOOLKITS if os.path.isdir(folder)] + wheel_folders()
    done = run_hiding(hidden, ["-c", "from halfbyte.cli.main import entry; entry()", *PLAN], tmp_path)
    assert done.returncode == 2, done.stderr[-2000:]
    assert "needs the assembler ptxas" in done.stderr and "[plan]'" in done.stderr


@pytest.mark.cuda_compiler
@pytest.mark.skipif(not wheel_folders(), reason="needs the wheel nvidia-cuda-nvcc-cu12, which the extra `plan` brings")
def test_wheel_serves_without_a_toolkit(tmp_path):
    done = run_hiding([folder for folder in TOOLKITS if os.path.isdir(folder)], ["-c", COMPILE], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
