"""A model's parameters as the tensors of Hugging Face `transformers`, from what they declare (`models.declared`).

There is one tensor a layer (and expert) there, and weights are [out, in]; here they are stacked and [in, out]. Rotary
halves are laid out alike (pairs i and i + head_dim/2), so nothing is permuted.
"""

from dataclasses import dataclass

from halfbyte.models import LlamaConfig, declared

TRANSPOSED = ("linear", "experts", "router", "head")


@dataclass(frozen=True)
class Site:
    """One tensor there, and where it is here: parameter `path`, its `layer` if the parameter is stacked, its `expert`
    if it is one of several."""

    module: str
    path: str
    layer: int | None
    shape: tuple[int, ...]
    kind: str
    expert: int | None = None

    @property
    def at(self) -> tuple[int, ...]:
        """Where it lies in its parameter: the numbers of its layer and of its expert."""
        return tuple(number for number in (self.layer, self.expert) if number is not None)

    @property
    def name(self) -> str:
        return f"{self.module}.weight"

    @property
    def transposed(self) -> bool:
        """Whether the tensor is [out, in]."""
        return self.kind in TRANSPOSED


def sites(cfg: LlamaConfig) -> list[Site]:
    """Every tensor of a model in the order of its declarations, layer by layer. A tied head has none."""
    specs = declared(cfg)
    first = next(place for place, spec in enumerate(specs.values()) if spec.stacked)
    found = []
    for place, (path, spec) in enumerate(specs.items()):
        shape = spec.shape[spec.stacked + bool(spec.experts) :]
        shape = shape[::-1] if spec.kind in TRANSPOSED else shape
        for layer in range(cfg.layers) if spec.stacked else (None,):
            module = spec.module if layer is None else f"model.layers.{layer}.{spec.module}"
            order = (place, 0) if layer is None else (first, layer)
            for expert in range(spec.experts) if spec.experts else (None,):
                named = module if expert is None else module.replace("*", str(expert))
                found.append((order, Site(named, path, layer, shape, spec.kind, expert)))
    return [site for _, site in sorted(found, key=lambda each: each[0])]
