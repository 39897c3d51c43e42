"""What the command line asks for, checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from txlcli import UserError
from txlcli.cli.flags import setting
from txlcli.config import FLAG, SettingError, fault_at, leaf, unescape

if TYPE_CHECKING:
    from txlcli.model import Lengths
    from txlcli.sources import DocumentRule

_SPLITS = ("valid", "test")
WINDOW_TOKENS = 256
"""Tokens that sliding windows score unless it is said how many."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the command line asks for, checked."""

    file: str | None
    split: str
    encoding: str | None
    documents: "DocumentRule | None"
    mem_lens: tuple[int, ...] | None
    tgt_len: int | None
    has_clamp_len: bool
    clamp_len: int | None
    same_length: str | None
    batch_size: int | None
    device: str
    precision: str
    attention: str
    threads: int | None
    is_deterministic: bool
    is_raw: bool
    is_by_line: bool
    window_tokens: int | None

    def lengths(self, trained: "Lengths", mem_len: int) -> "Lengths":
        """The lengths of one row: as trained, but for what was asked."""
        lengths = trained._replace(mem_len=mem_len, tgt_len=self.tgt_len or trained.tgt_len)
        if self.has_clamp_len:
            lengths = lengths._replace(clamp_len=self.clamp_len)
        return lengths if self.same_length is None else lengths._replace(same_length=self.same_length)


def choose_split(file: str | None, split: str | None, of_file: Mapping[str, bool]) -> str:
    """Return which held-out text is meant; refuse what does not go with FILE, or only with it."""
    if split is not None and split not in _SPLITS:
        raise UserError(f"--split: must be valid or test; got `{split}`")
    if file is not None and split is not None:
        raise UserError("--split: cannot go with FILE; give one of them")
    for flag, is_given in of_file.items():
        if file is None and is_given:
            raise UserError(f"{flag}: goes with FILE only; held-out text is stored as tokens")
    return split or "valid"


def choose_documents(given: Mapping[str, str | bool | None]) -> "DocumentRule | None":
    """Return how documents are told apart by the flags; None: as in the run."""
    from txlcli.sources import DocumentRule

    flags = [flag for flag, value in given.items() if value is not None]
    if len(flags) > 1:
        raise UserError(f"{flags[0]}: cannot go with {flags[1]}; give one of them")
    if not flags:
        return None
    separator = setting("document_separator", given["--document-separator"])
    try:
        separator = None if separator is None else unescape(separator)
    except SettingError as error:
        raise fault_at(leaf("document_separator"), FLAG, error.text) from None
    return DocumentRule(
        text_field=setting("text_field", given["--text-field"]),
        document_separator=separator,
        document_per_file=given["--document-per-file"] is not None,
    )


def choose_window_tokens(
    is_window: bool, n_tokens: int | None, is_by_line: bool, per_token: str | None
) -> int | None:
    """Return how many tokens are scored by sliding windows; None: none are."""
    if not is_window:
        if n_tokens is not None:
            raise UserError("--window-tokens: goes with --sliding-window only")
        return None
    for flag, is_given in (("--by-line", is_by_line), ("--per-token", per_token is not None)):
        if is_given:
            raise UserError(f"--sliding-window: cannot go with {flag}; give one of them")
    if n_tokens is not None and n_tokens < 1:
        raise UserError(f"--window-tokens: must be at least 1; got {n_tokens}")
    return n_tokens or WINDOW_TOKENS
