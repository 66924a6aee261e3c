"""Several processes that run one program: joining, messages, shared folders, coordinated stops."""

from .processes import HostsError as HostsError
from .rendezvous import join as join
from .stopping import Stop as Stop
