"""The form that an answer must have, as a request asks for it: JSON, a schema, a regex, a call.

This file knows the fields of requests, and leaves grammars to jflash.serving.grammar.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from jflash.server.errors import invalid, unsupported
from jflash.server.protocol import Asked
from jflash.serving.grammar import WHITE_SPACE, Kind

FIELDS: tuple[tuple[str, Kind], ...] = (
    ("json", "json_schema"), ("regex", "regex"), ("choice", "choice"), ("grammar", "grammar"),
)  # fmt: skip
NO_OTHER = {"additionalProperties": False}
# Keywords of JSON Schema: with schemas under names of the client's, and with values as they are.
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
VALUES = ("const", "enum", "default", "examples")


class Form(NamedTuple):
    """A grammar's kind and text, and the field that brought it."""

    kind: Kind
    text: str
    param: str


def form_of(asked: Asked, response_format: Mapping[str, Any] | None, param: str) -> Form | None:
    """The one form that a request asks for; `param` is the field of `response_format`.

    ApiError for two of them, or for one that is none.
    """
    forms = [
        _form(name, kind, getattr(asked, f"guided_{name}"), "guided_") for name, kind in FIELDS
    ]
    outputs, where = asked.structured_outputs, "structured_outputs"
    if outputs is not None:
        named = [_form(name, kind, getattr(outputs, name), f"{where}.") for name, kind in FIELDS]
        if outputs.json_object:
            named.append(Form("json_schema", '{"type": "object"}', f"{where}.json_object"))
        if not any(named):
            raise invalid(where, "names none of json, regex, choice, grammar, json_object")
        forms += named
    if response_format is not None:
        forms.append(_by_type(response_format, param))
    wanted = [form for form in forms if form is not None]
    if len(wanted) > 1:
        raise invalid(wanted[1].param, f"an answer has one form, and {wanted[0].param} gives one")
    return wanted[0] if wanted else None


def _form(name: str, kind: Kind, value: Any, prefix: str) -> Form | None:
    param = prefix + name
    if value is None:
        return None
    if kind == "json_schema":
        return Form(kind, _schema(value, param), param)
    if kind == "choice":
        return Form(kind, msgspec.json.encode(value).decode(), param)
    return Form(kind, value, param)


def _schema(value: Any, param: str) -> str:
    """A schema as text; it may come as text."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            raise invalid(param, "is no JSON") from None
    if not isinstance(value, dict | bool):
        raise invalid(param, "must be a JSON schema")
    if value is False:
        raise invalid(param, "false allows no text")
    value = {} if value is True else value  # which llguidance takes only as an object
    return msgspec.json.encode(value).decode()


def _by_type(given: Mapping[str, Any], param: str) -> Form | None:
    """OpenAI's response_format, and text.format, where a schema's fields lie one level higher; each
    may have the other's form."""
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Form("json_schema", '{"type": "object"}', param)
    if kind != "json_schema":
        raise unsupported(f"{param}.type", f"{kind!r} is none of text, json_object, json_schema")
    inner, where = given, param
    if "schema" not in given and ("json_schema" in given or param == "response_format"):
        inner, where = given.get("json_schema"), f"{param}.json_schema"
    if not isinstance(inner, dict) or "schema" not in inner:
        raise invalid(f"{where}.schema", "is missing")
    lenient = inner.get("strict") is False
    text = _schema(inner["schema"], f"{where}.schema")
    return Form("lenient_json_schema" if lenient else "json_schema", text, f"{where}.schema")


def answer_form(
    asked: Asked,
    response_format: Mapping[str, Any] | None,
    param: str,
    tools: Sequence[Mapping[str, Any]],
    forced: Sequence[Mapping[str, Any]],
    marks: tuple[str, str],
    one_call: bool,
) -> Form | None:
    """The form of the answer: that of a forced call, or what `form_of` finds. OpenAI's
    `response_format` is the form of the text alone, in whose place one of the `tools` may be
    called; the other fields leave no place for a call.

    `marks` are those before and after a call, as Lark writes them.
    """
    form = form_of(asked, response_format, param)
    of_text = form is not None and form.param.startswith(param)
    if forced:
        if form is not None and not of_text:
            raise invalid(form.param, "tool_choice forces a call, which has a form already")
        return Form("grammar", f"start: {_calls(forced, marks, one_call)}", "tools")
    if form is None or not of_text or not tools:
        return form
    # Of a call that is not forced the arguments are the model's, with a form of the text or not.
    free = [{"function": {"name": tool["function"]["name"]}} for tool in tools]
    text = _json(msgspec.json.decode(form.text), lenient=form.kind == "lenient_json_schema")
    ways = f"start: text | calls\ntext: {text}\ncalls: {_calls(free, marks, one_call)}"
    return Form("grammar", ways, form.param)


def _calls(tools: Sequence[Mapping[str, Any]], marks: tuple[str, str], one_call: bool) -> str:
    """At least one call of one of the tools, and nothing else, and the rules that this names."""
    ways = []
    for place, tool in enumerate(tools):
        function = tool["function"]
        # A schema that leaves the type open would allow what is no call.
        arguments = (function.get("parameters") or {}) | {"type": "object"}
        arguments = _moved(arguments, f"#/anyOf/{place}/properties/arguments")
        properties = {"name": {"const": function["name"]}, "arguments": arguments}
        way = {"type": "object", "properties": properties, "required": [*properties]} | NO_OTHER
        ways.append(way)
    opens, closes = marks
    more = "" if one_call else ' ("\\n" call)*'
    body = _json({"anyOf": ways}, lenient=True)
    return f'call{more}\ncall: {opens} "\\n" body "\\n" {closes}\nbody: {body}'


def _json(schema: dict[str, Any], lenient: bool) -> str:
    """A schema as a part of a grammar."""
    options = {"whitespace_pattern": WHITE_SPACE, "lenient": lenient}
    return f"%json {msgspec.json.encode(schema | {'x-guidance': options}).decode()}"


def _moved(schema: Any, to: str) -> Any:
    """A schema that will lie at `to` in another one, to which its own pointers lead then. One with
    an `$id` stays, for there they lead to itself."""
    if isinstance(schema, list):
        return [_moved(each, to) for each in schema]
    if not isinstance(schema, dict) or isinstance(schema.get("$id"), str):
        return schema
    moved = dict(schema)
    for keyword, value in schema.items():
        if keyword == "$ref" and isinstance(value, str) and (value == "#" or value[:2] == "#/"):
            moved[keyword] = to + value[1:]
        elif keyword in NAMED and isinstance(value, dict):
            moved[keyword] = {name: _moved(each, to) for name, each in value.items()}
        elif keyword not in VALUES:
            moved[keyword] = _moved(value, to)
    return moved
