"""Node ids and addresses as strangers' words: what of them is worth a dial, and in which order."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from meshinfer.base.errors import BadInput
from meshinfer.transport.addresses import parse_address

# Base58 is a subset. The grammar only keeps an id harmless in logs and files; the handshake proves it.
_NODE_ID = re.compile(r"[A-Za-z0-9]{1,64}")

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


def is_node_id(text: str) -> bool:
    return _NODE_ID.fullmatch(text) is not None


def ip_of(address: str) -> IpAddress | None:
    """The IP address in `host:port`; None where the host is a name, or nothing of it is right."""
    try:
        return ipaddress.ip_address(parse_address(address)[0])
    except (BadInput, ValueError):
        return None


def worth_dialling(addresses: Iterable[str], limit: int) -> tuple[str, ...]:
    """Those of `addresses` that are `IP:port` of one node, each once, at most `limit`.

    Names are left out: a stranger could make us look up anything.
    """
    kept: dict[str, None] = {}
    for address in addresses:
        ip = ip_of(address)
        if ip is not None and not ip.is_unspecified and not ip.is_multicast:
            kept[address] = None
            if len(kept) == limit:
                break
    return tuple(kept)


def nearness(address: str, own_addresses: Iterable[str]) -> tuple[int, int]:
    """Sort key: addresses that are likelier to work, and faster, come first.

    Loopback before all, but only for a node that announces loopback itself; after that, by how many
    leading bits the address shares with one of our own: the same subnet first, then the same site.
    """
    ip = ip_of(address)
    own_ips = [own for own in map(ip_of, own_addresses) if own is not None]
    if ip is None:
        return (1, 0)
    if ip.is_loopback:
        return (0, 0) if any(own.is_loopback for own in own_ips) else (2, 0)
    shared = (
        own.max_prefixlen - (int(own) ^ int(ip)).bit_length()
        for own in own_ips
        if own.version == ip.version and not own.is_loopback
    )
    return (1, -max(shared, default=0))
