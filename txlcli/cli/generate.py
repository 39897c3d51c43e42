"""`txl generate`."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from txlcli import UserError
from txlcli.cli.app import command
from txlcli.cli.flags import (
    SAMPLING,
    AttentionFlag,
    CheckpointFlag,
    DeterministicFlag,
    DeviceFlag,
    JsonFlag,
    MosesFlag,
    PrecisionFlag,
    QuietFlag,
    RunFlag,
    ThreadsFlag,
    option,
    setting,
)
from txlcli.cli.interactive import Conversation
from txlcli.cli.output import TextOutput, json_line
from txlcli.cli.signals import Interruption, listening
from txlcli.report import Screen

if TYPE_CHECKING:
    from typing import TypeAlias

    from txlcli.api import LanguageModel
    from txlcli.generate import GeneratedText, Piece, SamplingOptions

    Event: TypeAlias = Piece | GeneratedText

_LARGEST_PROMPT_BYTES = 1 << 30
_BLOCK_BYTES = 1 << 18


@command(
    examples=[
        'txl generate --prompt "Once upon a time"',
        "txl generate --prompt-file letter.txt --no-echo --max-tokens 2000 --seed 7",
        "txl generate --num-samples 3 --json --logprobs > samples.jsonl",
    ]
)
def generate(
    *,
    prompt: Annotated[
        str | None, option("--prompt", metavar="TEXT", help="text to continue", may_be_empty=True)
    ] = None,
    prompt_file: Annotated[
        str | None,
        option("--prompt-file", metavar="FILE", help="file that holds the prompt; - for standard input"),
    ] = None,
    is_echoed: Annotated[
        bool, option("--echo/--no-echo", help="print the prompt before its text", has_default=True)
    ] = True,
    is_interactive: Annotated[
        bool,
        option("--interactive", help="answer each line of standard input; an empty one: just go on"),
    ] = False,
    run: RunFlag = None,
    checkpoint: CheckpointFlag = "best",
    is_raw: MosesFlag = False,
    is_json: JsonFlag = False,
    has_logprobs: Annotated[
        bool, option("--logprobs", help="with --json: the model's own log-probability of each token, in nats")
    ] = False,
    is_quiet: QuietFlag = False,
    max_tokens: Annotated[
        int,
        option(
            "--max-tokens", metavar="N", help="tokens to make", panel=SAMPLING, number=int, has_default=True
        ),
    ] = 500,
    temperature: Annotated[
        float,
        option(
            "--temperature",
            metavar="F",
            help="above 1 wilder, below 1 tamer; 0: greedy",
            panel=SAMPLING,
            number=float,
            has_default=True,
        ),
    ] = 0.8,
    top_k: Annotated[
        int,
        option(
            "--top-k",
            metavar="N",
            help="draw from the N likeliest tokens; 0: off",
            panel=SAMPLING,
            number=int,
            has_default=True,
        ),
    ] = 0,
    top_p: Annotated[
        float,
        option(
            "--top-p",
            metavar="F",
            help="draw from the fewest likeliest tokens of this probability; 1: off",
            panel=SAMPLING,
            number=float,
            has_default=True,
        ),
    ] = 0.95,
    min_p: Annotated[
        float,
        option(
            "--min-p",
            metavar="F",
            help="draw from tokens at least this share as likely as the likeliest; 0: off",
            panel=SAMPLING,
            number=float,
            has_default=True,
        ),
    ] = 0.0,
    repetition_penalty: Annotated[
        float,
        option(
            "--repetition-penalty",
            metavar="F",
            help="above 1: the last mem_len tokens become less likely; 1: off",
            panel=SAMPLING,
            number=float,
            has_default=True,
        ),
    ] = 1.0,
    seed: Annotated[
        int | None,
        option(
            "--seed", metavar="N", help="seed; else a fresh one, which is shown", panel=SAMPLING, number=int
        ),
    ] = None,
    num_samples: Annotated[
        int,
        option(
            "--num-samples", metavar="N", help="texts to make", panel=SAMPLING, number=int, has_default=True
        ),
    ] = 1,
    stop: Annotated[
        list[str] | None,
        option(
            "--stop", metavar="TEXT", help="text that ends a sample, not printed; repeatable", panel=SAMPLING
        ),
    ] = None,
    mem_len: Annotated[
        int | None,
        option("--mem-len", metavar="N", help="memory; else as trained", panel=SAMPLING, number=int),
    ] = None,
    tgt_len: Annotated[
        int | None,
        option("--tgt-len", metavar="N", help="segment; else as trained", panel=SAMPLING, number=int),
    ] = None,
    device: DeviceFlag = "auto",
    precision: PrecisionFlag = "auto",
    attention: AttentionFlag = "auto",
    threads: ThreadsFlag = None,
    is_deterministic: DeterministicFlag = False,
) -> None:
    """Continue a text.

    Reads a run and prints text as it is made, at constant cost per token, and nothing else on stdout;
    settings and seed go to stderr. With --json, one JSON object a line for each sample when it is finished.
    With --interactive you and the model write in turn, and its memory holds all of it; Ctrl-C ends an answer,
    the end of the input (Ctrl-D) the command.
    """
    if prompt is not None and prompt_file is not None:
        raise UserError("--prompt-file: cannot go with --prompt; give one of them")
    if is_interactive and prompt_file == "-":
        raise UserError("--prompt-file: standard input is what --interactive reads; give a file or --prompt")
    if is_interactive and num_samples != 1:
        raise UserError(f"--num-samples: must be 1 with --interactive; got {num_samples}")
    if has_logprobs and not is_json:
        raise UserError("--logprobs: goes with --json only")
    machine = {
        "device": setting("device", device),
        "precision": setting("precision", precision),
        "attention": setting("attention", attention),
        "threads": setting("threads", threads),
        "deterministic": is_deterministic,
    }
    with listening("stopping; once more to stop at once") as interruption:
        from txlcli.api import load
        from txlcli.generate import SamplingOptions

        options = SamplingOptions(
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
            num_samples=num_samples,
            stop=tuple(stop or ()),
            mem_len=mem_len,
            tgt_len=tgt_len,
        ).seeded()
        source = _read_prompt(prompt, prompt_file)
        screen, out = Screen.of(sys.stderr, is_quiet=is_quiet), Screen.of(sys.stdout)
        lm = load(run, checkpoint, moses=is_raw, **machine)
        if is_interactive:
            _told(lm, options, screen)
            conversation = Conversation(
                lm,
                options,
                screen,
                out,
                interruption,
                is_echoed=is_echoed,
                is_json=is_json,
                has_logprobs=has_logprobs,
            )
            conversation.hold(source if prompt is not None or prompt_file is not None else None)
            interruption.leave()
            return
        pieces = _pieces(lm, source, options, screen)
        if is_json:
            _write_json(pieces, out, has_logprobs, interruption)
        else:
            _write_text(pieces, out, source if is_echoed else b"", options.num_samples, interruption)
        interruption.leave()


def _read_prompt(prompt: str | None, prompt_file: str | None) -> bytes:
    if prompt_file is not None:
        from txlcli.files import read_bounded, read_stdin

        if prompt_file == "-":
            source = bytearray()
            while block := read_stdin(_BLOCK_BYTES):
                source += block
                if len(source) > _LARGEST_PROMPT_BYTES:
                    raise UserError(f"-: too large; expected at most {_LARGEST_PROMPT_BYTES:,} bytes")
            return bytes(source)
        return read_bounded(Path(prompt_file), _LARGEST_PROMPT_BYTES)
    # The bytes that the shell handed over, whatever encoding Python took them for.
    return os.fsencode(prompt or "")


def _pieces(
    lm: "LanguageModel", source: bytes, options: "SamplingOptions", screen: Screen
) -> "Iterator[Event]":
    """Say what is about to happen, and generate, sample after sample."""
    from txlcli.generate import GeneratedText, in_order

    prompt = lm.read_prompt(source)
    _told(lm, options, screen, prompt.notices)
    for event in in_order(lm.stream(prompt, options)):
        yield event
        if isinstance(event, GeneratedText):
            finished = event
    if finished.tokens_per_s is not None:
        each = " each" if options.num_samples > 1 else ""
        screen.aside(f"{finished.tokens_per_s:,.0f} tokens/s{each}")


def _told(
    lm: "LanguageModel", options: "SamplingOptions", screen: Screen, notices: tuple[str, ...] = ()
) -> None:
    """Say what is about to happen, and what the user should know about it."""
    if lm.damage is not None:
        screen.warn(lm.damage)
    for notice in (*lm.notices, *notices):
        screen.note(notice)
    if options.repetition_penalty != 1 and options.lengths(lm.model.lengths).mem_len == 0:
        screen.note("repetition penalty: does nothing at mem_len 0: it looks at the last mem_len tokens")
    screen.aside(" · ".join(_settings(lm, options)))


def _settings(lm: "LanguageModel", options: "SamplingOptions") -> list[str]:
    """Name what the text will depend on; what is off is left out."""
    lengths = options.lengths(lm.model.lengths)
    filters = (
        ("top-k", options.top_k, 0),
        ("top-p", options.top_p, 1),
        ("min-p", options.min_p, 0),
        ("repetition penalty", options.repetition_penalty, 1),
    )
    return [
        str(lm.run.folder),
        f"step {lm.step:,}",
        f"temperature {options.temperature:g}",
        *(f"{name} {value:g}" for name, value, off in filters if value != off),
        f"seed {options.seed}",
        f"mem_len {lengths.mem_len}",
        f"tgt_len {lengths.tgt_len}",
        str(lm.device),
        *_text_rule(lm),
    ]


def _text_rule(lm: "LanguageModel") -> list[str]:
    """Say what text a vocabulary of words takes and gives."""
    from txlcli.tokenizer import MosesTokenizer

    if lm.config.data.newlines != "eos":
        return []
    is_raw = isinstance(lm.tokenizer, MosesTokenizer)
    return ["raw text, split by Moses' rules" if is_raw else "text split into words; raw text with --moses"]


def _write_text(
    pieces: "Iterator[Event]", out: Screen, echo: bytes, n_samples: int, interruption: Interruption
) -> None:
    """Print texts as they are made, an empty line between samples."""
    from txlcli.generate import Piece

    sample, text = -1, TextOutput(out)
    for event in pieces:
        if event.sample != sample:
            sample = event.sample
            text.write((b"\n\n" if sample else b"") + echo)
        if isinstance(event, Piece):
            text.write(event.text.encode())
        else:
            text.end()
            if out.is_terminal and sample == n_samples - 1:
                text.write(b"\n")
        if interruption():
            break


def _write_json(
    pieces: "Iterator[Event]", out: Screen, has_logprobs: bool, interruption: Interruption
) -> None:
    """Print one JSON object a line for each finished sample."""
    from txlcli.generate import GeneratedText

    for event in pieces:
        if isinstance(event, GeneratedText):
            out.write_text(json_line(event, has_logprobs=has_logprobs))
        if interruption():
            break
