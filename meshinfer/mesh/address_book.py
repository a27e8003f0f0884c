"""Where nodes were last reached: a file in the home directory, so that a restart finds the mesh again.

It holds hints only, each of which the handshake proves or refutes; a book that is lost, old or garbled
costs a few failed dials.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from meshinfer.base.files import write_atomically
from meshinfer.base.ids import NodeId
from meshinfer.mesh.addresses import is_node_id, worth_dialling

log = logging.getLogger(__name__)

MAX_NODES = 256
ADDRESSES_PER_NODE = 8
MAX_FILE_BYTES = 1024 * 1024
"""256 nodes of 8 IPv6 addresses take 110 KB; a larger file is not ours."""


class AddressBook:
    """node id → addresses, the node met last in front."""

    def __init__(self, path: Path) -> None:
        """Reads what is at `path`, if it can. Blocks on the disk for a moment."""
        self._path = path
        self._entries: dict[NodeId, tuple[str, ...]] = _read(path)
        self._saved = dict(self._entries)

    def entries(self) -> dict[NodeId, tuple[str, ...]]:
        return dict(self._entries)

    def remember(self, node: NodeId, addresses: Iterable[str]) -> None:
        """`node` was met, and said that it is at `addresses`."""
        kept = worth_dialling(addresses, ADDRESSES_PER_NODE)
        if kept:
            rest = {other: known for other, known in self._entries.items() if other != node}
            self._entries = dict(list({node: kept, **rest}.items())[:MAX_NODES])

    @property
    def is_saved(self) -> bool:
        return self._entries == self._saved

    def save(self) -> None:
        """Write it down if it changed. Blocks; a disk that refuses costs a warning, not the mesh."""
        entries = self._entries
        if entries == self._saved:
            return
        text = json.dumps(
            {"nodes": [{"node_id": node, "addresses": known} for node, known in entries.items()]}, indent=1
        )
        try:
            write_atomically(self._path, text.encode())
        except OSError as error:
            log.warning("cannot write the address book %s: %s", self._path, error)
        self._saved = dict(entries)


def _read(path: Path) -> dict[NodeId, tuple[str, ...]]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError("it is too large")  # noqa: TRY301
        return _parse(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        log.warning("the address book %s cannot be read (%s); starting a new one", path, error)
        return {}


def _parse(content: Any) -> dict[NodeId, tuple[str, ...]]:
    nodes = content.get("nodes") if isinstance(content, dict) else None
    if not isinstance(nodes, list):
        raise ValueError("it has no list of nodes")  # noqa: TRY004 - the file is wrong, not the caller
    entries: dict[NodeId, tuple[str, ...]] = {}
    for entry in nodes[:MAX_NODES]:
        if not isinstance(entry, dict):
            continue
        node, addresses = entry.get("node_id"), entry.get("addresses")
        if isinstance(node, str) and is_node_id(node) and isinstance(addresses, list):
            kept = worth_dialling((address for address in addresses if isinstance(address, str)), ADDRESSES_PER_NODE)
            if kept:
                entries[NodeId(node)] = kept
    return entries
