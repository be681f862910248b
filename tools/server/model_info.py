"""/props and /v1/models: what the server tells of itself and of its model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from .errors import ApiError, parse_json
from .respond import JsonResponse
from .state import BUILD_INFO, ServerState


async def health(http: HttpRequest, state: ServerState) -> Response:
    return JsonResponse({"status": "ok"})


async def props(http: HttpRequest, state: ServerState) -> Response:
    model, config = state.model, state.config
    tokenizer = model.tokenizer
    out: dict[str, Any] = {
        "default_generation_settings": {
            "params": replace(model.defaults, reasoning_format="none").settings(with_text=False),
            "n_ctx": model.engine.n_ctx,
        },
        "total_slots": len(model.engine.slots),
        "model_alias": state.name,
        "model_ftype": model.info.ftype,
        "model_path": model.info.path,
        "modalities": {"vision": False, "video": False, "audio": False},
        "media_marker": state.media_marker,
        "endpoint_slots": config.slots,
        "endpoint_props": config.props,
        "endpoint_metrics": config.metrics,
        "ui": config.ui,
        "ui_settings": config.ui_settings,
        "chat_template": model.chat.default.source,
        "chat_template_caps": vars(model.chat.default.capabilities),
        "bos_token": tokenizer.text(tokenizer.bos),
        "eos_token": tokenizer.text(tokenizer.eos),
        "build_info": BUILD_INFO,
        "is_sleeping": False,
        "cors_proxy_enabled": False,
    }
    if model.chat.tool_use is not None:
        out["chat_template_tool_use"] = model.chat.tool_use.source
    return JsonResponse(out)


async def set_props(http: HttpRequest, state: ServerState) -> Response:
    if not state.config.props:
        raise ApiError("This server does not support changing global properties. Start it with `--props`", 501)
    parse_json(await http.body())
    return JsonResponse({"success": True})


async def models(http: HttpRequest, state: ServerState) -> Response:
    name, config, info = state.name, state.config, state.model.info
    details = {
        "parent_model": "",
        "format": "gguf",
        "family": "",
        "families": [""],
        "parameter_size": "",
        "quantization_level": "",
    }
    entry = {
        "name": name,
        "model": name,
        "modified_at": "",
        "size": "",
        "digest": "",
        "type": "model",
        "description": "",
        "tags": [""],
        "capabilities": ["completion"],
        "parameters": "",
        "details": details,
    }
    data = {
        "id": name,
        "aliases": sorted(config.aliases) or [name],
        "tags": sorted(config.tags),
        "object": "model",
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
        "created": state.created,
        "owned_by": "llamacpp",
        "meta": {
            "vocab_type": info.vocab_type,
            "n_vocab": info.n_vocab,
            "n_ctx": state.model.engine.n_ctx,
            "n_ctx_train": info.n_ctx_train,
            "n_embd": info.n_embd,
            "n_params": info.n_params,
            "size": info.n_bytes,
            "ftype": info.ftype,
        },
    }
    return JsonResponse({"models": [entry], "object": "list", "data": [data]})


async def lora_adapters(http: HttpRequest, state: ServerState) -> Response:
    """No adapters are supported, so the list is empty; setting an empty list is the only thing that fits."""
    if http.method == "GET":
        return JsonResponse([])
    value = parse_json(await http.body())
    if not isinstance(value, list):
        raise ApiError("Request body must be an array")
    if value:
        raise ApiError("adapters are not supported: no --lora was loaded, so only an empty list can be set")
    return JsonResponse({"success": True})
