"""Commands that a text advises, as they can be pasted: with the `--home` that the user named, if one was.

The rooms below do not know by which option their home was meant, and need not: a command in backticks gets it where
its sentence meets a person's eyes. One that is to be run elsewhere says so right behind it ("`meshinfer models pull x`
on a node with room", "the code that `meshinfer invite` prints there"), and stays as it is.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from meshinfer.config import default_home

_COMMAND_HERE = re.compile(r"`(meshinfer [^`]+)`(?! (?:\w+ )?(?:on|there)\b)")


def home_option(home: Path | None) -> str:
    """` --home DIRECTORY`; nothing where a command without it means that home, too."""
    meant = home and home.expanduser().absolute()
    return "" if meant in (None, default_home().absolute()) else f" --home {shlex.quote(str(meant))}"


def with_home(text: str, home: Path | None) -> str:
    """`text`, whose commands mean `home`."""
    option = home_option(home)

    def pasteable(found: re.Match[str]) -> str:
        commands = found[1]
        if " --home " in commands or " --api " in commands:
            return found[0]
        return f"`{commands.replace(' && ', f'{option} && ')}{option}`"

    return _COMMAND_HERE.sub(pasteable, text) if option else text
