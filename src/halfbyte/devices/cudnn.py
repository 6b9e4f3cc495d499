"""Which cuDNN a program will run with: the installed one, or the one that programs for other devices are made for."""

import contextlib
from collections.abc import Iterator

from halfbyte.devices.lookup import lookup
from halfbyte.devices.table import Device
from halfbyte.devices.target import CUDNN_VERSION


def is_here(device: Device) -> bool:
    """Whether `device` is this machine's GPU, and not one that programs are compiled for. An entry of the table may
    stand for boards of several names.
    """
    import jax

    if jax.default_backend() != "gpu":
        return False
    here = lookup(jax.devices()[0])
    return (here.name, here.kind) == (device.name, device.kind)


def cudnn_version(device: Device) -> tuple[int, int, int]:
    """Of the cuDNN that JAX loads for this machine's GPU; for a device that is not here, the target's."""
    if not is_here(device):
        return CUDNN_VERSION
    from jax._src.lib import cuda_versions  # JAX asks here itself; no public hook exists

    if cuda_versions is None:
        return (0, 0, 0)
    number = cuda_versions.cudnn_get_version()
    return number // 10000, number // 100 % 100, number % 100


@contextlib.contextmanager
def target_cudnn() -> Iterator[None]:
    """Within it, JAX believes in the target's cuDNN: for compiling, without a GPU, for a machine that has one.

    JAX asks the installed library for its version while it traces cuDNN attention, and a machine without a GPU has
    none.
    """
    from jax._src.cudnn import fused_attention_stablehlo as fused  # the only place that knows; no public hook exists

    original = fused.check_cudnn_version
    major, minor, patch = CUDNN_VERSION
    fused.check_cudnn_version = lambda: 10000 * major + 100 * minor + patch
    try:
        yield
    finally:
        fused.check_cudnn_version = original
