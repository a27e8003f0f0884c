"""A conversation written out the way its model was trained to read it: the chat template.

A chat template is a Jinja program that came with the model, so it is code from a stranger. It runs
in Jinja's immutable sandbox, which has no way to files, modules or Python's internals, with the few
helpers that template authors rely on (`raise_exception`, `strftime_now`, `tojson` that keeps
non-ASCII text, loop controls, the `generation` tag). These are transformers' own conventions; we use
Jinja itself because importing transformers costs 1.3 s and 40 MB in every agent, and pulls in torch
wherever that happens to be installed. A test compares the two renderers.

User text must never become a special token. Telling them apart is `text.TextModel`'s work; this
file only guards what goes in: `Shield.guard` breaks every special token's text that a caller wrote by
a character that occurs nowhere in the conversation, and `Shield.lift` takes that character out again
once the template's own special tokens have been marked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

import jinja2
import jinja2.nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from meshinfer.base.errors import BadInput, CorruptModel

# 1 MiB: the longest published template has 30 KB; past this it is not a template.
MAX_TEMPLATE_CHARS = 1024 * 1024

# Planes 15 and 16 are private use: no standard gives their characters a meaning, so nearly no text has one.
_FIRST_SHIELD, _LAST_SHIELD = 0xF0000, 0xFFFFD


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, source: str, names: Mapping[str, str], clock: Callable[[], datetime]) -> None:
        """Compile `source`.

        Args:
            source: the Jinja program.
            names: what the template knows by name, such as `bos_token`.
            clock: for the templates that print today's date.

        Raises:
            CorruptModel: it does not compile.
        """
        if len(source) > MAX_TEMPLATE_CHARS:
            raise CorruptModel(f"a chat template of {len(source)} characters", expected=f"at most {MAX_TEMPLATE_CHARS}")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        helpers: dict[str, Any] = {
            "range": environment.globals["range"],
            "dict": _dict,
            "namespace": _Namespace,
            "raise_exception": _raise,
            "strftime_now": partial(_strftime_now, clock),
        }
        environment.globals.clear()
        environment.globals.update(helpers)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CorruptModel(
                f"the chat template does not compile: {error.message} (line {error.lineno})",
                do="pull the model again, or report it to its author",
            ) from error
        self._names = dict(names)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt for `messages`, up to where the assistant's answer begins.

        Raises:
            BadInput: the template refuses this conversation (roles that do not alternate, no system role, …).
        """
        try:
            # Templates ask whether `tools` is none; what is not there at all would be something to some.
            return self._template.render(messages=messages, tools=None, add_generation_prompt=True, **self._names)
        except jinja2.TemplateError as error:
            raise BadInput(
                f"the model's chat template refuses this conversation: {error}",
                expected="messages in an order and with roles that the model was trained on",
            ) from error
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError) as error:
            # What a template's own expressions raise when a message lacks what they take for granted.
            raise BadInput(
                f"the model's chat template fails on this conversation: {type(error).__name__}: {error}",
                expected="messages with the fields that the template reads",
            ) from error


@dataclass(frozen=True, slots=True)
class Shield:
    """Keeps `words` that callers wrote from being taken for the template's own."""

    words: tuple[str, ...]
    """Special tokens' texts, longest first."""
    mark: str
    """One character that occurs nowhere in what is guarded."""

    @classmethod
    def over(cls, words: Iterable[str], values: Any) -> Shield:
        """A shield whose mark does not occur in any string of the JSON-like `values`."""
        used = set[str]()
        for text in _strings(values):
            used.update(text)
        mark = next((chr(code) for code in range(_FIRST_SHIELD, _LAST_SHIELD) if chr(code) not in used), None)
        if mark is None:
            raise BadInput("a conversation with every private-use character there is", expected="text")
        return cls(tuple(sorted(words, key=lambda word: (-len(word), word))), mark)

    def guard(self, values: Any) -> Any:
        """`values` with each string guarded; keys of mappings stay, they are the protocol's."""
        if isinstance(values, str):
            return self._guard_text(values)
        if isinstance(values, Mapping):
            return {key: self.guard(value) for key, value in values.items()}
        if isinstance(values, (list, tuple)):
            return [self.guard(value) for value in values]
        return values

    def lift(self, text: str) -> str:
        return text.replace(self.mark, "")

    def _guard_text(self, text: str) -> str:
        for word in self.words:
            if word in text:
                text = text.replace(word, word[0] + self.mark + word[1:])
        # Two texts that a template sets side by side could make one word: "<|im_" and "end|>". The left one
        # then ends with the word's beginning (templates trim, so look before trailing spaces).
        body = text.rstrip()
        if any(body.endswith(word[:length]) for word in self.words for length in range(1, len(word))):
            text = body + self.mark + text[len(body) :]
        return text


def _strings(values: Any) -> Iterable[str]:
    if isinstance(values, str):
        yield values
    elif isinstance(values, Mapping):
        for key, value in values.items():
            yield str(key)
            yield from _strings(value)
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _strings(value)


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's tokens for training; here it just passes its body through."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja wants it

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Jinja's namespace without names that start with an underscore, which only an attack would set."""

    def __init__(self, **items: Any) -> None:
        _refuse_inner_names(items)
        super().__init__(items)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_inner_names([name])
        super().__setitem__(name, value)


def _refuse_inner_names(names: Iterable[str]) -> None:
    for name in names:
        if name.startswith("_"):
            raise jinja2.TemplateError(f"a chat template may not set {name!r}")


def _dict(*sources: Any, **items: Any) -> dict[str, Any]:
    """A function, not the class: templates call it, and have no business with its attributes."""
    return dict(*sources, **items)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(clock: Callable[[], datetime], form: str) -> str:
    return clock().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own `tojson` escapes `<` and `&` for HTML, which a model never saw in training."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
