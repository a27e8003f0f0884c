"""The one door to libp2p: nothing outside this package imports it, and no word of it leaves."""

from meshinfer.transport.libp2p.transport import Libp2pSettings, Libp2pTransport

__all__ = ["Libp2pSettings", "Libp2pTransport"]
