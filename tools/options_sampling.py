"""Options of sampling. Names, ranges and formulas: docs/sampling.md."""

from __future__ import annotations

from ggufspec.sampling import sampler_letters, sampler_names
from ggufspec.sampling.params import SAMPLERS
from ggufspec.tools import option_values as read
from ggufspec.tools.options import TEXT, Option

G = "sampling"


def chain_of_names(text: str) -> tuple[str, ...]:
    known, unknown = sampler_names(text.split(";"))
    if unknown:
        names = ", ".join(name for _, name in SAMPLERS)
        raise ValueError(f"unknown sampler {unknown[0]!r}: expected names of {names}, separated by ';'")
    return tuple(known)


def chain_of_letters(text: str) -> tuple[str, ...]:
    known, unknown = sampler_letters(text)
    if unknown:
        raise ValueError(f"unknown sampler letter {unknown[0]!r}: expected letters of edskypmxtia")
    return tuple(known)


def dry_breaker(text: str) -> tuple[str, ...]:
    return () if text == "none" else (text,)


def temperature(text: str) -> float:
    return max(read.number(text), 0.0)


def _number(names: str, key: str, help: str, env: str = "", parse: read.Reader = read.number) -> Option:
    metavar = "N" if parse is not read.number and parse is not temperature else "F"
    return Option(tuple(names.split()), G, help, f"sampling.{key}", metavar, parse,
                  env=f"LLAMA_ARG_{env}" if env else "", tools=TEXT)  # fmt: skip


OPTIONS = (
    Option(("--samplers",), G, "the chain, names in order, separated by ';'", "sampling.samplers", "SAMPLERS",
           chain_of_names, tools=TEXT),
    Option(("--sampling-seq", "--sampler-seq"), G, "the chain as letters", "sampling.samplers", "LETTERS",
           chain_of_letters, tools=TEXT),
    Option(("-s", "--seed"), G, "seed of the random numbers (-1: a random one)", "sampling.seed", "SEED", read.seed,
           tools=TEXT),
    Option(("--ignore-eos",), G, "never end by an end-of-text token", "sampling.ignore_eos", tools=TEXT),
    _number("--temperature --temp", "temperature", "temperature (0: always the likeliest token)", "TEMPERATURE",
            temperature),
    _number("--top-k", "top_k", "keep the k likeliest tokens (0: all)", "TOP_K", read.integer),
    _number("--top-p", "top_p", "keep the likeliest tokens up to this total probability (1: all)", "TOP_P"),
    _number("--min-p", "min_p", "keep tokens at least this likely, relative to the likeliest (0: all)", "MIN_P"),
    _number("--top-nsigma --top-n-sigma", "top_n_sigma",
            "keep logits within n standard deviations of the largest (-1: all)"),
    _number("--xtc-probability", "xtc_probability", "how often xtc removes the likeliest tokens (0: never)"),
    _number("--xtc-threshold", "xtc_threshold", "xtc counts tokens at least this likely (> 0.5: off)"),
    _number("--typical --typical-p", "typical_p", "locally typical sampling (1: off)"),
    _number("--repeat-last-n", "repeat_last_n", "tokens that the penalties look back on (0: off)",
            parse=read.at_least(0)),
    _number("--repeat-penalty", "repeat_penalty", "factor on repeated tokens (1: off)", "REPEAT_PENALTY"),
    _number("--presence-penalty", "presence_penalty", "taken from the logit of repeated tokens",
            "PRESENCE_PENALTY"),
    _number("--frequency-penalty", "frequency_penalty", "taken from the logit for each repetition",
            "FREQUENCY_PENALTY"),
    _number("--dry-multiplier", "dry_multiplier", "DRY: strength (0: off)"),
    _number("--dry-base", "dry_base", "DRY: growth with the length of the repetition"),
    _number("--dry-allowed-length", "dry_allowed_length", "DRY: longest repetition without penalty",
            parse=read.integer),
    _number("--dry-penalty-last-n", "dry_penalty_last_n", "DRY: tokens to look back on", parse=read.at_least(0)),
    Option(("--dry-sequence-breaker",), G, "DRY: a text no repetition reaches across; repeatable, the first use "
           "replaces the default ones (none: no breakers)", "sampling.dry_sequence_breakers", "STRING",
           dry_breaker, appends=True, tools=TEXT),
    _number("--adaptive-target", "adaptive_target", "adaptive_p: probability aimed at (negative: off)"),
    _number("--adaptive-decay", "adaptive_decay", "adaptive_p: memory, 0 to 0.99",
            parse=read.between(0, 0.99, read.number)),
    _number("--dynatemp-range", "dynatemp_range", "dynamic temperature: half width of the range (0: off)"),
    _number("--dynatemp-exp", "dynatemp_exponent", "dynamic temperature: exponent of the entropy"),
    _number("--mirostat", "mirostat", "mirostat in place of the chain: 0 off, 1 or 2", parse=read.between(0, 2)),
    _number("--mirostat-lr", "mirostat_eta", "mirostat: learning rate"),
    _number("--mirostat-ent", "mirostat_tau", "mirostat: surprise aimed at"),
    Option(("-l", "--logit-bias"), G, "add to a token's logit: ID(+/-)BIAS, such as 15043-1; repeatable",
           "sampling.logit_bias", "ID(+/-)BIAS", read.logit_bias, appends=True, tools=TEXT),
    Option(("--grammar",), G, "GBNF grammar (root rule: root)", "grammar.grammar", "GRAMMAR", read.text, tools=TEXT),
    Option(("--grammar-file",), G, "GBNF grammar from a file", "grammar.grammar", "FNAME", read.file_text, tools=TEXT),
    Option(("-j", "--json-schema"), G, "JSON schema that the answer must fit ({}: any JSON)", "grammar.json_schema",
           "SCHEMA", read.json_text, tools=TEXT),
    Option(("-jf", "--json-schema-file"), G, "JSON schema from a file", "grammar.json_schema", "FNAME",
           read.of_file(read.json_text), tools=TEXT),
    Option(("-bs", "--backend-sampling"), G, env="LLAMA_ARG_BACKEND_SAMPLING", tools=TEXT, status="no-op",
           note="the usual samplers always run on the device"),
)  # fmt: skip
