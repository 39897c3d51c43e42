"""From Python: load a run, continue texts, score texts.

    from txlcli import load

    lm = load("runs/corpus")
    lm.generate("Once", max_tokens=100).text
    lm.score("Once upon a time").bits_per_byte

Results are what the commands print, as dataclasses; nothing is printed here.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from txlcli import UserError
from txlcli.attention import Demands, cannot_run, choose_backend, fall_back
from txlcli.checkpoint import load_model
from txlcli.config import Config, check, leaf, unescape
from txlcli.data import (
    Counts,
    Prepared,
    Progress,
    Split,
    TokenStore,
    check_store,
    encode_text,
    open_counts,
    open_split,
    read_store_info,
)
from txlcli.device import Precision, choose_device, choose_precision, repeat_exactly
from txlcli.evaluate import Score, evaluate, final_score
from txlcli.generate import (
    Dialogue,
    Event,
    GeneratedText,
    Prompt,
    SamplingOptions,
    encode_prompt,
    generate,
    joined,
    to_bytes,
)
from txlcli.model import Lengths, TransformerXL
from txlcli.run import Run, latest_run, open_run, read_conversion
from txlcli.sources import Corpus, DocumentRule, NotJsonLines, NotText, find_encoding, search_corpus
from txlcli.tokenizer import CorpusWordTokenizer, MosesTokenizer, Tokenizer, refuse_missing_moses


@dataclass(frozen=True)
class LanguageModel:
    """A trained model of a run, ready to generate and to score.

    Attributes:
        run: The run that it was loaded from.
        step: The step of its checkpoint.
        config: The run's settings.
        model: The network, in evaluation mode.
        tokenizer: Text to ids and back; with `moses`, raw text.
        start_id: The token that an empty prompt starts from.
        device: Where the network lies.
        precision: What was asked for: `auto`, `fp32`, `bf16` or `fp16`.
        notices: What is otherwise here than where the run was trained.
        damage: Which newer checkpoint is damaged, so that this one was taken; None: none.
    """

    run: Run
    step: int
    config: Config
    model: TransformerXL
    tokenizer: Tokenizer
    start_id: int
    device: torch.device
    precision: str = "auto"
    notices: tuple[str, ...] = ()
    damage: str | None = None

    # Generating

    def generate(
        self,
        prompt: str | bytes = "",
        *,
        max_tokens: int = SamplingOptions.max_tokens,
        temperature: float = SamplingOptions.temperature,
        top_k: int = SamplingOptions.top_k,
        top_p: float = SamplingOptions.top_p,
        min_p: float = SamplingOptions.min_p,
        repetition_penalty: float = SamplingOptions.repetition_penalty,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        mem_len: int | None = None,
        tgt_len: int | None = None,
    ) -> GeneratedText:
        """Continue a text once; the parameters are those of `SamplingOptions`.

        Args:
            prompt: What to continue.
            max_tokens: Tokens to draw.
            temperature: 0 takes the most probable token.
            top_k: 0: off.
            top_p: 1: off.
            min_p: 0: off.
            repetition_penalty: 1: off.
            seed: None: a fresh one, which the result names.
            stop: A text, or several, that end the sample.
            mem_len: Rows of memory; None: as trained.
            tgt_len: Tokens in a segment; None: as trained.

        Raises:
            UserError: an option makes no sense, or the prompt is no text.
        """
        options = SamplingOptions(
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            mem_len=mem_len,
            tgt_len=tgt_len,
        )
        return self.samples(prompt, options)[0]

    def samples(self, prompt: str | bytes, options: SamplingOptions) -> list[GeneratedText]:
        """Continue a text `options.num_samples` times, side by side."""
        events = self.stream(prompt, options)
        finished = (event for event in events if isinstance(event, GeneratedText))
        return sorted(finished, key=lambda result: result.sample)

    def stream(self, prompt: str | bytes | Prompt, options: SamplingOptions) -> Iterator[Event]:
        """Continue a text, yielding pieces as they are made and each sample when it ends."""
        read = prompt if isinstance(prompt, Prompt) else self.read_prompt(prompt)
        events = generate(
            self.model, self.tokenizer, read, options, precision=self._precision(is_generating=True)
        )
        return self._joined(events, read)

    def dialogue(self, options: SamplingOptions) -> Dialogue:
        """Begin a text to which user and model add in turn; see `answer`."""
        return Dialogue(self.model, self.tokenizer, options, precision=self._precision(is_generating=True))

    def answer(self, dialogue: Dialogue, added: str | bytes | Prompt) -> Iterator[Event]:
        """Add to a dialogue, and yield pieces of what the model answers and then the whole answer."""
        read = added if isinstance(added, Prompt) else self.read_prompt(added, dialogue)
        events = dialogue.answer(read)
        return self._joined(events, read)

    def _joined(self, events: Iterator[Event], read: Prompt) -> Iterator[Event]:
        """Put words back together to raw text where the model writes words that Moses' rules split."""
        if isinstance(self.tokenizer, MosesTokenizer):
            return joined(events, self.tokenizer, read.text)
        return events

    def read_prompt(self, prompt: str | bytes, dialogue: Dialogue | None = None) -> Prompt:
        """Turn a prompt, or what is added to a dialogue, into tokens.

        Its notices name characters that the vocabulary does not have.
        """
        data, is_first = self.config.data, dialogue is None or dialogue.n_answers == 0
        return encode_prompt(
            self.tokenizer,
            prompt,
            self.start_id if is_first else None,
            newlines=data.newlines,
            spaces=data.spaces,
        )

    # Scoring

    def score(
        self,
        text: str | bytes | Path,
        *,
        mem_len: int | None = None,
        tgt_len: int | None = None,
        clamp_len: int | None = None,
        same_length: Literal["off", "mem_len", "mem_len+1"] | None = None,
        batch_size: int | None = None,
        encoding: str | None = None,
        documents: DocumentRule | None = None,
    ) -> Score:
        """Score a text: every token but the first once, from an empty memory.

        A text and its bytes have no documents, unless `documents` tells how to find them: they are scored as
        one piece, and no token for a document's end is put in. Files are read as those of the run were,
        packed ones unpacked, with documents by the same rule if it had any; then a token ends each document
        and is scored too.

        Args:
            text: A text, its bytes, or the path of a file or folder.
            mem_len: Rows of memory; None, as for the next three: as trained.
            tgt_len: Tokens in a segment.
            clamp_len: Distances beyond this share one encoding.
            same_length: Whether every query sees equally many keys.
            batch_size: Streams side by side at most; the totals do not depend on it. None: as many as pay.
            encoding: Encoding of bytes and files; None: that of the run's text.
            documents: How documents are told apart; `DocumentRule()`: there are none. None: as said above.

        Raises:
            UserError: the text is too short, is not in this encoding, is no JSON lines where the run's text
                was, or cannot be read; a length makes no sense; the run knows no documents.
        """
        lengths = self._lengths(mem_len, tgt_len, clamp_len, same_length)
        if documents is None and not isinstance(text, Path):
            documents = DocumentRule()
        with self._encoded(text, encoding, documents) as (store, counts, place):
            return self._score(store, counts, lengths, batch_size, place)

    def score_split(
        self,
        split: Split = "valid",
        *,
        mem_len: int | None = None,
        tgt_len: int | None = None,
        clamp_len: int | None = None,
        same_length: Literal["off", "mem_len", "mem_len+1"] | None = None,
        batch_size: int | None = None,
    ) -> Score:
        """Score a held-out part that the run keeps, `valid` or `test`; the parameters are those of `score`.

        Raises:
            UserError: the run holds no such part, or it is damaged.
        """
        lengths = self._lengths(mem_len, tgt_len, clamp_len, same_length)
        folder = self.run.folder
        with open_split(folder, split) as store, open_counts(folder, split) as counts:
            for _ in check_store(folder, read_store_info(folder), [split]):
                pass  # progress, which nobody watches here
            return self._score(store, counts, lengths, batch_size, str(store.path))

    def _score(
        self, store: TokenStore, counts: Counts, lengths: Lengths, batch_size: int | None, place: str
    ) -> Score:
        if batch_size is not None and batch_size < 1:
            raise UserError(f"batch_size: must be 1 or more; got {batch_size}")
        precision = self._precision(is_generating=False)
        return final_score(
            evaluate(
                self.model,
                store,
                counts,
                lengths=lengths,
                n_stream=batch_size,
                precision=precision,
                place=place,
            )
        )

    def _lengths(
        self, mem_len: int | None, tgt_len: int | None, clamp_len: int | None, same_length: str | None
    ) -> Lengths:
        given = {"mem_len": mem_len, "tgt_len": tgt_len, "clamp_len": clamp_len, "same_length": same_length}
        changes: dict[str, Any] = {  # Any: each setting's own type, which `check` sees to
            name: check(leaf(name), value) for name, value in given.items() if value is not None
        }
        lengths = self.model.lengths._replace(**changes)
        self.model.refuse_lengths(lengths)
        return lengths

    @property
    def document_rule(self) -> DocumentRule:
        """How the text of the run was told apart into documents."""
        data = self.config.data
        separator = data.document_separator
        return DocumentRule(
            text_field=data.text_field,
            document_separator=None if separator is None else unescape(separator),
            document_per_file=data.document_per_file,
        )

    def encode_file(
        self,
        name: str,
        folder: Path,
        *,
        encoding: str | None = None,
        documents: DocumentRule | None = None,
        least_tokens: int = 2,
    ) -> Iterator[Progress | Corpus | Prepared]:
        """Read a file or folder as the run's text was read, and encode it as the split `test` of a store.

        Yields the progress, in between the corpus once it is found, and at last what was prepared.

        Args:
            name: The path, or `-` for standard input, which is copied into `folder`.
            folder: Where the store is made.
            encoding: Encoding of the files; None: that of the run's text.
            documents: How documents are told apart; None: as in the run.
            least_tokens: Fewer are refused.

        Raises:
            UserError: as for `score`.
        """
        if documents not in (None, DocumentRule()) and self.tokenizer.document_end is None:
            raise UserError(
                f"--{_flag_of(documents)}: {self.run.folder} was not trained on documents, so that its "
                "vocabulary has no end of one; leave it out"
            )
        data, rule = self.config.data, self.document_rule if documents is None else documents
        try:
            for event in search_corpus(
                [name],
                encoding=data.encoding if encoding is None else encoding,
                errors=data.encoding_errors,
                raw=self.tokenizer.kind == "byte",
                newlines=data.newlines,
                spaces=data.spaces,
                packed=data.packed,
                stdin_copy=folder / "stdin",
                **rule._asdict(),
            ):
                yield event
            assert isinstance(event, Corpus), "a search ends with the corpus"
            yield from encode_text(event, self.tokenizer, folder, least_tokens=least_tokens)
        except NotJsonLines as error:
            if documents is not None:
                raise
            raise UserError(
                f"{error}; it is read as JSON lines because the text of {self.run.folder} was; "
                "for plain text give --no-documents"
            ) from None
        except NotText as error:
            if encoding is not None or find_encoding(data.encoding) == "utf-8":
                raise
            raise UserError(
                f"{error}; it is read as {data.encoding} because the text of {self.run.folder} was"
            ) from None

    @contextmanager
    def _encoded(
        self, text: str | bytes | Path, encoding: str | None, documents: DocumentRule | None
    ) -> Iterator[tuple[TokenStore, Counts, str]]:
        """Encode a text to a store in a temporary folder, the same way as a file of the command line."""
        with tempfile.TemporaryDirectory(prefix="txl-") as name:
            folder = Path(name)
            path = text if isinstance(text, Path) else folder / "text"
            place = str(text) if isinstance(text, Path) else "text"
            if not isinstance(text, Path):
                path.write_bytes(to_bytes(text, place))
                encoding = "utf-8" if isinstance(text, str) else encoding
            try:
                for _ in self.encode_file(str(path), folder, encoding=encoding, documents=documents):
                    pass  # progress, which nobody watches here
            except UserError as error:
                raise UserError(str(error).replace(str(path), place)) from error
            with open_split(folder, "test") as store, open_counts(folder, "test") as counts:
                yield store, counts, place

    def _precision(self, *, is_generating: bool) -> Precision:
        """Resolve `auto`: float32, but on CUDA text is generated in the precision of training."""
        name = self.precision
        if name == "auto" and is_generating and self.device.type == "cuda":
            name = self.config.machine.precision
        return choose_precision(name, self.device, training=False)


def load(
    path: str | Path | None = None,
    checkpoint: str | int = "best",
    *,
    device: str = "auto",
    precision: str = "auto",
    attention: str = "auto",
    threads: int | None = None,
    deterministic: bool = False,
    moses: bool = False,
) -> LanguageModel:
    """Load a run.

    Args:
        path: The run's folder; None: the run under `runs/` that saved last.
        checkpoint: `best`, `last` or a step.
        device: `auto`, `cpu`, `cuda`, `cuda:N` or `mps`.
        precision: Of matrix products: `fp32`, `bf16`, `fp16`; `auto`: as the commands choose.
        attention: Backend of the attention operation; `auto`: the fastest that runs here.
        threads: CPU threads of this process from now on; None: as they are.
        deterministic: Only operations that repeat bit for bit, in this process from now on.
        moses: Text is raw and not split into words yet: for runs of words with newlines `eos`, whose corpus
            was split by Moses' rules.

    Raises:
        UserError: the folder is no run, its files are damaged, or this machine lacks the device, precision,
            backend or sacremoses.
    """
    if moses:
        refuse_missing_moses()
    chosen = choose_device(device)
    choose_precision(precision, chosen, training=False)
    choose_backend(attention)
    if threads is not None:
        torch.set_num_threads(threads)
    if deterministic:
        repeat_exactly()
    run = latest_run() if path is None else open_run(path)
    loaded = load_model(run, str(checkpoint), chosen)
    known = read_conversion(run) or read_store_info(run.folder)
    if known.n_vocab != loaded.tokenizer.n_vocab:
        raise UserError(
            f"{run.folder}: has a tokenizer of {loaded.tokenizer.n_vocab:,} ids, the rest of it is made for "
            f"{known.n_vocab:,}; put the run's own tokenizer back"
        )
    tokenizer = _of_raw_text(loaded.tokenizer, run) if moses else loaded.tokenizer
    choice = loaded.model.use_attention(attention)
    if attention not in ("auto", choice.name):
        raise cannot_run(attention, choice)
    told = None
    if attention == "auto":
        demands = Demands(chosen, loaded.model.d_head, has_values=loaded.model.has_value_rows)
        told = fall_back(loaded.config.machine.attention, demands) or fall_back("auto", demands)
    return LanguageModel(
        run=run,
        step=loaded.step,
        config=loaded.config,
        model=loaded.model,
        tokenizer=tokenizer,
        start_id=known.start_id,
        device=chosen,
        precision=precision,
        notices=() if told is None else (f"attention: {told}",),
        damage=loaded.damage,
    )


def _flag_of(rule: DocumentRule | None) -> str:
    """Name the setting by which documents are told apart."""
    names = [name for name, value in (rule or DocumentRule())._asdict().items() if value not in (None, False)]
    return names[0].replace("_", "-")


def _of_raw_text(tokenizer: Tokenizer, run: Run) -> MosesTokenizer:
    if not isinstance(tokenizer, CorpusWordTokenizer):
        raise UserError(
            f"--moses: goes with words that white space separates (tokenizer word, newlines eos); "
            f"{run.folder} has tokenizer {tokenizer.kind}; leave it out"
        )
    return MosesTokenizer(tokenizer)
