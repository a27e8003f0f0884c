"""One end of a probe in a process of its own: `accept HOST BULK` or `dial`; the two talk through their parent.

accept: reads a certificate (hex), prints an offer (hex), again and again.
dial: prints its certificate; reads an offer and a number of bytes, prints what it measured as JSON, again and again.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict

import trio

from meshinfer.base.ids import NodeId
from meshinfer.transport.probe_channel import ProbeDoor
from meshinfer.wire.codec import decode, encode
from meshinfer.wire.messages import ChannelOffer


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def accept(host: str, bulk_bytes: int) -> None:
    door = ProbeDoor("0.0.0.0")
    with door.listening():
        for line in sys.stdin:
            say(encode(door.offer(bytes.fromhex(line), (host,), bulk_bytes)).hex())


async def dial() -> None:
    door = ProbeDoor("0.0.0.0")
    say(door.certificate_der.hex())
    for line in sys.stdin:
        offer, bulk_bytes = line.split()
        began, cpu = time.monotonic(), time.process_time()
        found = await door.measure(NodeId("peer"), decode(ChannelOffer, bytes.fromhex(offer)), int(bulk_bytes))
        cost = {"seconds": time.monotonic() - began, "cpu_seconds": time.process_time() - cpu}
        say(json.dumps(asdict(found) | cost))


if __name__ == "__main__":
    if sys.argv[1] == "accept":
        accept(sys.argv[2], int(sys.argv[3]))
    else:
        trio.run(dial)
