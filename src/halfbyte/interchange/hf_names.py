"""A model's parameters as the tensors of Hugging Face `transformers`, from what they declare (`models.declared`).

There is one tensor a layer there, and weights are [out, in]; here layers are stacked and weights are [in, out]. Rotary
halves are laid out alike (pairs i and i + head_dim/2), so nothing is permuted.
"""

from dataclasses import dataclass

from halfbyte.models import LlamaConfig, declared

TRANSPOSED = ("linear", "router", "head")


@dataclass(frozen=True)
class Site:
    """One tensor there, and where it is here: parameter `path`, and its `layer` if the parameter is stacked."""

    module: str
    path: str
    layer: int | None
    shape: tuple[int, ...]
    kind: str

    @property
    def name(self) -> str:
        return f"{self.module}.weight"

    @property
    def transposed(self) -> bool:
        """Whether the tensor is [out, in]."""
        return self.kind in TRANSPOSED


def sites(cfg: LlamaConfig) -> list[Site]:
    """Every tensor of a model in the order of its declarations, layer by layer. A tied head has none. ValueError for
    experts, whose tensors nothing here reads or writes.
    """
    specs = declared(cfg)
    first = next(place for place, spec in enumerate(specs.values()) if spec.stacked)
    found = []
    for place, (path, spec) in enumerate(specs.items()):
        if spec.kind == "experts":
            raise ValueError(f"parameter {path}: experts are neither read from Hugging Face folders nor written there")
        shape = spec.shape[spec.stacked :]
        shape = shape[::-1] if spec.kind in TRANSPOSED else shape
        for layer in range(cfg.layers) if spec.stacked else (None,):
            module = spec.module if layer is None else f"model.layers.{layer}.{spec.module}"
            order = (place, 0) if layer is None else (first, layer)
            found.append((order, Site(module, path, layer, shape, spec.kind)))
    return [site for _, site in sorted(found, key=lambda each: each[0])]
