"""What config.json says about quantized weights, in the words of compressed-tensors and of ModelOpt, and back."""

from collections.abc import Mapping, Sequence
from typing import Any

import halfbyte.interchange.layouts as layouts
from halfbyte.interchange.layouts import NvfpLayout

LAYOUTS: dict[str, NvfpLayout] = {"compressed-tensors": layouts.COMPRESSED_TENSORS, "modelopt": layouts.MODELOPT}
"""quant_method -> how its tensors are laid out."""


def quantization_config(method: str, ignore: Sequence[str], *, activations: bool, producer: str) -> dict[str, Any]:
    """The `quantization_config` of config.json. `ignore`: linears that stay as they are."""
    if method == "modelopt":
        numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
        group = {"targets": ["Linear"], "weights": numbers, "input_activations": numbers if activations else None}
        return modelopt_config(ignore, activations=activations, producer=producer)["quantization"] | {
            "quant_method": "modelopt",
            "config_groups": {"group_0": group},
        }
    weights = _tensor_group(dynamic=False)
    inputs = _tensor_group(dynamic="local") if activations else None
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "format": "nvfp4-pack-quantized"}},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _tensor_group(*, dynamic: bool | str) -> dict[str, Any]:
    return {
        "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True,
        "dynamic": dynamic, "scale_dtype": "torch.float8_e4m3fn",
    }  # fmt: skip


def modelopt_config(ignore: Sequence[str], *, activations: bool, producer: str) -> dict[str, Any]:
    """hf_quant_config.json, which ModelOpt's readers look for beside config.json."""
    name, _, version = producer.partition(" ")
    return {
        "producer": {"name": name, "version": version},
        "quantization": {
            "quant_algo": "NVFP4" if activations else "W4A16_NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "exclude_modules": list(ignore),
        },
    }


def layout_of(fields: Mapping[str, Any]) -> NvfpLayout | None:
    """The layout of a folder's weights by its config.json, None if they are plain; ValueError for any other kind."""
    found = fields.get("quantization_config")
    if found is None:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else None
    if method == "compressed-tensors" and _is_nvfp4(found):
        return LAYOUTS["compressed-tensors"]
    if method == "modelopt" and "NVFP4" in str(found.get("quant_algo")):
        return LAYOUTS["modelopt"]
    raise ValueError(
        f"import: quantization_config.quant_method is {str(method)[:40]!r}; "
        "quantized weights are read as NVFP4 in the layouts of compressed-tensors and modelopt"
    )


def _is_nvfp4(found: Mapping[str, Any]) -> bool:
    groups = [found, *(found.get("config_groups") or {}).values()]
    return any(group.get("format") == "nvfp4-pack-quantized" for group in groups if isinstance(group, Mapping))
