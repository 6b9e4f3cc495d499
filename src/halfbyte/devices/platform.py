"""Keeps JAX quiet on a machine that has the CUDA compiler plugin but no GPU. Nothing here imports JAX on its own."""

import contextlib
import ctypes
import os
from collections.abc import Iterator, Mapping, MutableMapping
from glob import glob
from importlib import import_module
from importlib.util import find_spec

# What an NVIDIA driver puts into /dev: native, Jetson, WSL.
DRIVER_NODES = ("/dev/nvidiactl", "/dev/nvidia[0-9]*", "/dev/nvhost-gpu", "/dev/dxg")
CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
OTHER_PLUGINS = ("libtpu", "jax_rocm60_plugin", "jax_rocm7_plugin", "jax_metal", "intel_extension_for_openxla")


def has_nvidia_driver() -> bool:
    """True if this machine shows an NVIDIA device node."""
    return any(glob(node) for node in DRIVER_NODES)


def any_installed(names: tuple[str, ...]) -> bool:
    return any(find_spec(name) is not None for name in names)


def settle_platform(environ: MutableMapping[str, str]) -> str | None:
    """Sets JAX_PLATFORMS=cpu if a CUDA plugin is the only accelerator plugin and there is no GPU; what it set, or None.

    Without it JAX prints a page of tracebacks about missing CUDA libraries on every start. A JAX_PLATFORMS that is
    already set is never touched.
    """
    if "JAX_PLATFORMS" in environ or not is_compiler_alone() or any_installed(OTHER_PLUGINS):
        return None
    environ["JAX_PLATFORMS"] = "cpu"
    return "cpu"


def is_compiler_alone() -> bool:
    """True if a CUDA plugin is here without a GPU: its libraries would say so on stderr, one after the other."""
    return any_installed(CUDA_PLUGINS) and not has_nvidia_driver()


def idle_card(environ: Mapping[str, str], platform: str) -> str | None:
    """What to tell a person whose NVIDIA card stands idle because JAX runs on `platform`; None if all is well."""
    if platform != "cpu" or not has_nvidia_driver():
        return None
    if not any_installed(CUDA_PLUGINS):
        return (
            "an NVIDIA card is here, and JAX runs on the CPU: its CUDA plugin is not installed; "
            "pip install 'halfbyte[cuda12]' (or cuda13: docs/install.md), or `make train GPU=1`"
        )
    if "cpu" in environ.get("JAX_PLATFORMS", ""):
        return f"an NVIDIA card is here, and JAX runs on the CPU, as JAX_PLATFORMS={environ['JAX_PLATFORMS']} says"
    return (
        "an NVIDIA card is here, the CUDA plugin is installed, and JAX runs on the CPU all the same: the driver is too "
        "old for it, or the plugin's version is not that of jax (docs/install.md)"
    )


def load_jax_quietly() -> None:
    """Imports JAX and the CUDA plugin's libraries while they cannot write that there is no driver: we know."""
    with silent_stderr():
        import_module("jax")
        for name in filter(find_spec, CUDA_PLUGINS):
            import_module(f"{name}.cuda_plugin_extension")
        for library in _plugin_libraries():
            ctypes.CDLL(library)  # JAX loads it later: the second time is silent


def _plugin_libraries() -> list[str]:
    """The compiler's shared libraries inside the namespace package that JAX plugins share."""
    shared = find_spec("jax_plugins")
    folders = (shared.submodule_search_locations or []) if shared else []
    return [library for folder in folders for library in glob(f"{folder}/xla_cuda*/xla_cuda_plugin.so")]


@contextlib.contextmanager
def silent_stderr() -> Iterator[None]:
    """Nothing written to file descriptor 2 is shown, also not what a C library writes."""
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)
