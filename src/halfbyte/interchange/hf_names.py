"""Parameters of Llama and Qwen3 under the names and layouts of Hugging Face `transformers`.

They keep one tensor a layer and weights as [out, in]; here layers are stacked and weights are [in, out]. Rotary halves
are laid out alike (pairs i and i + head_dim/2), so nothing is permuted.
"""

from dataclasses import dataclass

from halfbyte.models import LlamaConfig, flatten, param_specs

LAYER_NAMES = {
    "layers/attention/norm": "input_layernorm",
    "layers/attention/q": "self_attn.q_proj",
    "layers/attention/k": "self_attn.k_proj",
    "layers/attention/v": "self_attn.v_proj",
    "layers/attention/o": "self_attn.o_proj",
    "layers/attention/q_norm": "self_attn.q_norm",
    "layers/attention/k_norm": "self_attn.k_norm",
    "layers/mlp/norm": "post_attention_layernorm",
    "layers/mlp/gate": "mlp.gate_proj",
    "layers/mlp/up": "mlp.up_proj",
    "layers/mlp/down": "mlp.down_proj",
}
OUTER_NAMES = {"embed": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}
TRANSPOSED = ("q", "k", "v", "o", "gate", "up", "down", "head")


@dataclass(frozen=True)
class Site:
    """One tensor there, and where it is here: parameter `path`, and its `layer` if the parameter is stacked."""

    module: str
    path: str
    layer: int | None
    shape: tuple[int, ...]
    transposed: bool

    @property
    def name(self) -> str:
        return f"{self.module}.weight"


def sites(cfg: LlamaConfig) -> list[Site]:
    """Every tensor of a model, embedding first, then layer by layer, then norm and head. A tied head has none."""
    found = []
    for path, spec in flatten(param_specs(cfg)).items():
        transposed = path.rsplit("/", 1)[-1] in TRANSPOSED
        stacked = path in LAYER_NAMES
        shape = spec.shape[1:] if stacked else spec.shape
        for layer in range(cfg.layers) if stacked else (None,):
            module = OUTER_NAMES[path] if layer is None else f"model.layers.{layer}.{LAYER_NAMES[path]}"
            found.append(Site(module, path, layer, shape[::-1] if transposed else shape, transposed))
    outer = list(OUTER_NAMES)
    middle = 0.5  # layers come after the embedding and before the last norm
    return sorted(found, key=lambda site: (outer.index(site.path), 0) if site.layer is None else (middle, site.layer))
