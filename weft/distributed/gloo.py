"""The address at which Gloo, which does the collectives of CPUs, is reached by the other hosts.

JAX takes the address that the host's own name resolves to. On Debian and Ubuntu that is 127.0.1.1, which only
the host itself can reach. Here it is the address that the host has on the way to the coordinator. On the
coordinator's own host that may be the loopback interface; there it is the address on the way to another host.
"""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress
from typing import Any

from weft.distributed import processes


def use_reachable_address(timeout: float) -> None:
    """Let JAX's CPU client, which is not made yet, listen where the other processes can reach it.

    Args:
      timeout: how many seconds to wait for the others.
    """
    from jax._src import xla_bridge  # JAX has no public way
    from jax._src.lib import _jax

    own = _towards(processes.coordinator_address().rpartition(":")[0].strip("[]"))
    address = choose_address(
        own, processes.gather_texts(processes.unique_key("the addresses of all"), own, timeout)
    )

    def client() -> Any:
        collectives = _jax.make_gloo_tcp_collectives(processes.client(), hostname=address)
        return xla_bridge.make_cpu_client(collectives)

    if address:
        xla_bridge.register_backend_factory("cpu", client, priority=0, fail_quietly=False)


def choose_address(own: str, all_addresses: list[str]) -> str:
    """The address to listen at: `own`, or if no other host reaches that, the one on the way to another host.

    Args:
      own: this host's address on the way to the coordinator; empty if that is not known.
      all_addresses: those of all processes.
    """
    elsewhere = [one for one in all_addresses if not _is_local(one)]
    return _towards(elsewhere[0]) if elsewhere and _is_local(own) else own


def _is_local(address: str) -> bool:
    return not address or ipaddress.ip_address(address).is_loopback


def _towards(host: str) -> str:
    """This host's address on the way to another; empty if there is no way."""
    with suppress(OSError):
        for family, kind, protocol, _, place in socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as one:
                one.connect(place)  # of a datagram socket: nothing is sent
                return one.getsockname()[0]
    return ""
