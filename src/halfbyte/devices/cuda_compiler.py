"""Finds what XLA needs to compile for an NVIDIA GPU: a CUDA plugin of JAX and the assembler `ptxas`."""

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from halfbyte.devices.platform import CUDA_PLUGINS, any_installed

CUDA_DATA_DIR = "--xla_gpu_cuda_data_dir="
WHEELS = ("cuda_nvcc", "cu13")  # folders below site-packages/nvidia: nvidia-cuda-nvcc-cu12, nvidia-cuda-nvcc
TOOLKITS = ("/usr/local/cuda", "/opt/cuda")
INSTALL = "pip install 'halfbyte[plan]'"


def missing_cuda_compiler(environ: Mapping[str, str] = os.environ) -> str | None:
    """Returns what compiling for a GPU lacks and how to install it, or None if nothing is missing."""
    if not any_installed(CUDA_PLUGINS):
        return f"compiling for a GPU needs the CUDA compiler plugin; {INSTALL}"
    if find_ptxas(environ) is None:
        return (
            "compiling for a GPU needs the assembler ptxas: there is none in this Python environment, in PATH or in "
            f"{' or '.join(TOOLKITS)}. {INSTALL} brings it (nvidia-cuda-nvcc-cu12), or add the bin folder of a CUDA "
            "toolkit to PATH"
        )
    return None


def check_cuda_compiler() -> None:
    """Raises ValueError if compiling for a GPU lacks something. Without `ptxas`, XLA would crash the process."""
    if missing := missing_cuda_compiler():
        raise ValueError(missing)


def find_ptxas(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Returns the first executable `ptxas` where JAX and XLA look for one, or None."""
    if in_path := shutil.which("ptxas", path=environ.get("PATH", os.defpath)):
        return Path(in_path)
    candidates = (root / "bin" / "ptxas" for root in _cuda_roots(environ))
    return next((file for file in candidates if file.is_file() and os.access(file, os.X_OK)), None)


def _cuda_roots(environ: Mapping[str, str]) -> Iterator[Path]:
    """Where JAX (`jax._src.lib.cuda_path`) and XLA (`tsl/platform/default/cuda_root_path.cc`) look for a toolkit."""
    for word in environ.get("XLA_FLAGS", "").split():
        if word.startswith(CUDA_DATA_DIR):
            yield Path(word.removeprefix(CUDA_DATA_DIR))
    if root := environ.get("CUDA_ROOT"):
        yield Path(root)
    nvidia = find_spec("nvidia")
    for folder in (nvidia.submodule_search_locations or []) if nvidia else []:
        yield from (Path(folder) / wheel for wheel in WHEELS)
    yield from map(Path, TOOLKITS)
    yield Path(sys.prefix)  # a conda environment with NVIDIA's packages
