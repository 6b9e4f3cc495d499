"""Halfbyte: language-model pretraining in 4-bit NVFP4 with JAX, on the hardware people have.

The public names below are imported when they are first used, so that `import halfbyte` and `halfbyte --help` cost
nothing: JAX is loaded by the first name that needs it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> the room it lives in. A new public name is one entry here.
_PUBLIC = {
    "formats": (
        "BF16", "FP8", "FP8_E5M2", "MXFP4", "MXFP4_FLOOR", "MXFP8", "MXFP8_E5M2", "MXFP8_FLOOR", "NVFP4",
        "BlockFormat", "QTensor", "all_finite", "hadamard16", "quantize",
    ),
    "recipe": ("OperandPolicy", "Policy", "Recipe", "Rule", "policy", "recipe", "recipe_names"),
    "ops": ("QWeight", "apply_recipe", "dot_general", "grouped_qdot", "jit", "mlp", "qdot", "quantize_weight"),
    "devices": ("DEVICES", "Device"),
    "train": ("TrainConfig", "train"),
    "runs": ("evaluate", "generate", "load", "run_config"),
}  # fmt: skip
_ROOM_OF = {name: room for room, names in _PUBLIC.items() for name in names}

if TYPE_CHECKING:
    from halfbyte.recipe import recipe as recipe  # the rooms of these names are callable
    from halfbyte.train import train as train


def __getattr__(name: str) -> Any:
    """The public object `name`, imported from its room and kept."""
    if name not in _ROOM_OF:
        raise AttributeError(f"module 'halfbyte' has no attribute {name!r}")
    room = import_module(f"halfbyte.{_ROOM_OF[name]}")
    value = room if name == _ROOM_OF[name] else getattr(room, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_ROOM_OF])
