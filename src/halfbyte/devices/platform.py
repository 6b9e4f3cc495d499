"""Keeps JAX quiet on a machine that has the CUDA compiler plugin but no GPU. It imports no JAX: it runs first."""

from collections.abc import Callable, MutableMapping
from glob import glob
from importlib.util import find_spec

# What an NVIDIA driver puts into /dev: native, Jetson, WSL.
DRIVER_NODES = ("/dev/nvidiactl", "/dev/nvidia[0-9]*", "/dev/nvhost-gpu", "/dev/dxg")
CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
OTHER_PLUGINS = ("libtpu", "jax_rocm60_plugin", "jax_rocm7_plugin", "jax_metal", "intel_extension_for_openxla")


def has_nvidia_driver() -> bool:
    """True if this machine shows an NVIDIA device node."""
    return any(glob(node) for node in DRIVER_NODES)


def _installed(names: tuple[str, ...]) -> bool:
    return any(find_spec(name) is not None for name in names)


def settle_platform(
    environ: MutableMapping[str, str],
    *,
    driver: Callable[[], bool] = has_nvidia_driver,
    installed: Callable[[tuple[str, ...]], bool] = _installed,
) -> str | None:
    """Sets JAX_PLATFORMS=cpu if a CUDA plugin is the only accelerator plugin and there is no GPU; what it set, or None.

    Without it JAX prints a page of tracebacks about missing CUDA libraries on every start. A JAX_PLATFORMS that is
    already set is never touched.
    """
    if "JAX_PLATFORMS" in environ or driver() or not installed(CUDA_PLUGINS) or installed(OTHER_PLUGINS):
        return None
    environ["JAX_PLATFORMS"] = "cpu"
    return "cpu"
