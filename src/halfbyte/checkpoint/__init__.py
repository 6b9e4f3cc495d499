"""Checkpoints with checksums, locks of run directories, and copies in object stores."""

from typing import TYPE_CHECKING

from halfbyte.checkpoint.bucket_copy import NAME, Copy
from halfbyte.checkpoint.checkpoint_record import (
    MAX_PLAUSIBLE_VALUE,
    CheckpointReadError,
    CheckpointRecord,
    CheckpointStructureError,
    CorruptCheckpointError,
    NonFiniteCheckpointError,
    checksum_tree,
    named_leaves,
)
from halfbyte.checkpoint.locks import (
    LOCK_FILE,
    CheckpointDeletedError,
    RunDirectoryLockedError,
    RunLock,
    hold_for_reading,
)
from halfbyte.checkpoint.restore import NoUsableCheckpointError, RestoredCheckpoint
from halfbyte.checkpoint.store import CheckpointManager
from halfbyte.renamed import old_names

if not TYPE_CHECKING:
    __getattr__ = old_names(__name__)
