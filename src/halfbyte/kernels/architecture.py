"""Explains why a kernel for a second GPU architecture does not compile where JAX compiles for one per process only.

Tracing for several architectures is fine on every JAX, so kernels only record what they are traced for. XLA's error
("Pass pipeline failed", with `ptxas fatal` on stderr) names neither cause nor remedy; `explained_compile_errors` does.
"""

import contextlib
from collections.abc import Iterator

import jax

from halfbyte.devices.jax_versions import mosaic_keeps_first_architecture
from halfbyte.devices.target import lowering_capability

XLA_MESSAGES = ("Pass pipeline failed", "ptxas")
_traced: dict[tuple[int, int], None] = {}  # compute capabilities of this process's Mosaic GPU kernels, in order


def record_architecture() -> None:
    """Records the compute capability that a Mosaic GPU kernel is traced for. Call it before `plgpu.kernel`."""
    if (capability := lowering_capability()) is not None:
        _traced.setdefault(capability)


@contextlib.contextmanager
def explained_compile_errors() -> Iterator[None]:
    """Raises RuntimeError from XLA's compile error if this process has kernels for two architectures and JAX assembles
    all of them for the first. Other exceptions pass.
    """
    try:
        yield
    except Exception as error:
        second = lowering_capability()
        others = [capability for capability in _traced if capability != second]
        is_compile_error = any(message in str(error) for message in XLA_MESSAGES)
        if not (mosaic_keeps_first_architecture() and is_compile_error and second in _traced and others):
            raise
        this, first = ("sm_{}{}a".format(*capability) for capability in (second, others[0]))
        raise RuntimeError(
            f"kernels for {this} cannot be compiled in a process that has kernels for {first}: JAX {jax.__version__} "
            f"assembles all Mosaic GPU kernels of a process for the first architecture. Start another process for "
            f"{this}, or install JAX 0.12."
        ) from error
