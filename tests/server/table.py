"""Requests that this server and llama.cpp's are compared on, and how two answers are compared.

Each row is (name, method, path, body, expectation). Without an expectation the answers must have the same status, the
same keys and types at every level, the same texts and counts; times and random ids only have to be there.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

CODE = "def add(a, b):\n"
HELLO = [{"role": "user", "content": "Write add"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
CACHED = ("cache_read_input_tokens", "input_tokens")  # checkpoints lie elsewhere
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
HALF = 'root ::= "aé😀é"'  # bytes are tokens of the bundled vocabulary: 4 or 5 of them end inside the second one
PIXEL = "data:image/png;base64,AAAA"


@dataclass(frozen=True)
class Row:
    name: str
    path: str
    body: Any = None  # None: GET
    status: tuple[int, int] | None = None  # (theirs, ours) where they differ on purpose
    loose: tuple[str, ...] = ()  # keys whose values may differ (keys and types must not)
    skip: tuple[str, ...] = ()  # keys that are not compared at all


def greedy(path: str, **body: Any) -> tuple[str, dict[str, Any]]:
    return path, {"temperature": 0, **body}


def completion(name: str, *, row: dict[str, Any] | None = None, **body: Any) -> Row:
    return Row(name, "/completion", {"temperature": 0, "n_predict": 6, "cache_prompt": False, **body}, **(row or {}))


def text(name: str, **body: Any) -> Row:
    return Row(name, "/v1/completions", {"temperature": 0, "max_tokens": 6, "cache_prompt": False, **body})


def chat(name: str, *, row: dict[str, Any] | None = None, **body: Any) -> Row:
    defaults = {"temperature": 0, "max_tokens": 6, "cache_prompt": False, "messages": HELLO}
    return Row(name, "/v1/chat/completions", {**defaults, **body}, **(row or {}))


def bad(name: str, path: str, body: Any, status: tuple[int, int] | None = None) -> Row:
    return Row(name, path, body, status)


TABLE = (
    Row("health", "/health"),
    Row("health v1", "/v1/health"),
    Row("unknown path", "/nope"),
    Row("models", "/v1/models", loose=("created",)),
    Row("models without v1", "/models", loose=("created",)),
    Row("props", "/props", loose=("media_marker", "build_info")),
    Row("lora list", "/lora-adapters"),
    Row("tools off", "/tools"),
    # -- native completions
    completion("greedy", prompt=CODE, n_predict=16),
    completion("stream", prompt=CODE, stream=True),
    completion("ids", prompt=[264, 660, 38]),
    completion("mixed ids and text", prompt=[38, "dd", 282]),
    completion("prompt object", prompt={"prompt_string": CODE}),
    completion("list of prompts", prompt=[CODE, "class A:\n"]),
    completion("n", prompt=CODE, n=2, row={"loose": ("id_slot",)}),
    completion("empty prompt", prompt="", row={"loose": ("stop_type", "tokens_cached")}),
    completion("stop string", prompt=CODE, n_predict=20, stop=["axes"], return_tokens=True),
    completion("stop that never comes", prompt=CODE, stop="zzzz"),
    completion("ignore_eos", prompt=CODE, ignore_eos=True),
    completion("no tokens asked for", prompt=CODE, n_predict=0),
    completion("probabilities", prompt=CODE, n_probs=3),
    completion("probabilities in a stream", prompt=CODE, n_probs=2, stream=True),
    completion("a list of one prompt", prompt=["a"]),
    completion("a list of one empty prompt", prompt=[[]], row={"loose": ("tokens_cached",)}),  # what the slot had there
    completion("numbers beyond 32 bits", prompt=CODE, n_predict=2**32 + 3, top_k=2**40 + 5, n_keep=2**63 - 1,
        id_slot=2**33),
    completion("a limit of 64 ones", prompt=CODE, n_predict=2**64 - 1, stop=["\n", " ", "_"],
        t_max_predict_ms=2**40),
    completion("logprobs as a number", prompt=CODE, logprobs=2),
    completion("post-sampling", prompt=CODE, n_probs=2, post_sampling_probs=True),
    completion("response_fields", prompt=CODE, response_fields=["content", "timings/prompt_n", "a/b"]),
    completion("timings per token", prompt=CODE, timings_per_token=True, stream=True),
    completion("progress", prompt=CODE, return_progress=True, stream=True),
    completion("logit bias", prompt=CODE, logit_bias=[[264, False], ["dd", 2.5], [99999, 1]]),
    completion("logit bias object", prompt=CODE, logit_bias={"264": -3}),
    completion("settings", prompt=CODE, top_k=5, top_p=0.5, min_p=0.1, repeat_penalty=1.1, mirostat_tau=3.5,
               samplers=["top_k", "temp"], dry_sequence_breakers=["\n", "x"], seed=7, typical_p=0.9),
    completion("sampler letters", prompt=CODE, samplers="kpt"),
    completion("with a grammar", prompt=CODE, grammar='root ::= "ab" [0-9]'),
    completion("with any JSON", prompt=CODE, json_schema=True, row={"loose": ("grammar",)}),
    completion("a grammar that waits", prompt=CODE, grammar="root ::= [^0-9 ]+", grammar_lazy=True,
               grammar_triggers=[{"type": 2, "value": "[a-z]"}, {"type": 1, "value": "zz zz"}]),
    completion("a grammar whose trigger never comes", prompt=CODE, grammar='root ::= "Z"', grammar_lazy=True,
               grammar_triggers=[{"type": 0, "value": "class", "token": 99}, {"type": 1, "value": "class"}],
               preserved_tokens=["class"]),
    Row("byte order mark", "/completion", b'\xef\xbb\xbf{"prompt":"a","n_predict":1,"temperature":0}'),
    completion("an adapter there is not", prompt=CODE, lora=[{"id": 3, "scale": 0.5}], row={"loose": ("lora",)}),
    completion("id_slot wraps", prompt=CODE, id_slot=7),
    completion("repeat penalty", prompt=CODE, repeat_penalty=1.3, n_predict=12),
    completion("n_indent", prompt="def f():\n", n_predict=24, n_indent=4,
               row={"loose": ("tokens_predicted", "predicted_n", "tokens_cached")}),
    # -- OpenAI text completions
    text("text", prompt=CODE),
    text("text list", prompt=[CODE, "class A:\n"]),
    text("text n", prompt=CODE, n=2),
    text("text logprobs", prompt=CODE, logprobs=2),
    text("text stream", prompt=CODE, stream=True),
    text("text empty prompt", prompt=""),
    text("text logprobs as a flag", prompt=CODE, logprobs=True),
    text("text stream usage", prompt=CODE, stream=True, stream_options={"include_usage": True}, logprobs=1),
    # -- chat
    chat("chat"),
    chat("chat stream", stream=True),
    chat("chat stream usage", stream=True, stream_options={"include_usage": True}),
    chat("chat n", n=2),
    chat("chat n stream", n=2, stream=True),
    chat("chat logprobs", logprobs=True, top_logprobs=2),
    chat("chat logprobs default", logprobs=True, max_tokens=1, row={"loose": ("top_logprobs",)}),
    chat("chat logprobs stream", logprobs=True, top_logprobs=1, stream=True),
    chat("chat stop", stop=["def"], max_tokens=20),
    chat("chat ends by itself", max_tokens=120),
    chat("chat max_completion_tokens", max_completion_tokens=2),
    chat("chat system", messages=[{"role": "system", "content": "Be short"}, *HELLO]),
    chat("chat developer", messages=[{"role": "developer", "content": "Be short"}, *HELLO]),
    chat("chat parts", messages=[{"role": "user", "content": PARTS}]),
    chat("chat no thinking", chat_template_kwargs={"enable_thinking": False}),
    chat("chat kwargs have any name", chat_template_kwargs={"tools": [], "add_generation_prompt": False, "self": 1}),
    chat("chat effort none", reasoning_effort="none"),
    chat("chat null in stop", stop=[None, "def"]),
    chat("chat prefill", messages=[*HELLO, {"role": "assistant", "content": "```py"}]),
    chat("chat prefill stream", messages=[*HELLO, {"role": "assistant", "content": "```py"}], stream=True),
    chat("chat no generation prompt", add_generation_prompt=False),
    chat("chat grammar", grammar='root ::= "abc"'),
    chat("chat timings per token", timings_per_token=True, stream=True),
    chat("chat progress", return_progress=True, stream=True, timings_per_token=True),
    chat("chat verbose", verbose=True, row={"loose": ("chat_format",)}),
    chat("chat tool history", messages=[
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "x", "content": "5"},
    ], row={"loose": ("prompt_tokens", "total_tokens", "prompt_n", "content")}),
    chat("chat tool_choice none", tool_choice="none", tools=[
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]),
    # -- Responses, Messages
    Row("responses", "/v1/responses",
        {"input": "Write add", "max_output_tokens": 6, "temperature": 0, "cache_prompt": False}),
    Row("responses stream", "/v1/responses",
        {"input": "Write add", "max_output_tokens": 6, "temperature": 0, "stream": True, "cache_prompt": False}),
    Row("responses items", "/v1/responses", {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "Write add"}]}],
        "instructions": "Be short", "max_output_tokens": 6, "temperature": 0, "cache_prompt": False}),
    Row("messages", "/v1/messages", {"messages": HELLO, "max_tokens": 6, "temperature": 0}, loose=CACHED),
    Row("messages stream", "/v1/messages",
        {"messages": HELLO, "max_tokens": 6, "temperature": 0, "stream": True}, loose=CACHED),
    Row("messages system and blocks", "/v1/messages", {
        "system": [{"type": "text", "text": "Be short"}], "max_tokens": 6, "temperature": 0,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Write add"}]}]}, loose=CACHED),
    Row("messages stop", "/v1/messages",
        {"messages": HELLO, "max_tokens": 30, "temperature": 0, "stop_sequences": ["def"]}, loose=CACHED),
    Row("count tokens", "/v1/messages/count_tokens", {"messages": HELLO}),
    Row("chat input tokens", "/v1/chat/completions/input_tokens", {"messages": HELLO}),
    Row("responses input tokens", "/v1/responses/input_tokens", {"input": "Write add"}),
    # -- a generation that ends inside a character: half of it is in whole answers, never in a stream
    completion("half a character", prompt="def ", grammar=HALF, n_predict=5),
    completion("half a character, stop", prompt="def ", grammar=HALF, n_predict=5, stop=["\ufffd", "aéb"]),
    completion("half a character, stream", prompt="def ", grammar=HALF, n_predict=5, stream=True,
        row={"skip": ("tokens",)}),
    completion("half a character, stream, stop", prompt="def ", grammar=HALF, n_predict=5, stream=True, stop=["\ufffd"],
        row={"skip": ("tokens",)}),
    text("text half a character", prompt="def ", grammar=HALF, max_tokens=4),
    text("text half a character, stream", prompt="def ", grammar=HALF, max_tokens=4, stream=True),
    chat("chat half a character", grammar=HALF, max_tokens=5),
    chat("chat half a character, stream", grammar=HALF, max_tokens=4, stream=True),
    Row("responses half a character, stream", "/v1/responses", {"input": "Write add", "temperature": 0,
        "grammar": HALF, "max_output_tokens": 4, "stream": True}, loose=CACHED),
    # -- tokens and templates
    Row("tokenize", "/tokenize", {"content": "Hé😀 <|im_end|>", "with_pieces": True}),
    Row("tokenize plain", "/tokenize", {"content": "Hi <|im_end|>", "parse_special": False, "add_special": True}),
    Row("tokenize mixed", "/tokenize", {"content": ["Hi", 5, "x"]}),
    Row("tokenize nothing", "/tokenize", {}),
    Row("detokenize", "/detokenize", {"tokens": [264, 660, 0, 1]}),
    Row("detokenize other numbers", "/detokenize", {"tokens": [264.0, 660.7, True]}),
    Row("tokenize with wrong flags", "/tokenize", {"content": "a", "with_pieces": "x", "parse_special": 0}),
    Row("detokenize nothing", "/detokenize", {}),
    Row("template", "/apply-template", {"messages": HELLO}),
    Row("template thinking", "/apply-template", {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": True}}),
    Row("template prefill with thoughts", "/apply-template",
        {"messages": [*HELLO, {"role": "assistant", "content": None, "reasoning_content": "hm"}]}),
    Row("template prefill, thinking on", "/apply-template", {
        "messages": [*HELLO, {"role": "assistant", "content": "yes"}],
        "chat_template_kwargs": {"enable_thinking": True}}),
    Row("template goes on with a user's words", "/apply-template",
        {"messages": HELLO, "continue_final_message": True, "add_generation_prompt": False}),
    Row("template null content", "/apply-template",
        {"messages": [*HELLO, {"role": "assistant", "content": None, "tool_calls": None}, *HELLO]}),
    Row("template thinking is a number", "/apply-template",
        {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": 0}}),
    Row("template prefill", "/apply-template", {"messages": [*HELLO, {"role": "assistant", "content": "yes"}]}),
    # -- refusals
    bad("not JSON", "/completion", b"{"),
    bad("no body", "/completion", b""),
    bad("an array", "/completion", b"[]"),
    bad("no prompt", "/completion", {}),
    bad("empty prompt list", "/completion", {"prompt": []}),
    bad("prompt is a number", "/completion", {"prompt": 3}),
    bad("invalid token", "/completion", {"prompt": [0, 99999]}),
    bad("temperature is text", "/completion", {"prompt": "a", "temperature": "x"}),
    bad("n_predict too small", "/completion", {"prompt": "a", "n_predict": -5}),
    bad("n too large", "/completion", {"prompt": "a", "n": 5}),
    bad("min_keep", "/completion", {"prompt": "a", "min_keep": -1}),
    bad("repeat_penalty", "/completion", {"prompt": "a", "repeat_penalty": -1}),
    bad("adaptive_decay", "/completion", {"prompt": "a", "adaptive_decay": 2}),
    bad("breakers", "/completion", {"prompt": "a", "dry_sequence_breakers": []}),
    bad("grammar", "/completion", {"prompt": "a", "grammar": "x ::= ["}),
    bad("number overflow", "/completion", b'{"prompt":"a","temperature":1e999}'),
    bad("lora", "/completion", {"prompt": "a", "lora": 5}),
    bad("triggers", "/completion", {"prompt": "a", "grammar_triggers": 5}),
    bad("trigger word", "/completion", {"prompt": "a", "grammar_triggers": [{"type": 1, "value": "class"}]}),
    bad("trigger without its token", "/completion", {"prompt": "a", "grammar_triggers": [{"type": 0, "value": "x"}]}),
    bad("media", "/completion", {"prompt": {"prompt_string": "a", "multimodal_data": ["aa"]}}),
    bad("context", "/completion", {"prompt": "a b " * 1200}),
    bad("context in a stream", "/completion", {"prompt": "a b " * 1200, "stream": True}),
    bad("no messages", "/v1/chat/completions", {}),
    bad("messages is text", "/v1/chat/completions", {"messages": "x"}),
    bad("no content", "/v1/chat/completions", {"messages": [{"role": "user"}]}),
    bad("content is a number", "/v1/chat/completions", {"messages": [{"role": "user", "content": 3}]}),
    bad("empty assistant", "/v1/chat/completions", {"messages": [*HELLO, {"role": "assistant"}]}),
    bad("unknown part", "/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "foo"}]}]}),
    bad("tool_choice", "/v1/chat/completions", {"messages": HELLO, "tool_choice": "x"}),
    bad("response_format", "/v1/chat/completions", {"messages": HELLO, "response_format": {"type": "x"}}),
    bad("top_logprobs alone", "/v1/chat/completions", {"messages": HELLO, "top_logprobs": 2}),
    bad("top_logprobs and a number of logprobs", "/v1/chat/completions",
        {"messages": HELLO, "logprobs": 3, "top_logprobs": 2}),
    bad("thinking is text", "/v1/chat/completions",
        {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": "x"}}),
    bad("continue and generate", "/v1/chat/completions",
        {"messages": HELLO, "continue_final_message": True, "add_generation_prompt": True}),
    bad("continue without a word of the prompt", "/v1/chat/completions",
        {"messages": [*HELLO, {"role": "assistant", "content": "yes"}], "continue_final_message": True}),
    bad("kwargs replace the messages", "/v1/chat/completions",
        {"messages": HELLO, "chat_template_kwargs": {"messages": 5}}, (400, 400)),
    bad("continue is a number", "/v1/chat/completions", {"messages": HELLO, "continue_final_message": 5}),
    bad("two answers at the end", "/v1/chat/completions",
        {"messages": [*HELLO, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]}),
    bad("grammar and tools", "/v1/chat/completions", {"messages": HELLO, "grammar": 'root ::= "a"', "tools": [
        {"type": "function", "function": {"name": "f", "parameters": {}}}]}),
    bad("include_usage is text", "/v1/chat/completions", {"messages": HELLO, "stream_options": {"include_usage": "x"}}),
    bad("responses without input", "/v1/responses", {}),
    bad("responses input is a number", "/v1/responses", {"input": 3}),
    bad("responses item", "/v1/responses", {"input": [{"type": "zz"}]}),
    bad("responses previous", "/v1/responses", {"input": "a", "previous_response_id": "x"}),
    bad("embeddings off", "/v1/embeddings", {"input": "a"}),
    bad("transcriptions off", "/v1/audio/transcriptions", {}),
    bad("decisions off", "/v1/systemone", {}),
    bad("adapters are no list", "/lora-adapters", {}),
    bad("rerank off", "/rerank", {"query": "a", "documents": ["b"]}),
    bad("props off", "/props", {}),
    bad("infill without its tokens", "/infill", {"input_prefix": "a", "input_suffix": "b"}),
    bad("control without id", "/v1/chat/completions/control", {}),
    bad("control unknown", "/v1/chat/completions/control", {"id": "x", "action": "zz"}),
    Row("control of nothing", "/v1/chat/completions/control", {"id": "x", "action": "reasoning_end"}),
    Row("erase", "/slots/0?action=erase", b"", loose=("n_erased",)),
    bad("slot action", "/slots/0?action=zz", {"filename": "a"}),
    bad("slot id", "/slots/x?action=save", {"filename": "a"}),
    bad("slot file", "/slots/0?action=save", {"filename": "../a"}),
    bad("slot file missing", "/slots/0?action=save", {}),
    bad("slot restore of nothing", "/slots/0?action=restore", {"filename": "nope.bin"}),
    # -- the input's fault, which llama.cpp calls a 500: clients retry those in vain
    bad("image", "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PIXEL}}]}]}, (500, 400)),
    bad("no role", "/v1/chat/completions", {"messages": [{"content": "x"}]}, (500, 400)),
    bad("tools is a number", "/v1/chat/completions", {"messages": HELLO, "tools": 3}, (500, 400)),
    bad("reasoning format", "/v1/chat/completions", {"messages": HELLO, "reasoning_format": "zz"}, (500, 400)),
    bad("schema and grammar", "/v1/chat/completions",
        {"messages": HELLO, "json_schema": {"type": "object"}, "grammar": 'root ::= "a"'}, (500, 400)),
    bad("messages missing", "/v1/messages", {}, (500, 400)),
    bad("detokenize outside", "/detokenize", {"tokens": [99999]}, (500, 400)),
)  # fmt: skip

# Values that are never equal between two servers, or between two runs of one.
FREE = {
    "id", "item_id", "call_id", "created", "created_at", "completed_at", "system_fingerprint", "prompt_ms", "time_ms",
    "prompt_per_token_ms", "prompt_per_second", "predicted_ms", "predicted_per_token_ms", "predicted_per_second",
    "id_slot",
}  # fmt: skip
NEAR = {"logprob", "prob"}  # equal to rounding


def differences(ours: Any, theirs: Any, row: Row, path: str = "") -> list[str]:
    """What is not the same, one line each; empty when the answers agree."""
    key = path.rsplit(".", 1)[-1].split("[")[0]
    if key in row.skip:
        return []
    if kind(ours) != kind(theirs):
        return [f"{path}: {ours!r} is not the type of {theirs!r}"]
    if isinstance(theirs, dict):
        out = [f"{path}: no key {k!r}" for k in theirs if k not in ours]
        out += [f"{path}: key {k!r} is not llama.cpp's" for k in ours if k not in theirs]
        for k in theirs:
            if k in ours:
                out += differences(ours[k], theirs[k], row, f"{path}.{k}")
        return out
    if key in FREE or key in row.loose:
        return []
    if key in ("top_logprobs", "top_probs") and isinstance(theirs, list):
        # near ties may come in another order: ranks are compared by value
        ours, theirs = ([sorted_values(item) for item in items] for items in (ours, theirs))
    if isinstance(theirs, list):
        if len(ours) != len(theirs):
            return [f"{path}: {len(ours)} items, llama.cpp has {len(theirs)}"]
        return [d for i, (a, b) in enumerate(zip(ours, theirs)) for d in differences(a, b, row, f"{path}[{i}]")]
    if key in NEAR and not isinstance(ours, str):
        same = math.isclose(ours, theirs, rel_tol=2e-2, abs_tol=2e-2)
        return [] if same else [f"{path}: {ours} is not near {theirs}"]
    return [] if ours == theirs else [f"{path}: {ours!r}, llama.cpp has {theirs!r}"]


def sorted_values(entry: Any) -> Any:
    return {key: value for key, value in entry.items() if key in NEAR} if isinstance(entry, dict) else entry


def kind(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return type(value).__name__
    return "number" if isinstance(value, int | float) else type(value).__name__


def chunks_of(stream: str) -> list[Any]:
    """Parsed `data:` of a stream, with the event's name beside it where it has one; pings left out."""
    out = []
    for block in stream.strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n") if ": " in line)
        if "data" in lines:
            data = lines["data"] if lines["data"] == "[DONE]" else json.loads(lines["data"])
            out.append((lines.get("event", ""), data))
    return out


def folded(chunks: list[Any]) -> dict[str, Any]:
    """A stream as one comparable value: what cutting a text into more or fewer chunks does not change."""
    texts: dict[str, str] = {}
    tokens: list[int] = []
    probs: list[Any] = []
    shapes: list[Any] = []
    for event, data in chunks:
        if not isinstance(data, dict):
            if data is not None:  # llama.cpp sends a stray null before the chunks of a list of prompts
                shapes.append(data)
            continue
        collect(data, texts, tokens, probs)
        shape = [event, shape_of(data)]
        if shape not in shapes:
            shapes.append(shape)
    return {"texts": texts, "tokens": tokens, "probs": probs, "shapes": shapes}


def collect(data: dict[str, Any], texts: dict[str, str], tokens: list[int], probs: list[Any]) -> None:
    def add(key: str, value: Any) -> None:
        texts[key] = texts.get(key, "") + (value or "")

    if "content" in data and "index" in data:
        add(f"content{data['index']}", data["content"])
        if "prompt_progress" not in data:
            tokens += data["tokens"]
        probs += data.get("completion_probabilities", [])
    for choice in data.get("choices", []):
        add(f"text{choice['index']}", choice.get("text"))
        for key in ("content", "reasoning_content"):
            add(f"{key}{choice['index']}", choice.get("delta", {}).get(key))
        probs += (choice.get("logprobs") or {}).get("content", [])
    delta = data.get("delta")
    if isinstance(delta, str):
        add(data["type"], delta)
    elif isinstance(delta, dict) and "type" in delta:
        add(delta["type"], delta.get("text") or delta.get("thinking") or delta.get("partial_json"))


def shape_of(data: Any) -> Any:
    """Keys and kinds at every level, without values; lists by the shape of their first item."""
    if isinstance(data, dict):
        return {key: shape_of(value) for key, value in sorted(data.items())}
    if isinstance(data, list):
        return [shape_of(data[0])] if data else []
    return kind(data)
