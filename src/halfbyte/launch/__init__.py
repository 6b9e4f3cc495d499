"""One process becomes one of many: peers, coordinator, and the settings a GPU run wants."""

from .cluster import DistributedConfig, Peers, find_peers
from .mock import MOCK_NOTE, Mock, check_mock, mock_gpus
from .start import start
from .xla_flags import FLAG_SETS, Applied, Setting, apply, recommended, repeatable, visible_gpus
