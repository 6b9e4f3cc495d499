"""Llama 3 and Qwen3 as pure functions: `apply`, `loss`, `token_nll`.

A block is x + attention(norm(x)), then x + mlp(norm(x)), with x in the compute dtype. Layers are stacked and scanned,
one `lax.scan` a policy segment, so
that tracing and compiling cost the same for 4 layers as for 126. On a mesh, x between blocks is split along positions
over `tensor` too
(`residual_seq`); a block gathers it, and its output projection scatters it again.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from halfbyte.kernels.stacks import hand_back
from halfbyte.models.config import LlamaConfig
from halfbyte.models.context import PLAIN, Context, LayerContext, key_of_layer, segments
from halfbyte.models.embedding import embed_tokens, head_weight
from halfbyte.models.linear import BETWEEN, gated_mlp, inside, linears, quantize_ahead, stacks_of
from halfbyte.models.params import Params, param_specs
from halfbyte.models.quantized import share_scales
from halfbyte.models.remat import flattened, rematerialized, streamed
from halfbyte.models.unrolled import unstack
from halfbyte.nn.attention import attention
from halfbyte.nn.loss import cross_entropy
from halfbyte.nn.loss import token_nll as chunked_nll
from halfbyte.nn.norm import rms_norm
from halfbyte.nn.rope import apply_rope, rope_frequencies, rope_tables
from halfbyte.ops.activation import ACTIVATIONS
from halfbyte.ops.operand import pinned
from halfbyte.sharding import axis_size

Batch = dict[str, jax.Array]
Tables = tuple[jax.Array, jax.Array]


def apply(cfg: LlamaConfig, params: Params, batch: Batch, ctx: Context = PLAIN) -> jax.Array:
    """Logits, float32 [batch, seq, vocab]. `batch` holds `tokens` and, if rows are packed, `segments` and `positions`
    (all int32 [batch, seq]).
    """
    hidden = hidden_states(cfg, params, batch, ctx)
    return project_logits(cfg, params, hidden, ctx)


def loss(
    cfg: LlamaConfig, params: Params, batch: Batch, ctx: Context = PLAIN, *, z_loss: float = 0.0
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(mean over scored tokens of nll + z_loss * lse^2, aux). aux: `tokens`, `nll_sum`, `z_sum`; `z_loss` and `nll`,
    the two parts of the mean.
    """
    total, aux = loss_sum(cfg, params, batch, ctx, z_loss=z_loss)
    scored = jnp.maximum(aux["tokens"], 1.0)
    return total / scored, aux | {"nll": aux["nll_sum"] / scored, "z_loss": aux["z_sum"] / scored}


def loss_sum(
    cfg: LlamaConfig, params: Params, batch: Batch, ctx: Context = PLAIN, *, z_loss: float = 0.0
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(sum over scored tokens, aux) with aux `tokens`, `nll_sum`, `z_sum`: what microbatches add up before they
    divide by all tokens.
    """
    hidden = hidden_states(cfg, params, batch, ctx)
    return cross_entropy(
        hidden,
        head_weight(params),
        batch["targets"],
        z_loss=z_loss,
        chunk=ctx.loss_chunk,
        mesh=ctx.mesh,
        rules=ctx.rules,
        reduce_dtype=ctx.reduce_dtype,
    )


def token_nll(cfg: LlamaConfig, params: Params, batch: Batch, ctx: Context = PLAIN) -> jax.Array:
    """The negative log-likelihood of every target, float32 [batch, seq], 0 where the target is -1. Logits never exist
    whole; no gradient.
    """
    hidden = hidden_states(cfg, params, batch, ctx)
    return chunked_nll(
        hidden, head_weight(params), batch["targets"], chunk=ctx.loss_chunk, mesh=ctx.mesh, rules=ctx.rules
    )


def hidden_states(cfg: LlamaConfig, params: Params, batch: Batch, ctx: Context = PLAIN) -> jax.Array:
    """What the head reads: [batch, seq, embed] in the compute dtype, after the last norm."""
    tokens = batch["tokens"]
    attend = functools.partial(
        attention, segments=batch.get("segments"), implementation=ctx.attention, mesh=ctx.mesh, rules=ctx.rules
    )
    tables = rope_of(cfg, positions_of(batch))
    x = embed_tokens(params["embed"], tokens, ctx)
    specs = param_specs(cfg)

    for segment in segments(cfg, ctx):

        def body(
            carry: tuple[jax.Array, Any], layer: tuple[Params, jax.Array], segment: Any = segment
        ) -> tuple[tuple[jax.Array, Any], None]:
            (x, stacks), (weights, number) = carry, layer
            here = LayerContext(ctx, specs, segment.recipes, key_of_layer(ctx, number))
            place = None if stacks is None else (*stacks, number - segment.start)
            x, place = block_in_place(cfg, weights, x, place, tables, here, attend)
            return (x, None if place is None else place[:2]), None

        layer = rematerialized(body, ctx.remat, looped=ctx.looped)
        layers = quantize_ahead(layer_slice(params, cfg, segment), x, LayerContext(ctx, specs, segment.recipes, None))
        stacks = stacks_of(segment, x, cfg.mlp, ctx)
        x = through_layers(layer, x, stacks, layers, segment, unroll=ctx.unroll)
    return gather_seq(rms_norm(x, params["final_norm"], cfg.norm_eps), ctx)


def through_layers(body: Any, x: jax.Array, stacks: Any, layers: Params, segment: Any, *, unroll: int) -> jax.Array:
    """x after a segment's layers: a loop, or one layer after another if `unroll` covers them all. `stacks` for what the
    loop's layers keep, or None.
    """
    count = segment.stop - segment.start
    if unroll < count or count == 1:
        (x, stacks), _ = lax.scan(body, (x, stacks), (layers, layer_numbers(segment)), unroll=unroll)
        return x if stacks is None else hand_back(x, stacks)
    traced_once = jax.jit(body)
    for layer, number in zip(unstack(layers, count), layer_numbers(segment), strict=True):
        (x, _), _ = traced_once((x, None), (layer, number))
    return x


def block(
    cfg: LlamaConfig, weights: Params, x: jax.Array, tables: Tables, here: LayerContext, attend: Any
) -> jax.Array:
    """One transformer block, [batch, seq, embed] -> the same. `attend(q, k, v)` is given rotated q and k."""
    return block_in_place(cfg, weights, x, None, tables, here, attend)[0]


def block_in_place(
    cfg: LlamaConfig, weights: Params, x: jax.Array, place: Any, tables: Tables, here: LayerContext, attend: Any
) -> tuple[jax.Array, Any]:
    """(`block`, `place` with what its MLP keeps there, as `ops.mlp_in_stacks`)."""
    ctx = here.ctx
    x = x + attention_block(cfg, weights["attention"], x, tables, here, attend)
    x = streamed(ctx.constrain(x, *BETWEEN))
    y, place = mlp_block(cfg, weights["mlp"], x, here, place)
    return pinned(ctx.constrain(x + y, *BETWEEN)), place


def attention_block(
    cfg: LlamaConfig, weights: Params, x: jax.Array, tables: Tables, here: LayerContext, attend: Any
) -> jax.Array:
    """Norm, projections, norms of queries and keys (Qwen3), rotation, attention, output projection."""
    ctx, weights = here.ctx, share_scales(weights, here, "attention") if here.shares_scales else weights
    h = ctx.constrain(rms_norm(x, weights["norm"], cfg.norm_eps), *BETWEEN)
    wide, narrow = inside("heads"), inside("kv_heads")

    def heads(y: jax.Array, axis: str) -> jax.Array:
        # [batch, seq, heads * head_dim] -> [batch, seq, heads, head_dim]
        return ctx.constrain(y.reshape(*x.shape[:2], -1, cfg.head_dim), "batch", "seq", axis, "head_dim")

    def turn(name: str, y: jax.Array) -> jax.Array:
        return apply_rope(rms_norm(y, weights[f"{name}_norm"], cfg.norm_eps) if cfg.qk_norm else y, tables)

    q, k, v = linears(h, weights, here, "attention", {"q": wide, "k": narrow, "v": narrow}, x_axes=BETWEEN)
    q, k, v = turn("q", heads(q, "heads")), turn("k", heads(k, "kv_heads")), heads(v, "kv_heads")
    out = attend(*(streamed(t) for t in (q, k, v)))

    def project_back(out: jax.Array) -> jax.Array:
        (y,) = linears(ctx.constrain(out, *wide), weights, here, "attention", {"o": BETWEEN}, x_axes=wide)
        return y

    # [batch, seq, heads, head_dim] -> [batch, seq, heads * head_dim] -> [batch, seq, embed]
    y = flattened(project_back, out, (*x.shape[:2], cfg.heads * cfg.head_dim))
    return ctx.constrain(y, *BETWEEN)


def mlp_block(
    cfg: LlamaConfig, weights: Params, x: jax.Array, here: LayerContext, place: Any = None
) -> tuple[jax.Array, Any]:
    """(norm and gated MLP, `place` with what it keeps there)."""
    weights = share_scales(weights, here, "mlp") if here.shares_scales else weights
    h = here.ctx.constrain(rms_norm(x, weights["norm"], cfg.norm_eps), *BETWEEN)
    y, place = gated_mlp(h, weights, here, ACTIVATIONS[cfg.activation], place)
    return here.ctx.constrain(y, *BETWEEN), place


def gather_seq(h: jax.Array, ctx: Context) -> jax.Array:
    """`h`, split along positions as between blocks, gathered to how a block reads it."""
    if axis_size(ctx.mesh, ctx.rules.mesh_axes("residual_seq")) > axis_size(ctx.mesh, ctx.rules.mesh_axes("seq")):
        # A compiler that may keep excess precision would gather the norm's float32 numbers: twice the bytes, unrounded.
        h = lax.optimization_barrier(ctx.constrain(h, "batch", "residual_seq", "width"))
    return ctx.constrain(h, "batch", "seq", "width")


def project_logits(cfg: LlamaConfig, params: Params, hidden: jax.Array, ctx: Context) -> jax.Array:
    """Logits, float32 [..., vocab], of hidden states [batch, seq, embed]."""
    weight = head_weight(params).astype(hidden.dtype)
    logits = jnp.dot(hidden, weight, preferred_element_type=jnp.float32)
    return ctx.constrain(logits, "batch", "seq", "vocab")


def positions_of(batch: Batch) -> jax.Array:
    """The batch's positions, or 0, 1, ... in every row."""
    if "positions" in batch:
        return batch["positions"]
    return jnp.arange(batch["tokens"].shape[1], dtype=jnp.int32)[None]


def rope_of(cfg: LlamaConfig, positions: jax.Array) -> Tables:
    """cos and sin for the model's frequencies at `positions`."""
    return rope_tables(positions, rope_frequencies(cfg.head_dim, theta=cfg.rope_theta, scaling=cfg.rope_scaling))


def layer_slice(params: Params, cfg: LlamaConfig, segment: Any) -> Params:
    """The stacked parameters of a segment's layers; the whole stack as it is if there is one segment."""
    if segment.stop - segment.start == cfg.layers:
        return params["layers"]
    return jax.tree.map(lambda stacked: stacked[segment.start : segment.stop], params["layers"])


def layer_numbers(segment: Any) -> jax.Array:
    """The numbers, over the whole model, of a segment's layers."""
    return jnp.arange(segment.start, segment.stop, dtype=jnp.int32)
