"""Several processes that run one program: joining, messages, shared folders, coordinated stops."""

from .processes import DistributedError as DistributedError
from .rendezvous import join as join
from .stopping import Stop as Stop
