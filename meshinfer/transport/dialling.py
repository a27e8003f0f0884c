"""Dialling a channel: how long to wait for an answer, when to try again, and what to say of what failed.

The same for runners (`transport.tls`) and for origins (`transport.origin`).
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence

from meshinfer.base.errors import MeshinferError, PeerLost, Refused

CONNECT_SECONDS = 1.5
"""For one address; a dead one must not eat the time of the next."""
ANSWER_SECONDS = 2.0
"""For the end of a handshake: 10 ms on a LAN, and room for one segment that is lost and sent again (1 s). Also for how long
a dial is tried at least before it is said that nothing answers: a firewall that lets agents through and not their runners
answers nothing, and raising this has answers wait for it."""
LOADING_ANSWER_SECONDS = 6.0
"""The same of a runner that reads layers, which may be silent for 5.25 s before its own agent gives it up."""

_NO_WAY = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH})
"""Not ENETUNREACH: that is this machine's own kernel, while its Wi-Fi has no address."""


class Unanswered(PeerLost):
    """Nothing came back, not even a refusal: whoever was dialled may well be there, and the way to it blocked."""


def retry_pauses() -> Iterator[float]:
    """Seconds between attempts to open a channel, for ever: 0.05, 0.1, 0.2, 0.4 and then 0.5 each."""
    pause = 0.05
    while True:
        yield pause
        pause = min(0.5, 2 * pause)


def is_unanswered(failures: Sequence[MeshinferError]) -> bool:
    """Whether in this round the first address answered nothing: that is where the agents reach each other, if they do. At
    others (of a bridge that every machine has, say) a stranger may refuse, or this machine itself.
    """
    return isinstance(failures[0], Unanswered)


def most_telling(failures: Sequence[MeshinferError]) -> MeshinferError:
    """One error for what was tried: who answered and refused matters more than who did not answer."""
    what = f"no channel: {'; '.join(failure.args[0] for failure in failures)}"
    if is_unanswered(failures):
        return Unanswered(what)
    refusal = next((failure for failure in failures if isinstance(failure, Refused)), None)
    return refusal or PeerLost(what)


def of_a_dial(error: OSError) -> type[PeerLost]:
    """Whether nothing came back, or something did: a refusal, a reset."""
    return Unanswered if isinstance(error, TimeoutError) or error.errno in _NO_WAY else PeerLost
