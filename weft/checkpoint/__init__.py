"""Checkpoints: atomic, verified by checksums, and restorable under any mesh and layout."""

from .manager import Checkpoints as Checkpoints
from .manifest import CheckpointError as CheckpointError
from .manifest import CheckpointWarning as CheckpointWarning
