"""Checkpoints: written atomically, verified by checksums, and restored under any mesh and layout."""

from ..core.errors import CheckpointError as CheckpointError
from ..core.errors import CheckpointWarning as CheckpointWarning
from .manager import CheckpointManager as CheckpointManager
