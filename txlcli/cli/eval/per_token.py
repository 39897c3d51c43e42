"""The table of --per-token: one line for each scored token."""

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from txlcli.cli.eval.text import Text
from txlcli.report import one_line

if TYPE_CHECKING:
    from txlcli.evaluate import TokenNats
    from txlcli.tokenizer import Tokenizer


def open_tsv(path: str | None, stack: ExitStack) -> BinaryIO | None:
    """Open the file of --per-token before anything is computed; it appears when the command ends well."""
    if path is None:
        return None
    from txlcli.files import open_whole

    return stack.enter_context(open_whole(Path(path)))


def write_tsv(file: BinaryIO, text: Text, tokenizer: "Tokenizer", nats: "TokenNats") -> None:
    """Write one line for each scored token: id, text with escapes, nats, byte offset in the source."""
    from txlcli.evaluate import token_scores

    file.write(b"token\ttext\tnats\tbyte_offset\n")
    for token in token_scores(
        text.store, text.counts if text.has_offsets else None, nats, tokenizer.document_end
    ):
        source = tokenizer.decode([token.token], after=token.previous)
        offset = "" if token.byte_offset is None else token.byte_offset
        file.write(f"{token.token}\t{one_line(source)}\t{token.nats!r}\t{offset}\n".encode())
