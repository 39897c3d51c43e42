"""`txl train` takes any corpus: packed, in folders, in documents; a dry run shows what was found of it."""

import gzip
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import txlcli
from tests.test_sources import count_unpacked
from txlcli import UserError
from txlcli.cli import main
from txlcli.config import load
from txlcli.data import read_store_info
from txlcli.run import Run
from txlcli.tokenizer import load_tokenizer

SIZES = "--d-model 16 --n-layer 1 --n-head 2 --tgt-len 8 --mem-len 8 --batch-size 2"
TINY = f"{SIZES} --device cpu --precision fp32 --optimizer adamw --steps 2".split()
TEXT = "".join(f"the quick brown fox jumps over {number % 7} lazy dogs.\n" for number in range(60))


def train(*args: object, code: int = 0, stdin: bytes | None = None) -> tuple[str, str]:
    """Train in this process and return stdout and stderr."""
    result = CliRunner().invoke(main, ["train", *map(str, args), *TINY], input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.stderr
    return result.stdout, result.stderr


def refusal(*args: object) -> str:
    """Return the last line of a command that is refused, which leaves nothing behind."""
    before = sorted(Path().rglob("*"))
    stdout, stderr = train(*args, code=2)
    assert stdout == ""
    assert sorted(Path().rglob("*")) == before
    return stderr.splitlines()[-1].removeprefix("error: ")


def shown(*args: object) -> dict[str, list[str]]:
    """Return what a dry run shows, by name; nothing is left on the disk."""
    before = sorted(Path().rglob("*"))
    stdout, _ = train(*args, "--dry-run")
    assert sorted(Path().rglob("*")) == before
    facts: dict[str, list[str]] = {}
    name = ""
    for line in stdout.splitlines():
        found = re.match(r"(\S+(?: \S+)*|)\s{2,}(.*)", line)
        assert found is not None, line
        name = found[1] or name
        facts.setdefault(name, []).append(found[2].strip())
    return facts


@pytest.fixture
def books() -> Path:
    folder = Path("books")
    for name in ("a.txt", "b.txt", "drafts/c.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(TEXT)
    (folder / "d.txt").write_bytes(gzip.compress(TEXT.encode()))
    (folder / "notes.md").write_text("notes")
    (folder / "picture.png").write_bytes(b"\x89PNG\0")
    return folder


def test_a_dry_run_shows_sources_documents_and_what_is_held_out(books: Path) -> None:
    packed = f"{(books / 'd.txt').stat().st_size} bytes"
    size = f"{len(TEXT) / 1000:.1f} kB"
    facts = shown(
        books, "--document-per-file", "--include", "*.txt", "--include", "*.png", "--exclude", "drafts"
    )
    assert facts["sources"] == [
        f"books/a.txt · {size} · utf-8",
        f"books/b.txt · {size} · utf-8",
        f"books/d.txt · {size} unpacked · gzip, {packed} packed · utf-8",
    ]
    assert facts["skipped"] == [
        "books/drafts · excluded",
        "books/notes.md · not included",
        "books/picture.png · binary: it holds NUL bytes",
    ]
    assert facts["documents"] == ["3 · one per file · memory goes on through them"]
    n_bytes = 3 * len(TEXT)
    split = n_bytes - n_bytes // 20
    assert facts["held out"] == [
        f"the last 5.0% · {n_bytes - split} bytes from byte {split:,} on · 1 document"
    ]

    facts = shown(books, "--document-separator", r"\n", "--valid-every", 10, "--exclude", "notes.md")
    assert facts["documents"] == [r"240 · separated by \n · memory goes on through them"]
    held_out = 4 * sum(len(line) + 1 for line in TEXT.splitlines()[9::10])
    assert facts["held out"] == [f"the last of every 10 documents · {held_out / 1000:.1f} kB · 24 documents"]

    facts = shown(books, "--valid", books / "b.txt", "--test", books / "a.txt")
    assert facts["held out"] == [f"books/b.txt · {size}"]
    assert facts["valid"] == [f"books/b.txt · {size} · utf-8"]
    assert facts["test"] == [f"books/a.txt · {size} · utf-8"]
    assert facts["skipped"][:2] == ["books/a.txt · held out", "books/b.txt · held out"]
    assert "documents" not in facts
    assert "held out" not in shown(books, "--valid-fraction", 0)


def test_text_that_is_named_twice_is_learned_from_once(books: Path) -> None:
    Path("books/again.md").symlink_to("notes.md")
    facts = shown("books/a.txt", "books/a.txt", "books", "books/drafts", "--exclude", "*.png")
    assert facts["skipped"] == [
        "books/picture.png · excluded",
        "books/a.txt · read once, named twice",
        "books/notes.md · read once, named twice",
        "books/drafts/c.txt · read once, named twice",
    ]
    _, stderr = train("books/a.txt", "books/a.txt", "--tokenizer", "char", "--out", "twice")
    assert "note: books/a.txt: read once, named twice\n" in stderr
    train("books/a.txt", "--tokenizer", "char", "--out", "once")
    ids = [(Path(name) / "data" / "valid.ids").read_bytes() for name in ("once", "twice")]
    assert ids[0] == ids[1]
    Path("linked").mkdir()
    for name in ("a.txt", "b.txt"):
        Path(f"linked/{name}").symlink_to("../books/a.txt")
    alone, linked = (evaluate(name, "--run", "once")["rows"][0] for name in ("books/a.txt", "linked"))
    assert (alone["tokens"], alone["total_nll"]) == (linked["tokens"], linked["total_nll"])
    assert txlcli.load("once").score(Path("linked")).tokens == alone["tokens"]
    assert refusal("-", "-") == "-: standard input can be named once; got it 2 times; name it once"


def test_a_test_text_that_chooses_the_checkpoint_too_is_told(books: Path) -> None:
    Path("same.txt").hardlink_to("books/b.txt")
    told = "given as --valid and --test; chooses the checkpoint too, so the score of the test text flatters"
    for valid, test, names in (
        ("books/b.txt", "same.txt", "same.txt"),
        ("books/b.txt", "books", "books/b.txt"),
        ("books", "books/b.txt", "books/b.txt"),
    ):
        result = CliRunner().invoke(
            main, ["train", "books/a.txt", "--valid", valid, "--test", test, *TINY, "--dry-run"]
        )
        assert result.exit_code == 0, result.stderr
        assert f"note: {names}: {told}\n" in result.stderr
    _, stderr = train("books/a.txt", "--valid", "books/b.txt", "--test", "books/notes.md", "--out", "r")
    assert "chooses the checkpoint" not in stderr
    assert stderr.endswith("\n      txl eval --run r --split test\n")
    result = CliRunner().invoke(main, ["train", "--resume", "r"])
    assert result.stderr.endswith("\n      txl eval --run r --split test\n")


def test_a_dry_run_lists_some_of_many_files() -> None:
    Path("many").mkdir()
    for i in range(12):
        Path(f"many/{i:02}.txt").write_text(TEXT)
        Path(f"many/.{i:02}.txt").write_text(TEXT)
    facts = shown("many")
    assert facts["sources"][9:] == [
        f"many/09.txt · {len(TEXT) / 1000:.1f} kB · utf-8",
        "and 2 more; 12 in all",
    ]
    assert facts["skipped"][9:] == ["many/.09.txt · hidden", "and 2 more; 12 in all"]


def test_packed_text_trains_as_the_same_text_does() -> None:
    Path("plain.txt").write_text(TEXT)
    Path("packed.txt").write_bytes(gzip.compress(TEXT[:100].encode()) + gzip.compress(TEXT[100:].encode()))
    for name in ("plain", "packed"):
        train(f"{name}.txt", "--tokenizer", "char", "--out", name)
    train("-", "--tokenizer", "char", "--out", "stdin", stdin=Path("packed.txt").read_bytes())
    ids = [(Path(name) / "data" / "train.ids").read_bytes() for name in ("plain", "packed", "stdin")]
    assert ids[0] == ids[1] == ids[2]
    train("packed.txt", "--tokenizer", "byte", "--out", "unpacked")
    train("packed.txt", "--tokenizer", "byte", "--packed", "keep", "--valid-fraction", 0, "--out", "kept")
    assert (Path("kept") / "data" / "train.ids").read_bytes() == Path("packed.txt").read_bytes()
    assert TEXT.encode().startswith((Path("unpacked") / "data" / "train.ids").read_bytes())


def test_a_packed_text_of_some_megabytes_is_unpacked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("packed.txt").write_bytes(gzip.compress(TEXT.encode()))
    unpacked = count_unpacked(monkeypatch)
    train("packed.txt", "--tokenizer", "sentencepiece", "--document-separator", r"\n", "--out", "r")
    assert sum(unpacked) == len(TEXT)


def test_settings_of_a_corpus_are_kept_with_the_run() -> None:
    Path("lines.jsonl").write_text("".join(json.dumps({"body": line}) + "\n" for line in TEXT.splitlines()))
    train("lines.jsonl", "--tokenizer", "char", "--text-field", "body", "--include", "*", "--out", "r")
    config = load(Run(Path("r")).config_path)
    assert (config.data.text_field, config.data.include, config.data.valid_every) == ("body", ("*",), None)
    train("-c", "r/config.yaml", "--out", "again")
    ids = [(Path(name) / "data" / "train.ids").read_bytes() for name in ("r", "again")]
    assert ids[0] == ids[1]
    # A flag replaces the rule of the file.
    train("-c", "r/config.yaml", "--document-separator", r"\n", "--out", "third")
    assert load(Run(Path("third")).config_path).data.text_field is None


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (
            "--document-separator \\q",
            r"--document-separator: must have \n, \t, \r or \\ where a backslash is; ",
        ),
        (
            "--document-separator a\\",
            r"--document-separator: must have \n, \t, \r or \\ where a backslash is; ",
        ),
        (
            "--document-separator 紅 --encoding cp1252",
            "--document-separator: the separator of documents `紅` cannot be written in cp1252; "
            "choose one that stands in the text, or another encoding",
        ),
        (
            "--valid-every 10",
            "--valid-every: needs documents; give --text-field, --document-separator or --document-per-file "
            "too",
        ),
        (
            "--valid-every 1 --document-per-file",
            "--valid-every: must be a whole number of at least 2; got `1`",
        ),
        (
            "--valid-every 10 --document-per-file --valid-fraction 0.1",
            "--valid-every: cannot go with --valid-fraction; give one of them",
        ),
        (
            "--valid-every 10 --document-per-file --valid text.txt",
            "--valid-every: cannot go with --valid; give one of them",
        ),
        (
            "--document-per-file --text-field a",
            "--document-per-file: cannot go with --text-field; give one of them",
        ),
        (
            "--reset-memory-at-documents",
            "--reset-memory-at-documents: needs documents; give --text-field, --document-separator or "
            "--document-per-file too",
        ),
        ("--include *.txt --include", "--include: needs a value"),
        (
            "--text-field text",
            "text.txt: line 1 is not JSON at column 1 (expecting value); got `the quick brown fox `; "
            "mend the line",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(args: str, text: str) -> None:
    Path("text.txt").write_text(TEXT)
    # An option without its value must come last.
    words = args.split()
    if words[-1] == "--include":
        result = CliRunner().invoke(main, ["train", "text.txt", *words])
        assert result.exit_code == 2
        assert result.stderr.splitlines()[-1] == f"error: {text}"
    else:
        assert refusal("text.txt", *words).startswith(text)


def test_a_file_contradicts_itself_too() -> None:
    Path("text.txt").write_text(TEXT)
    Path("c.yaml").write_text("data:\n  corpus: text.txt\n  document_per_file: true\n  text_field: a\n")
    assert refusal("-c", "c.yaml") == (
        "c.yaml:4: text_field cannot go with document_per_file; give one rule for documents"
    )
    Path("c.yaml").write_text("data:\n  corpus: text.txt\n  valid_every: 5\n")
    assert refusal("-c", "c.yaml") == (
        "c.yaml:3: valid_every needs documents; give text_field, document_separator or document_per_file too"
    )


def test_bad_files_are_refused_and_leave_nothing(books: Path) -> None:
    whole = (books / "d.txt").read_bytes()
    Path("cut.gz").write_bytes(whole[:-3])
    assert refusal("cut.gz", "--out", "r") == (
        f"cut.gz: gzip file cut short at byte {len(whole) - 3}, after {len(TEXT):,} unpacked bytes; "
        "give the whole file as it was packed"
    )
    (books / "e.txt").write_bytes(whole[:-3])
    assert refusal(books, "--out", "r").startswith("books/e.txt: gzip file cut short at byte ")
    Path("cut.txt").write_bytes(TEXT.encode() + "紅".encode()[:2])
    assert refusal("cut.txt", "--tokenizer", "char", "--out", "r").startswith(
        f"cut.txt: not utf-8 at byte {len(TEXT)}, line 61; got 0xe7 0xb4 at its end, which is no whole"
    )


def test_documents_need_a_vocabulary_that_has_an_end_for_them() -> None:
    Path("text.txt").write_text(TEXT)
    tokenizer = ("--tokenizer", "char")
    train("text.txt", *tokenizer, "--out", "plain")
    train("text.txt", *tokenizer, "--document-per-file", "--out", "documents")
    assert refusal("text.txt", "--document-per-file", "--init", "plain", "--out", "r") == (
        "--document-per-file: needs a vocabulary with an end of documents, and that of plain has none; "
        "leave it out, or train without --init"
    )
    train("text.txt", "--document-per-file", "--init", "documents", "--out", "tuned")
    train("text.txt", "--init", "documents", "--out", "without")


def test_an_empty_prompt_starts_where_a_document_does() -> None:
    Path("text.txt").write_text(TEXT)
    train("text.txt", "--tokenizer", "char", "--document-separator", r"\n", "--out", "r")
    tokenizer = load_tokenizer(Path("r"))
    assert tokenizer.document_end == tokenizer.n_vocab - 1
    assert read_store_info(Path("r")).start_id == tokenizer.document_end


def test_the_first_line_shown_is_that_of_the_first_document_learned_from() -> None:
    Path("text.txt").write_text("one|two|three|four|" + "and so on|" * 200)
    rules = ("--tokenizer", "char", "--document-separator", "|", "--valid-every", "2")
    facts = shown("text.txt", *rules)
    assert facts["first line"] == ["one"]
    assert facts["3 pieces"] == ["│o│n│e│"]


def test_of_a_long_first_line_the_first_pieces_are_shown() -> None:
    Path("text.txt").write_text("\n\n" + "紅 ab " * 200 + "\nand so on" * 100)
    facts = shown("text.txt", "--tokenizer", "char")
    assert facts["first line"][-1].endswith("…")
    # Seven bytes a time in 400; of the one more that fits no character is made.
    assert facts["first 285 pieces"][-1].endswith("│…")
    facts = shown("text.txt", "--tokenizer", "word", "--newlines", "eos")
    assert facts["first line"][-1].endswith("…")
    (name,) = (name for name in facts if name.startswith("first ") and name.endswith(" pieces"))
    assert facts[name][0].startswith("│紅│")


# A run that was trained on documents scores files as such.


DOCUMENTS = [f"the {name} fox\njumps over {number} dogs" for number, name in enumerate(["é", "red", "blue"])]


@pytest.fixture
def lined() -> Path:
    """Train a run on JSON lines, whose memory ends with documents."""
    Path("lines.jsonl").write_text("".join(json.dumps({"body": one}) + "\n" for one in DOCUMENTS * 10))
    rules = ("--text-field", "body", "--reset-memory-at-documents", "--tokenizer", "char")
    _, stderr = train("lines.jsonl", *rules, "--out", "lined")
    assert "documents   30 · JSON lines, field body · memory ends with each\nheld out " in stderr
    return Path("lined")


def evaluate(*args: object, stdin: bytes | None = None) -> dict[str, Any]:
    """Score in this process and return what --json prints."""
    result = CliRunner().invoke(main, ["eval", *map(str, args), "--json"], input=stdin)
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_file_is_scored_with_documents_as_its_run_learned_them(lined: Path) -> None:
    Path("some.jsonl").write_text("".join(json.dumps({"body": one}) + "\n\n" for one in DOCUMENTS))
    Path("packed").write_bytes(gzip.compress(Path("some.jsonl").read_bytes()))
    Path("some.txt").write_text("<|end|>".join(DOCUMENTS))
    Path("folder").mkdir()
    for number, one in enumerate(DOCUMENTS):
        (Path("folder") / f"{number}.txt").write_text(one, encoding="utf-16")
    found = [
        evaluate("some.jsonl", "--run", lined),
        evaluate("packed", "--run", lined),
        evaluate("-", "--run", lined, stdin=Path("packed").read_bytes()),
        evaluate("some.txt", "--run", lined, "--document-separator", "<|end|>"),
        evaluate("folder", "--run", lined, "--document-per-file", "--encoding", "utf-16"),
    ]
    n_characters = sum(map(len, DOCUMENTS))
    assert {one["rows"][0]["total_nll"] for one in found} == {found[0]["rows"][0]["total_nll"]}
    assert {one["rows"][0]["tokens"] for one in found} == {n_characters + len(DOCUMENTS) - 1}
    # The first character is not scored; of each separator but the last, which the file's end is, seven bytes.
    n_bytes = len("".join(DOCUMENTS).encode()) - 1
    in_utf_16 = 2 * (n_characters - 1)
    assert [one["rows"][0]["bytes_scored"] for one in found] == [*[n_bytes] * 3, n_bytes + 2 * 7, in_utf_16]
    characters = [*[n_characters - 1] * 3, n_characters - 1 + 2 * 7, n_characters - 1]
    assert [one["rows"][0]["chars_scored"] for one in found] == characters
    assert found[0]["bytes"] == n_bytes + 1
    assert {one["protocol"]["n_documents"] for one in found} == {3}
    assert {one["protocol"]["reset_memory_at_documents"] for one in found} == {True}
    assert [one["protocol"]["documents"].split(" · ")[1] for one in found[2:]] == [
        "JSON lines, field body; what else stands in them is not counted",
        "separated by <|end|>, whose bytes count with a document's end",
        "one per file",
    ]
    plain = evaluate("some.txt", "--run", lined, "--no-documents")
    assert plain["protocol"]["documents"] == "none, the whole is one text"
    assert plain["protocol"]["n_documents"] == 0
    assert plain["rows"][0]["tokens"] == n_characters + 2 * 7 - 1
    table = CliRunner().invoke(main, ["eval", "some.jsonl", "--run", str(lined)]).stdout
    assert "documents  3 · JSON lines, field body; " in table
    assert evaluate("--run", lined)["protocol"]["n_documents"] >= 1


def test_what_stands_before_a_document_does_not_change_its_score(lined: Path) -> None:
    def nats(name: str, *args: object) -> list[tuple[str, ...]]:
        options = ("--document-separator", "|", "--per-token", "a.tsv", "--tgt-len", 4, "--mem-len", 50)
        evaluate(name, "--run", lined, *options, *args)
        lines = [tuple(line.split("\t")) for line in Path("a.tsv").read_text().splitlines()[1:]]
        return [(token, text, f"{float(nats):.5f}", place) for token, text, nats, place in lines]

    Path("one.txt").write_text("|".join(DOCUMENTS))
    Path("other.txt").write_text("|".join([DOCUMENTS[2][: len(DOCUMENTS[0])], *DOCUMENTS[1:]]))
    length = len(DOCUMENTS[0])
    one, other = nats("one.txt", "--batch-size", 1), nats("other.txt", "--batch-size", 1)
    # Only the first character of a document is predicted from the end of the one before.
    assert [row[2] for row in one[length + 1 :]] == [row[2] for row in other[length + 1 :]]
    assert one[length][2] != other[length][2]
    # `one` has a character of two bytes; an end's place is that of the separator.
    assert one[length - 1][1::2] == ("", str(length + 1))
    assert one[length][1::2] == ("t", str(length + 2))
    several = evaluate("one.txt", "--run", lined, "--document-separator", "|", "--mem-len", "0,5,50")["rows"]
    assert len({row["nll"] for row in several}) == 3
    Path("gaps.txt").write_text("||".join(DOCUMENTS))
    assert {row[3] for row in nats("gaps.txt")} == {""}
    assert evaluate("gaps.txt", "--run", lined, "--document-separator", "|", "--per-token", "b.tsv")[
        "notices"
    ] == ["byte offsets are left out: not all that stands between the tokens is counted"]


def test_a_file_that_is_no_json_lines_is_refused_with_the_way_out(lined: Path) -> None:
    def refusal_of(*args: object) -> str:
        result = CliRunner().invoke(main, ["eval", *map(str, args)])
        assert (result.exit_code, result.stdout) == (2, "")
        return result.stderr.splitlines()[-1].removeprefix("error: ")

    Path("text.txt").write_text(TEXT)
    assert refusal_of("text.txt", "--run", lined) == (
        "text.txt: line 1 is not JSON at column 1 (expecting value); got `the quick brown fox `; "
        "mend the line; it is read as JSON lines because the text of lined was; "
        "for plain text give --no-documents"
    )
    assert refusal_of("text.txt", "--run", lined, "--text-field", "a").endswith("; mend the line")
    assert refusal_of("text.txt", "--run", lined, "--text-field", "a", "--no-documents") == (
        "--text-field: cannot go with --no-documents; give one of them"
    )
    for flag in ("--no-documents", "--document-per-file"):
        assert refusal_of("--run", lined, flag) == (
            f"{flag}: goes with FILE only; held-out text is stored as tokens"
        )
    train("text.txt", "--tokenizer", "byte", "--out", "plain")
    assert refusal_of("text.txt", "--run", "plain", "--document-separator", "a") == (
        "--document-separator: plain was not trained on documents, so that its vocabulary has no end of one; "
        "leave it out"
    )
    assert refusal_of("text.txt", "--run", lined, "--document-separator", "紅", "--encoding", "latin-1") == (
        "--document-separator: the separator of documents `紅` cannot be written in iso8859-1; "
        "choose one that stands in the text, or another encoding"
    )
    assert refusal_of("text.txt", "--run", lined, "--document-separator", r"a\q") == (
        r"--document-separator: must have \n, \t, \r or \\ where a backslash is; got `a\q`; write \\ for one"
    )
    assert (
        refusal_of("text.txt", "--run", lined, "--text-field", "")
        == "--text-field: must not be empty; got ``"
    )
    Path("pretty.json").write_text(json.dumps([{"a": TEXT}], indent=1))
    assert refusal_of("pretty.json", "--run", lined, "--text-field", "a") == (
        "pretty.json: line 1 is no JSON object; got a list that goes on beyond the line; each line must be "
        "an object with a text in `a`: for example jq -c '.[]' FILE writes such lines"
    )


def test_a_separator_that_is_nowhere_is_said_of_every_text(lined: Path) -> None:
    Path("some.txt").write_text("|".join(DOCUMENTS))
    told = "some.txt: the document separator is nowhere in it; it is one document"
    for separator, notices in (("#", [told]), ("|", [])):
        found = evaluate("some.txt", "--run", lined, "--document-separator", separator)
        assert found["notices"] == notices
    Path("text.txt").write_text(TEXT.replace("\n", "#"))
    rules = ("--document-separator", "#", "--tokenizer", "char")
    _, stderr = train("text.txt", *rules, "--valid", "some.txt", "--test", "some.txt", "--out", "r")
    assert stderr.count(told) == 2
    assert "text.txt: the document separator" not in stderr
    Path("text.txt").write_text(TEXT)
    _, stderr = train("text.txt", *rules, "--out", "none")
    assert stderr.count("text.txt: the document separator is nowhere in it; it is one document") == 1


def test_the_protocol_calls_bytes_raw_only_where_they_are_read_as_they_are() -> None:
    Path("lines.jsonl").write_text('{"body": "the fox"}\n' * 60, encoding="utf-16")
    train("lines.jsonl", "--text-field", "body", "--encoding", "utf-16", "--tokenizer", "byte", "--out", "r")
    found = [
        evaluate("lines.jsonl", "--run", "r"),
        evaluate("--run", "r"),
        evaluate("lines.jsonl", "--run", "r", "--no-documents"),
    ]
    assert [one["protocol"]["encoding"] for one in found] == ["utf-16", "utf-16", "raw bytes"]


def test_a_file_is_read_in_the_encoding_of_the_runs_text() -> None:
    from txlcli.api import load as load_run

    text = "紅樓夢 a\n" * 60
    Path("text.txt").write_text(text, encoding="gb18030")
    Path("utf8.txt").write_text(text)
    train("text.txt", "--encoding", "gb18030", "--tokenizer", "char", "--out", "r")
    found = [
        evaluate("text.txt", "--run", "r"),
        evaluate("-", "--run", "r", stdin=text.encode("gb18030")),
        evaluate("text.txt", "--run", "r", "--encoding", "gbk"),
        evaluate("utf8.txt", "--run", "r", "--encoding", "utf-8"),
    ]
    assert {one["rows"][0]["total_nll"] for one in found} == {found[0]["rows"][0]["total_nll"]}
    assert [one["protocol"]["encoding"] for one in found] == ["gb18030", "gb18030", "gbk", "utf-8"]
    assert [one["bytes"] for one in found] == [9 * 60, 9 * 60, 9 * 60, 12 * 60]
    lm = load_run("r", device="cpu")
    scores = [
        lm.score(text),
        lm.score(Path("text.txt")),
        lm.score(text.encode("gb18030")),
        lm.score(Path("utf8.txt"), encoding="utf-8"),
    ]
    assert {one.total_nll for one in scores} == {found[0]["rows"][0]["total_nll"]}
    Path("utf8.txt").write_text("紅 " * 20)
    result = CliRunner().invoke(main, ["eval", "utf8.txt", "--run", "r"])
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (
        2,
        "error: utf8.txt: not gb18030 at byte 2, line 1; got 0x85; it may be utf-8: try "
        "--encoding utf-8, or train with --encoding-errors replace or --tokenizer byte; it is read as "
        "gb18030 because the text of r was",
    )


def test_from_python_files_have_documents_and_texts_have_none(lined: Path) -> None:
    from txlcli.api import load as load_run
    from txlcli.sources import DocumentRule

    lm = load_run(lined, device="cpu")
    assert lm.document_rule == DocumentRule(text_field="body")
    Path("some.txt").write_text("|".join(DOCUMENTS))
    n_characters = sum(map(len, DOCUMENTS))
    rule = DocumentRule(document_separator="|")
    scores = [lm.score(one, documents=rule) for one in ("|".join(DOCUMENTS), Path("some.txt"))]
    assert {one.tokens for one in scores} == {n_characters + 2}
    assert lm.score("|".join(DOCUMENTS)).tokens == n_characters + 1
    assert lm.score(Path("some.txt"), documents=DocumentRule()).tokens == n_characters + 1
    with pytest.raises(UserError, match=r"^some.txt: line 1 is not JSON at column 1 .*--no-documents$"):
        lm.score(Path("some.txt"))


def test_a_text_to_score_that_the_disk_cannot_hold_is_refused(
    lined: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10))
    result = CliRunner().invoke(main, ["eval", "lines.jsonl", "--run", str(lined), "--quiet"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.fullmatch(
        r"error: \S+: the disk is too full for the ids; needs about 0\.0 MB, 0\.0 MB are free; "
        r"choose another place by the environment variable TMPDIR\n",
        result.stderr,
    )
