"""A text ready to be scored: its tokens, in the run or encoded of a file."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from txlcli.cli.eval.request import Request
from txlcli.cli.signals import Interruption
from txlcli.files import shell_name
from txlcli.report import Stages

if TYPE_CHECKING:
    from txlcli.api import LanguageModel
    from txlcli.data import Counts, Split, SplitInfo, TokenStore
    from txlcli.sources import DocumentRule
    from txlcli.tokenizer import Tokenizer

_BLOCK_TOKENS = 1 << 20


@dataclass(frozen=True)
class Text:
    """A text ready to be scored.

    `file_bytes` counts all bytes of the files, those that are neither scored nor counted too; None: not
    known. `n_documents` None: they have no ends among the tokens.
    """

    name: str
    store: "TokenStore"
    counts: "Counts"
    info: "SplitInfo"
    encoding: str
    documents: "DocumentRule"
    n_documents: int | None
    file_bytes: int | None
    notices: tuple[str, ...]

    @property
    def has_offsets(self) -> bool:
        """Whether each token's place in the files is known: with documents only if every byte is counted.

        A store of before does not know its byte-order marks.
        """
        is_counted = self.documents.setting is None or self.info.n_bytes == self.file_bytes
        return is_counted and self.info.marks is not None


def open_text(
    request: Request, lm: "LanguageModel", stack: ExitStack, stages: Stages, interruption: Interruption
) -> Text:
    """Find the text's tokens: in the run, or by encoding FILE into a temporary folder."""
    import tempfile

    from txlcli.data import Progress, check_store, open_counts, open_split, read_store_info
    from txlcli.run import refuse_converted
    from txlcli.sources import Corpus, told_replaced

    split: Split = "valid" if request.split == "valid" else "test"
    folder, name, notices = lm.run.folder, f"{request.split} text of {lm.run.folder}", tuple[str, ...]()
    corpus: Corpus | None = None
    if request.file is not None:
        folder, split, name = (
            Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="txl-"))),
            "test",
            request.file,
        )
        for event in lm.encode_file(
            request.file,
            folder,
            encoding=request.encoding,
            documents=request.documents,
            least_tokens=1 if request.is_by_line else 2,
        ):
            if isinstance(event, Progress):
                stages.show(event.stage, event.done_bytes, event.total_bytes, "bytes")
            else:
                notices += event.notices
                corpus = event if isinstance(event, Corpus) else corpus
            interruption.leave()
    if request.file is None:
        refuse_converted(
            lm.run,
            f"which has no held-out text; name a file: txl eval FILE --run {shell_name(lm.run.folder)}",
        )
    store = stack.enter_context(open_split(folder, split))
    counts = stack.enter_context(open_counts(folder, split))
    info = read_store_info(folder)
    if corpus is not None and info.splits[split].n_replaced:
        # Said with what it does to the numbers, by `losses`.
        told = told_replaced(corpus, info.splits[split].n_replaced or 0)
        notices = tuple(notice for notice in notices if notice != told)
    for done in check_store(folder, info, [split]) if request.file is None else ():
        stages.show(done.stage, done.done_bytes, done.total_bytes, "bytes")
        interruption.leave()
    return Text(
        name=name,
        store=store,
        counts=counts,
        info=info.splits[split],
        encoding=info.encoding,
        documents=lm.document_rule if request.documents is None else request.documents,
        n_documents=_count_documents(store, lm.tokenizer),
        file_bytes=None if corpus is None else corpus.n_bytes - sum(one.n_mark for one in corpus.sources),
        notices=notices,
    )


def _count_documents(store: "TokenStore", tokenizer: "Tokenizer") -> int | None:
    """Count the ends of documents among the tokens; None: the vocabulary has none."""
    if tokenizer.document_end is None:
        return None
    return sum(
        int((store.read(start, min(start + _BLOCK_TOKENS, store.n_tokens)) == tokenizer.document_end).sum())
        for start in range(0, store.n_tokens, _BLOCK_TOKENS)
    )
