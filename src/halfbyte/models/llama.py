"""Forward pass of Llama 3, Qwen3 and the families with experts, as pure functions: `apply`, `loss`, `token_nll`.

The computation of a model is defined here only: `embed_inputs`, `transformer_block`, `apply_norm` and
`project_logits`. `layer_scan.scan_layers` runs the block over all layers, for every caller. A block is
x + attention(norm(x)), then x + mlp(norm(x)), with x in the compute dtype. On a mesh, x between blocks is sharded
along positions over `tensor` too (`residual_seq`): a block all-gathers it and its output projection reduce-scatters.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from halfbyte.distributed import axis_size
from halfbyte.models.config import SHARED_SITES, LlamaConfig
from halfbyte.models.embedding import embed_tokens, head_weight
from halfbyte.models.layer_scan import scan_layers
from halfbyte.models.linear_layers import MLP_SITES, apply_linears, gated_mlp
from halfbyte.models.model_context import (
    DEFAULT_CONTEXT,
    RESIDUAL_STREAM_AXES,
    LayerContext,
    ModelContext,
    block_activation_axes,
    is_scanned,
)
from halfbyte.models.moe import moe_mlp
from halfbyte.models.params import Params
from halfbyte.models.quantized_params import quantize_with_shared_scale
from halfbyte.models.remat import call_with_reshaped, round_residual_stream
from halfbyte.ops.activation import ACTIVATIONS
from halfbyte.ops.attention import attention
from halfbyte.ops.cross_entropy import LossSharding, cross_entropy
from halfbyte.ops.cross_entropy import per_token_nll as chunked_nll
from halfbyte.ops.moe_dispatch import ExpertLoad
from halfbyte.ops.operand import round_to_dtype
from halfbyte.ops.rms_norm_vjp import NormFanout, norm_kernel_refusal, rms_norm, rms_norm_fanout
from halfbyte.ops.rope import apply_rope, rope_cos_sin, rope_frequencies

Batch = dict[str, jax.Array]
RopeTables = tuple[jax.Array, jax.Array]
QKV = ("q", "k", "v")


def apply(cfg: LlamaConfig, params: Params, batch: Batch, ctx: ModelContext = DEFAULT_CONTEXT) -> jax.Array:
    """Returns the logits, float32 [batch, seq, vocab].

    `batch` has `tokens` and, if rows are packed, `segments` and `positions`, all int32 [batch, seq].
    """
    hidden = hidden_states(cfg, params, batch, ctx)
    return project_logits(cfg, params, hidden, ctx)


def loss(
    cfg: LlamaConfig, params: Params, batch: Batch, ctx: ModelContext = DEFAULT_CONTEXT, *, z_loss: float = 0.0
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the mean over scored tokens of nll + z_loss * lse^2, and aux.

    aux has `tokens`, `nll_sum`, `z_sum`, and both terms of the mean: `nll` and `z_loss`.
    """
    total, aux = loss_sum(cfg, params, batch, ctx, z_loss=z_loss)
    scored = jnp.maximum(aux["tokens"], 1.0)
    return total / scored, aux | {"nll": aux["nll_sum"] / scored, "z_loss": aux["z_sum"] / scored}


def loss_sum(
    cfg: LlamaConfig, params: Params, batch: Batch, ctx: ModelContext = DEFAULT_CONTEXT, *, z_loss: float = 0.0,
    balance_loss: float = 0.0, router_z_loss: float = 0.0,
) -> tuple[jax.Array, dict[str, jax.Array]]:  # fmt: skip
    """Returns the loss summed over scored tokens, and aux: sums that microbatches add before dividing by all tokens.

    aux has `tokens`, `nll_sum` and `z_sum`. With experts it also has both router losses, each the mean over layers
    times the scored tokens (`balance_sum`, `router_z_sum`), and `load`, float32 [layers, experts]: the number of
    (token, expert) pairs.
    """
    routed: list[ExpertLoad] = []
    hidden = hidden_states(cfg, params, batch, ctx, routed)
    total, aux = loss_from_hidden(cfg, params, hidden, batch["targets"], ctx, z_loss=z_loss)
    if not cfg.experts:
        return total, aux
    load = jax.tree.map(lambda *parts: jnp.concatenate(parts), *routed)
    balance, z = (aux["tokens"] * jnp.mean(term) for term in (load.balance, load.z))
    router_aux = {"balance_sum": balance, "router_z_sum": z, "load": load.counts.astype(jnp.float32)}
    return total + balance_loss * balance + router_z_loss * z, aux | jax.tree.map(lax.stop_gradient, router_aux)


def loss_from_hidden(
    cfg: LlamaConfig, params: Params, hidden: jax.Array, targets: jax.Array, ctx: ModelContext, *, z_loss: float = 0.0
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns `loss_sum` without router losses, from hidden states [batch, seq, embed] after the last norm."""
    return cross_entropy(hidden, head_weight(params), targets, z_loss=z_loss, **_logits_options(cfg, ctx))


def _logits_options(cfg: LlamaConfig, ctx: ModelContext) -> dict[str, Any]:
    """Returns the keyword arguments for chunking and sharding the logits, the same for every loss."""
    return {"chunk": ctx.loss_chunk, "spread": LossSharding(ctx.mesh, ctx.rules, ctx.reduce_dtype)}


def token_nll(cfg: LlamaConfig, params: Params, batch: Batch, ctx: ModelContext = DEFAULT_CONTEXT) -> jax.Array:
    """Returns the negative log-likelihood of every target, float32 [batch, seq]; 0 where the target is -1.

    Logits are computed in chunks and are never in memory at once. Has no gradient.
    """
    hidden = hidden_states(cfg, params, batch, ctx)
    return chunked_nll(hidden, head_weight(params), batch["targets"], **_logits_options(cfg, ctx))


def hidden_states(
    cfg: LlamaConfig,
    params: Params,
    batch: Batch,
    ctx: ModelContext = DEFAULT_CONTEXT,
    routed: list[ExpertLoad] | None = None,
) -> jax.Array:
    """Returns the hidden states after the last norm, [batch, seq, embed] in the compute dtype.

    The load of experts is appended to `routed`, stacked per segment.
    """
    layer = make_block_fn(cfg, batch, ctx)

    def visit(x: jax.Array, weights: Params, here: LayerContext, _: None) -> tuple[jax.Array, ExpertLoad | None]:
        loads: list[ExpertLoad] = []
        x = layer(x, weights, dataclasses.replace(here, expert_loads=loads))
        return x, loads[0] if loads else None

    x, segment_loads = scan_layers(cfg, params, embed_inputs(cfg, params, batch["tokens"], ctx), ctx, visit)
    if routed is not None:
        routed += segment_loads
    return all_gather_sequence(apply_norm(cfg, x, params["final_norm"]), ctx)


def embed_inputs(cfg: LlamaConfig, params: Params, tokens: jax.Array, ctx: ModelContext) -> jax.Array:
    """Returns the input of the first layer: [batch, seq, embed] in the compute dtype."""
    return embed_tokens(params["embed"], tokens, ctx)


def apply_norm(cfg: LlamaConfig, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Applies the RMS norm with this weight to x."""
    return rms_norm(x, weight, cfg.norm_eps)


def make_block_fn(
    cfg: LlamaConfig, batch: Batch, ctx: ModelContext
) -> Callable[[jax.Array, Params, LayerContext], jax.Array]:
    """Returns `transformer_block` for this batch: a function of x, the weights of a layer and its context."""
    attend = functools.partial(
        attention, segments=batch.get("segments"), implementation=ctx.attention, mesh=ctx.mesh, rules=ctx.rules
    )
    tables = rope_of(cfg, positions_of(batch))
    return lambda x, weights, here: transformer_block(cfg, weights, x, tables, here, attend)


def transformer_block(
    cfg: LlamaConfig, weights: Params, x: jax.Array, tables: RopeTables, here: LayerContext, attend: Any
) -> jax.Array:
    """Applies one transformer block to x [batch, seq, embed]; `attend(q, k, v)` gets rotated q and k."""
    ctx = here.ctx
    x, h = norm_fanout(cfg, x, weights["attention"], here, ("attention", QKV))
    x = x + attention_block(cfg, weights["attention"], h, tables, here, attend)
    x, h = norm_fanout(
        cfg,
        round_residual_stream(ctx.constrain(x, *RESIDUAL_STREAM_AXES)),
        weights["mlp"],
        here,
        ("mlp", MLP_SITES[:2]),
    )
    y = mlp_block(cfg, weights["mlp"], h[0], here)
    return round_to_dtype(ctx.constrain(x + y, *RESIDUAL_STREAM_AXES))


def norm_fanout(
    cfg: LlamaConfig, x: jax.Array, weights: Params, here: LayerContext, sites: tuple[str, Sequence[str]]
) -> tuple[jax.Array, tuple[Any, ...]]:
    """Returns the residual stream and norm(x): one copy, or with the norm kernel one per linear in `sites`."""
    ctx, (group, names), weight = here.ctx, sites, weights["norm"]
    copies = 1 if here.watch or group == "mlp" else len(names)  # an observer sees one copy; an MLP is one op
    stack_slice = None if here.stacks is None else here.stacks.norm_stack(group)
    looped = stack_slice is None and is_scanned(cfg, ctx.unroll)
    if norm_kernel_refusal(x.shape, x.dtype, looped=looped, mesh=ctx.mesh, rules=ctx.rules):
        return x, (ctx.constrain(rms_norm(x, weight, cfg.norm_eps), *RESIDUAL_STREAM_AXES),)
    fanout = NormFanout(cfg.norm_eps, copies, ctx.mesh, ctx.rules)
    x, normed, stack = rms_norm_fanout(fanout, x, weight, stack_slice)
    h = tuple(ctx.constrain(copy, *RESIDUAL_STREAM_AXES) for copy in normed)
    if here.stacks is not None and stack is not None:
        here.stacks.norms[group] = stack
    return x, h


def attention_block(
    cfg: LlamaConfig, weights: Params, h: Sequence[jax.Array], tables: RopeTables, here: LayerContext, attend: Any
) -> jax.Array:
    """Applies attention to `h`, the normed x: projections, norms of q and k (Qwen3), RoPE, attention, projection."""
    ctx, weights = here.ctx, quantize_with_shared_scale(weights, here, "attention") if here.shares_scales else weights
    lead = h[0].shape[:2]

    def heads(y: jax.Array, axis: str) -> jax.Array:
        # [batch, seq, heads * head_dim] -> [batch, seq, heads, head_dim]
        return ctx.constrain(y.reshape(*lead, -1, cfg.head_dim), "batch", "seq", axis, "head_dim")

    def norm_and_rotate(name: str, y: jax.Array) -> jax.Array:
        norm_per_head = cfg.qk_norm and not cfg.joint_qk_norm
        return apply_rope(apply_norm(cfg, y, weights[f"{name}_norm"]) if norm_per_head else y, tables)

    q, k, v = apply_linears(h[0], weights, here, "attention", QKV, copies=h[1:])
    if cfg.joint_qk_norm:
        q, k = apply_norm(cfg, q, weights["q_norm"]), apply_norm(cfg, k, weights["k_norm"])
    q, k, v = norm_and_rotate("q", heads(q, "heads")), norm_and_rotate("k", heads(k, "kv_heads")), heads(v, "kv_heads")
    out = attend(*(round_residual_stream(t) for t in (q, k, v)))

    def project_back(out: jax.Array) -> jax.Array:
        (y,) = apply_linears(ctx.constrain(out, *block_activation_axes("heads")), weights, here, "attention", ("o",))
        return y

    # [batch, seq, heads, head_dim] -> [batch, seq, heads * head_dim] -> [batch, seq, embed]
    flat = (*lead, cfg.heads * cfg.head_dim)
    # An observer may store what it sees, and no value may escape from a rematerialized function.
    y = project_back(out.reshape(flat)) if here.watch else call_with_reshaped(project_back, out, flat)
    return ctx.constrain(y, *RESIDUAL_STREAM_AXES)


def mlp_block(cfg: LlamaConfig, weights: Params, h: jax.Array, here: LayerContext) -> jax.Array:
    """Applies the gated MLP, or the routed experts plus the shared experts, to `h`, the normed x."""
    weights = quantize_with_shared_scale(weights, here, "mlp") if here.shares_scales else weights

    def dense(sites: Sequence[str]) -> jax.Array:
        y = gated_mlp(h, weights, here, ACTIVATIONS[cfg.activation], sites)
        return here.ctx.constrain(y, *RESIDUAL_STREAM_AXES)

    if not cfg.experts:
        return dense(MLP_SITES)
    y = moe_mlp(cfg, weights, h, here)
    return y + dense(SHARED_SITES) if cfg.shared_experts else y


def all_gather_sequence(h: jax.Array, ctx: ModelContext) -> jax.Array:
    """All-gathers the positions of `h` that are sharded between blocks but not inside them."""
    if axis_size(ctx.mesh, ctx.rules.mesh_axes("residual_seq")) > axis_size(ctx.mesh, ctx.rules.mesh_axes("seq")):
        # XLA may keep excess precision: without the barrier it gathers the float32 output of the norm, which is twice
        # the bytes and not rounded.
        h = lax.optimization_barrier(ctx.constrain(h, "batch", "residual_seq", "width"))
    return ctx.constrain(h, "batch", "seq", "width")


def project_logits(cfg: LlamaConfig, params: Params, hidden: jax.Array, ctx: ModelContext) -> jax.Array:
    """Returns the logits, float32 [batch, seq, vocab], of hidden states [batch, seq, embed]."""
    weight = head_weight(params).astype(hidden.dtype)
    logits = jnp.dot(hidden, weight, preferred_element_type=jnp.float32)
    return ctx.constrain(logits, "batch", "seq", "vocab")


def positions_of(batch: Batch) -> jax.Array:
    """Returns the positions of the batch, by default 0, 1, ... in every row."""
    if "positions" in batch:
        return batch["positions"]
    return jnp.arange(batch["tokens"].shape[1], dtype=jnp.int32)[None]


def rope_of(cfg: LlamaConfig, positions: jax.Array) -> RopeTables:
    """Returns cos and sin of the rotary embedding at `positions`, with the frequencies of the model."""
    return rope_cos_sin(positions, rope_frequencies(cfg.head_dim, theta=cfg.rope_theta, scaling=cfg.rope_scaling))
