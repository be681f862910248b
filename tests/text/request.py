"""A chat request as the server reads it, without a server: body in; prompt, parser and grammar out."""

from types import SimpleNamespace
from typing import Any

from ggufspec.chat import load_templates
from ggufspec.sampling import SamplingParams
from ggufspec.tokenizer import Tokenizer
from ggufspec.tools.server.chat import ChatPrompt, read_chat
from ggufspec.tools.server.fields import Task
from ggufspec.tools.server.state import Loaded, ModelInfo, ServerState
from ggufspec.tools.settings import Settings

from .vocabularies import byte_bpe, metadata


def read_request(template: str, body: dict[str, Any], keys: dict[str, Any] | None = None) -> ChatPrompt:
    """What the server makes of `body` for a model with this template and these `tokenizer.ggml.*` keys."""
    tokenizer = Tokenizer.from_metadata(metadata(keys or byte_bpe("qwen2")))
    bos, eos = tokenizer.text(tokenizer.bos), tokenizer.text(tokenizer.eos)
    templates = load_templates({"tokenizer.chat_template": template}, bos, eos)
    state = ServerState(Settings())
    engine: Any = SimpleNamespace(slots=[None], tokenizer=tokenizer, n_ctx=4096)
    state.ready(Loaded(engine, tokenizer, templates, ModelInfo("m.gguf"), Task(sampling=SamplingParams())))
    return read_chat(state, body)
