"""One file over HTTP, gone on with where an earlier attempt ended: after a lost connection, a stop or a kill.

The hub's library does not do that (since 2.0 it throws away what a killed download had, up to 5 GB
a file), and pip never did. The caller knows the file's size and digest beforehand and has pinned
its revision in the URL, so what is there is always the beginning of the same file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx

from meshinfer.base.errors import CorruptModel, PeerLost

SILENCE_SECONDS = 30.0
"""A server that sends nothing for this long is asked again."""
_TRIES = 5
"""Without a single byte in between; with the pauses 15 s, or what the server asks for."""
_MAX_PAUSE_SECONDS = 60.0
_LOOK_SECONDS = 0.2
_BUSY = (408, 425, 429, 500, 502, 503, 504)


def open_client(headers: Mapping[str, str] | None = None) -> httpx.Client:
    """Proxies and certificates as the environment says. Credentials in `headers` stay with the first host."""
    return httpx.Client(headers=headers, follow_redirects=True, timeout=SILENCE_SECONDS)


def download(client: httpx.Client, url: str, half: Path, size_bytes: int, look: Callable[[int], None]) -> None:
    """Bring `half` to its `size_bytes`.

    `look` is called with the bytes that are there, several times a second; what it raises ends the download.

    Raises:
        PeerLost: the server does not answer, or is busy, time and again.
        CorruptModel: it sends more than the file has.
        httpx.HTTPStatusError: it refuses.
    """
    half.touch()
    failures = 0
    while (have := half.stat().st_size) < size_bytes:
        look(have)
        pause_seconds = 2.0**failures
        try:
            with client.stream("GET", url, headers=_range(have)) as response:
                if response.status_code in _BUSY:
                    pause_seconds = _asked_pause(response, pause_seconds)
                response.raise_for_status()
                _receive(response, half, have, size_bytes, look)
            reason = "it closed the connection early"
        except httpx.HTTPStatusError as error:
            if error.response.status_code not in _BUSY:
                raise
            reason = f"it answers {error.response.status_code}"
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
        failures = 0 if half.stat().st_size > have else failures + 1
        if failures == _TRIES:
            raise PeerLost(
                f"{httpx.URL(url).host} does not send {half.stem}: {reason}", do="try again later: it goes on from here"
            )
        if failures:
            _wait(pause_seconds, have, look)
    if half.stat().st_size != size_bytes:
        half.unlink()
        raise CorruptModel(f"{url} has more bytes than announced", expected=f"{size_bytes}", do="pull again")


def _range(have: int) -> dict[str, str]:
    # identity: a length and an offset mean the file's bytes, not those of some compression of it
    return {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})


def _receive(response: httpx.Response, half: Path, have: int, size_bytes: int, look: Callable[[int], None]) -> None:
    resumed = response.status_code == 206  # else the server ignores ranges, and this is the whole file
    done = have if resumed else 0
    with half.open("ab" if resumed else "wb") as out:
        for chunk in response.iter_bytes():  # as they come: pieces of a set size would be lost with the connection
            out.write(chunk)
            done += len(chunk)
            if done > size_bytes:
                return
            look(done)


def _asked_pause(response: httpx.Response, otherwise: float) -> float:
    text = response.headers.get("Retry-After", "")
    return min(float(text), _MAX_PAUSE_SECONDS) if text.isdecimal() else otherwise


def _wait(seconds: float, have: int, look: Callable[[int], None]) -> None:
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        look(have)
        time.sleep(min(left, _LOOK_SECONDS))
