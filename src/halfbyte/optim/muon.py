"""Muon (arXiv 2502.16982, https://kellerjordan.github.io/posts/muon) from optax's parts: matrices of linears by Muon,
all else (embeddings, head, norms, routers) by AdamW.

    m <- b m + (1 - b) g;   O = newton_schulz(Nesterov's m);   w <- w - rate(step) * (0.2 sqrt(max(in, out)) O +
    weight_decay * w)

O has singular values near 1, so its elements have a root mean square of 1 / sqrt(max(in, out)): times 0.2 sqrt(max(in,
out)) it is as long as AdamW's update usually is, and one learning rate and one weight decay serve both. Each layer's
matrix of a stack, and each expert's, is orthogonalized by itself.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax

from halfbyte.later import later

from .adamw import scale_by_adam
from .config import OptimizerConfig

if TYPE_CHECKING:
    import optax
else:
    optax = later("optax")

RMS = 0.2  # of an update, whatever the matrix's shape: section 2.2 of arXiv 2502.16982


def muon(config: OptimizerConfig, decay_mask: Any, *, matrices: Any) -> optax.GradientTransformation:
    """Direction of descent for a rate of 1: Muon where `matrices` (a tree of bools, like the parameters) is true, Adam
    elsewhere, plus decay where `decay_mask` is true."""
    labels = jax.tree.map(lambda is_matrix: "muon" if is_matrix else "adam", matrices)
    return optax.chain(
        optax.partition({"muon": _scale_by_muon(config), "adam": scale_by_adam(config)}, labels),
        optax.add_decayed_weights(config.weight_decay, mask=decay_mask),
    )


def _scale_by_muon(config: OptimizerConfig) -> optax.GradientTransformation:
    matrix = optax.contrib.MuonDimensionNumbers(-2, -1)  # the last two dims; those before count matrices
    inner = optax.contrib.scale_by_muon(
        beta=config.momentum, eps=config.eps, mu_dtype=config.mu_dtype,
        weight_dimension_numbers=lambda updates: jax.tree.map(lambda _: matrix, updates),
    )  # fmt: skip

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        with jax.numpy_dtype_promotion("standard"):  # optax mixes its int32 count with floats
            updates, state = inner.update(grads, state, params)
        return jax.tree.map(lambda u: u * (RMS * math.sqrt(max(u.shape[-2:]))), updates), state

    return optax.GradientTransformation(inner.init, update)
