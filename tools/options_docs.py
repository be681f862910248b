"""The option tables of docs/cli.md, made from the same rows as the parser and `--help`.

python -m ggufspec.tools.options_docs docs/cli.md      rewrites what stands between the markers
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

from ggufspec.tools.command import shown_default
from ggufspec.tools.options import ALL, Option, table

BEGIN, END = "<!-- options: begin -->", "<!-- options: end -->"
_TITLES = {
    "common": "Process, model, devices, context",
    "sampling": "Sampling",
    "speculative": "Speculative decoding",
    "chat": "Chats",
    "server": "Server",
    "cli": "Terminal",
    "perplexity": "Perplexity",
    "plan": "Planning",
}


def tables() -> str:
    """Markdown: per group the supported options, then those without effect, not supported, or removed."""
    parts = []
    for group, title in _TITLES.items():
        rows = [option for option in table() if option.group == group]
        parts.append(f"### {title}\n")
        parts.append("| option | environment | default | tools | |\n|---|---|---|---|---|")
        parts += [_row(option) for option in rows if option.status == "supported"]
        parts.append("")
        for status, text in (
            ("no-op", "Accepted, without effect"),
            ("unsupported", "Not supported"),
            ("removed", "Removed"),
        ):
            others = [option for option in rows if option.status == status]
            if others:
                parts.append(f"{text}:\n")
                parts += [f"- {_names(option)}: {option.note}" for option in others]
                parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def _names(option: Option) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.names, *option.negative))
    return names + (f" {_cell(option.metavar)}" if option.metavar else "")


def _row(option: Option) -> str:
    tools = "all" if option.tools == ALL else " ".join(sorted(option.tools))
    environment = f"`{option.env}`" if option.env else ""
    default = _default(option)
    notes = [option.help]
    notes += [f"{_value(option, value)}: not supported, {reason}" for value, reason in option.refused]
    notes += [f"{_value(option, value)}: no effect, {reason}" for value, reason in option.warned]
    cells = (_names(option), environment, _cell(default), tools, _cell("; ".join(notes)))
    return "| " + " | ".join(cells) + " |"


def _default(option: Option) -> str:
    """The default of most tools, then those of the others: `on (perplexity: off)`."""
    by_tool = {tool: shown_default(option, tool) for tool in sorted(option.tools)}
    most = Counter(by_tool.values()).most_common(1)[0][0]
    others = ", ".join(f"{tool}: {value}" for tool, value in by_tool.items() if value != most)
    return f"{most} ({others})".strip() if others else most


def _value(option: Option, value: object) -> str:
    if value is False and option.negative:
        return f"`{option.negative[-1]}`"
    return f"`{option.name}`" if option.is_flag else "`on`" if value is True else f"`{value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def with_tables(document: str) -> str:
    """`document` with fresh tables between its markers."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    return pattern.sub(lambda _: f"{BEGIN}\n\n{tables()}\n{END}", document)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_tables(path.read_text()))
