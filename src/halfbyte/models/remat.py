"""What the backward pass keeps of a layer.

| remat | kept | recomputed |
|---|---|---|
| none | all that the VJPs read | nothing |
| dots | outputs of linears and of fused attention, packed operands | norms, rotations, SwiGLU |
| full | the layer's input | everything |
| quantized | all but the MLP's g, u and h, of which packed operands stay | g and u, inside the MLP's own VJP |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from halfbyte.ops.operand import SAVED

LINEAR = "linear"  # the checkpoint name of a linear's output, in the compute dtype
FUSED_ATTENTION = (
    "dot_product_attention_fwd"  # cuDNN's primitives: their outputs are the context and the softmax statistics
)


def rematerialized(layer: Callable[..., Any], remat: str) -> Callable[..., Any]:
    """`layer` (a scan body) with what `remat` says kept for its backward pass."""
    if remat == "full":
        return jax.checkpoint(layer, prevent_cse=False)  # the scan already keeps the two passes apart
    if remat == "dots":
        return jax.checkpoint(layer, prevent_cse=False, policy=_keeps_dots)
    return layer


def named(y: jax.Array) -> jax.Array:
    """`y`, marked as a linear's output."""
    return checkpoint_name(y, LINEAR)


def _keeps_dots(primitive: Any, *args: Any, **params: Any) -> bool:
    # By name and not by `dot_general`: a GEMM's own output is float32, twice the size of what is used.
    if primitive.name.startswith(FUSED_ATTENTION):
        return True
    return jax.checkpoint_policies.save_only_these_names(LINEAR, SAVED)(primitive, *args, **params)
