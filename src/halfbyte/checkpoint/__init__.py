"""Checkpoints that notice damage, and the lock that keeps a run directory to one writer."""

from .checksum import checksum, checksums, named_leaves
from .lock import RunDirectoryHeld, RunLock
from .record import CheckpointMismatch, DamagedCheckpoint, Record
from .store import Checkpoints, NoGoodCheckpoint, Restored

__all__ = [
    "CheckpointMismatch",
    "Checkpoints",
    "DamagedCheckpoint",
    "NoGoodCheckpoint",
    "Record",
    "Restored",
    "RunDirectoryHeld",
    "RunLock",
    "checksum",
    "checksums",
    "named_leaves",
]
