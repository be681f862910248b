"""Small chat templates with the features of real ones."""

from typing import Any

TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {
    "name": "get_weather", "description": "The weather of a place.",
    "parameters": {"type": "object", "required": ["city"], "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "note": {"type": ["string", "number"]}}},
}}]  # fmt: skip

PLAIN = """{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}
{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""

# thinking is a switch of the generation prompt only
SWITCH = PLAIN.replace(
    "{%- endif -%}",
    """{%- if enable_thinking is defined and enable_thinking -%}{{- '<think>\n' -}}
{%- else -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}{%- endif -%}""",
)

TYPED = """{%- for message in messages -%}{{- '<|im_start|>' + message.role + '\n' -}}
{%- for part in message.content -%}{{- part.text -}}{%- endfor -%}{{- '<|im_end|>\n' -}}
{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""

_FRAME = """{%- if tools -%}{{- '<|im_start|>system\n# Tools\n<tools>' -}}
{%- for tool in tools -%}{{- '\n' + (tool | tojson) -}}{%- endfor -%}{{- '\n</tools>\nHow: EXAMPLE<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' -}}
{%- elif message.role == 'assistant' -%}
{{- '<|im_start|>assistant\n' -}}
{%- if message.reasoning_content and (loop.last or preserve_thinking is not defined or preserve_thinking) -%}
{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' -}}
{%- endif -%}
{{- message.content -}}
{%- for call in message.tool_calls or [] -%}CALL{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- else -%}
{{- '<|im_start|>' + message.role + '\n' -}}CONTENT{{- '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\n\n</think>\n\n' -}}
{%- else -%}{{- '<think>\n' -}}{%- endif -%}{%- endif -%}"""

# thoughts, and calls as Qwen3.5 writes them
FULL = _FRAME.replace(
    "EXAMPLE", "<tool_call>\\n<function=f>\\n<parameter=p>\\nv\\n</parameter>\\n</function>\\n</tool_call>"
).replace(
    "CALL",
    """{{- '\n<tool_call>\n<function=' + call.function.name + '>\n' -}}
{%- for key, value in call.function.arguments | items -%}
{{- '<parameter=' + key + '>\n' + (value if value is string else value | tojson) + '\n</parameter>\n' -}}
{%- endfor -%}{{- '</function>\n</tool_call>' -}}""",
).replace(
    "CONTENT",
    """{%- if message.content is string -%}{{- message.content -}}
{%- else -%}{%- for part in message.content -%}{{- part.text -}}{%- endfor -%}{%- endif -%}""",
)  # fmt: skip

# thoughts, and calls as JSON between the same tags
HERMES = (
    _FRAME.replace("EXAMPLE", '<tool_call>{"name": "f", "arguments": {"p": "v"}}</tool_call>')
    .replace(
        "CALL",
        """{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson -}}
{{- '}\n</tool_call>' -}}""",
    )
    .replace("CONTENT", "{{- message.content -}}")
)
