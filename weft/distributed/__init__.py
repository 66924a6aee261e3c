"""Distributed runs: join processes, exchange messages, check shared folders, stop together."""

from ..core.errors import DistributedError as DistributedError
from .rendezvous import join as join
from .stopping import Stop as Stop
