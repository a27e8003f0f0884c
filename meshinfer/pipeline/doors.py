"""How channels come into a runner: those that its agent announced, and those that its agent asks it to dial.

Whichever way, an open channel goes to the mailbox; the MLX thread gives it its place and starts it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque

from meshinfer.base.errors import MeshinferError, Refused
from meshinfer.pipeline.channel import Channel
from meshinfer.pipeline.mailbox import Broken, Mailbox, Opened
from meshinfer.transport.certificates import fingerprint, make_certificate
from meshinfer.transport.dialling import Unanswered
from meshinfer.transport.tls import MAX_EXPECTED, WELCOME, Listener, SecureSocket, dial
from meshinfer.wire.runner_control import DialChannel, ExpectChannel, Listening, Rebind

log = logging.getLogger(__name__)

DIAL_SECONDS = 10.0
"""For all addresses of an offer; a loading instance is waiting for it."""


class Doors:
    """A runner's certificate, its listening port, and what is opened through them."""

    def __init__(self, bind_host: str, mailbox: Mailbox) -> None:
        self._certificate = make_certificate()
        self._mailbox = mailbox
        self._listener = Listener(bind_host, self._certificate, self._admit)
        self._lock = threading.Lock()
        """Guards what is below, and that no channel of an epoch comes into the mailbox after the epoch's end."""
        self._epoch = 0
        """Counts the rebindings: what was asked for before one is of no use after it."""
        self._tokens: deque[bytes] = deque(maxlen=MAX_EXPECTED)
        """Of the channels that were expected in this epoch; the lapsed ones go when there are too many."""

    @property
    def listening(self) -> Listening:
        return Listening(self._listener.port, self._certificate.der)

    def expect(self, message: ExpectChannel) -> None:
        with self._lock:
            self._tokens.append(message.token)
        try:
            self._listener.expect(message)
        except MeshinferError as error:  # what another node's agent sent: it will not get in, and that is all
            log.warning("a %s channel from seat %d will not be let in: %s", message.role, message.from_seat, error)

    def dial(self, message: DialChannel) -> None:
        """Begin to dial; the result goes to the mailbox."""
        threading.Thread(target=self._dial, args=(message, self._epoch), name="dial", daemon=True).start()

    def rebind(self, message: Rebind) -> None:
        """From here on channels are the new epoch's."""
        self._listener.expect_nobody()
        with self._lock:
            self._epoch += 1
            self._tokens.clear()
            self._mailbox.put(message)

    def _dial(self, message: DialChannel, epoch: int) -> None:
        offer = message.offer
        try:
            secure = dial(offer, self._certificate, DIAL_SECONDS)
        except (MeshinferError, OSError) as error:
            # Whatever it was: a seat whose dialling ends unheard waits for a minute.
            with self._lock:
                if epoch == self._epoch:
                    self._mailbox.put(
                        Broken(message.role, message.to_seat, str(error), unanswered=isinstance(error, Unanswered))
                    )
            return
        channel = Channel(message.role, message.to_seat, fingerprint(offer.certificate_der), secure, dialled=True)
        with self._lock:
            if is_wanted := epoch == self._epoch:
                self._mailbox.put(Opened(channel))
        if not is_wanted:
            secure.close()

    def _admit(self, expected: ExpectChannel, secure: SecureSocket) -> None:
        peer = fingerprint(expected.certificate_der)
        channel = Channel(expected.role, expected.from_seat, peer, secure, dialled=False)
        # In this order: once welcomed, an origin may open sessions at the head, and their steps must find its
        # channel here.
        with self._lock:
            if expected.token not in self._tokens:  # its token was taken just before the rebinding
                raise Refused(f"a {expected.role} channel of an epoch that is over")
            self._mailbox.put(Opened(channel))
        secure.send_all(WELCOME)
