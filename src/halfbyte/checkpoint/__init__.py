"""Checkpoints that notice damage, and the lock that keeps a run directory to one writer."""

from .beside import GoneCheckpoint, reading
from .checksum import LARGEST, inspect, named_leaves
from .copying import NAME, Copy
from .lock import LOCK, RunDirectoryHeld, RunLock
from .record import CheckpointMismatch, DamagedCheckpoint, PoisonedCheckpoint, Record, UnreadableCheckpoint
from .restoring import NoGoodCheckpoint, Restored
from .store import Checkpoints
