"""What the command line's tests talk to."""

import socket
from collections.abc import Iterator

import pytest
from scripted_agent import ScriptedAgent, scripted_agent


@pytest.fixture
def agent() -> Iterator[ScriptedAgent]:
    with scripted_agent() as running:
        yield running


@pytest.fixture
def unused_url() -> Iterator[str]:
    """An address where nobody listens, and nobody else will as long as the test runs."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"
