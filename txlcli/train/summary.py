"""The plan in words: its summary, and where something comes out otherwise than it was asked for."""

from collections.abc import Iterator

import torch

from txlcli.config import Config, Settings, value_of
from txlcli.data import StoreInfo, steps_per_epoch
from txlcli.plan import Facts, Measured, last_eval_is_whole
from txlcli.sources import complete_utf8
from txlcli.tokenizer import Tokenizer
from txlcli.train.cost import count_parameters, memory_bytes
from txlcli.train.events import Budget, FirstLine, Found, Notice, PlanSummary
from txlcli.train.request import Request
from txlcli.train.texts import Texts

LARGEST_LINE_BYTES = 400

COMPILE_SHARE = 0.1
"""Share of a run's time above which it is said that compiling takes it."""


def summarize(
    config: Config,
    settings: Settings,
    found: Found,
    info: StoreInfo,
    tokenizer: Tokenizer,
    device: torch.device,
    expected_s: float | None,
) -> PlanSummary:
    """Gather what is about to be trained, on what, and what it takes."""
    train, model, steps = info.splits["train"].n_tokens, config.model, config.train.steps
    valid = info.splits["valid"].n_tokens if "valid" in info.splits else 0
    assert steps is not None
    n_stream = min(config.optim.batch_size, train - 1)
    per_epoch = steps_per_epoch(train, n_stream, model.tgt_len)
    n_embedding, n_rest = count_parameters(model, tokenizer.n_vocab)
    is_whole = last_eval_is_whole(valid, steps * (train - 1) // per_epoch)
    return PlanSummary(
        corpus=config.data.corpus,
        found=found,
        n_train_tokens=train,
        n_valid_tokens=valid,
        tokenizer=tokenizer.kind,
        n_vocab=tokenizer.n_vocab,
        n_embedding=n_embedding,
        n_rest=n_rest,
        step_tokens=n_stream * model.tgt_len,
        epochs=steps / per_epoch,
        memory_bytes=memory_bytes(config, tokenizer.n_vocab),
        device=str(device),
        precision=config.machine.precision,
        attention=config.machine.attention,
        expected_s=expected_s,
        last_eval_tokens=valid if is_whole else min(valid, config.train.eval_tokens or valid),
        config=config,
        settings=settings,
    )


def first_line(texts: Texts, tokenizer: Tokenizer) -> FirstLine:
    """Encode the first line that has something in it."""
    start = texts.start_of_train()
    line = next((line for line in start.splitlines() if line.strip()), start)
    is_cut = len(line) > LARGEST_LINE_BYTES
    if is_cut:
        line = line[:LARGEST_LINE_BYTES]
        line = line[: tokenizer.complete_prefix(line) or complete_utf8(line)]
    ids = tokenizer.encode(line).tolist()
    pieces = [
        tokenizer.decode([token], after=before).decode(errors="replace")
        for before, token in zip([None, *ids], ids, strict=False)
    ]
    return FirstLine(line.decode(errors="replace"), tuple(pieces), tuple(ids), is_cut)


def told_vocabulary(request: Request, tokenizer: Tokenizer) -> Iterator[Notice]:
    """Say where the vocabulary has another size than was asked for."""
    asked = value_of(request.settings, "vocab_size")
    if request.init is None and asked is not None and tokenizer.n_vocab != asked:
        yield Notice(f"vocabulary: {asked:,} asked for, the text gives {tokenizer.n_vocab:,}")


def told_clusters(settings: Settings) -> Iterator[Notice]:
    """Say where clusters of the vocabulary, or their widths, bring nothing."""
    kind, starts, div_val = (value_of(settings, name) for name in ("tokenizer", "cutoffs", "div_val"))
    if starts and kind != "word":
        yield Notice(
            "cutoffs: clusters pay where frequent tokens have small ids; "
            f"those of a {kind} vocabulary are not sorted by frequency"
        )
    if div_val > 1 and not starts:
        yield Notice(
            f"div_val: {div_val} asked for; without cutoffs there is one cluster, so it changes nothing"
        )


def told_short_streams(config: Config, facts: Facts) -> Iterator[Notice]:
    """Say when the text is shared among so many streams that none fills a segment."""
    n_stream, tgt_len = config.optim.batch_size, config.model.tgt_len
    longest = -(-max(facts.n_train_tokens - 1, 1) // n_stream)
    if n_stream > 1 and longest < tgt_len:
        yield Notice(
            f"tgt_len: {tgt_len} asked for, {longest} taken: {facts.n_train_tokens:,} tokens in "
            f"{n_stream} streams; a smaller --batch-size gives longer segments"
        )


def told_compile_time(measured: Measured, budget: Budget) -> Iterator[Notice]:
    """Say when compiling takes much of the time that was asked for."""
    if measured.compile_s > COMPILE_SHARE * budget.limit_s:
        yield Notice(f"compile: takes {measured.compile_s:,.0f} s of the {budget.limit_s:,.0f} s asked for")
