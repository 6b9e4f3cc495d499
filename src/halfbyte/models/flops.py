"""Counting: which GEMMs a step runs, and how many FLOPs a token costs.

FLOPs of a training step are counted as MaxText counts them, for B sequences of S tokens: ffn 6BSdF, qkv 2BSd(H+2K)h,
output projection 2BSdHh, attention 4BS^2Hh/2 (causal), head 2BSdV; the first four times the layers, all times 3 for
forward and backward. Rematerialized work is not counted.
"""

from __future__ import annotations

import dataclasses

from halfbyte.models.config import LlamaConfig
from halfbyte.models.params import declared
from halfbyte.models.spec import GEMMS

FLOPS_FORMULA = "maxtext-2026-06"  # logged beside every TFLOP/s figure, so that figures can be compared later


@dataclasses.dataclass(frozen=True)
class GemmSite:
    """One linear: `count` of them (its layers), each [tokens, k] x [k, n] forward."""

    path: str
    count: int
    tokens: int
    k: int
    n: int
    axes: tuple[str | None, ...] = dataclasses.field(default=(None, None), compare=False)
    """Logical axes of its weight [k, n]."""
    experts: int = 0
    """How many matrices share the tokens, each row with one of them; 0: one linear."""

    @property
    def flops(self) -> int:
        """FLOPs of fprop, dgrad and wgrad over all layers."""
        return 6 * self.count * self.tokens * self.k * self.n


def gemm_sites(cfg: LlamaConfig, batch: int, seq: int) -> list[GemmSite]:
    """Every linear of the model for a batch of `batch` sequences of `seq`, the head last."""
    tokens = batch * seq
    sites = [
        GemmSite(path, cfg.layers, tokens * spec.active, k, n, spec.axes[-2:], spec.experts)
        for path, spec in declared(cfg).items()
        if spec.kind in GEMMS
        for k, n in (spec.shape[-2:],)
    ]
    return [*sites, GemmSite("head", 1, tokens, cfg.embed, cfg.vocab_size)]


def flops_shares(cfg: LlamaConfig, seq: int) -> dict[str, float]:
    """Training FLOPs a token by part of the model: `mlp` (of the experts that it passes), `qkv`, `o`, `attention`,
    `router`, `head`.
    """
    d, wide = cfg.embed, cfg.heads * cfg.head_dim
    per_layer = {
        "mlp": 6 * d * cfg.active_mlp,
        "qkv": 2 * d * (cfg.heads + 2 * cfg.kv_heads) * cfg.head_dim,
        "o": 2 * d * wide,
        "attention": 4 * seq * wide / 2,
    }
    if cfg.experts:
        per_layer["router"] = 2 * d * cfg.experts
    return {part: 3.0 * cfg.layers * flops for part, flops in per_layer.items()} | {
        "head": 3.0 * 2 * d * cfg.vocab_size
    }


def flops_per_token(cfg: LlamaConfig, seq: int) -> float:
    """Training FLOPs a token, forward and backward, in sequences of `seq`."""
    return sum(flops_shares(cfg, seq).values())
