"""The address at which other hosts reach Gloo, the library that runs CPU collectives.

JAX uses the address that the host's own name resolves to. On Debian and Ubuntu that is 127.0.1.1, which only
the host itself can reach. This module uses the host's address on the route to the coordinator. On the
coordinator's own host that may be the loopback interface; there it uses the address on the route to another
host.
"""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress

from weft.core import jax_compat
from weft.distributed import processes


def use_reachable_address(timeout: float) -> None:
    """Make JAX's CPU client, before it exists, listen where the other processes can reach it.

    Args:
      timeout: how many seconds to wait for the others.
    """
    own = _address_towards(processes.coordinator_address().rpartition(":")[0].strip("[]"))
    key = processes.unique_key("the addresses of all")
    address = choose_address(own, processes.gather_texts(key, own, timeout))
    if address:
        jax_compat.register_gloo_client(processes.client(), address)


def choose_address(own: str, all_addresses: list[str]) -> str:
    """The address to listen at: `own`, unless it is local while other hosts take part.

    Args:
      own: this host's address on the route to the coordinator; empty if it is unknown.
      all_addresses: the addresses of all processes.
    """
    remote = [address for address in all_addresses if not _is_local(address)]
    return _address_towards(remote[0]) if remote and _is_local(own) else own


def _is_local(address: str) -> bool:
    return not address or ipaddress.ip_address(address).is_loopback


def _address_towards(host: str) -> str:
    """This host's address on the route to another host; empty if there is no route."""
    with suppress(OSError):
        for family, kind, protocol, _, target in socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as datagram:
                datagram.connect(target)  # sends nothing, but selects a route
                return datagram.getsockname()[0]
    return ""
