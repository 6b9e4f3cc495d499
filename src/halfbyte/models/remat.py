"""What the backward pass keeps of a layer.

| remat | kept | recomputed |
|---|---|---|
| none | all that the VJPs read | nothing |
| dots | outputs of linears and of fused or context-parallel attention, packed operands | norms, rotations, SwiGLU |
| quantized | the inputs of both norms; q, k, v; attention's output, as above; scales | operands, the MLP's g and u |
| full | the layer's input | everything |

`quantized` makes again what costs passes over memory and no GEMM, and of the GEMMs only those of gate and up, whose
results are most of what a layer keeps.
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

LINEAR_NAME = "linear"  # the checkpoint name of a linear's output, in the compute dtype
STREAM_NAME = "stream"  # of the stream between the halves of a layer, and of what attention reads
# cuDNN's primitives: their outputs are the context and the softmax statistics.
FUSED_ATTENTION_PRIMITIVE = "dot_product_attention_fwd"


def checkpoint_layer(layer: Callable[..., Any], remat: str, *, looped: bool = True) -> Callable[..., Any]:
    """`layer` (a scan body) with what `remat` says kept for its backward pass.

    A loop keeps the two passes apart; where the layers are unrolled (not `looped`) a barrier must, or the compiler
    finds that what is computed again is there already.
    """
    if remat == "none":
        return layer
    policies = {"dots": _save_dots, "quantized": _save_residual_stream, "full": None}
    return jax.checkpoint(layer, prevent_cse=not looped, policy=policies[remat])


def name_linear_output(y: jax.Array) -> jax.Array:
    """`y`, marked as a linear's output."""
    return checkpoint_name(y, LINEAR_NAME)


def round_residual_stream(x: jax.Array) -> jax.Array:
    """`x`, rounded to its dtype for good and marked as part of the stream.

    What a remat policy saves is rounded, what it does not save a compiler may carry on with excess precision; with the
    rounding here, the model computes the same under every policy.
    """
    bits = jnp.finfo(x.dtype)
    return checkpoint_name(lax.reduce_precision(x, exponent_bits=bits.nexp, mantissa_bits=bits.nmant), STREAM_NAME)


def call_with_reshaped(fn: Callable[[jax.Array], jax.Array], x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """fn(x reshaped to `shape`), where the backward pass keeps x, if anyone does, and no reshaped copy beside it."""
    return jax.checkpoint(lambda x: fn(x.reshape(shape)), prevent_cse=False, policy=_save_all_but_views)(x)


def _save_all_but_views(primitive: Any, *args: Any, **params: Any) -> bool:
    return bool(primitive.name != "reshape")


def _save_dots(primitive: Any, *args: Any, **params: Any) -> bool:
    # By name and not by `dot_general`: a GEMM's own output is float32, twice the size of what is used.
    return _fused_attention(primitive) or _SAVES_DOTS(primitive, *args, **params)


def _save_residual_stream(primitive: Any, *args: Any, **params: Any) -> bool:
    return _fused_attention(primitive) or _SAVES_STREAM(primitive, *args, **params)


def _fused_attention(primitive: Any) -> bool:
    return bool(primitive.name.startswith(FUSED_ATTENTION_PRIMITIVE))


_SAVES_DOTS = jax.checkpoint_policies.save_only_these_names(LINEAR_NAME, RESIDUAL_NAME, SAVED_NAME, SCALES_NAME)
_SAVES_STREAM = jax.checkpoint_policies.save_only_these_names(STREAM_NAME, RESIDUAL_NAME, SCALES_NAME)
