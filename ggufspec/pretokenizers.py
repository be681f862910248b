"""Which pre-tokenizer a GGUF's `tokenizer.ggml.pre` names: the regexes that cut text into words before BPE.

Each list is applied in order: every regex splits the pieces left by the one before, and text between two matches
stays a piece of its own. The regexes are the data of the original models' `tokenizer.json`, as llama.cpp runs them.
"""

from dataclasses import dataclass

from .errors import UnsupportedError

# llama.cpp's character tables are Unicode 15.1's; the regex engine of `tokenizers` knows 16.0. To it these newer
# letters, marks, digits and signs would be words where llama.cpp sees unassigned characters.
_NEWER = """
    897 1B4E-1B4F 1B7F 1C89-1C8A 2427-2429 31E4-31E5 A7CB-A7CD A7DA-A7DC 105C0-105F3 10D40-10D65
    10D69-10D85 10D8E-10D8F 10EC2-10EC4 10EFC 11380-11389 1138B 1138E 11390-113B5 113B7-113C0 113C2
    113C5 113C7-113CA 113CC-113D5 113D7-113D8 113E1-113E2 116D0-116E3 11BC0-11BE1 11BF0-11BF9 11F5A
    13460-143FA 16100-16139 16D40-16D79 18CFF 1CC00-1CCF9 1CD00-1CEB3 1E5D0-1E5FA 1E5FF 1F8B2-1F8BB
    1F8C0-1F8C1 1FA89 1FA8F 1FABE 1FAC6 1FADC 1FADF 1FAE9 1FBCB-1FBEF
"""


def _class(*categories: str) -> str:
    """A regex character class of Unicode 15.1: any of these general categories, without the newer characters."""
    newer = "".join("-".join(rf"\x{{{point}}}" for point in span.split("-")) for span in _NEWER.split())
    named = "".join(rf"\p{{{name}}}" for name in categories)
    return f"[{named}&&[^{newer}]]"


_L, _M, _N, _P, _S = (_class(name) for name in "LMNPS")
# Letters that may stand in the capital and in the small part of a word: llama.cpp tells the cases of ASCII apart and
# lets every other letter be both, where the original models' regexes go by Unicode case and count marks as letters.
_UPPER, _LOWER = rf"[{_L}&&[^a-z]]", rf"[{_L}&&[^A-Z]]"
_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS = rf" ?[^\s{_L}{_N}]+[\r\n]*"
_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?{_L}+| ?{_N}+| ?[^\s{_L}{_N}]+|\s+(?!\S)"
_TITLE = rf"[^\r\n{_L}{_N}]?{_UPPER}*{_LOWER}+"
_CAPITALS = rf"[^\r\n{_L}{_N}]?{_UPPER}+{_LOWER}*"

REGEXES: dict[str, tuple[str, ...]] = {
    "qwen2": (rf"{_CONTRACTION}|[^\r\n{_L}{_N}]?{_L}+|{_N}|{_SIGNS}|{_BLANKS}",),
    # Combining marks belong to words: the one difference from qwen2, and what keeps Devanagari and the like whole.
    "qwen35": (rf"{_CONTRACTION}|[^\r\n{_L}{_N}]?[{_L}{_M}]+|{_N}| ?[^\s{_L}{_M}{_N}]+[\r\n]*|{_BLANKS}",),
    "llama3": (rf"{_CONTRACTION}|[^\r\n{_L}{_N}]?{_L}+|{_N}{{1,3}}|{_SIGNS}|{_BLANKS}",),
    "gpt-2": (_GPT2,),
    "digits": (_N, _GPT2),
    "default": (rf"[{_P}\$\+<=>\^~\|]+", _GPT2, rf"{_N}+", "[0-9][0-9][0-9]"),
    "deepseek-v3": (
        rf"{_N}{{1,3}}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
        rf"|[^\r\n{_L}{_P}{_S}]?[{_L}{_M}]+| ?[{_P}{_S}]+[\r\n]*|{_BLANKS}",
    ),
    "tekken": (rf"{_TITLE}|{_CAPITALS}|{_N}| ?[^\s{_L}{_N}]+[\r\n/]*|{_BLANKS}",),
    "gpt-4o": (rf"{_TITLE}{_CONTRACTION}?|{_CAPITALS}{_CONTRACTION}?|{_N}{{1,3}}| ?[^\s{_L}{_N}]+[\r\n/]*|{_BLANKS}",),
}


@dataclass(frozen=True)
class PreTokenizer:
    """One row of the table: the name of the regex list, and the flags that go with the GGUF name."""

    regexes: str
    ignore_merges: bool = False  # a word that is a token is taken whole, whatever the merges say
    add_bos: bool = False  # default when the file has no `tokenizer.ggml.add_bos_token`


def _rows(regexes: str, names: str, **flags: bool) -> dict[str, PreTokenizer]:
    return {name: PreTokenizer(regexes, **flags) for name in names.split()}


PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **_rows("llama3", "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
            ignore_merges=True, add_bos=True),
    **_rows("llama3", "dbrx smaug-bpe chatglm-bpe"),
    **_rows("llama3", "glm4 glm5", ignore_merges=True),
    **_rows("qwen2", "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 megrez hunyuan solar-open grok-2"),
    **_rows("qwen35", "qwen35"),
    **_rows("digits", "smollm command-r starcoder refact codeshell exaone minerva-7b mellum2"),
    **_rows("gpt-2", "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum modern-bert "
            "exaone4 mpt olmo jais trillion granite-docling"),
    **_rows("default", "default"),
    **_rows("deepseek-v3", "deepseek-v3 hunyuan-dense joyai-llm hy_v4"),
    **_rows("tekken", "tekken", ignore_merges=True, add_bos=True),
    **_rows("gpt-4o", "gpt-4o llama4 kanana2 talkie minimax-m2"),
}  # fmt: skip


def pre_tokenizer(name: str) -> PreTokenizer:
    """The table row of a `tokenizer.ggml.pre` value. Raises UnsupportedError for a name that is not in the table."""
    try:
        return PRE_TOKENIZERS[name]
    except KeyError:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise UnsupportedError(
            f"unknown pre-tokenizer type: '{name}' (tokenizer.ggml.pre); supported: {known}"
        ) from None
