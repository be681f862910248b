"""Chat templates by name, for `--chat-template NAME`: layouts that llama.cpp knows under the same names."""

_MERGED_SYSTEM = (
    "{%- set ns = namespace(system='') -%}{%- for message in messages -%}{%- if message.role == 'system' -%}"
    "{%- set ns.system = SYSTEM -%}{%- elif message.role == 'user' -%}USER{%- set ns.system = '' -%}"
    "{%- else -%}{{- ASSISTANT -}}{%- endif -%}{%- endfor -%}"
)


def _turns(*expressions: str) -> str:
    """The turns of system, user and assistant as Jinja expressions over `message`, then the generation prompt."""
    *texts, generation = expressions
    turns = dict(zip(("system", "user", "assistant"), texts))
    branches = "".join(
        f"{{%- {'if' if role == 'system' else 'elif'} message.role == '{role}' -%}}{{{{- {turn} -}}}}"
        for role, turn in turns.items()
    )
    last = f"{{%- if add_generation_prompt -%}}{{{{- {generation} -}}}}{{%- endif -%}}"
    return f"{{%- for message in messages -%}}{branches}{{%- endif -%}}{{%- endfor -%}}{last}"


def _framed(start: str, middle: str, end: str, trim: bool = False) -> str:
    """The same frame for every role: start ROLE middle text end."""
    text = "message.content | trim" if trim else "message.content"
    frame = f"'{start}' ~ message.role ~ '{middle}' ~ ({text}) ~ '{end}'"
    return (
        f"{{%- for message in messages -%}}{{{{- {frame} -}}}}{{%- endfor -%}}"
        f"{{%- if add_generation_prompt -%}}{{{{- '{start}assistant{middle}' -}}}}{{%- endif -%}}"
    )


def _instruct(system: str, user: str, assistant: str) -> str:
    """`[INST]` layouts: the system text goes into the next user turn; no generation prompt."""
    return (
        _MERGED_SYSTEM.replace("SYSTEM", system).replace("USER", "{{- " + user + " -}}").replace("ASSISTANT", assistant)
    )


BUILT_IN: dict[str, str] = {
    "chatml": _framed("<|im_start|>", "\\n", "<|im_end|>\\n"),
    "llama2": _instruct("message.content ~ '\\n'", "'[INST] ' ~ ns.system ~ message.content ~ ' [/INST]'",
                        "message.content ~ '</s>'"),
    "llama2-sys": _instruct("'<<SYS>>\\n' ~ message.content ~ '\\n<</SYS>>\\n\\n'",
                            "'[INST] ' ~ ns.system ~ message.content ~ ' [/INST]'", "message.content ~ '</s>'"),
    "llama3": _framed("<|start_header_id|>", "<|end_header_id|>\\n\\n", "<|eot_id|>", trim=True),
    "llama4": _framed("<|header_start|>", "<|header_end|>\\n\\n", "<|eot|>", trim=True),
    "gemma": _instruct("(message.content | trim) ~ '\\n\\n'",
                       "'<start_of_turn>user\\n' ~ ns.system ~ (message.content | trim) ~ '<end_of_turn>\\n'",
                       "'<start_of_turn>model\\n' ~ (message.content | trim) ~ '<end_of_turn>\\n'")
             + "{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}",
    "phi3": _framed("<|", "|>\\n", "<|end|>\\n"),
    "phi4": _framed("<|im_start|>", "<|im_sep|>", "<|im_end|>"),
    "zephyr": _framed("<|", "|>\\n", "<|endoftext|>\\n"),
    "falcon3": _framed("<|", "|>\\n", "\\n"),
    "granite": _framed("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>\\n"),
    "megrez": _framed("<|role_start|>", "<|role_end|>", "<|turn_end|>"),
    "mistral-v1": _instruct("message.content ~ '\\n\\n'", "' [INST] ' ~ ns.system ~ message.content ~ ' [/INST]'",
                            "' ' ~ message.content ~ '</s>'"),
    "mistral-v7": _turns("'[SYSTEM_PROMPT] ' ~ message.content ~ '[/SYSTEM_PROMPT]'",
                         "'[INST] ' ~ message.content ~ '[/INST]'", "' ' ~ message.content ~ '</s>'", "''"),
    "mistral-v7-tekken": _turns("'[SYSTEM_PROMPT]' ~ message.content ~ '[/SYSTEM_PROMPT]'",
                                "'[INST]' ~ message.content ~ '[/INST]'", "message.content ~ '</s>'", "''"),
    "vicuna": _turns("message.content ~ '\\n\\n'", "'USER: ' ~ message.content ~ '\\n'",
                     "'ASSISTANT: ' ~ message.content ~ '</s>\\n'", "'ASSISTANT:'"),
    "vicuna-orca": _turns("'SYSTEM: ' ~ message.content ~ '\\n'", "'USER: ' ~ message.content ~ '\\n'",
                          "'ASSISTANT: ' ~ message.content ~ '</s>\\n'", "'ASSISTANT:'"),
    "deepseek": _turns("message.content", "'### Instruction:\\n' ~ message.content ~ '\\n'",
                       "'### Response:\\n' ~ message.content ~ '\\n<|EOT|>\\n'", "'### Response:\\n'"),
    "deepseek2": _turns("message.content ~ '\\n\\n'", "'User: ' ~ message.content ~ '\\n\\n'",
                        "'Assistant: ' ~ message.content ~ '<｜end▁of▁sentence｜>'", "'Assistant:'"),
    "deepseek3": _turns("message.content ~ '\\n\\n'", "'<｜User｜>' ~ message.content",
                        "'<｜Assistant｜>' ~ message.content ~ '<｜end▁of▁sentence｜>'", "'<｜Assistant｜>'"),
    "command-r": _turns(*(f"'<|START_OF_TURN_TOKEN|><|{role}_TOKEN|>' ~ (message.content | trim)"
                          " ~ '<|END_OF_TURN_TOKEN|>'" for role in ("SYSTEM", "USER", "CHATBOT")),
                        "'<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>'"),
    "openchat": _turns("message.content ~ '<|end_of_turn|>'",
                       "'GPT4 Correct User: ' ~ message.content ~ '<|end_of_turn|>'",
                       "'GPT4 Correct Assistant: ' ~ message.content ~ '<|end_of_turn|>'", "'GPT4 Correct Assistant:'"),
}  # fmt: skip
