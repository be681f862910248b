"""Grammars for answers with tool calls or a JSON schema, as data for the grammar engine (Lark, llguidance's dialect).

A lazy grammar sleeps until one of its triggers appears in the text; it then covers the text from the trigger on.
User-defined tokens (`<tool_call>`, `<think>`) must be ordinary bytes to the engine, not special tokens.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .chat_calls import FORMATS, is_text, schemas

_ANY = r"/(?s:.*)/"


@dataclass(frozen=True)
class ChatGrammar:
    """`lark` with rule `start`; `lazy`: active from the first of `triggers` on, else from the first token."""

    lark: str
    lazy: bool = False
    triggers: tuple[str, ...] = ()


def tool_grammar(call_format: str, tools: Sequence[Mapping[str, Any]], required: bool, parallel: bool,
                 thinking_open: str = "") -> ChatGrammar:  # fmt: skip
    """The grammar of calls to `tools`.

    Not `required`: lazy, from the call's mark on. `required`: from the first token; text may come first (thoughts that
    the prompt opened must end with `thinking_open`, the end mark), then at least one call.
    """
    rules: list[str] = []
    names = []
    for i, (name, schema) in enumerate(schemas(tools).items()):
        names.append(f"call_{i}")
        make = _xml_rules if call_format == "qwen-xml" else _json_rules
        rules += make(f"call_{i}", name, schema, call_format)
    triggers = tuple(FORMATS[call_format]({}).triggers)
    blank = r"/[ \t\r\n;]*/" if call_format == "llama3-json" else r"/[ \t\r\n]*/"
    first, more = "(" + " | ".join(names) + ")", f"( {blank} " + "( " + " | ".join(names) + " ) )*" if parallel else ""
    mark = json.dumps(triggers[0])
    if call_format == "llama3-json":
        start = f"start: {first} {more}" if required else f"start: {mark}? {first} {more}"
        return ChatGrammar("\n".join([start, *rules]), lazy=not required, triggers=() if required else triggers)
    # The first mark is eaten by the free text in front of it, so the rules of calls do not hold it.
    again = f"( {blank} {mark} {first} )*" if parallel else ""
    if not required:
        return ChatGrammar("\n".join([f"start: {mark} {first} {again} {blank}", *rules]), True, triggers)
    free = f"free[suffix={mark}]: {_ANY}"
    lines = [f"start: free {first} {again} {blank}", free]
    if thinking_open:
        lines = [
            f"start: thought free {first} {again} {blank}",
            f"thought[suffix={json.dumps(thinking_open)}]: {_ANY}",
            free,
        ]
    return ChatGrammar("\n".join([*lines, *rules]))


def schema_grammar(schema: Mapping[str, Any], thinking_open: str = "") -> ChatGrammar:
    """JSON of this schema; behind the thoughts if the prompt has opened them (`thinking_open`: their end mark)."""
    value = f"%json {json.dumps(schema)}"
    if not thinking_open:
        return ChatGrammar(f"start: {value}")
    return ChatGrammar(
        f"start: thought /[ \\t\\r\\n]*/ answer\nthought[suffix={json.dumps(thinking_open)}]: {_ANY}\nanswer: {value}"
    )


def _json_rules(rule: str, name: str, schema: Mapping[str, Any], call_format: str) -> list[str]:
    key = "parameters" if call_format == "llama3-json" else "arguments"
    properties = {"name": {"const": name}, key: _with_definitions_outside(schema)}
    call: dict[str, Any] = {"type": "object", "properties": properties, "required": ["name", key],
                            "additionalProperties": False}  # fmt: skip
    if "$defs" in schema:
        call["$defs"] = schema["$defs"]
    value = f"%json {json.dumps(call)}"
    if call_format == "llama3-json":
        return [f"{rule}: {value}"]
    return [f'{rule}: "\\n" {rule}_object "\\n</tool_call>"', f"{rule}_object: {value}"]


def _with_definitions_outside(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key != "$defs"}


def _xml_rules(rule: str, name: str, schema: Mapping[str, Any], call_format: str) -> list[str]:
    """Required parameters once each (in any order up to three, else in the schema's), then the optional ones."""
    properties: Mapping[str, Any] = schema.get("properties") or {}
    rules, parameters = [], {}
    for i, (key, kind) in enumerate(properties.items()):
        parameters[key] = f"{rule}_{i}"
        head = json.dumps(f"<parameter={key}>\n", ensure_ascii=False)
        if is_text(kind):
            rules += [f"{rule}_{i}: {head} {rule}_{i}_text", f'{rule}_{i}_text[suffix="\\n</parameter>\\n"]: {_ANY}']
            if "enum" in kind:
                choices = " | ".join(json.dumps(value, ensure_ascii=False) for value in kind["enum"])
                rules[-2:] = [f'{rule}_{i}: {head} ({choices}) "\\n</parameter>\\n"']
        else:
            shape = dict(kind)
            if "$defs" in schema:
                shape["$defs"] = schema["$defs"]
            rules += [
                f'{rule}_{i}: {head} {rule}_{i}_json "\\n</parameter>\\n"',
                f"{rule}_{i}_json: %json {json.dumps(shape)}",
            ]
    required = [parameters[key] for key in schema.get("required") or () if key in parameters]
    optional = [item for key, item in parameters.items() if item not in required]
    orders = itertools.permutations(required) if len(required) <= 3 else [tuple(required)]
    body = [" | ".join(" ".join(order) for order in orders)] if required else []
    body = [f"({body[0]})"] if body else []
    if optional:
        body.append("(" + " | ".join(optional) + ")*")
    head = json.dumps(f"\n<function={name}>\n", ensure_ascii=False)
    return [f'{rule}: {head} {" ".join(body)} "</function>\\n</tool_call>"', *rules]
