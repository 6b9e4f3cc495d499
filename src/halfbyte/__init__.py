"""Halfbyte: language-model pretraining in 4-bit NVFP4 with JAX, on the hardware people have.

The public names below are imported when they are first used, so that `import halfbyte` and `halfbyte --help` cost
nothing: JAX is loaded by the first name that needs it.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

# Public name -> the package it lives in. A new public name is one entry here.
_PUBLIC = {
    "formats": (
        "BF16", "FP8", "FP8_E5M2", "MXFP4", "MXFP4_FLOOR", "MXFP8", "MXFP8_E5M2", "MXFP8_FLOOR", "NVFP4",
        "BlockFormat", "QTensor", "all_finite", "hadamard16", "quantize",
    ),
    "recipes": ("OperandPolicy", "Policy", "Recipe", "Rule", "policy", "recipe", "recipe_names", "step_key"),
    "ops": ("QWeight", "apply_recipe", "dot_general", "grouped_qdot", "jit", "mlp", "qdot", "quantize_weight"),
    "devices": ("DEVICES", "Device"),
    "train": ("TrainConfig", "train"),
    "api": ("evaluate", "generate", "load", "precision_plan", "run_config"),
}  # fmt: skip
_PACKAGE_OF = {name: package for package, names in _PUBLIC.items() for name in names}

if TYPE_CHECKING:
    from halfbyte.recipes import recipe as recipe  # the packages of these names are callable
    from halfbyte.train import train as train


def __getattr__(name: str) -> Any:
    """The public object `name`, imported from its package and kept."""
    if name not in _PACKAGE_OF:
        raise AttributeError(f"module 'halfbyte' has no attribute {name!r}")
    package = import_module(f"halfbyte.{_PACKAGE_OF[name]}")
    value = package if name == _PACKAGE_OF[name] else getattr(package, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_PACKAGE_OF])


class _OldModules:
    """Finds modules of version 0.1 by their old path, after all other finders have failed."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        return import_module("halfbyte.renamed").find_old_module(name) if name.startswith("halfbyte.") else None


if not any(finder.__name__ == "_OldModules" for finder in sys.meta_path if isinstance(finder, type)):
    sys.meta_path.append(_OldModules)
