"""What the backward pass keeps of a layer.

| remat | kept | recomputed |
|---|---|---|
| none | all that the VJPs read | nothing |
| dots | outputs of GEMMs and of attention | norms, rotations, quantized operands, SwiGLU |
| full | the layer's input | everything |
| quantized | all but the MLP's g, u and h, of which packed operands stay | g and u, inside the MLP's own VJP |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

# Fused calls that are GEMMs or attention, though they are not `dot_general`.
FUSED = ("dot_product_attention_fwd", "scaled_matmul")


def rematerialized(layer: Callable[..., Any], remat: str) -> Callable[..., Any]:
    """`layer` (a scan body) with what `remat` says kept for its backward pass."""
    if remat == "full":
        return jax.checkpoint(layer, prevent_cse=False)  # the scan already keeps the two passes apart
    if remat == "dots":
        return jax.checkpoint(layer, prevent_cse=False, policy=_keeps_dots)
    return layer


def _keeps_dots(primitive: Any, *args: Any, **params: Any) -> bool:
    if primitive.name.startswith(FUSED):
        return True
    return jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *args, **params)
