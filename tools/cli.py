"""`ggufspec cli`: text from a prompt, or a chat, in the terminal."""

from __future__ import annotations

import sys
from dataclasses import replace

from ggufspec import bundled
from ggufspec.errors import RequestError
from ggufspec.job import Request
from ggufspec.tools import cli_chat, model_defaults, rank
from ggufspec.tools.command import OptionCommand
from ggufspec.tools.runtime import Runtime, open_runtime
from ggufspec.tools.settings import Settings
from ggufspec.tools.terminal import Clock, Interrupt, Screen, drafter_lines, quit_at_once, timing_lines
from ggufspec.tools.warm_up import warm_up

CAPTURE_SECONDS = 0.5  # somebody waits for the first token: lengths of drafts that are missing then can be done without
ROOM = 4  # tokens of the context that a raw prompt must leave


def run(settings: Settings) -> int:
    clock = Clock()
    settings = with_bundled_model(settings)
    if rank.is_follower():
        rank.follow_torchrun(settings)
    runtime = open_runtime(settings)
    sampling = model_defaults.sampling_of(settings, runtime.file.metadata).with_seed()
    request = Request(
        [],
        sampling,
        n_predict=settings.context.n_predict,
        stop=settings.chat.reverse_prompts,
        grammar=model_defaults.grammar_of(settings),
        parse_special_out=settings.chat.special,
    )
    warm_up(runtime, CAPTURE_SECONDS)
    load_ms = clock.ms()
    screen = Screen(settings.cli.color)
    if is_chat(settings):
        return cli_chat.chat(runtime, request, screen)
    return complete(runtime, request, screen, load_ms)


def with_bundled_model(settings: Settings) -> Settings:
    """Without --model: the model inside the package, drafting with its own MTP block or a bundled drafter."""
    if settings.model.path is not None:
        return settings
    spec = settings.speculative
    types = spec.types or (() if spec.model else ("draft-mtp",))
    model = spec.model
    if model is None and types in (("draft-dspark",), ("draft-dflash",)):
        model = str(bundled.path("dspark" if types == ("draft-dspark",) else "dflash2"))
    path = bundled.target_path()
    if not rank.is_follower():
        print(f"no --model given: running the bundled {path.name} ({','.join(types) or 'drafter of --model-draft'})",
              file=sys.stderr)  # fmt: skip
    return replace(
        settings,
        model=replace(settings.model, path=str(path)),
        speculative=replace(spec, types=types, model=model),
    )


def is_chat(settings: Settings) -> bool:
    wanted = settings.cli.conversation
    return settings.cli.prompt is None if wanted is None else wanted


def complete(runtime: Runtime, request: Request, screen: Screen, load_ms: float) -> int:
    """One completion of the raw prompt."""
    settings, tokenizer, clock = runtime.settings, runtime.tokenizer, Clock()
    ids = tokenizer.encode(settings.cli.prompt or "", add_special=True, parse_special=True)
    if not ids:
        raise RequestError("the prompt is empty: give one with -p or -f")
    room = runtime.engine.n_ctx - ROOM
    if len(ids) > room:
        raise RequestError(f"prompt is too long ({len(ids)} tokens, max {room}): raise --ctx-size")
    shown = tokenizer.decode(ids, skip_special=not settings.chat.special) if settings.cli.display_prompt else ""
    if request.n_predict == 0:  # a server reads the prompt into its cache and gives one token; here nobody asked for it
        screen.prompt(shown)
        screen.write("\n")
        return 0
    job = None
    with Interrupt() as interrupt:
        events = runtime.engine.generate(replace(request, prompt=ids))
        for event in events:
            if event.kind == "error":
                continue  # raised next
            if job is None:  # the request is good: nothing is printed before that is known
                screen.prompt(shown)
            job = event.job
            screen.write(event.text)
            if interrupt.pressed:
                break
        events.close()
    if interrupt.pressed:
        quit_at_once()
    assert job is not None
    screen.write(" [end of text]\n" if job.stop_kind == "eos" else "\n")
    if settings.cli.show_timings and settings.common.perf:
        lines = timing_lines(job.stats, load_ms, load_ms + clock.ms()) + drafter_lines(runtime.drafter)
        print("", *lines, sep="\n", file=sys.stderr)
    return 130 if interrupt.pressed else 0


command = OptionCommand(
    "cli", run, "Generate text in the terminal: one completion with -p or -f, otherwise a chat. Without -m the model "
    "that ships with the package runs."
)  # fmt: skip
