"""Cross-entropy of a language model without its logits.

A batch of 8 x 8192 tokens against a vocabulary of 128k has 34 GB of float32 logits. This module takes the tokens in
chunks: it computes the logits of one chunk, reduces them and frees them. Under differentiation the same step also
computes the gradients, because for a loss that is a *sum* over tokens

    L = sum over t of (lse_t - logit_t[target]) + z lse_t^2
    dlogits_t = softmax_t (1 + 2 z lse_t) - onehot_t,   dx = dlogits W^T,   dW = x^T dlogits

depend on no later value: the backward pass only multiplies by the cotangent of L. The head therefore has one GEMM
forward and two backward, as in a model that saves its logits. Logits are the float32 result of a GEMM in the dtype of
the hidden states; dlogits are rounded to that dtype (for z = 0 they are within -1..1).

On a mesh the loop runs inside `shard_map`: tokens are sharded over data, fsdp and context, the vocabulary over tensor.
dW is reduced over devices once.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from halfbyte.distributed import (
    DEFAULT_RULES,
    LogicalAxisRules,
    axis_size,
    check_sharded,
    shard_map_over,
    with_logical_constraint,
)
from halfbyte.ops.linear_sharding import reduce_scatter_gradient

LOGITS_CHUNK_BYTES = 2**30  # limit of one chunk's float32 logits if `chunk` is None


class LossSharding(NamedTuple):
    """Devices that compute the loss. The head's gradient is reduced over them in `reduce_dtype`."""

    mesh: Mesh | None = None
    rules: LogicalAxisRules = DEFAULT_RULES
    reduce_dtype: str = "float32"


UNSHARDED_LOSS = LossSharding()


class _Setup(NamedTuple):
    """Static configuration: hashable, as a non-differentiated argument of `custom_vjp` must be."""

    z_loss: float
    chunk: int | None
    cap: float | None
    spread: LossSharding


class _PerToken(NamedTuple):
    nll: jax.Array  # float32, 0 where not scored
    lse: jax.Array  # float32, 0 where not scored


def cross_entropy(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    *,
    z_loss: float = 0.0,
    chunk: int | None = None,
    cap: float | None = None,
    spread: LossSharding = UNSHARDED_LOSS,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns (sum over scored tokens of nll + z_loss * lse^2, aux), float32.

    `hidden`: [B, S, D]. `head`: [D, V]. `targets`: int [B, S], -1 for a token that is not scored. aux: `nll_sum`,
    `z_sum` (the sum of the z terms) and `tokens` (the number of scored tokens, float32), all without a gradient.
    `chunk` is the number of a device's tokens whose logits exist at one time; `cap` bounds logits (`softcap_logits`).
    """
    _check(hidden, head, targets, spread)
    setup = _Setup(float(z_loss), chunk, cap, spread)
    total, nll_sum, z_sum = _chunked_cross_entropy(hidden, head, targets, setup)
    tokens = jnp.sum(targets >= 0, dtype=jnp.int32).astype(jnp.float32)
    return total, {"nll_sum": lax.stop_gradient(nll_sum), "z_sum": lax.stop_gradient(z_sum), "tokens": tokens}


def per_token_nll(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    *,
    chunk: int | None = None,
    cap: float | None = None,
    spread: LossSharding = UNSHARDED_LOSS,
) -> jax.Array:
    """Returns the negative log-likelihood of each target, float32 [B, S], without a gradient; 0 for target -1."""
    _check(hidden, head, targets, spread)
    per_token, _ = _sharded(hidden, head, targets, _Setup(0.0, chunk, cap, spread), with_grads=False)
    return lax.stop_gradient(per_token.nll)


def softcap_logits(logits: jax.Array, cap: float | None) -> jax.Array:
    """Returns cap tanh(logits / cap), within -cap..cap and nearly equal to small logits; unchanged if `cap` is None."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def _check(hidden: jax.Array, head: jax.Array, targets: jax.Array, spread: LossSharding) -> None:
    if hidden.shape[:-1] != targets.shape or hidden.shape[-1] != head.shape[0]:
        raise ValueError(
            f"loss: hidden {hidden.shape}, head {head.shape} and targets {targets.shape} "
            "do not fit [B, S, D], [D, V], [B, S]"
        )
    check_sharded(head.shape[1], "vocab", spread.mesh, what="vocab_size", rules=spread.rules)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _chunked_cross_entropy(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, setup: _Setup
) -> tuple[jax.Array, jax.Array, jax.Array]:
    per_token, _ = _sharded(hidden, head, targets, setup, with_grads=False)
    return _sums(per_token, setup)


def _sums(per_token: _PerToken, setup: _Setup) -> tuple[jax.Array, jax.Array, jax.Array]:
    nll_sum = jnp.sum(per_token.nll)
    z_sum = setup.z_loss * jnp.sum(per_token.lse * per_token.lse)
    return nll_sum + z_sum, nll_sum, z_sum


def _summed_fwd(hidden: jax.Array, head: jax.Array, targets: jax.Array, setup: _Setup) -> tuple[Any, Any]:
    per_token, grads = _sharded(hidden, head, targets, setup, with_grads=True)
    return _sums(per_token, setup), (grads, jnp.zeros((), head.dtype))


def _summed_bwd(
    setup: _Setup, residuals: Any, cotangents: tuple[jax.Array, jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, None]:
    ((dhidden, dhead), head_like), g = residuals, cotangents[0]
    return (dhidden.astype(jnp.float32) * g).astype(dhidden.dtype), (dhead * g).astype(head_like.dtype), None


_chunked_cross_entropy.defvjp(_summed_fwd, _summed_bwd)


def _sharded(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, setup: _Setup, *, with_grads: bool
) -> tuple[_PerToken, Any]:
    """Runs the chunk loop, on one device or inside `shard_map`.

    Returns (nll and lse per token, (dhidden, dhead) for a cotangent of 1, or None without `with_grads`).
    """
    mesh, rules, _ = setup.spread
    head = head.astype(hidden.dtype)
    if mesh is None:
        return _local(hidden, head, targets, setup, with_grads=with_grads)
    tokens = rules.spec(("batch", "seq"), mesh)
    stored = rules.spec(("embed", "vocab"), mesh)
    gathered = rules.spec((None, "vocab"), mesh)
    head = with_logical_constraint(head, ("embed", "vocab"), mesh, rules)  # cast before the all-gather
    local = functools.partial(_local, setup=setup, with_grads=with_grads)
    out_specs = tokens, (tokens, stored) if with_grads else None
    outputs: tuple[_PerToken, Any] = shard_map_over(local, mesh, (tokens, gathered, tokens), out_specs)(
        hidden, head, targets
    )
    return outputs


def _local(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, setup: _Setup, *, with_grads: bool
) -> tuple[_PerToken, Any]:
    batch, seq, width = hidden.shape
    tokens = batch * seq
    chunk = min(setup.chunk or _default_chunk(head.shape[1], tokens), tokens)
    count = -(-tokens // chunk)
    padding = count * chunk - tokens
    # [batch, seq, width] -> [count, chunk, width]
    x = jnp.pad(hidden.reshape(tokens, width), ((0, padding), (0, 0))).reshape(count, chunk, width)
    t = jnp.pad(targets.reshape(tokens), (0, padding), constant_values=-1).reshape(count, chunk)

    step = functools.partial(_chunk_step, head=head, setup=setup, with_grads=with_grads)
    if count == 1:
        dhead, (per_token, dx) = step(None, (x[0], t[0]))
    else:
        start = jnp.zeros(head.shape, jnp.float32) if with_grads else None
        dhead, (per_token, dx) = lax.scan(step, start, (x, t))

    per_token = _PerToken(*(part.reshape(-1)[:tokens].reshape(batch, seq) for part in per_token))
    if not with_grads:
        return per_token, None
    return per_token, (dx.reshape(-1, width)[:tokens].reshape(hidden.shape), _reduce_head(dhead, setup))


def _chunk_step(
    dhead: jax.Array | None, chunk: tuple[jax.Array, jax.Array], *, head: jax.Array, setup: _Setup, with_grads: bool
) -> Any:
    """Returns dhead plus this chunk's share of it, and the chunk's nll, lse and dx."""
    x, target = chunk
    vocab_axes = _live_axes(setup, "vocab")
    logits = softcap_logits(jnp.dot(x, head, preferred_element_type=jnp.float32), setup.cap)  # [chunk, vocab]
    scored = (target >= 0).astype(jnp.float32)
    lse = _logsumexp(logits, vocab_axes)
    shard = lax.axis_index(vocab_axes).astype(jnp.int32) if vocab_axes else jnp.int32(0)
    local_target = target - jnp.int32(head.shape[1]) * shard  # index in this shard of the vocabulary
    hit = lax.broadcasted_iota(jnp.int32, logits.shape, 1) == local_target[:, None]
    target_logit = _psum(jnp.sum(jnp.where(hit, logits, 0.0), axis=-1), vocab_axes)
    per_token = _PerToken((lse - target_logit) * scored, lse * scored)
    if not with_grads:
        return None, (per_token, None)
    weight = scored * (1.0 + (2.0 * setup.z_loss) * lse)
    dlogits = jnp.exp(logits - lse[:, None]) * weight[:, None] - jnp.where(hit, scored[:, None], 0.0)
    if setup.cap is not None:  # d tanh = 1 - tanh^2
        dlogits = dlogits * (1.0 - (logits / setup.cap) ** 2)
    dlogits = dlogits.astype(x.dtype)
    dx = _psum(jnp.dot(dlogits, head.T, preferred_element_type=jnp.float32), vocab_axes).astype(x.dtype)
    chunk_dhead = jnp.dot(x.T, dlogits, preferred_element_type=jnp.float32)
    return chunk_dhead if dhead is None else dhead + chunk_dhead, (per_token, dx)


def _logsumexp(logits: jax.Array, vocab_axes: tuple[str, ...]) -> jax.Array:
    row_max = jnp.max(logits, axis=-1)
    row_max = lax.pmax(row_max, vocab_axes) if vocab_axes else row_max
    return jnp.log(_psum(jnp.sum(jnp.exp(logits - row_max[:, None]), axis=-1), vocab_axes)) + row_max


def _reduce_head(dhead: jax.Array, setup: _Setup) -> jax.Array:
    """Reduces dW over all devices with other tokens, and leaves it sharded as W is stored."""
    if setup.spread.mesh is None:
        return dhead
    split = _live_axes(setup, "embed")
    summed = tuple(axis for axis in (*_live_axes(setup, "batch"), *_live_axes(setup, "seq")) if axis not in split)
    scattered = reduce_scatter_gradient(dhead, (split, ()), setup.spread.reduce_dtype)
    return _psum(scattered, summed)  # over the remaining axes only the shard is reduced


def _live_axes(setup: _Setup, logical: str) -> tuple[str, ...]:
    """Returns the mesh axes with more than one device over which a logical axis is sharded."""
    mesh, rules, _ = setup.spread
    if mesh is None:
        return ()
    return tuple(axis for axis in rules.mesh_axes(logical) if axis_size(mesh, axis) > 1)


def _psum(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return lax.psum(x, axes) if axes else x


def _default_chunk(vocab: int, tokens: int) -> int:
    """Returns the tokens per chunk: the largest multiple of 128 within LOGITS_CHUNK_BYTES that divides `tokens`.

    If none above half the limit does, returns the limit, and the caller pads.
    """
    limit = max(128, LOGITS_CHUNK_BYTES // (4 * vocab) // 128 * 128)
    return next((n for n in range(limit, limit // 2, -128) if tokens % n == 0), limit)
