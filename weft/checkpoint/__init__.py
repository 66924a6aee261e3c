"""Checkpoints: written atomically, verified by checksums, and restored under any mesh and layout."""

from .manager import CheckpointManager as CheckpointManager
from .manifest import CheckpointError as CheckpointError
from .manifest import CheckpointWarning as CheckpointWarning
