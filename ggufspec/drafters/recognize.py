"""What kind of drafter a GGUF file is, and whether it belongs to a target. Every refusal names what disagrees."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import ConfigError, UnsupportedError
from ..models import ARCHITECTURES
from .dflash_config import DFlashConfig, kind_of, read_dflash_config

if TYPE_CHECKING:
    from ..gguf_file import GGUFFile

# llama.cpp's names of `--spec-type`, in its order.
TYPES = (
    "none", "draft-simple", "draft-eagle3", "draft-mtp", "draft-dflash", "draft-dspark",
    "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache",
)  # fmt: skip
NEEDS_FILE = ("draft-simple", "draft-dflash", "draft-dspark")

_COMMON = {
    "fc.weight", "enc.output_norm.weight", "output_norm.weight", "token_embd.weight", "output.weight", "d2t",
    "rope_freqs.weight",
}  # fmt: skip
_BLOCK = {
    "attn_norm.weight", "ffn_norm.weight", "attn_q.weight", "attn_k.weight", "attn_v.weight",
    "attn_output.weight", "attn_q_norm.weight", "attn_k_norm.weight", "post_attention_norm.weight",
    "post_ffw_norm.weight", "layer_output_scale.weight", "attn_sinks.weight", "ffn_gate.weight",
    "ffn_up.weight", "ffn_down.weight",
}  # fmt: skip
_KIND = {
    "dflash": set[str](),
    "dspark": {"markov_w1.weight", "markov_w2.weight", "conf_proj.weight", "conf_proj.bias"},
    "dflash2": {"selector_predecessor.weight", "selector_successor.weight", "selector_hidden.weight"},
}
_CONV = {"attn_conv_base", "ffn_conv_base", "attn_conv_proj.weight", "ffn_conv_proj.weight"}
_NAMES = {"dflash": "DFlash", "dspark": "DSpark", "dflash2": "DFlash2"}
_SPEC_TYPE = {"dflash": "draft-dflash", "dflash2": "draft-dflash", "dspark": "draft-dspark"}

# Vocabularies may differ in this many padding tokens, and below this id (llama.cpp's tolerances).
MAX_SIZE_DIFFERENCE = 128
FIRST_COMPARED = 5


def parse_types(texts: Sequence[str]) -> tuple[str, ...]:
    """Values of `--spec-type`, each a comma-separated list, to type names in the order given, without `none`.

    `none` anywhere in one value makes that value nothing. ConfigError for an unknown name.
    """
    types: list[str] = []
    for text in texts:
        names = [name.strip() for name in text.split(",")]
        for name in names:
            if name not in TYPES:
                raise ConfigError(f"unknown speculative type: {name} (known: {', '.join(TYPES)})")
        if "none" not in names:
            types += [name for name in names if name not in types]
    if "draft-eagle3" in types:
        raise UnsupportedError("--spec-type draft-eagle3 is not supported; this runtime has no EAGLE-3 drafter")
    return tuple(types)


def mtp_block(file: GGUFFile) -> int | None:
    """Index of the MTP block, when the file's last block is one."""
    key = file.key("block_count")
    last = int(file.metadata.get(key, 0)) - 1
    return last if f"blk.{last}.nextn.eh_proj.weight" in file.tensors else None


def infer_types(draft: GGUFFile | None) -> tuple[str, ...]:
    """The types when none was asked for: what the draft file is; nothing for an ordinary model.

    UnsupportedError for a file that is neither a drafter nor a model known here.
    """
    if draft is None:
        return ()
    if draft.architecture == "dflash":
        return (_SPEC_TYPE[kind_of(draft)],)
    if draft.architecture not in ARCHITECTURES:
        raise UnsupportedError(
            f"{draft.path}: architecture {draft.architecture!r} is not a drafter that this program knows; expected "
            f"dflash, a file with an MTP block (qwen35), or a model ({', '.join(ARCHITECTURES)})"
        )
    return ("draft-mtp",) if mtp_block(draft) is not None else ()


def file_for(spec_type: str, draft: GGUFFile | None) -> GGUFFile | None:
    """The file a drafter comes from; None: the target's. Beside a `dflash` file MTP means the target's own block."""
    if spec_type == "draft-mtp" and draft is not None and draft.architecture == "dflash":
        return None
    return draft


def check_types(types: Sequence[str], draft: GGUFFile | None, target: GGUFFile) -> None:
    """`check_type` for each type with its own file, and whether any model drafter asked for is what the file is."""
    for name in types:
        check_type(name, file_for(name, draft), target)
    with_model = [name for name in types if name.startswith("draft-")]
    if draft is not None and with_model and all(file_for(name, draft) is None for name in with_model):
        kind = kind_of(draft)
        raise ConfigError(
            f"{draft.path}: is a {_NAMES[kind]} drafter, but --spec-type is {','.join(with_model)}; expected "
            f"--spec-type {_SPEC_TYPE[kind]}, or no --model-draft to draft with the target's own MTP block"
        )


def check_type(spec_type: str, draft: GGUFFile | None, target: GGUFFile) -> None:
    """Whether the files can serve a `--spec-type`; ConfigError says what the file is instead."""
    if spec_type in NEEDS_FILE and draft is None:
        raise ConfigError(f"--spec-type {spec_type} needs a draft model; give one with --model-draft")
    if spec_type == "draft-mtp":
        check_mtp(draft or target, is_target=draft is None)
        return
    if draft is None or spec_type.startswith("ngram"):
        return
    is_dflash = draft.architecture == "dflash"
    if spec_type == "draft-simple":
        if is_dflash:
            kind = kind_of(draft)
            raise ConfigError(
                f"{draft.path}: is a {_NAMES[kind]} drafter, but --spec-type is draft-simple; "
                f"expected --spec-type {_SPEC_TYPE[kind]}"
            )
        return
    if not is_dflash:
        raise ConfigError(
            f"{draft.path}: has architecture {draft.architecture!r}, but --spec-type {spec_type} needs 'dflash'"
        )
    kind = kind_of(draft)
    if _SPEC_TYPE[kind] != spec_type:
        raise ConfigError(
            f"{draft.path}: is a {_NAMES[kind]} drafter, but --spec-type is {spec_type}; "
            f"expected --spec-type {_SPEC_TYPE[kind]}"
        )


def check_mtp(file: GGUFFile, *, is_target: bool) -> None:
    """The file has an MTP block, whole; otherwise ConfigError names the first missing tensor."""
    n = int(file.metadata.get(file.key("nextn_predict_layers"), 0))
    hint = "; give a file that has one with --model-draft" if is_target else ""
    if file.architecture != "qwen35":
        raise UnsupportedError(
            f"{file.path}: draft-mtp is supported for architecture 'qwen35', this file has {file.architecture!r}"
        )
    if n == 0:
        raise ConfigError(
            f"{file.path}: has no MTP block ({file.key('nextn_predict_layers')} is 0), "
            f"which --spec-type draft-mtp needs{hint}"
        )
    block = f"blk.{int(file.metadata.get(file.key('block_count'), 0)) - 1}"
    needed = [f"{block}.nextn.{name}.weight" for name in ("eh_proj", "enorm", "hnorm")]
    needed += [
        f"{block}.{name}.weight"
        for name in (
            "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm",
            "post_attention_norm", "ffn_gate", "ffn_up", "ffn_down",
        )
    ]  # fmt: skip
    if not is_target:
        needed += ["token_embd.weight", "output_norm.weight"]
    for name in needed:
        if name not in file.tensors:
            raise ConfigError(
                f"{file.path}: {file.key('nextn_predict_layers')} is {n}, but tensor {name} is missing; "
                f"--spec-type draft-mtp needs it{hint}"
            )


def check_tensors(file: GGUFFile, config: DFlashConfig) -> None:
    """Every tensor of a `dflash` file belongs to its kind, or it is some other kind's: refused, never guessed."""
    block = _BLOCK | (_CONV if config.kind == "dflash2" else set())
    for name in file.tensors:
        match = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
        if match is None:
            known = name in _COMMON or name in _KIND[config.kind]
        else:
            known = match[2] in block and int(match[1]) < config.common.block_count
        if not known:
            raise UnsupportedError(
                f"{file.path}: tensor {name} is not part of a {_NAMES[config.kind]} drafter of "
                f"{config.common.block_count} blocks; this kind of drafter is not supported"
            )


def check_pair(draft: GGUFFile, target: GGUFFile, *, can_tap: bool = True) -> None:
    """A drafter with a model belongs to the target: sizes, taps, vocabulary, special ids; ConfigError if not."""
    if draft.architecture == "dflash":
        config = read_dflash_config(draft)
        check_tensors(draft, config)
        _check_width(draft, target)
        _check_taps(draft, target, config, can_tap)
        n_vocab = len(target.metadata.get("tokenizer.ggml.tokens", ()))
        mask = config.mask_token_id
        if not 0 <= mask < max(n_vocab, 1):
            raise ConfigError(
                f"{draft.path}: tokenizer.ggml.mask_token_id is {mask}, but {target.path} has {n_vocab} tokens"
            )
        if len(_texts(draft)) not in (0, n_vocab):
            raise ConfigError(
                f"{draft.path}: has {len(_texts(draft))} tokens, but the target {target.path} has {n_vocab}; "
                "this drafter looks tokens up by the target's ids"
            )
        _check_d2t(draft, n_vocab)
    elif mtp_block(draft) is not None and draft.architecture == target.architecture:
        _check_width(draft, target)
    check_vocabulary(draft, target)


def _check_width(draft: GGUFFile, target: GGUFFile) -> None:
    ours, theirs = (file.get(file.key("embedding_length"), int) for file in (draft, target))
    if ours != theirs:
        raise ConfigError(
            f"{draft.path}: {draft.key('embedding_length')} is {ours}, but the target {target.path} has "
            f"{theirs}; this drafter was made for another target"
        )


def _check_taps(draft: GGUFFile, target: GGUFFile, config: DFlashConfig, can_tap: bool) -> None:
    if not can_tap:
        raise UnsupportedError(
            f"{draft.path}: reads layers of the target, which architecture {target.architecture!r} does not offer"
        )
    n_layers = target.get(target.key("block_count"), int)
    n_layers -= int(target.metadata.get(target.key("nextn_predict_layers"), 0))
    for tap in config.target_layers:
        if not 0 <= tap < n_layers:
            raise ConfigError(
                f"{draft.path}: dflash.target_layers names layer {tap}, but the target {target.path} has "
                f"{n_layers} layers (0 to {n_layers - 1}); this drafter was made for another target"
            )


def _check_d2t(draft: GGUFFile, n_vocab: int) -> None:
    if "d2t" not in draft.tensors:
        return
    if "output.weight" not in draft.tensors:
        raise ConfigError(f"{draft.path}: has d2t but no output.weight; a reduced vocabulary needs its own head")
    rows, n = draft.tensors["output.weight"].shape[0], draft.tensors["d2t"].shape[0]
    if rows != n:
        raise ConfigError(f"{draft.path}: output.weight has {rows} rows, d2t has {n} entries; expected as many")
    ids = draft.read("d2t").view("<i8").reshape(-1)
    bad = ids[(ids < 0) | (ids >= n_vocab)]
    if len(bad):
        raise ConfigError(f"{draft.path}: d2t names token {int(bad[0])}, but the vocabulary has {n_vocab} tokens")


def check_vocabulary(draft: GGUFFile, target: GGUFFile) -> None:
    """Same kind of tokenizer, same special ids, sizes within 128, same texts from id 5 on (llama.cpp's rule)."""
    for key in ("tokenizer.ggml.model", "tokenizer.ggml.mask_token_id"):
        ours, theirs = draft.metadata.get(key), target.metadata.get(key)
        if ours is not None and theirs is not None and ours != theirs:
            raise ConfigError(f"{draft.path}: {key} is {ours}, but the target {target.path} has {theirs}")
    for name in ("bos", "eos"):
        add = f"tokenizer.ggml.add_{name}_token"
        ours, theirs = draft.metadata.get(add), target.metadata.get(add)
        if ours is not None and theirs is not None and ours != theirs:
            raise ConfigError(f"{draft.path}: {add} is {ours}, but the target {target.path} has {theirs}")
        key = f"tokenizer.ggml.{name}_token_id"
        ours, theirs = draft.metadata.get(key), target.metadata.get(key)
        if ours is not None and theirs is not None and ours != theirs:
            raise ConfigError(f"{draft.path}: {key} is {ours}, but the target {target.path} has {theirs}")
    ours_, theirs_ = (_texts(file) for file in (draft, target))
    if not ours_ or not theirs_:
        raise ConfigError(f"{(draft if not ours_ else target).path}: has no tokenizer.ggml.tokens to compare")
    if abs(len(ours_) - len(theirs_)) > MAX_SIZE_DIFFERENCE:
        raise ConfigError(
            f"{draft.path}: has {len(ours_)} tokens, the target {target.path} {len(theirs_)}; "
            f"expected sizes within {MAX_SIZE_DIFFERENCE}"
        )
    if ours_[FIRST_COMPARED:] == theirs_[FIRST_COMPARED:]:
        return
    for i, (a, b) in enumerate(zip(ours_, theirs_)):
        if i >= FIRST_COMPARED and a != b:
            raise ConfigError(
                f"{draft.path}: token {i} is {a!r}, but in the target {target.path} it is {b!r}; "
                "the two need the same vocabulary"
            )


def _texts(file: GGUFFile) -> list[str]:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    return [] if tokens is None else tokens.to_list()
