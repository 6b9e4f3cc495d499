"""What differs between the JAX versions that Halfbyte supports: 0.10, 0.11 and 0.12.

No other module compares version numbers (tests/test_architecture.py). Each entry names the versions and what they do;
callers ask for the behaviour. Extend the upper bound of `jax` in pyproject.toml after `tests/smoke.py` passes on the
new series.
"""

from collections.abc import Sequence
from typing import Any

# XLA flags that pipeline a layer's all-gathers into the previous iteration of the layer loop, and its reduce-scatters
# into the next: the name in JAX 0.11 and later (modes ON and OFF), and the one in JAX 0.10 (true and false). XLA
# rejects names that it does not know; `is_known_xla_flag` decides which one to pass.
ALL_GATHER_PIPELINING = ("xla_gpu_pipeline_all_gather", "xla_gpu_enable_pipelined_all_gather")
REDUCE_SCATTER_PIPELINING = ("xla_gpu_pipeline_reduce_scatter", "xla_gpu_enable_pipelined_reduce_scatter")


def jax_series() -> tuple[int, int]:
    """(major, minor) of the installed JAX. For this module and its test; other code asks for a behaviour."""
    import jax

    major, minor = jax.__version_info__[:2]
    return major, minor


def transpose_ref(ref: Any, order: tuple[int, ...]) -> Any:
    """Returns a transposed view of a Mosaic GPU ref. JAX 0.10 has a function, 0.11 and later a method of the ref."""
    if hasattr(ref, "transpose"):
        return ref.transpose(order)
    from jax.experimental.pallas import mosaic_gpu

    return mosaic_gpu.transpose_ref(ref, order)


def scan_counts(params: dict[str, Any], operands: Sequence[Any]) -> tuple[int, int]:
    """Returns (constants, carries): how many `operands` of a `scan` equation are which; the rest are scanned over.

    JAX 0.10 has two numbers among the equation's params. 0.11 and later have a tree of the three groups, `ft_in`.
    """
    if jax_series() < (0, 11):
        return params["num_consts"], params["num_carry"]
    consts, carries, _ = params["ft_in"].update(list(range(len(operands)))).unpack()
    return len(list(consts)), len(list(carries))


def mosaic_keeps_first_architecture() -> bool:
    """True if Mosaic GPU assembles every kernel of a process for the architecture of the first one.

    JAX 0.11 does, so that a kernel for a second architecture fails in `ptxas`. JAX 0.10 and 0.12 compile each kernel
    for its own target.
    """
    return jax_series() == (0, 11)


def has_measured_h200_memory() -> bool:
    """True if XLA's programs need the memory that was measured on an H200 (docs/evidence, JAX 0.11).

    XLA of JAX 0.12 compiles the bf16 step of 8B on fsdp=4,tensor=2 to a program that needs 8.6% less; no H200 has run
    that program, so the measurement is an upper bound there.
    """
    return jax_series() < (0, 12)
