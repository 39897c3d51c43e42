import dataclasses
import io
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txlcli import config, report, train
from txlcli.config import Sourced
from txlcli.config.sections import SECTIONS
from txlcli.evaluate import Score, WindowScore
from txlcli.model import Lengths
from txlcli.report import Screen, Stages, Training
from txlcli.report.screen import facts_table
from txlcli.report.tables import (
    column_names,
    eval_table,
    presets_table,
    runs_table,
    settings_table,
    window_table,
)
from txlcli.report.text import duration_text, number_text, size_text
from txlcli.run import Run, RunSummary
from txlcli.sources import Corpus, Source, Survey


class Stream(io.TextIOWrapper):
    """A stream that keeps what is written, a terminal if asked."""

    def __init__(self, *, is_terminal=False, encoding="utf-8"):
        super().__init__(io.BytesIO(), encoding=encoding, newline="")
        self.is_terminal = is_terminal

    def isatty(self):
        return self.is_terminal

    @property
    def text(self):
        self.flush()
        return self.buffer.getvalue().decode("utf-8")


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)


def score(**changes):
    values = {
        "lengths": Lengths(64, 128),
        "tokens": 1000,
        "total_nll": 1500.0,
        "n_bytes": 2000,
        "n_characters": 1900,
        "n_words": 300,
        "context_min": 129,
        "context_max": 192,
        "receptive_field": 448,
        "is_beyond_training": False,
        "n_stream": 4,
        "n_line": None,
        "elapsed_s": 0.5,
        "notices": (),
    }
    return Score(**(values | changes))


def stepped(step, **changes):
    values = {
        "step": step,
        "steps": 3000,
        "loss": 1.5,
        "lr": 0.004,
        "grad_norm": 0.3,
        "tokens": 64 * step,
        "tokens_per_s": 24310.4,
        "elapsed_s": 0.1 * step,
        "bits_per_byte": 2.164,
    }
    return train.Stepped(**(values | changes))


def found(n_documents=None, **rules):
    """Return a corpus of 1,115,394 bytes, its last twentieth held out."""
    source = Source(
        name="a.txt",
        path=Path("a.txt"),
        n_bytes=1_115_394,
        mtime_ns=0,
        encoding="utf-8",
        codec="utf-8",
        n_mark=0,
        stored_bytes=1_115_394,
        ctime_ns=0,
        device=0,
        inode=0,
    )
    survey = Survey(
        n_bytes=source.n_bytes,
        split_at=1_059_624,
        n_valid_bytes=55_770,
        n_characters=source.n_bytes,
        alphabet={"a": 1_059_624},
        has_text=True,
        script="latin",
        n_replaced=0,
        n_documents=n_documents,
        n_valid_documents=None if n_documents is None else 2,
        notices=(),
    )
    return train.Found(Corpus(sources=(source,), **rules), survey, None, None)


def summary(**changes):
    settings = config.from_flags({"corpus": ("a.txt",), "steps": "3000"})
    values = {
        "corpus": ("a.txt",),
        "found": found(),
        "n_train_tokens": 1_059_624,
        "n_valid_tokens": 55_770,
        "tokenizer": "char",
        "n_vocab": 321,
        "n_embedding": 51_681,
        "n_rest": 1_338_000,
        "step_tokens": 1024,
        "epochs": 2.899,
        "memory_bytes": 350_000_000,
        "device": "cpu",
        "precision": "fp32",
        "attention": "eager",
        "expected_s": None,
        "last_eval_tokens": 55_770,
        "config": config.build(settings),
        "settings": settings,
    }
    return train.PlanSummary(**(values | changes))


# Text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (999.6, "1.00 k"),
        (51_681, "51.7 k"),
        (999_600, "1.00 M"),
        (123_456_789, "123 M"),
        (4.2e9, "4.20 G"),
    ],
)
def test_counts_have_three_figures(number, text):
    assert report.count_text(number) == text


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [(0, "0 bytes"), (1, "1 byte"), (22_471, "22.5 kB"), (3_200_000, "3.2 MB"), (123_456_789, "123 MB")],
)
def test_sizes_are_powers_of_a_thousand(n_bytes, text):
    assert size_text(n_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.4, "0:59"), (59.6, "1:00"), (592, "9:52"), (3723, "1:02:03")]
)
def test_durations_are_clock_times(seconds, text):
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (1.5, "1.5000"), (12345.0, "12,345.0000"), (math.inf, "inf"), (2.5e12, "2.5e+12")],
)
def test_measured_numbers(value, text):
    assert number_text(value) == text


def test_control_codes_are_shown():
    assert report.escape_controls("a\x1b[31m\x07b\x9bc\x7f\td\ne") == "a\\x1b[31m\\x07b\\x9bc\\x7f\td\ne"
    assert report.escape_controls("a\r\nb\rc\r") == "a\r\nb\\rc\\r"
    assert report.escape_controls("a\u202eb\u2069\u200f") == "a\\u202eb\\u2069\u200f"
    assert report.escape_line("a\tb\r\nc\u2028\x9b") == "a\\tb\\r\\nc\\u2028\\x9b"
    assert report.one_line("a\\b\n\tc\x1b\r") == "a\\\\b\\n\\tc\\x1b\\r"
    assert report.one_line(b"\xe6\x9d\\x") == "\\xe6\\x9d\\\\x"


@given(st.text())
def test_one_line_is_one_line_and_harmless(text):
    shown = report.one_line(text)
    assert not any(ord(character) < 32 or 127 <= ord(character) < 160 for character in shown)


# Names of files hold what they have of bytes that are no text as lone surrogates.
_texts = st.text(st.characters() | st.characters(categories=["Cs"]))


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | _texts,
        lambda inner: st.lists(inner) | st.dictionaries(_texts, inner),
    )
)
def test_json_is_json_without_what_is_not_finite(value):
    def finite(value):
        if isinstance(value, float):
            return value if math.isfinite(value) else None
        if isinstance(value, list):
            return [finite(item) for item in value]
        if isinstance(value, dict):
            return {key: finite(item) for key, item in value.items()}
        return value

    text = report.json_text(value)
    assert "\x9b" not in text
    assert text.encode().decode() == text
    assert json.loads(text, parse_constant=lambda name: pytest.fail(name)) == finite(value)


# Screens


@pytest.mark.parametrize(
    ("is_terminal", "environment", "expected"),
    [
        (True, {}, (True, True)),
        (False, {}, (False, False)),
        (True, {"NO_COLOR": "1"}, (True, False)),
        (True, {"TERM": "dumb"}, (False, False)),
    ],
)
def test_what_a_stream_can_show(monkeypatch, is_terminal, environment, expected):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    screen = Screen.of(Stream(is_terminal=is_terminal))
    assert (screen.is_animated, screen.has_color) == expected


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "latin-1"])
def test_decoration_degrades_where_the_encoding_is_small(encoding):
    stream = Stream(encoding=encoding)
    screen = Screen.of(stream)
    screen.write("a · b × 1–2 … │東京")
    screen.draw(eval_table([score()], [128], 200))
    stream.flush()
    text = stream.buffer.getvalue().decode(encoding)
    assert text.startswith("a - b x 1-2 ... |??\n")
    assert text.isascii()


def test_text_of_models_is_utf8_in_every_encoding():
    stream = Stream(encoding="ascii")
    Screen.of(stream).write_text("東京\x1b[0m".encode())
    assert stream.text == "東京\x1b[0m"


def test_text_of_models_cannot_command_a_terminal():
    stream = Stream(is_terminal=True)
    Screen.of(stream).write_text(b"a\x1b]0;pwned\x07\xff\n")
    assert stream.text == "a\\x1b]0;pwned\\x07\ufffd\n"


def test_text_of_users_is_no_markup():
    stream = Stream()
    screen = Screen.of(stream)
    screen.draw(facts_table([("[bold]name[/]", "[red]x[/red] :smile: \x1b[31m")]))
    screen.draw(presets_table({"a": "[link=x]b[/link]"}))
    assert "[bold]name[/]  [red]x[/red] :smile: \\x1b[31m\n" in stream.text
    assert "a  [link=x]b[/link]\n" in stream.text


def test_a_quiet_screen_writes_warnings_alone():
    stream = Stream()
    screen = Screen.of(stream, is_quiet=True)
    screen.write("a")
    screen.note("b")
    screen.draw(facts_table([("c", "d")]))
    Stages(screen).show("e", 0, 10, "bytes")
    assert stream.text == ""
    screen.warn("lost\n")
    assert stream.text == "warning: lost\\n\n"


# Stages


def test_stages_are_a_few_lines_where_nobody_looks():
    stream = Stream()
    stages = Stages(Screen.of(stream))
    for done in range(0, 1_000_001, 10_000):
        stages.show("encoding", done, 1_000_000, "bytes")
    stages.show("making the vocabulary", 0, 0, "bytes")
    stages.show("scoring", 0, 500, "tokens")
    stages.close()
    assert stream.text == "encoding: 1.0 MB\nmaking the vocabulary\nscoring: 500 tokens\n"


def test_stages_are_a_bar_on_a_terminal():
    stream = Stream(is_terminal=True)
    stages = Stages(Screen.of(stream))
    stages.show("encoding", 0, 1_000_000, "bytes")
    stages.close()
    assert "\rencoding    0%" in stream.text


# Training


def draw(events, *, is_terminal=False, is_quiet=False, is_dry_run=False):
    screen, results = Stream(is_terminal=is_terminal), Stream(is_terminal=is_terminal)
    with Training(Screen.of(screen, is_quiet=is_quiet), Screen.of(results), is_dry_run=is_dry_run) as drawing:
        for event in events:
            drawing.show(event)
    return screen.text, results.text


def test_the_plan_names_what_people_ask_for():
    text, results = draw([train.Planned(summary())])
    assert results == ""
    assert text.splitlines() == [
        "text        a.txt · 1.1 MB",
        "held out    the last 5.0% · 55.8 kB from byte 1,059,624 on",
        "tokens      1,059,624 to learn from · 55,770 held out",
        "vocabulary  char · 321",
        "model       4 layers of 160 · 4 heads of 40 · tgt_len 64 · mem_len 64",
        "positions   relative",
        "parameters  1.39 M = 51.7 k embedding + 1.34 M rest",
        "steps       3,000 of 16 streams × 64 tokens · 2.90 epochs",
        "optimizer   adamw · lr 0.004 · cosine · warm-up 50 steps",
        "machine     cpu · fp32 · attention eager",
        "memory      about 350 MB",
    ]
    text, _ = draw([train.Planned(summary(expected_s=592.0, n_valid_tokens=0))])
    assert "nothing held out, best is last" in text
    assert "held out  " not in text
    assert ", in 9:52\n" in text
    text, _ = draw([train.Planned(summary())], is_terminal=True)
    assert "plan" in text.splitlines()[0]
    assert "╭─" in text


@pytest.mark.parametrize("is_reset", [False, True])
def test_the_plan_tells_of_documents(is_reset):
    settings = config.from_flags({"corpus": ("a.txt",), "steps": "3000", "document_separator": r"\n"})
    built = config.build(settings | {"reset_memory_at_documents": Sourced(is_reset, config.FLAG)})
    of_documents = found(n_documents=1200, document_separator="\n")
    text, _ = draw([train.Planned(summary(config=built, found=of_documents))])
    memory = "memory ends with each" if is_reset else "memory goes on through them"
    assert text.splitlines()[1:3] == [
        rf"documents   1,200 · separated by \n · {memory}",
        "held out    the last 5.0% · 55.8 kB from byte 1,059,624 on · 2 documents",
    ]


@pytest.mark.parametrize(
    ("flags", "row"),
    [
        ({}, "positions   relative"),
        ({"untie_r": "true"}, "positions   relative · u and v for each layer"),
        (
            {"clamp_len": "96", "same_length": "mem_len+1"},
            "positions   relative · clamp_len 96 · same_length mem_len+1",
        ),
        ({"position": "shaw"}, "positions   shaw · rows to distance 64 · also on values"),
        (
            {"position": "shaw", "shaw_values": "false", "max_relative_position": "1000"},
            "positions   shaw · rows to distance 1,000 · not on values",
        ),
        (
            {"position": "sinusoid"},
            "positions   sinusoid · restart in each segment, rows of memory repeat them",
        ),
        ({"position": "learned", "mem_len": "0"}, "positions   learned · restart in each segment"),
        (
            {"position": "sinusoid", "absolute_positions": "continue"},
            "positions   sinusoid · run on through the text",
        ),
    ],
)
def test_the_plan_names_the_scheme_of_positions(flags, row):
    settings = config.from_flags({"steps": "3000", **flags})
    text, _ = draw([train.Planned(summary(config=config.build(settings)))])
    assert [line for line in text.splitlines() if line.startswith("positions")] == [row]


@pytest.mark.parametrize(
    ("flags", "row"),
    [
        ({"cutoffs": "2000,8000"}, "embeddings  clusters from 2,000, 8,000"),
        (
            {"cutoffs": "9", "div_val": "4", "d_embed": "64"},
            "embeddings  clusters from 9 · each 4 times narrower, projections tied: tail · 64 wide",
        ),
        ({"tied": False}, "embeddings  output has its own table"),
        ({"div_val": "4"}, "vocabulary  word · 33,000"),
        ({"newlines": "eos", "tokenizer": "word"}, "vocabulary  word · 33,000 · newlines are <eos>"),
    ],
)
def test_the_plan_says_how_a_vocabulary_is_read_and_divided(flags, row):
    settings = config.from_flags({"steps": "3000", **flags})
    text, _ = draw([train.Planned(summary(config=config.build(settings), tokenizer="word", n_vocab=33_000))])
    assert row in text.splitlines()


def test_a_dry_run_gives_plan_and_pieces_as_results():
    line = train.FirstLine(text="ab\tc", pieces=("a", "b\t", "c"), ids=(1, 2, 3))
    text, results = draw([train.Planned(summary()), line], is_dry_run=True, is_quiet=True)
    assert text == ""
    assert results.startswith("text        a.txt")
    assert results.endswith("first line  ab\\tc\n3 pieces    │a│b\\t│c│\n")
    line = train.FirstLine(text="ab", pieces=("a", "b"), ids=(1, 2), is_cut=True)
    _, results = draw([line], is_dry_run=True)
    assert results == "first line      ab…\nfirst 2 pieces  │a│b│…\n"
    _, results = draw([train.FirstLine(text="a", pieces=("a",), ids=(1,))], is_dry_run=True)
    assert results == "first line  a\n1 piece     │a│\n"


def test_a_training_is_some_tens_of_plain_lines_where_nobody_looks(monkeypatch):
    text, _ = draw([stepped(step) for step in range(1, 3001)])
    lines = text.splitlines()
    assert 20 <= len(lines) <= 60
    assert lines[0] == "step 1/3,000  loss 1.500  2.164 bits/byte  lr 4.0e-03  24,310 tokens/s"
    assert lines[-1].startswith("step 3,000/3,000  loss 1.500")
    assert lines[-1].endswith("0:00 left")
    assert "\r" not in text
    assert "\x1b" not in text


def test_a_terminal_has_one_bar_below_everything_else():
    events = [
        stepped(1),
        train.Evaluated(500, score(), 128, is_best=True, is_whole=False),
        train.Sampled(500, "one\ntwo \x1b[2J" + "x" * 200),
        stepped(3000),
    ]
    text, _ = draw(events, is_terminal=True)
    assert "3,000/3,000" in text
    assert "step 500" in text
    assert "\x1b[2J" not in text
    sample = next(line for line in text.splitlines() if "»" in line)
    assert "one\\ntwo \\x1b[2Jxxx" in sample
    assert sample.count("x") < 80
    assert "…" in sample


def test_evaluations_say_their_scope_once():
    events = [
        stepped(1),
        train.Evaluated(500, score(), 128, is_best=True, is_whole=False),
        train.Sampled(500, "The king\nsaid"),
        train.Evaluated(1000, score(total_nll=1600.0), 128, is_best=False, is_whole=False),
        train.Evaluated(1000, score(tokens=2000, n_bytes=4000), 128, is_best=False, is_whole=True),
    ]
    text, _ = draw(events)
    assert text.splitlines()[1:] == [
        "step 500  held out 1.5000 nats/token · 1.0820 bits/byte · first 1,001 tokens  best",
        "  » The king\\nsaid",
        "step 1,000  held out 1.6000 nats/token · 1.1542 bits/byte",
        "step 1,000  held out 0.7500 nats/token · 0.5410 bits/byte · all 2,001 tokens",
    ]


def test_notices_and_skipped_steps_are_notes():
    text, _ = draw([train.Notice("mind [this]\x1b"), train.Skipped(7, "the loss is not finite")])
    assert text == "note: mind [this]\\x1b\nnote: step 7: no update, the loss is not finite\n"


def finished(**changes):
    values = {
        "step": 3000,
        "run": Run(Path("runs/a b")),
        "reason": "length",
        "best_step": 2500,
        "best_nll": 1.5,
        "best_bits_per_byte": 1.082,
        "best_score": score(),
        "last_score": score(total_nll=1600.0),
        "mem_len": 96,
    }
    return train.Finished(**(values | changes))


def test_the_end_names_the_result_and_what_to_try_next():
    ready = train.Ready(Run(Path("runs/a b")), config.build(config.from_flags({"mem_len": "96"})), {})
    best = train.Evaluated(2500, score(tokens=500), 96, is_best=True, is_whole=False)
    evaluated = train.Evaluated(3000, score(total_nll=1600.0), 96, is_best=False, is_whole=True)
    text, results = draw([ready, best, stepped(3000), evaluated, finished()])
    assert results.splitlines() == [
        "done  step 3,000 in 0:00",
        "best  step 2,500 · 1.5000 nats/token · 1.0820 bits/byte held out · first 501 tokens",
        "last  step 3,000 · 1.6000 nats/token · 1.1542 bits/byte · all 1,001 tokens",
        "run   runs/a b",
    ]
    assert text.splitlines()[-2:] == [
        "next  txl generate --run 'runs/a b' --prompt 'Once'",
        "      txl eval --run 'runs/a b' --mem-len 0,96,192,384",
    ]
    text, _ = draw([finished(has_test=True)])
    assert text.splitlines()[-1] == "      txl eval --run 'runs/a b' --split test"


def test_the_end_of_an_interrupted_training_says_how_to_go_on():
    event = finished(step=5, reason="interrupted", best_step=None, best_score=None, last_score=None)
    text, results = draw([event])
    assert results == "done  step 5 · interrupted, saved\nrun   runs/a b\n"
    assert text.startswith("next  txl train --resume 'runs/a b'\n")
    text, results = draw([finished(best_score=None, last_score=None)], is_quiet=True)
    assert text == ""
    assert results.splitlines()[1] == "best  step 2,500 · 1.5000 nats/token · 1.0820 bits/byte held out"


def test_a_best_that_is_lost_is_not_the_result():
    _, results = draw([finished(is_best_lost=True, best_score=None, last_score=None)])
    assert results.splitlines()[1] == "best  the last, step 3,000 · step 2,500, which was better, is lost"


def test_silence_does_not_change_the_result():
    evaluated = train.Evaluated(3000, score(total_nll=1600.0), 96, is_best=False, is_whole=False)
    events = [evaluated, finished()]
    assert draw(events, is_quiet=True) == ("", draw(events)[1])


def test_what_is_lost_is_said_to_all_but_those_who_cannot_hear():
    lost = train.Notice("a is damaged; b is used instead", is_damage=True)
    assert draw([lost], is_quiet=True)[0] == draw([lost])[0] == "warning: a is damaged; b is used instead\n"
    stream = Stream()
    with Training(Screen.of(stream), Screen.of(stream)) as drawing:
        drawing.hush()
        drawing.show(lost)
    assert stream.text == ""


# Tables


def test_eval_table():
    rows = [score(), score(lengths=Lengths(64, 9999), is_beyond_training=True, total_nll=math.inf)]
    stream = Stream()
    Screen.of(stream).draw(eval_table(rows, [128, 9999], 200))
    header, names, _, first, second = stream.text.splitlines()
    assert [" ".join(line.split()) for line in (header, names, first, second)] == [
        "through nats bits bits perplexity",
        "mem_len tgt_len context layers tokens /token perplexity /byte /char /word tokens/s",
        "128 64 129–192 448 1,000 1.5000 4.482 1.0820 1.1390 148.4 2,000",
        "9,999* 64 129–192 448 1,000 inf inf inf inf inf 2,000",
    ]


def test_eval_table_fits_a_narrow_window_and_leaves_out_what_nobody_knows():
    stream = Stream(is_terminal=True)
    Screen.of(stream).draw(eval_table([score()], [128], 80))
    assert "/word" not in stream.text
    assert "tokens/s" in stream.text
    stream = Stream()
    Screen.of(stream).draw(eval_table([score(n_characters=None, n_words=None, n_bytes=None)], [128], 200))
    assert "/char" not in stream.text
    assert "/byte" not in stream.text


def run_summary(**changes):
    values = {
        "run": Run(Path("runs/[a]")),
        "config": config.build({}),
        "tokenizer": "char",
        "n_vocab": 1321,
        "step": None,
        "steps": 3000,
        "best_step": None,
        "best_nll": None,
        "best_bits_per_byte": None,
        "n_bytes": 3_600_000,
    }
    return RunSummary(**(values | changes))


WIDE_SCORE = score(
    lengths=Lengths(1024, 4096),
    tokens=12_345_678,
    total_nll=7e7,
    n_bytes=20_000_000,
    n_characters=19_000_000,
    n_words=3_000_000,
    context_min=4097,
    context_max=5120,
    receptive_field=123_456,
    is_beyond_training=True,
    elapsed_s=12.0,
)
WIDE_WINDOW = WindowScore(
    lengths=Lengths(1024, 4096),
    attention_length=5120,
    tokens=1000,
    nll=3.21,
    nll_with_memory=3.22,
    nll_difference_se=0.0123,
    token_s=1 / 1234.5,
    token_s_with_memory=1 / 1_234_567,
    ideal_ratio=1234.5,
    batch_size=16,
    batch_size_with_memory=64,
)
WIDE_RUN = run_summary(
    run=Run(Path("runs/the-old-man-and-the-sea")),
    config=config.build(config.from_flags({"position": "sinusoid"})),
    tokenizer="sentencepiece",
    n_vocab=8192,
    step=123_456,
    steps=123_456,
    best_step=120_000,
    best_nll=3.2109,
    best_bits_per_byte=1.2345,
)


@pytest.mark.parametrize("width", [200, 100, 80])
@pytest.mark.parametrize(
    "make",
    [
        lambda width: eval_table([WIDE_SCORE], [4096], width),
        lambda width: window_table([WIDE_WINDOW], [4096], width),
        lambda width: runs_table([WIDE_RUN], width),
    ],
    ids=["eval", "window", "runs"],
)
def test_tables_fit_a_window_with_every_word_whole(make, width):
    table, widest = make(width), make(200)
    lines = dataclasses.replace(Screen.of(Stream()), width=width).render(table).splitlines()
    assert all(len(line) <= width for line in lines)
    *header, rule, row = lines
    assert len(header) <= 2
    assert set(rule) <= set("─ ")
    cells = {str(column.header): [str(cell) for cell in column.cells] for column in widest.columns}
    for column in table.columns:
        (cell,) = cells[str(column.header)]
        assert cell in row
    names = column_names(table)
    assert not any("\n" in name for name in names)
    assert len(names) < len(widest.columns) or width > 80


def test_a_legend_is_as_wide_as_the_window_and_breaks_no_word(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    path = "a/" + "very-long-name/" * 9 + "text.txt"
    rows = [("text", f"{path} · 1 byte"), ("", "well-known words of some length, " * 9), ("note", "a\nb")]
    stream = Stream()
    Screen.of(stream).explain(rows)
    lines = stream.text.splitlines()
    assert all(len(line) <= 100 for line in lines if path not in line)
    assert max(map(len, lines[1:])) > 80
    assert sum(path in line for line in lines) == 1
    assert {word for line in lines for word in line.split()} == {
        word for row in rows for text in row for word in text.split()
    }
    assert lines[-2:] == ["note  a", "      b"]
    stream = Stream(is_terminal=True)
    Screen.of(stream).explain(rows[1:])
    lines = stream.text.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert "well-known" in stream.text


def test_runs_table():
    run = run_summary()
    stream = Stream()
    Screen.of(stream).draw(runs_table([run], 200))
    assert stream.text.splitlines()[0].split("  ")[0] == "run"
    row = " ".join(stream.text.splitlines()[2].split())
    assert row == "runs/[a] 4 × 160 char 1,321 –/3,000 – – – 3.6 MB"


def test_lists_are_shown_as_flags_take_them():
    assert report.value_text((2000, 8000)) == "2000,8000"
    assert report.value_text(("a.txt", "b.txt")) == "a.txt b.txt"
    assert report.value_text(()) == "none"


def test_settings_table_shows_every_setting_with_its_origin():
    values = config.flatten(config.build({}))
    settings = {name: Sourced(value, f"from [{name}]") for name, value in values.items()}
    stream = Stream()
    Screen.of(stream).draw(settings_table(settings))
    lines = stream.text.splitlines()
    assert len(lines) == len(config.LEAVES) + len(SECTIONS)
    assert "  n_layer" in stream.text
    assert any(line.split() == ["tied", "true", "from", "[tied]"] for line in lines)
    assert any(line.split() == ["corpus", "none", "from", "[corpus]"] for line in lines)
