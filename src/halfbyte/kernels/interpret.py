"""Whether kernels are compiled for a GPU, or interpreted: NumPy and XLA on any machine, slowly, for tests."""

import contextlib

import jax

_interpreted = jax.make_user_context(False)  # JAX traces a function anew where it differs


def interpreted() -> contextlib.AbstractContextManager[None]:
    """Kernels of what is traced inside run on any machine."""
    context: contextlib.AbstractContextManager[None] = _interpreted(True)
    return context


def is_interpreted() -> bool:
    """Whether the kernels that are traced now are interpreted."""
    return bool(_interpreted.value)
