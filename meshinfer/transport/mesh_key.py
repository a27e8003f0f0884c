"""Who may come in: a mesh is all the agents that know one key, and a person carries it as six words.

`meshinfer up` on the first laptop draws a join code, and remembers it once it serves, since only then
is it shown; `meshinfer join CODE` on each other laptop remembers it. The code is six words of the EFF's long list, drawn by the system's generator:
7772 words (four of the 7776 have a hyphen of their own) give 6 × log2 7772 = 77.5 bits, more than
anyone can search even without the stretching below. Words because people read them aloud across
a room; six because a seventh makes nobody safer.

The key is scrypt of the code (32 MiB, about 0.1 s, once per start), so that what is derived from
it and seen in public, the mesh id and the proofs given to whoever we dial, is no quick oracle for
guesses. The key itself is never used: each purpose has a MAC of its own, labelled, so that a proof
of membership can never pass for a discovery beacon. It never leaves its object: no repr, no
pickle, no comparison that takes longer for a better guess.

An open mesh has a key that is written here for all to see. It runs the same protocol and keeps
nobody out, which is what was asked for.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal, NoReturn

from meshinfer.base.errors import BadInput
from meshinfer.transport.secret_files import MAX_SECRET_BYTES, read_secret, write_secret

log = logging.getLogger(__name__)

WORDS_PER_CODE = 6
JOIN_CODE_VARIABLE = "MESHINFER_JOIN_CODE"
OPEN_MESH_ID = "open"

_CODE_FILE = "join-code"
# n·r·128 bytes = 32 MiB: what a small laptop can spare at start, and what makes a guess dear.
_SCRYPT_N, _SCRYPT_R, _SCRYPT_P = 2**15, 8, 1
_SALT = b"meshinfer mesh key 1"
_ADVICE = "`meshinfer invite` on a laptop of the mesh prints its code"


class JoinCode:
    """Six words that let a laptop in. A secret: `reveal` is the only way to see it."""

    __slots__ = ("_words",)

    def __init__(self, words: tuple[str, ...]) -> None:
        self._words = words

    def reveal(self) -> str:
        """The words joined by '-', for the eyes of whoever runs the agent."""
        return "-".join(self._words)

    def __repr__(self) -> str:
        return f"JoinCode({len(self._words)} words)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JoinCode) and self._words == other._words

    def __hash__(self) -> int:
        return hash(self._words)


@functools.cache
def word_list() -> tuple[str, ...]:
    """The words that codes are made of, without those that hold a hyphen, which is our separator."""
    text = resources.files("xkcdpass").joinpath("static", "eff-long").read_text(encoding="ascii")
    return tuple(word for word in text.split() if word.isalpha())


def new_join_code() -> JoinCode:
    return JoinCode(tuple(secrets.choice(word_list()) for _ in range(WORDS_PER_CODE)))


def parse_join_code(text: str, *, suggest: bool = False) -> JoinCode:
    """The code in `text`, as people type it: any case, any separators.

    `suggest`: say which words a mistyped one may have been. Only to whoever is typing.

    Raises:
        BadInput: a word that is not on the list, or not six of them. The message repeats nothing of the text, since
            messages are logged, and a code with one typing mistake, or without its dashes, is nearly the code.
    """
    words = tuple(re.findall(r"[^\W\d_]+", text[:MAX_SECRET_BYTES].casefold()))
    known = frozenset(word_list())
    for position, word in enumerate(words[:WORDS_PER_CODE], start=1):
        if word not in known:
            close = difflib.get_close_matches(word, word_list(), n=3) if suggest else []
            meant = " or ".join(close) or f"{WORDS_PER_CODE} words of the EFF long list, with dashes or spaces between"
            raise BadInput(f"word {position} is not a word of a join code", expected=meant, do=_ADVICE)
    if len(words) != WORDS_PER_CODE:
        raise BadInput(f"a join code of {len(words)} words", expected=f"{WORDS_PER_CODE} words", do=_ADVICE)
    return JoinCode(words)


class MeshKey:
    """What all agents of a mesh know, as a maker of MACs; the bytes stay inside."""

    __slots__ = ("__secret", "mesh_id")

    mesh_id: str
    """Public name of the mesh: 16 hex digits derived from the key, or `open`. Equal ids: surely the same key."""

    def __init__(self, secret: bytes, mesh_id: str | None = None) -> None:
        self.__secret = secret
        self.mesh_id = mesh_id or self.mac(b"mesh id")[:8].hex()

    @classmethod
    def from_join_code(cls, code: JoinCode) -> MeshKey:
        """Stretches the code; about 0.1 s."""
        password = code.reveal().encode()
        memory = 2 * 128 * _SCRYPT_N * _SCRYPT_R
        return cls(hashlib.scrypt(password, salt=_SALT, n=_SCRYPT_N, r=_SCRYPT_R, p=_SCRYPT_P, maxmem=memory, dklen=32))

    @classmethod
    def open_mesh(cls) -> MeshKey:
        """The key that everybody knows."""
        return cls(hashlib.sha256(b"meshinfer open mesh 1").digest(), OPEN_MESH_ID)

    def mac(self, purpose: bytes, *parts: bytes) -> bytes:
        """HMAC-SHA256 (32 bytes) over `purpose` and `parts`, each framed by its length so that no two splits collide."""
        state = hmac.new(self.__secret, digestmod=hashlib.sha256)
        for part in (purpose, *parts):
            state.update(len(part).to_bytes(8, "big"))
            state.update(part)
        return state.digest()

    def proves(self, mac: bytes, purpose: bytes, *parts: bytes) -> bool:
        """Whether `mac` was made by someone who knows this key. Takes as long for a good guess as for a bad one."""
        return hmac.compare_digest(mac, self.mac(purpose, *parts))

    def __repr__(self) -> str:
        return f"MeshKey(mesh {self.mesh_id})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a mesh key is not written anywhere but in its own file")


@dataclass(frozen=True, slots=True)
class Membership:
    """The mesh that this agent belongs to, and how it came to know."""

    key: MeshKey
    code: JoinCode | None
    """None: the mesh is open."""
    source: Literal["made", "home", "file", "environment", "open"]
    """made: drawn just now. Nobody knows it yet: `remember` it, and show it to the person at the keyboard."""


def load_or_make(
    home: Path, *, key_file: Path | None = None, environment: Mapping[str, str] = os.environ, open_mesh: bool = False
) -> Membership:
    """What `up` uses: the open mesh if asked for, else the code in `key_file`, else MESHINFER_JOIN_CODE, else what this
    home remembers, else a new one. Writes nothing: a start that fails leaves no mesh that nobody was told of.

    Raises:
        BadInput: the first of these that is there holds no join code, or can be read by others.
    """
    if open_mesh:
        return Membership(MeshKey.open_mesh(), None, "open")
    if key_file is not None:
        return _member(_code_in_file(key_file), "file")
    if named := environment.get(JOIN_CODE_VARIABLE, "").strip():
        return _member(_parse(named, JOIN_CODE_VARIABLE), "environment")
    if (remembered := remembered_code(home)) is not None:
        return _member(remembered, "home")
    return _member(new_join_code(), "made")


def remember(home: Path, made: Membership) -> None:
    """Keep the code of a mesh that was made just now, for the next start.

    If `join` has put another there meanwhile, that one holds from the next start on.

    Raises:
        BadInput: the home cannot be written.
    """
    if made.source == "made" and made.code is not None:
        write_secret(home / _CODE_FILE, f"{made.code.reveal()}\n".encode(), replace=False)


def join(home: Path, text: str) -> Membership:
    """What `join CODE` does: remember the code, in the place of any other.

    Raises:
        BadInput: not a join code.
    """
    code = parse_join_code(text, suggest=True)
    write_secret(home / _CODE_FILE, f"{code.reveal()}\n".encode(), replace=True)
    return _member(code, "home")


def remembered_code(home: Path) -> JoinCode | None:
    """What `invite` shows: the code that this home remembers; None if it has none yet.

    Raises:
        BadInput: its file is damaged or can be read by others.
    """
    content = read_secret(home / _CODE_FILE)
    return None if content is None else _parse(content.decode(errors="replace"), str(home / _CODE_FILE))


def _member(code: JoinCode, source: Literal["made", "home", "file", "environment"]) -> Membership:
    return Membership(MeshKey.from_join_code(code), code, source)


def _code_in_file(path: Path) -> JoinCode:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_SECRET_BYTES)
            mode = os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise BadInput(f"the key file {path} cannot be read: {error.strerror}", do="check --mesh-key-file") from error
    if mode & stat.S_IROTH:
        # Not refused: secrets that an orchestrator mounts often are 0444 inside a container of their own.
        log.warning("%s can be read by every user of this machine; `chmod 600` it unless that is meant", path)
    return _parse(content.decode(errors="replace"), str(path))


def _parse(text: str, place: str) -> JoinCode:
    try:
        return parse_join_code(text)
    except BadInput as error:
        raise BadInput(f"{place} holds no join code: {error.what}", expected=error.expected, do=error.do) from None
