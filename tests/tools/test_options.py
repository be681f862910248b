"""The option table and llama.cpp's rules for reading a command line."""

import re
from pathlib import Path

import pytest

from ggufspec.errors import ConfigError
from ggufspec.sampling import DEFAULT_CHAIN
from ggufspec.tools import command, options, options_docs
from ggufspec.tools.options import ALL, Shown, default_of, for_tool, parse, table

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"


def read(tool, line="", environ=None):
    warnings = []
    settings = parse(tool, line.split(), environ or {}, warnings.append)
    return settings, warnings


def error(tool, line, environ=None):
    with pytest.raises(ConfigError) as caught:
        read(tool, line, environ)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("tool", sorted(ALL))
def test_table_is_consistent(tool):
    seen, environment = set(), set()
    for option in for_tool(tool):
        for name in (*option.names, *option.negative):
            assert name not in seen and re.fullmatch(r"--?[a-zA-Z][a-z0-9A-Z-]*", name), name
            seen.add(name)
        default_of(option, tool)  # the key exists
        assert option.help or option.status != "supported"
        assert option.note or option.status == "supported"
        assert (option.parse is not None) == (option.status == "supported" and not option.is_flag) or not option.key
        if option.env:
            assert (option.env, option.const) not in environment
            environment.add((option.env, option.const))


@pytest.mark.parametrize("tool", sorted(ALL))
def test_every_value_option_stores_what_it_reads(tool, tmp_path):
    """Every supported option with a key changes exactly that key, with every one of its names."""
    samples = ["7", "on", "off", "0.5", "layer", "q8_0", "yarn", "none", "1+2.5", "a=int:3", "{}", '{"a":1}', "edk"]
    samples += ["top_k;temp", "/x", str(tmp_path / "a.json"), "draft-mtp", "mean", "CUDA0", str(tmp_path)]
    (tmp_path / "a.json").write_text('{"a": 1}')
    base = options.defaults(tool)
    for option in for_tool(tool):
        if option.status != "supported" or not option.key:
            continue
        for name in option.names:
            if option.is_flag:
                settings, _ = read(tool, name)
                assert at(settings, option.key) == option.const
                continue
            for sample in samples:
                try:
                    settings, _ = read(tool, f"{name} {sample}")
                except ConfigError:
                    continue
                changed = {o.key for o in for_tool(tool) if o.key and at(settings, o.key) != at(base, o.key)}
                assert changed <= {option.key}
                if changed:
                    break
            else:
                pytest.fail(f"no sample value fits {name}")
        for name in option.negative:
            if (False,) not in [(value,) for value, _ in option.refused]:
                assert at(read(tool, name)[0], option.key) is False


def at(settings, key):
    for part in key.split("."):
        settings = getattr(settings, part)
    return settings


def test_a_users_whole_command_line():
    settings, warnings = read(
        "server",
        "-m T.gguf -ngl 999 -ub 2048 -b 8192 -dio -c 524288 -fa on -fit off -ctk f16 -ctv f16 --alias local --no-mmap "
        "--parallel 2 --spec-type draft-dspark --model-draft D.gguf --spec-draft-n-max 7 --spec-draft-p-min 0.0 "
        "-ctkd q8_0 -ctvd q5_1 --host 0.0.0.0 --port 5001 --jinja --cache-ram 16384 --image-min-tokens 1024 "
        "--reasoning-preserve --cont-batching --split-mode layer --tensor-split 4,6,6 --main-gpu 0 "
        "--device CUDA0,CUDA1,CUDA2 --device-draft CUDA1",
    )
    assert [w.split()[0] for w in warnings] == ["-dio", "--no-mmap", "--image-min-tokens"]
    assert settings.model.path == "T.gguf" and settings.model.gpu_layers == 999 and not settings.model.fit
    assert settings.model.tensor_split == (4, 6, 6) and settings.model.devices == ("CUDA0", "CUDA1", "CUDA2")
    context = settings.context
    assert (context.n_ctx, context.n_batch, context.n_ubatch, context.n_parallel) == (524288, 8192, 2048, 2)
    spec = settings.speculative
    assert (spec.types, spec.model, spec.n_max, spec.p_min) == (("draft-dspark",), "D.gguf", 7, 0.0)
    assert (spec.type_k, spec.type_v, spec.devices) == ("q8_0", "q5_1", ("CUDA1",))
    assert settings.server.hosts == ("0.0.0.0",) and settings.server.port == 5001
    assert settings.server.aliases == ("local",) and context.cache_ram_mib == 16384


def test_defaults_are_llama_cpps():
    settings, warnings = read("server")
    assert not warnings and not settings.given
    assert settings.context.n_parallel == -1 and settings.server.port == 8080
    assert settings.sampling.samplers == DEFAULT_CHAIN and settings.sampling.temperature == 0.8
    assert read("cli")[0].context.n_parallel == 1
    perplexity = read("perplexity")[0]
    assert perplexity.context.n_ctx == 512 and not perplexity.cli.escape


def test_underscores_are_dashes_in_long_names_only():
    assert read("cli", "--cache_type_k q8_0 --top_k 3")[0].context.type_k == "q8_0"
    assert "invalid argument: -top_k" in error("cli", "-top_k 3")


def test_integers_are_read_as_stoi_reads_them():
    assert read("cli", "-c 12abc")[0].context.n_ctx == 12
    assert parse("cli", ["-c", "  -3"], {}, print).context.n_ctx == -3
    assert 'error while handling argument "-c": stoi' in error("cli", "-c abc")
    assert "stoi" in error("cli", "-c 99999999999")
    assert read("cli", "--temp 1.5x")[0].sampling.temperature == 1.5
    assert "stof" in error("cli", "--temp warm")
    assert read("cli", "-s -1")[0].sampling.seed == 0xFFFFFFFF
    assert read("cli", "-s 4294967298")[0].sampling.seed == 2


def test_unknown_names_suggest_the_nearest():
    assert error("cli", "--ctx-sise 5") == "error: invalid argument: --ctx-sise (did you mean --ctx-size?)"
    assert "after '='" in error("cli", "--ctx-size=5")
    assert "server does" in error("cli", "--port 80")
    assert "options begin with '-'" in error("cli", "hello")
    assert error("cli", "--zzzzqqq") == "error: invalid argument: --zzzzqqq (see ggufspec cli --help)"


def test_missing_value():
    assert "expected value for argument (N)" in error("cli", "-p x -c")


def test_repeats_warn_and_the_last_wins_but_lists_grow():
    settings, warnings = read("cli", "-c 5 --ctx-size 6")
    assert settings.context.n_ctx == 6 and "more than once" in warnings[0]
    settings, warnings = read(
        "cli", "-l 5+1 -l 6-2.5 --spec-type ngram-mod --spec-type draft-mtp,ngram-cache -r a -r b"
    )
    assert not warnings and settings.sampling.logit_bias == ((5, 1.0), (6, -2.5))
    assert settings.speculative.types == ("ngram-mod", "draft-mtp", "ngram-cache")
    assert settings.chat.reverse_prompts == ("a", "b")


def test_environment_then_command_line():
    environ = {"LLAMA_ARG_CTX_SIZE": "100", "LLAMA_ARG_TOP_K": "7", "LLAMA_API_KEY": "a,b"}
    settings, warnings = read("server", "-c 200 --api-key c", environ)
    assert settings.context.n_ctx == 200 and settings.sampling.top_k == 7 and settings.server.api_keys == ("c",)
    assert [w.split()[0] for w in warnings] == ["LLAMA_ARG_CTX_SIZE", "LLAMA_API_KEY"]
    assert read("server", "", environ)[0].server.api_keys == ("a", "b")


@pytest.mark.parametrize(
    ("environ", "slots", "metrics"),
    [
        ({}, True, False),
        ({"LLAMA_ARG_ENDPOINT_SLOTS": "off", "LLAMA_ARG_ENDPOINT_METRICS": "enabled"}, False, True),
        ({"LLAMA_ARG_ENDPOINT_SLOTS": "1", "LLAMA_ARG_ENDPOINT_METRICS": "0"}, True, False),
        ({"LLAMA_ARG_NO_ENDPOINT_SLOTS": ""}, False, False),
    ],
)
def test_flags_in_the_environment(environ, slots, metrics):
    settings = read("server", "", environ)[0]
    assert (settings.server.slots, settings.server.metrics) == (slots, metrics)


def test_bad_flag_in_the_environment():
    assert "LLAMA_ARG_ENDPOINT_METRICS" in error("server", "", {"LLAMA_ARG_ENDPOINT_METRICS": "yes"})


def test_bare_flash_attn():
    assert read("cli", "-fa -c 5")[0].context.flash_attn == "on"
    assert read("cli", "--flash-attn")[0].context.flash_attn == "on"
    assert read("cli", "-fa -1 -c 5")[0].context.flash_attn == "auto"
    settings, warnings = read("cli", "-fa off")
    assert settings.context.flash_attn == "off" and "no effect" in warnings[0]
    assert "unknown value for --flash-attn: 'maybe'" in error("cli", "-fa maybe")


def test_what_is_not_supported_says_so():
    assert error("server", "--lora x") == "--lora is not supported: adapters are not implemented"
    assert not read("server", "--no-context-shift")[1]
    assert "-nkvo is not supported" in error("server", "-nkvo")
    assert "probabilistic is not supported" in error("server", "--spec-draft-sampling probabilistic")
    assert "LLAMA_ARG_RPC is not supported" in error("server", "", {"LLAMA_ARG_RPC": "x"})
    settings, warnings = read("server", "--numa isolate -tb 4")
    assert [w.split()[0] for w in warnings] == ["--numa", "-tb"]


def test_what_was_removed_says_what_to_use():
    assert "has been removed. use --spec-draft-n-max" in error("server", "--draft 5")
    assert "has been removed" in error("server", "", {"LLAMA_ARG_DRAFT_MAX": "5"})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-ctk q9", "Unsupported cache type: q9"),
        ("--repeat-last-n -1", "expected 0 or more"),
        ("--samplers top_k;foo", "unknown sampler 'foo'"),
        ("--sampler-seq kz", "unknown sampler letter 'z'"),
        ("--spec-type draft-x", "unknown speculative type: draft-x"),
        ("--spec-type draft-eagle3", "not supported"),
        ("--spec-draft-n-max -1", "expected 0 or more"),
        ("-l 12", "invalid input format"),
        ("-j {", "invalid JSON"),
        ("--override-kv a=int:x", "Invalid type for KV override"),
        ("-sm diagonal", "expected one of none, layer, row, tensor"),
        ("-ts " + ",".join("1" * 16), "only has 16 devices"),
        ("-f /nonexistent/file", "failed to open file"),
        ("--mirostat 3", "expected 0 to 2"),
        ("--repeat-penalty 0", "invalid repeat-penalty"),
    ],
)
def test_bad_values(line, message):
    assert message in error("cli", line)


def test_values_with_forms_of_their_own():
    settings = read("cli", "--samplers Top-K;nucleus;temp -ngl all --spec-draft-n-max auto -dev none")[0]
    assert settings.sampling.samplers == ("top_k", "top_p", "temperature")
    assert settings.model.gpu_layers == -2 and settings.speculative.n_max == "auto"
    assert settings.model.devices == ("none",)
    assert read("cli", "--spec-type none,draft-mtp")[0].speculative.types == ("none",)
    assert read("cli", "--spec-default")[0].speculative.types == ("ngram-mod",)
    overrides = parse("cli", ["--override-kv", 'a.b=str:x,"c=str:y,z",d=bool:true,e=float:1.5'], {}, print)
    assert overrides.model.overrides == (("a.b", "x"), ("c", "y,z"), ("d", True), ("e", 1.5))
    assert read("cli", "--temp -3")[0].sampling.temperature == 0.0


def test_dry_breakers_replace_the_defaults():
    def breakers(line):
        return read("cli", line)[0].sampling.dry_sequence_breakers

    assert breakers("--dry-sequence-breaker a --dry-sequence-breaker b") == ("a", "b")
    assert breakers("--dry-sequence-breaker none") == ()


@pytest.mark.parametrize("what", ["--help", "-h", "--usage", "--version", "--list-devices", "--completion-bash"])
def test_information_is_shown(what):
    with pytest.raises(Shown):
        read("cli", f"-c 5 {what} --nonsense")


@pytest.mark.parametrize("tool", sorted(ALL))
def test_help_names_every_option(tool):
    text = command.help_text(tool, "Summary.")
    words = set(re.split(r"[\s,]+", text))
    for option in for_tool(tool):
        assert {*option.names, *option.negative} <= words
    samples = any(option.group == "sampling" for option in for_tool(tool))
    assert ("----- sampling params -----" in text) == samples
    assert command.completion_script(tool).count("complete ") == 1


def test_documentation_has_the_same_table():
    """If this fails: python -m ggufspec.tools.options_docs docs/cli.md"""
    text = DOCS.read_text()
    assert text == options_docs.with_tables(text)
    assert not [o.name for o in table() if f"`{o.name}`" not in text]
