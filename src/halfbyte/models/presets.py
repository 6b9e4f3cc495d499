"""The presets of Llama 3, Qwen3, Mixtral and OLMoE, with the shapes that were published."""

from __future__ import annotations

import difflib

from halfbyte.models.config import LlamaConfig
from halfbyte.nn.rope import RopeScaling


def preset(name: str) -> LlamaConfig:
    """The configuration named `name`; an unknown name is a ValueError with the nearest ones."""
    if name not in _PRESETS:
        near = difflib.get_close_matches(name, _PRESETS, n=2, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(f"model: no preset {name!r}; {hint}the presets are {', '.join(_PRESETS)}")
    return _PRESETS[name]


def presets() -> dict[str, LlamaConfig]:
    """Every preset by name, smallest first."""
    return dict(_PRESETS)


def _small(name: str, *, embed: int, mlp: int, layers: int, heads: int) -> LlamaConfig:
    """The small Llamas of the low-rank and low-bit training literature, with a vocabulary of 32,768 and a context of
    2,048.
    """
    return LlamaConfig(
        name=name, vocab_size=32768, embed=embed, mlp=mlp, layers=layers, heads=heads, kv_heads=heads,
        head_dim=embed // heads, max_seq=2048, rope_theta=10_000.0,
    )  # fmt: skip


def _llama3(
    name: str, *, embed: int, mlp: int, layers: int, heads: int, factor: float | None, tied: bool = False
) -> LlamaConfig:
    """A published Llama 3: vocabulary 128,256, 8 key heads, theta 500,000; `factor` is the rotary scaling of the 3.1
    and 3.2 releases, which stretches 8,192 positions to 131,072.
    """
    return LlamaConfig(
        name=name, vocab_size=128256, embed=embed, mlp=mlp, layers=layers, heads=heads, kv_heads=8,
        head_dim=embed // heads, max_seq=131072 if factor else 8192, tied=tied,
        rope_scaling=RopeScaling(factor) if factor else None,
    )  # fmt: skip


def _qwen3(name: str, *, embed: int, mlp: int, layers: int, heads: int, tied: bool) -> LlamaConfig:
    """A published Qwen3 (its Base release): vocabulary 151,936, 8 key heads of 128, theta 1,000,000."""
    return LlamaConfig(
        name=name, vocab_size=151936, embed=embed, mlp=mlp, layers=layers, heads=heads, kv_heads=8, head_dim=128,
        max_seq=32768, tied=tied, rope_theta=1_000_000.0, norm_eps=1e-6, qk_norm=True,
    )  # fmt: skip


def _qwen3_moe(name: str, *, embed: int, mlp: int, layers: int, heads: int, kv_heads: int) -> LlamaConfig:
    """A published Qwen3-MoE: 128 experts of which a token passes 8, their weights normalised."""
    dense = _qwen3(name, embed=embed, mlp=mlp, layers=layers, heads=heads, tied=False)
    return dense.replace(kv_heads=kv_heads, experts=128, experts_per_token=8, norm_topk=True, max_seq=40960)


_DEMO = LlamaConfig(
    name="demo", vocab_size=1024, embed=128, mlp=640, layers=4, heads=4, kv_heads=2, head_dim=32, max_seq=512,
    rope_theta=10_000.0,
)  # fmt: skip
_OLMOE = LlamaConfig(
    name="olmoe-1b-7b", vocab_size=50304, embed=2048, mlp=1024, layers=16, heads=16, kv_heads=16, head_dim=128,
    max_seq=4096, rope_theta=10_000.0, qk_norm=True, joint_qk_norm=True, experts=64, experts_per_token=8,
)  # fmt: skip
_MIXTRAL = LlamaConfig(
    name="mixtral-8x7b", vocab_size=32000, embed=4096, mlp=14336, layers=32, heads=32, kv_heads=8, head_dim=128,
    max_seq=32768, rope_theta=1e6, experts=8, experts_per_token=2, norm_topk=True,
)  # fmt: skip
_PRESETS = {
    config.name: config
    for config in (
        _DEMO,
        _DEMO.replace(name="moe-demo", mlp=128, qk_norm=True, experts=8, experts_per_token=2, norm_topk=True),
        _small("llama-60m", embed=512, mlp=1376, layers=8, heads=8),
        _small("llama-125m", embed=768, mlp=2048, layers=12, heads=12),
        # An MLP of 2736 elsewhere: 2752 is a multiple of 32, as native FP4 needs.
        _small("llama-350m", embed=1024, mlp=2752, layers=24, heads=16),
        _qwen3("qwen3-0.6b", embed=1024, mlp=3072, layers=28, heads=16, tied=True),
        _llama3("llama3.2-1b", embed=2048, mlp=8192, layers=16, heads=32, factor=32.0, tied=True),
        _qwen3("qwen3-1.7b", embed=2048, mlp=6144, layers=28, heads=16, tied=True),
        _OLMOE,
        _llama3("llama3-8b", embed=4096, mlp=14336, layers=32, heads=32, factor=None),
        _qwen3("qwen3-8b", embed=4096, mlp=12288, layers=36, heads=32, tied=False),
        _qwen3_moe("qwen3-30b-a3b", embed=2048, mlp=768, layers=48, heads=32, kv_heads=4),
        _MIXTRAL,
        _llama3("llama3.1-70b", embed=8192, mlp=28672, layers=80, heads=64, factor=8.0),
        _qwen3_moe("qwen3-235b-a22b", embed=4096, mlp=1536, layers=94, heads=64, kv_heads=4),
        _llama3("llama3.1-405b", embed=16384, mlp=53248, layers=126, heads=128, factor=8.0),
    )
}
