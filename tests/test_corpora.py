"""`txl train` takes any corpus: packed, in folders, in documents; a dry run shows what was found of it."""

import gzip
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

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
    assert facts["documents"] == ["3 · one per file"]
    n_bytes = 3 * len(TEXT)
    split = n_bytes - n_bytes // 20
    assert facts["held out"] == [
        f"the last 5.0% · {n_bytes - split} bytes from byte {split:,} on · 1 document"
    ]

    facts = shown(books, "--document-separator", r"\n", "--valid-every", 10, "--exclude", "notes.md")
    assert facts["documents"] == [r"240 · separated by \n"]
    held_out = 4 * sum(len(line) + 1 for line in TEXT.splitlines()[9::10])
    assert facts["held out"] == [f"the last of every 10 documents · {held_out / 1000:.1f} kB · 24 documents"]

    facts = shown(books, "--valid", books / "b.txt", "--test", books / "a.txt")
    assert facts["held out"] == [f"books/b.txt · {size}"]
    assert facts["test"] == [f"books/a.txt · {size} · utf-8"]
    assert facts["skipped"][:2] == ["books/a.txt · held out", "books/b.txt · held out"]
    assert "documents" not in facts
    assert shown(books, "--valid-fraction", 0)["held out"] == ["nothing"]


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
            "--document-separator: document_separator `紅` cannot be written in cp1252; "
            "choose one that stands in the text",
        ),
        (
            "--valid-every 10",
            "--valid-every: needs documents; give text_field, document_separator or document_per_file too",
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
            "--reset-memory-at-documents: needs documents; give text_field, document_separator or "
            "document_per_file too",
        ),
        ("--include *.txt --include", "--include: needs a value"),
        (
            "--text-field text",
            "text.txt: line 1 is not JSON at column 1; got `the quick brown fox `; expecting value",
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
        f"cut.txt: not utf-8 at byte {len(TEXT)}, line 61; got 0xe7 0xb4 at its end, the beginning of"
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
    assert shown("text.txt", *rules)["first line"] == ["one"]
