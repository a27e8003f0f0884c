"""Which agent a command asks; the same rule for all of them.

The one that `--api` or MESHINFER_API names; else the one that runs in the home, wherever its API listens; else,
where nobody named a home, whatever answers at the default address.
"""

from __future__ import annotations

from pathlib import Path

from meshinfer.cli.options import DEFAULT_API_URL, home_or_default

# ruff: noqa: PLC0415 - what a command needs is loaded when it runs, so that `--help` starts fast


def agent_url(api: str | None, home: Path | None) -> str:
    """Where the agent answers that the options mean.

    Raises:
        NoAgent: a home is named, and no agent serves in it.
    """
    from meshinfer.cli.agent_client import NoAgent
    from meshinfer.transport.home_lock import api_of

    if api:
        return api
    found = api_of(home_or_default(home))
    if found is None and home is not None:
        raise NoAgent(
            f"no agent answers in {home}",
            do="start one with `meshinfer up`, or name another with --home, --api URL or MESHINFER_API",
        )
    return found or DEFAULT_API_URL
