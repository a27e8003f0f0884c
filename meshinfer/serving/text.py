"""The text side of a model: prompts to token ids, ids back to text; no weights, no MLX.

`TextModel.load(directory)` reads what lies beside the weights:

| file                                   | what for                                               |
|----------------------------------------|--------------------------------------------------------|
| tokenizer.json                         | the tokenizer itself (the `tokenizers` library)        |
| tokenizer_config.json, special_tokens_map.json | names of special tokens, chat template         |
| chat_template.jinja, chat_template.json | chat template, where it has its own file              |
| config.json, generation_config.json    | longest context, end-of-sequence ids                   |

**Special tokens stay out of users' hands.** A tokenizer reads `<|im_end|>` in a text as the token, and
then a user could end his own turn and begin the system's. So the tokenizer is told to take special
tokens' texts as plain text, and beside each special token stands a second name for it, made of random
characters at load, that only this object knows. A conversation is rendered with the callers' own
special strings broken (`text_template.Shield`); what the template wrote is then renamed to the secret
names, the breaks are taken out, and the whole is encoded in one go, so ids are exactly those of the
ordinary way wherever no caller wrote a special string.

Loading takes 0.1 to 1 s and encoding a long prompt tens of milliseconds: callers do both in a thread.
Code that comes with a model (`trust_remote_code`) is never run.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from meshinfer.base.errors import BadInput, CorruptModel
from meshinfer.base.units import MIB, format_bytes
from meshinfer.serving.text_bytes import Detokeniser, TokenBytes
from meshinfer.serving.text_template import ChatTemplate, Shield

# The largest published tokenizer.json has 34 MB (256 k tokens and their merges).
MAX_FILE_BYTES = 256 * MIB

# wire.records.OpenSession carries at most this many.
MAX_STOP_TOKEN_IDS = 64

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "max_seq_len")


class TextModel:
    """A model's tokenizer, template and ends. Immutable after `load`; safe to use from several threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        named_tokens: Mapping[str, str],
        stop_token_ids: Sequence[int],
        max_context_tokens: int | None,
        secret: str,
    ) -> None:
        """`tokenizer` becomes this object's own: it is changed. See `load` for the other arguments."""
        self.stop_token_ids = tuple(stop_token_ids)[:MAX_STOP_TOKEN_IDS]
        """Tokens that end an answer."""
        self.max_context_tokens = max_context_tokens
        """The longest context that the model was made for; None if it does not say."""
        self.vocab_size = tokenizer.get_vocab_size()
        self._tokenizer = tokenizer
        self._template = template
        special = _mark_special(tokenizer, named_tokens)
        self._special_text = {token_id: token.content for token_id, token in special.items()}
        self._secret_names, self._real_ids = _name_secretly(tokenizer, special, secret)
        longest_first = sorted(self._secret_names, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        tokenizer.encode_special_tokens = True
        self._token_bytes = TokenBytes(tokenizer, {*special, *self._real_ids, *self.stop_token_ids})

    @classmethod
    def load(
        cls, directory: Path, *, clock: Callable[[], datetime] = datetime.now, secret: str | None = None
    ) -> TextModel:
        """The text side of the model in `directory`. Blocking: run it in a thread.

        Args:
            directory: holds at least tokenizer.json.
            clock: for templates that print the date.
            secret: of the special tokens' second names; drawn if None.

        Raises:
            CorruptModel: a file is missing, unreadable or not what it should be.
        """
        tokenizer = _read_tokenizer(directory / "tokenizer.json")
        config = _read_object(directory / "config.json")
        tokenizer_config = _read_object(directory / "tokenizer_config.json")
        names = _named_tokens(_read_object(directory / "special_tokens_map.json")) | _named_tokens(tokenizer_config)
        stops = _stop_ids(tokenizer, config, _read_object(directory / "generation_config.json"), names)
        source = _template_source(directory, tokenizer_config)
        template = ChatTemplate(source, names, clock) if source else None
        secret = secrets.token_hex(16) if secret is None else secret
        return cls(tokenizer, template, names, stops, _max_context(config), secret)

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Token ids of a conversation, up to where the assistant's answer begins.

        Args:
            messages: mappings with `role`, `content` (text) and whatever else the template reads.

        Raises:
            BadInput: the model has no chat template, or its template refuses this conversation.
        """
        if self._template is None:
            raise BadInput(
                "this model has no chat template",
                expected="a model that was tuned for chat",
                do="choose its instruct or chat variant",
            )
        shield = Shield.over(self._secret_names, messages)
        rendered = self._template.render(shield.guard(messages))
        renamed = self._special_pattern.sub(lambda match: self._secret_names[match[0]], rendered)
        ids = self._tokenizer.encode(shield.lift(renamed), add_special_tokens=False).ids
        return tuple(self._real_ids.get(token_id, token_id) for token_id in ids)

    def detokeniser(self) -> Detokeniser:
        """For one answer."""
        return Detokeniser(self._token_bytes)

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """One token as log-probabilities show it: its text and its bytes.

        Special tokens go by their names there, and have no bytes; they never get into an answer's text.
        """
        name = self._special_text.get(token_id)
        if name is not None:
            return name, b""
        data = self._token_bytes.of(token_id, False) or b""
        return data.decode("utf-8", "replace"), data


def _read_tokenizer(path: Path) -> Tokenizer:
    text = _read_text(path)
    if text is None:
        raise CorruptModel(
            f"{path.name} is missing in {path.parent}",
            expected="a model with a fast tokenizer (code that comes with a model is not run)",
            do="pull the model again",
        )
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # tokenizers raises bare Exception, whatever is wrong with the file
        raise CorruptModel(f"{path} is not a tokenizer: {str(error)[:300]}", do="pull the model again") from error


def _read_text(path: Path) -> str | None:
    """The file's text; None if there is no such file."""
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise CorruptModel(f"{path} has {format_bytes(size)}", expected=f"at most {format_bytes(MAX_FILE_BYTES)}")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CorruptModel(f"{path} cannot be read: {error}", do="pull the model again") from error


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; empty if there is no such file."""
    text = _read_text(path)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptModel(f"{path} is not JSON: {error}", do="pull the model again") from error
    if not isinstance(value, dict):
        raise CorruptModel(f"{path} holds a {type(value).__name__}", expected="a JSON object")
    return value


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like with their texts; each is a string, or an object with its `content`."""
    named: dict[str, str] = {}
    for name in _NAMED_TOKENS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str) and text:
            named[name] = text
    return named


def _mark_special(tokenizer: Tokenizer, named_tokens: Mapping[str, str]) -> dict[int, AddedToken]:
    """The special tokens: those that are flagged so, and added tokens that the config names so.

    Not every named token: some models name an ordinary word as padding, and it must stay a word.
    """
    special: dict[int, AddedToken] = {}
    for token_id, token in tokenizer.get_added_tokens_decoder().items():
        if not token.special:
            if token.content not in named_tokens.values():
                continue
            tokenizer.add_special_tokens([token])
        special[token_id] = token
    return special


def _name_secretly(
    tokenizer: Tokenizer, special: Mapping[int, AddedToken], secret: str
) -> tuple[dict[str, str], dict[int, int]]:
    """Give each special token its second name: (its text → that name, that name's id → its id)."""
    names: dict[str, str] = {}
    real_ids: dict[int, int] = {}
    for token_id, token in special.items():
        name = f"\U00100000{secret}{token_id}\U00100001"
        # Found wherever the template wrote it: as it stands (not normalised), also inside a word. Some tokenizers
        # miss their own special tokens there, and the secret would then be a part of the prompt.
        twin = AddedToken(name, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False, special=False)
        tokenizer.add_tokens([twin])
        names[token.content] = name
        name_id = tokenizer.token_to_id(name)
        assert name_id is not None, "just added"
        real_ids[name_id] = token_id
    return names, real_ids


def _stop_ids(
    tokenizer: Tokenizer, config: Mapping[str, Any], generation_config: Mapping[str, Any], names: Mapping[str, str]
) -> list[int]:
    """Every id that any of the files calls the end of a sequence, each once."""
    ids: list[Any] = []
    for source in (generation_config, config):
        value = source.get("eos_token_id")
        ids += value if isinstance(value, list) else [value]
    if "eos_token" in names:
        ids.append(tokenizer.token_to_id(names["eos_token"]))
    return list(dict.fromkeys(value for value in ids if type(value) is int and 0 <= value < 2**31))


def _template_source(directory: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    own_file = _read_text(directory / "chat_template.jinja")
    if own_file:
        return own_file
    source = tokenizer_config.get("chat_template") or _read_object(directory / "chat_template.json").get(
        "chat_template"
    )
    if isinstance(source, list):  # several by name; `default` is the one for chat
        by_name = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = by_name.get("default")
    return source if isinstance(source, str) else None


def _max_context(config: Mapping[str, Any]) -> int | None:
    nested = config.get("text_config")
    for source in (config, nested if isinstance(nested, dict) else {}):
        for key in _CONTEXT_KEYS:
            value = source.get(key)
            if type(value) is int and value > 0:
                return value
    return None
