"""Machines whose runners talk to each other over fault proxies: activations, samples, and what origins send and receive.

As with cables of their own, but what comes to a machine by TCP, except for its agent, its kernel redirects to the fault
proxy for whoever sent it. That runs there, and passes it on to where it was to go:

    n0                                 n1
    runner ── activations ──► bridge ──► proxy for n0 ──► runner
    agent  ── control ─────────────────────────────────► agent

So nothing in the product knows of it. Who listens sees its own address as its peer's, which it does not ask for, and
who dials is let in by the proxy even where nobody listens, and then gets a reset. Link probes go the same way, so a
link is measured as bad as it is.

    BadChannels(directory).lines.suffer("n1", Faults(delay=0.2))
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from meshinfer.testing.machines import CabledMachines, needs_root
from meshinfer.testing.proxied_lines import Line, Lines

CONTROL_PORT = 7000
"""Of every agent."""
FIRST_PROXY_PORT = 7100
"""On each machine, of the proxy for who moved in first; runners listen from 32768 on."""


class BadChannels(CabledMachines):
    """Channels are good until their lines are to suffer."""

    AGENTS = 8
    """At most."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.lines = Lines(self.names)

    @staticmethod
    def why_not() -> str:
        return CabledMachines.why_not() or needs_root("nft", "sysctl")

    def options(self, name: str) -> tuple[str, ...]:
        return (*super().options(name), "--port", str(CONTROL_PORT))

    def _furnish(self, name: str) -> None:
        super()._furnish(name)
        namespace, me = self._namespace(name), self.names.index(name)
        # They would go round the proxies, which know IPv4 only.
        self._in(namespace, "sysctl", "-q", "-w", "net.ipv6.conf.all.disable_ipv6=1")
        lines = {(near, me): Line(None, FIRST_PROXY_PORT + near) for near in range(self.AGENTS) if near != me}
        redirects = [
            f"add rule ip bad in ip saddr {self._host_at(near)} tcp dport != {CONTROL_PORT} redirect to :{line.port}"
            for (near, _), line in lines.items()
        ]
        chain = "add chain ip bad in { type nat hook prerouting priority -100; }"
        self._in(namespace, "nft", "-f", "-", given="\n".join(["add table ip bad", chain, *redirects, ""]))
        self._stack.enter_context(self.lines.serving(lines, "0.0.0.0", Path("/run/netns") / namespace))  # noqa: S104 - of a network of our own

    @staticmethod
    def _in(namespace: str, *command: str, given: str = "") -> None:
        whole = ("ip", "netns", "exec", namespace, *command)
        subprocess.run(whole, check=True, capture_output=True, input=given, text=True)
