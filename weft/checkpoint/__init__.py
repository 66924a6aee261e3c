"""Checkpoints: atomic, verified by checksums, and restorable under any mesh and layout."""

from .manager import CheckpointManager as CheckpointManager
from .manifest import CheckpointError as CheckpointError
from .manifest import CheckpointWarning as CheckpointWarning
