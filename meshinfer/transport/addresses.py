"""`host:port`: how peers are told where this node listens, and how such a text is read.

A node that listens on every interface must name each of them, since `0.0.0.0` means nothing to
anyone else. Left out is what no other machine can dial: bridges to containers and virtual machines
on this one, loopback (unless asked for, or unless there is nothing else), and IPv6 link-local
addresses, which need a scope that differs on each machine. IPv4 link-local stays, as the last
choice: two laptops on one cable have nothing else.

The list is made anew on each call (0.1 ms), so a laptop that changes its network says so with its
next card.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator

import ifaddr

from meshinfer.base.errors import BadInput

MAX_ADDRESSES = 16
"""A card has room for 32; each is dialled in turn by whoever looks for us, so more would only delay that."""

WILDCARDS = frozenset({"", "0.0.0.0", "::"})  # noqa: S104 - recognised, in order not to be announced

# What Docker, Podman, Kubernetes, libvirt, LXD, VMware, VirtualBox and macOS call interfaces that lead to their
# guests only. macOS' bridge0 is the Thunderbolt bridge and stays; bridge100 and up are for virtual machines.
_VIRTUAL = re.compile(
    r"(docker|br-|veth|virbr|vnet|cni|flannel|cali|podman|nerdctl|kube|lxcbr|lxdbr|vmnet|vboxnet|bridge1\d\d)"
)

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def parse_address(text: str) -> tuple[str, int]:
    """Host and port in `host:port` or `[IPv6]:port`.

    Raises:
        BadInput: it is not that.
    """
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    # isdecimal alone would let in digits of other scripts.
    if not 0 < len(host) <= 255 or not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise BadInput(f"{text[:120]!r} is not an address", expected="host:port, such as 192.168.1.20:52416")
    return host, int(port)


def format_address(host: str, port: int) -> str:
    """The text that `parse_address` reads."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def dialable_hosts(listen_hosts: Iterable[str], *, include_loopback: bool) -> tuple[str, ...]:
    """The hosts under which others can reach a node that listens on `listen_hosts`, the likeliest first.

    A host that was named explicitly is taken at its word, whatever interface it belongs to.
    """
    named: list[Address] = []
    everywhere: list[Address] = []
    for host in listen_hosts:
        if host not in WILDCARDS:
            named.append(ipaddress.ip_address(host))
        else:
            version = 6 if host == "::" else 4
            everywhere += (address for address in _interface_addresses() if address.version == version)
    outward = sorted({address for address in everywhere if not address.is_loopback}, key=_preference)
    inward = sorted({address for address in everywhere if address.is_loopback}, key=_preference)
    found = [*named, *outward]
    if include_loopback or not found:
        found += inward
    return tuple(str(address) for address in dict.fromkeys(found))[:MAX_ADDRESSES]


def _interface_addresses() -> Iterator[Address]:
    for adapter in ifaddr.get_adapters():
        if _VIRTUAL.match(adapter.name):
            continue
        for ip in adapter.ips:
            # ifaddr gives IPv6 as (address, flow, scope).
            address = ipaddress.ip_address(ip.ip if isinstance(ip.ip, str) else ip.ip[0])
            unusable = address.is_unspecified or address.is_multicast
            if not unusable and not (address.version == 6 and address.is_link_local):
                yield address


def _preference(address: Address) -> tuple[bool, int, Address]:
    """IPv4 before IPv6, since runners' rings are IPv4 only; link-local last."""
    return (address.is_link_local, address.version, address)
