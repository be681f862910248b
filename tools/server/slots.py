"""/slots: what each slot is doing; save, restore and erase a slot as a file under `--slot-save-path`."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ggufspec.errors import GgufspecError, RequestError
from ggufspec.slot_file import read_slot, write_slot

from .errors import ApiError, missing_key, parse_object, type_error
from .respond import JsonResponse
from .state import ServerState


async def list_slots(http: HttpRequest, state: ServerState) -> Response:
    if not state.config.slots:
        raise ApiError("This server does not support slots endpoint. Start it with `--slots`", 501)
    slots = await state.worker.call(lambda engine: [_slot(engine, slot, state) for slot in engine.slots])
    if http.query_params.get("fail_on_no_slot") and all(slot["is_processing"] for slot in slots):
        raise ApiError("no slot available", 503)
    return JsonResponse(slots)


def _slot(engine: Any, slot: Any, state: ServerState) -> dict[str, Any]:
    """One slot; runs on the engine's thread."""
    job = slot.job
    out: dict[str, Any] = {
        "id": slot.id,
        "n_ctx": engine.n_ctx,
        "speculative": engine.drafter is not None,
        "is_processing": job is not None,
    }
    last = state.worker.task_of(slot)
    if job is None and last is None:
        return out
    n_predict = job.request.n_predict if job is not None else -1
    n_decoded = len(job.generated) if job is not None else 0
    out |= {
        "id_task": job.id if job is not None else last[0] if last else -1,
        "n_prompt_tokens": len(job.request.prompt) if job is not None else slot.n_past,
        "n_prompt_tokens_processed": job.n_prompt_done - job.n_prompt_cached if job is not None else 0,
        "n_prompt_tokens_cache": job.n_prompt_cached if job is not None else 0,
        "params": last[1].settings(with_text=False) if last is not None else {},
        "next_token": [
            {
                "has_next_token": job is not None,
                "has_new_line": job is not None and "\n" in job.text,
                "n_remain": n_predict - n_decoded if job is not None and n_predict >= 0 else -1,
                "n_decoded": n_decoded,
            }
        ],
    }
    if os.environ.get("LLAMA_SERVER_SLOTS_DEBUG"):
        out["prompt"] = engine.tokenizer.decode(job.request.prompt if job is not None else slot.tokens)
        out["generated"] = job.text if job is not None else ""
    return out


async def act(http: HttpRequest, state: ServerState) -> Response:
    """POST /slots/ID?action=save|restore|erase. ID counts modulo the number of slots, as llama-server has it."""
    folder = state.config.slot_save_path
    if folder is None:
        raise ApiError("This server does not support slots action. Start it with `--slot-save-path`", 501)
    text = http.path_params["id_slot"]
    if not re.fullmatch(r"-?\d{1,9}", text):
        raise ApiError("Invalid slot ID")
    id_slot = int(text)
    slot = id_slot % len(state.model.engine.slots)
    action = http.query_params.get("action", "")
    if action == "erase":
        n = await state.worker.call(lambda engine: engine.erase_slot(slot))
        return JsonResponse({"id_slot": id_slot, "n_erased": n})
    if action not in ("save", "restore"):
        raise ApiError("Invalid action")
    path = file_path(Path(folder), await http.body())
    model = state.model.info.fingerprint
    start = time.perf_counter()
    do = _save if action == "save" else _restore
    n, n_bytes = await state.worker.call(lambda engine: do(engine, slot, path, model))
    ms = 1000 * (time.perf_counter() - start)
    done, moved = ("n_saved", "n_written") if action == "save" else ("n_restored", "n_read")
    return JsonResponse(
        {"id_slot": id_slot, "filename": path.name, done: n, moved: n_bytes, "timings": {f"{action}_ms": ms}}
    )


def file_path(folder: Path, body: bytes) -> Path:
    """The file inside `folder` that a body names; no separators, no hidden or special names."""
    values = parse_object(body)
    if "filename" not in values:
        raise missing_key("filename")
    name = values["filename"]
    if not isinstance(name, str):
        raise ApiError(type_error("string", name))
    if not re.fullmatch(r"[^\x00-\x1f/\\:*?\"<>|]{1,200}", name) or name.strip(" .") != name or ".." in name:
        raise ApiError("Invalid filename")
    return folder / name


def _save(engine: Any, slot: int, path: Path, model: str) -> tuple[int, int]:
    data = engine.save_slot(slot)
    return len(data["tokens"]), write_slot(path, data, model)


def _restore(engine: Any, slot: int, path: Path, model: str) -> tuple[int, int]:
    """A failed restore leaves the slot empty: it must not answer from half a state."""
    try:
        data, n_bytes = read_slot(path, model)
        engine.restore_slot(slot, data)
    except RequestError:  # the slot is busy, or no slot of this engine can be restored
        raise
    except (GgufspecError, OSError) as e:
        engine.erase_slot(slot)
        raise ApiError(f"Unable to restore slot: {e}") from None
    return len(data["tokens"]), n_bytes
