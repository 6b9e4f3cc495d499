"""Rejects kernels for a second GPU architecture where JAX can compile for one per process only."""

import jax

from halfbyte.devices.jax_versions import mosaic_keeps_first_architecture
from halfbyte.devices.target import lowering_capability

_first: list[tuple[int, int]] = []  # of this process: the compute capability of its first Mosaic GPU kernel


def check_architecture() -> None:
    """Raises RuntimeError if this process has traced a Mosaic GPU kernel for another compute capability and JAX would
    assemble the next one for that. Call it before `plgpu.kernel`: XLA's own error (`ptxas fatal`) names neither cause
    nor remedy.
    """
    capability = lowering_capability()
    if capability is None or not mosaic_keeps_first_architecture():
        return
    if not _first:
        _first.append(capability)
    if capability != _first[0]:
        first, second = ("sm_{}{}a".format(*each) for each in (_first[0], capability))
        raise RuntimeError(
            f"kernels for {second} cannot be compiled in a process that has kernels for {first}: JAX {jax.__version__} "
            f"assembles all Mosaic GPU kernels of a process for the first architecture. Start another process for "
            f"{second}, or install JAX 0.12."
        )
