"""Options of the terminal front (llama-cli's and llama-completion's) and of perplexity."""

from __future__ import annotations

from ggufspec.tools import option_values as read
from ggufspec.tools.options import Option

_CLI = frozenset({"cli"})
_PPL = frozenset({"perplexity"})
_BOTH = _CLI | _PPL
_NO_MEDIA = "images, audio and video are not implemented"
_RAW_CHAT = "chats follow the model's template; use -cnv"
_OTHER_SCORES = "perplexity and KL divergence are the scores there are"


def _cli(names: str, key: str, help: str, metavar: str = "", parse: read.Reader | None = None, negative: str = "",
         **more: object) -> Option:  # fmt: skip
    return Option(tuple(names.split()), "cli", help, f"cli.{key}", metavar, parse, tuple(negative.split()),
                  **{"tools": _CLI, **more})  # type: ignore[arg-type]  # fmt: skip


def _ppl(
    names: str, key: str, help: str, metavar: str = "", parse: read.Reader | None = None, **more: object
) -> Option:
    return Option(tuple(names.split()), "perplexity", help, f"perplexity.{key}", metavar, parse,
                  tools=_PPL, **more)  # type: ignore[arg-type]  # fmt: skip


def _unsupported(names: str, note: str, metavar: str = "", tools: frozenset[str] = _CLI) -> Option:
    group = "cli" if tools is _CLI else "perplexity"
    return Option(tuple(names.split()), group, metavar=metavar, tools=tools, status="unsupported", note=note)


OPTIONS = (
    _cli("-p --prompt", "prompt", "the prompt; in a chat, the first message", "PROMPT", read.text, tools=_BOTH),
    _cli("-f --file", "prompt", "the prompt from a file, without its last newline", "FNAME", read.prompt_file,
         tools=_BOTH),
    _cli("-bf --binary-file", "prompt", "the prompt from a file, as it is", "FNAME", read.file_text, tools=_BOTH),
    _cli("-e --escape", "escape", r"read \n, \t, \', \" and \\ in prompts", negative="--no-escape", tools=_BOTH),
    _cli("-sys --system-prompt", "system", "system message", "PROMPT", read.text),
    _cli("-sysf --system-prompt-file", "system", "system message from a file", "FNAME", read.prompt_file),
    _cli("-cnv --conversation", "conversation", "chat with the model's template (default: when there is no prompt)",
         negative="-no-cnv --no-conversation"),
    _cli("-st --single-turn", "single_turn", "one answer, then exit"),
    _unsupported("-i --interactive", _RAW_CHAT),
    _unsupported("-if --interactive-first", _RAW_CHAT),
    _unsupported("--in-prefix", _RAW_CHAT, "TEXT"),
    _unsupported("--in-suffix", _RAW_CHAT, "TEXT"),
    _unsupported("--in-prefix-bos", _RAW_CHAT),
    _cli("-mli --multiline-input", "multiline_input", r"input goes on until a line that ends in \ (else the reverse)"),
    _cli("-co --color", "color", "color input and output: on, off or auto (in a terminal)", "on|off|auto",
         read.on_off_auto("--color"), env="LLAMA_ARG_COLOR"),
    _cli("--display-prompt", "display_prompt", "print the prompt before the answer", negative="--no-display-prompt"),
    _cli("--show-timings", "show_timings", "timings after an answer", negative="--no-show-timings",
         env="LLAMA_ARG_SHOW_TIMINGS"),
    _cli("-o --output", "transcript", "write the conversation to a file", "FNAME", read.text),
    _cli("--simple-io", "simple_io", "no line editing and no history of lines in a chat"),
    _unsupported("--image", _NO_MEDIA, "FNAME,..."),
    _unsupported("--audio", _NO_MEDIA, "FNAME,..."),
    _unsupported("--video", _NO_MEDIA, "FNAME,..."),
    _unsupported("--prompt-cache", "states are kept in memory only", "FNAME"),
    _unsupported("--prompt-cache-all", "states are kept in memory only"),
    _unsupported("--prompt-cache-ro", "states are kept in memory only"),
    _unsupported("--server-base", "the model runs in this process", "URL"),
    _unsupported("-ptc --print-token-count", "use ggufspec tokenize", "N"),
    # perplexity
    _ppl("--chunks", "n_chunks", "chunks to score (-1: all)", "N", read.integer),
    _ppl("--kl-divergence", "kl_divergence", "compare with the logits in --kl-divergence-base"),
    _ppl("--save-all-logits --kl-divergence-base", "logits_file", "file of logits: written, or read with "
         "--kl-divergence", "FNAME", read.text),
    _ppl("--ppl-output-type", "output_type", "0: running values; 1: a table line a chunk", "0|1", read.between(0, 1)),
    Option(("--gpu-mem",), "plan", "memory of the GPUs to plan for, in GiB (default: what is free on this machine's)",
           "plan.gpu_mem_gib", "GiB0,GiB1,...", read.number_list, tools=frozenset({"plan"})),
    _unsupported("--ppl-stride", "chunks do not overlap", "N", _PPL),
    _unsupported("--hellaswag", _OTHER_SCORES, tools=_PPL),
    _unsupported("--winogrande", _OTHER_SCORES, tools=_PPL),
    _unsupported("--multiple-choice", _OTHER_SCORES, tools=_PPL),
)  # fmt: skip
