"""One process becomes one of many: peers, coordinator, and the settings a GPU run wants."""

from .cluster import DistributedConfig, Peers, find_peers
from .start import Launched, start
from .xla_flags import Setting, apply, known_to_xla, recommended, visible_gpus

__all__ = [
    "DistributedConfig",
    "Launched",
    "Peers",
    "Setting",
    "apply",
    "find_peers",
    "known_to_xla",
    "recommended",
    "start",
    "visible_gpus",
]
