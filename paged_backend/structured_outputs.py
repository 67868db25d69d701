"""What an output must look like: a JSON schema, a regular expression, a list of choices or a grammar."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from paged_backend.errors import InvalidRequestError, MissingExtraError
from paged_backend.fields import Checker, rejects_unknown_arguments

MAX_CHARACTERS = 128 * 1024
"""Longest schema, regular expression, grammar or list of choices. The worst of this length take a second to compile."""
_KINDS = ("json", "regex", "choice", "grammar", "json_object")


@rejects_unknown_arguments(InvalidRequestError)
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """What an output must match from its first to its last character; exactly one of the first five fields.

    Names and meanings follow vLLM. The three switches are for `json` and `json_object` only. Raises
    `InvalidRequestError` for what is no schema, expression or grammar at all; whether it can be matched is found when a
    request is made of it.
    """

    json: Any = None
    """A JSON schema as a mapping or as text, or a type that pydantic knows: a model, a TypedDict, `list[int]`. Kept as
    text."""
    regex: str | None = None
    r"""A regular expression without look-around and back references; `\d` and `\w` are ASCII."""
    choice: Sequence[str] | None = None
    """Texts of which the output is one."""
    grammar: str | None = None
    """A context-free grammar, in llguidance's dialect of Lark or in GBNF."""
    json_object: bool | None = None
    """True: any JSON object."""
    disable_any_whitespace: bool = False
    """No white space between the parts of JSON."""
    disable_additional_properties: bool | None = None
    """No properties that the schema does not name; None: for pydantic's types, whose extra fields nobody would see."""
    whitespace_pattern: str | None = None
    """A regular expression for the white space between two parts of JSON, which must match nothing else; None: one
    line, as `json.dumps` writes it, where the model may leave out the blanks."""

    def __post_init__(self) -> None:
        given = self._given()
        if len(given) != 1:
            message = f"structured_outputs needs exactly one of {', '.join(_KINDS)}; got {given}"
            raise InvalidRequestError(message, field="structured_outputs")
        check = Checker(InvalidRequestError, self)
        if self.json_object not in (None, False, True):
            check.fail("json_object", "True or None")
        for name in ("regex", "grammar", "whitespace_pattern"):
            if not isinstance(getattr(self, name), str | None):
                check.fail(name, "text or None")
        check.flag("disable_any_whitespace")
        self._normalise()
        check.flag("disable_additional_properties")
        self._check_switches(given[0])
        check_length(self.source)

    @property
    def kind(self) -> str:
        """The field that was given."""
        return self._given()[0]

    @property
    def source(self) -> str:
        """What was given, as text."""
        if self.kind == "json_object":
            return '{"type": "object"}'
        given = getattr(self, self.kind)
        return json.dumps(given, ensure_ascii=False) if self.kind == "choice" else given

    def _given(self) -> list[str]:
        return [name for name in _KINDS if getattr(self, name) not in (None, False)]

    def _normalise(self) -> None:
        """What others could still change becomes text and tuples."""
        is_type = self.json is not None and not isinstance(self.json, (str, bool, list, Mapping))
        if self.disable_additional_properties is None:
            object.__setattr__(self, "disable_additional_properties", is_type)
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(_schema_of_type(self.json) if is_type else self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))

    def _check_switches(self, kind: str) -> None:
        if kind in ("json", "json_object"):
            if self.disable_any_whitespace and self.whitespace_pattern is not None:
                message = "whitespace_pattern and disable_any_whitespace exclude each other; give one"
                raise InvalidRequestError(message, field="whitespace_pattern")
            return
        for name in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
            if getattr(self, name):
                message = f"{name} is for json and json_object; it has no meaning for {kind}"
                raise InvalidRequestError(message, field=name)


def check_length(source: str) -> None:
    if len(source) > MAX_CHARACTERS:
        raise InvalidRequestError(
            f"structured_outputs has {len(source)} characters, but the limit is {MAX_CHARACTERS}; shorten it",
            field="structured_outputs",
        )


def _schema_text(schema: object) -> str:
    """JSON text of a schema, in the order it was written in: objects are generated in that order."""
    if isinstance(schema, str):
        check_length(schema)
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(parsed, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"json={_shortened(schema)} is no JSON schema: {error}", field="json") from None
    if not isinstance(parsed, Mapping):
        raise InvalidRequestError(f"json={_shortened(schema)} is no JSON schema: it must be an object", field="json")
    return text


def _schema_of_type(kind: Any) -> Mapping[str, Any]:
    try:
        import pydantic
    except ImportError:
        raise MissingExtraError(f"json={kind!r}", "grammar") from None
    try:
        return pydantic.TypeAdapter(kind).json_schema()
    except Exception as error:  # pydantic has many, without a common base
        message = f"json={_shortened(kind)} is no type with a JSON schema: {error}"
        raise InvalidRequestError(message, field="json") from error


def _choices(choices: Any) -> tuple[str, ...]:
    is_list = isinstance(choices, Sequence) and not isinstance(choices, (str, bytes))
    if not is_list or not choices or not all(isinstance(choice, str) for choice in choices):
        message = f"choice={_shortened(choices)} must be a list of at least one text"
        raise InvalidRequestError(message, field="choice")
    return tuple(choices)


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
