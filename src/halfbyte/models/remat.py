"""Rematerialization policies of a layer: which residuals are saved, which are recomputed in the backward pass.

| remat | saved | recomputed |
|---|---|---|
| none | all that the VJPs read | nothing |
| dots | outputs of linears and of fused or context-parallel attention, packed operands | norms, rotations, SwiGLU |
| quantized | the inputs of both norms; q, k, v; attention's output, as above; scales | operands, the MLP's g and u |
| full | the layer's input | everything |

`quantized` recomputes what needs only passes over memory. Of the GEMMs it recomputes those of gate and up, whose
outputs are most of the residuals of a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from halfbyte.ops.context_parallel_attention import RESIDUAL_NAME
from halfbyte.ops.operand import SAVED_NAME, SCALES_NAME

LINEAR_NAME = "linear"  # checkpoint name of the output of a linear, in the compute dtype
STREAM_NAME = "stream"  # of the residual stream between attention and MLP, and of q, k and v
# cuDNN's primitives: their outputs are the context and the softmax statistics.
FUSED_ATTENTION_PRIMITIVE = "dot_product_attention_fwd"


def checkpoint_layer(layer: Callable[..., Any], remat: str, *, looped: bool = True) -> Callable[..., Any]:
    """Wraps `layer` (a scan body) in `jax.checkpoint` with the policy of `remat`.

    A scan separates forward and backward pass. For unrolled layers (not `looped`) `prevent_cse` adds barriers: without
    them common subexpression elimination would replace the recomputation by the values of the forward pass.
    """
    if remat == "none":
        return layer
    policies = {"dots": _save_dots, "quantized": _save_residual_stream, "full": None}
    return jax.checkpoint(layer, prevent_cse=not looped, policy=policies[remat])


def name_linear_output(y: jax.Array) -> jax.Array:
    """Names y as the output of a linear for the remat policies."""
    return checkpoint_name(y, LINEAR_NAME)


def round_residual_stream(x: jax.Array) -> jax.Array:
    """Rounds x to its dtype (`reduce_precision`, which XLA keeps) and names it as residual stream.

    A saved residual is rounded, but XLA may carry an unsaved value with excess precision. With the rounding here the
    model computes the same under every policy.
    """
    bits = jnp.finfo(x.dtype)
    return checkpoint_name(lax.reduce_precision(x, exponent_bits=bits.nexp, mantissa_bits=bits.nmant), STREAM_NAME)


def call_with_reshaped(fn: Callable[[jax.Array], jax.Array], x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns fn(x.reshape(shape)); the backward pass may save x, but no reshaped copy of it."""
    return jax.checkpoint(lambda x: fn(x.reshape(shape)), prevent_cse=False, policy=_save_all_but_views)(x)


def _save_all_but_views(primitive: Any, *args: Any, **params: Any) -> bool:
    return bool(primitive.name != "reshape")


def _save_dots(primitive: Any, *args: Any, **params: Any) -> bool:
    # By name, not by `dot_general`: the output of a GEMM is float32, twice the bytes of the bf16 that is used.
    return _fused_attention(primitive) or _SAVES_DOTS(primitive, *args, **params)


def _save_residual_stream(primitive: Any, *args: Any, **params: Any) -> bool:
    return _fused_attention(primitive) or _SAVES_STREAM(primitive, *args, **params)


def _fused_attention(primitive: Any) -> bool:
    return bool(primitive.name.startswith(FUSED_ATTENTION_PRIMITIVE))


_SAVES_DOTS = jax.checkpoint_policies.save_only_these_names(LINEAR_NAME, RESIDUAL_NAME, SAVED_NAME, SCALES_NAME)
_SAVES_STREAM = jax.checkpoint_policies.save_only_these_names(STREAM_NAME, RESIDUAL_NAME, SCALES_NAME)
