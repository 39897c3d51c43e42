"""What a training tells while it runs: plain values, which `report` draws and nobody else prints."""

from dataclasses import dataclass
from pathlib import Path

from txlcli.config import Config, Settings
from txlcli.evaluate import Score
from txlcli.run import Run
from txlcli.sources import Corpus, Survey


@dataclass(frozen=True)
class Progress:
    """A long stage before the first step, or an evaluation, has come this far.

    Attributes:
        stage: What goes on, in the words of a status line: `encoding train`.
        done: Units done.
        total: Units in all; 0: not known.
        unit: `bytes` or `tokens` or `steps`.
        is_deaf: Until the next event, which may take minutes, nothing asks whether to stop. A
            KeyboardInterrupt meanwhile ends it, and stands for that wish if `should_stop` says so too.
    """

    stage: str
    done: int
    total: int
    unit: str
    is_deaf: bool = False


@dataclass(frozen=True)
class Notice:
    """Something that the user should know, said once.

    Attributes:
        text: What, in a line.
        is_damage: A part of the run is damaged or gone and the training goes on without it: said also
            to those who want to hear of errors only.
    """

    text: str
    is_damage: bool = False


@dataclass(frozen=True)
class Found:
    """The texts of a run.

    Attributes:
        corpus: What is learned from, and what was skipped.
        survey: What one pass over it found.
        valid: Held-out files of their own, None: none.
        test: Files kept for `txl eval --split test`, None: none.
    """

    corpus: Corpus
    survey: Survey
    valid: Corpus | None
    test: Corpus | None


@dataclass(frozen=True)
class PlanSummary:
    """What is about to be trained, on what, and what it takes.

    Attributes:
        corpus: The corpus as the user named it.
        found: The corpus, its documents, and what is held out of it or beside it.
        n_train_tokens: Tokens that the model learns from.
        n_valid_tokens: Held-out tokens; 0: nothing is held out.
        tokenizer: Kind of vocabulary.
        n_vocab: Size of the vocabulary.
        n_embedding: Parameters of embedding and output.
        n_rest: All other parameters.
        step_tokens: Tokens of a full step.
        epochs: Passes over the training text.
        memory_bytes: Estimate of the memory that training takes at its peak.
        device: Kind of device, such as `cpu` or `cuda:0`.
        precision: Of the matrix products.
        attention: Backend, and why it was taken.
        expected_s: Estimated time from the start to the last step; None: nothing was measured.
        last_eval_tokens: Held-out tokens that the last evaluation scores.
        config: All settings, lengths included.
        settings: The same with where each comes from.
    """

    corpus: tuple[str, ...]
    found: Found
    n_train_tokens: int
    n_valid_tokens: int
    tokenizer: str
    n_vocab: int
    n_embedding: int
    n_rest: int
    step_tokens: int
    epochs: float
    memory_bytes: int
    device: str
    precision: str
    attention: str
    expected_s: float | None
    last_eval_tokens: int
    config: Config
    settings: Settings

    @property
    def n_bytes(self) -> int:
        """Bytes of the corpus, held-out part included."""
        return self.found.corpus.n_bytes

    @property
    def steps(self) -> int:
        """Length in optimizer steps."""
        assert self.config.train.steps is not None
        return self.config.train.steps


@dataclass(frozen=True)
class Planned:
    """The plan stands; the first step comes next."""

    summary: PlanSummary


@dataclass(frozen=True)
class FirstLine:
    """The first line of the training text as the model will see it, piece by piece.

    Attributes:
        text: The line, without its end; of a long one the beginning.
        pieces: The text of each of its tokens, in order.
        ids: The tokens.
        is_cut: It is only the beginning, up to where a token surely ends.
    """

    text: str
    pieces: tuple[str, ...]
    ids: tuple[int, ...]
    is_cut: bool = False


@dataclass(frozen=True)
class Ready:
    """A run folder is complete and can be trained.

    Attributes:
        run: The run.
        config: Its settings, as config.yaml has them.
        origins: Where each setting comes from, by name.
        budget: The time that the run was asked to take; None: it was not measured.
        step: The step that it goes on from.
        is_checked: Its ids are surely those that were written; else training holds them against their
            checksums beside its first steps.
        is_taken: They are those of a run beside it, so that it can be begun once more from its texts.
    """

    run: Run
    config: Config
    origins: dict[str, str]
    budget: "Budget | None" = None
    step: int = 0
    is_checked: bool = False
    is_taken: bool = False


@dataclass(frozen=True)
class Budget:
    """A wish for the run to end in time: `--minutes`.

    Attributes:
        started: `time.monotonic()` when the command began.
        limit_s: Seconds from then to the end of the run.
    """

    started: float
    limit_s: float


@dataclass(frozen=True)
class Stepped:
    """A step whose numbers are worth a line.

    Attributes:
        step: Steps done.
        steps: Length of the run.
        loss: Mean nats per token of this step.
        lr: Learning rate of this step.
        grad_norm: Norm of the gradient before clipping.
        tokens: Tokens learnt from since the run began.
        tokens_per_s: Speed since the last such event, evaluations and saves apart.
        elapsed_s: Seconds of training since the run began, all its parts together.
        bits_per_byte: The loss in bits per byte of the training text.
        is_logged: It stands in metrics.jsonl too; else it only moves the progress bar.
    """

    step: int
    steps: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    tokens_per_s: float
    elapsed_s: float
    bits_per_byte: float
    is_logged: bool = True


@dataclass(frozen=True)
class Evaluated:
    """A score of held-out text.

    Attributes:
        step: Steps done.
        score: The result.
        mem_len: Memory length of the evaluation.
        is_best: Better than all before.
        is_whole: All held-out text was scored, not only the slice that periodic evaluations take.
    """

    step: int
    score: Score
    mem_len: int
    is_best: bool
    is_whole: bool


@dataclass(frozen=True)
class Sampled:
    """A little text from the model as it is now."""

    step: int
    text: str


@dataclass(frozen=True)
class Saved:
    """A checkpoint is on the disk."""

    step: int
    path: Path


@dataclass(frozen=True)
class Skipped:
    """A step without an update, since its loss or gradient was not finite."""

    step: int
    reason: str


@dataclass(frozen=True)
class Finished:
    """The end of a training.

    Attributes:
        step: Steps done.
        run: The run.
        reason: `length`: it is complete; `patience`: evaluations stopped improving; `stop_at`: as asked;
            `interrupted`: by the user, after saving.
        best_step: The step of the best evaluation; None: nothing was evaluated, so best is last.
        best_nll: Its held-out nats per token, on the slice that periodic evaluations take.
        best_bits_per_byte: The same in bits per byte; None: not known any more.
        best_score: The score of that step, if it was made since training was started or resumed.
        last_score: The last score made, if any.
        mem_len: The memory length that it was trained with.
        is_best_lost: The checkpoint of the best step is damaged or gone, so that best is last.
        has_valid: The run has held-out text.
        has_test: The run has a test text, which no training scores.
    """

    step: int
    run: Run
    reason: str
    best_step: int | None
    best_nll: float | None
    best_bits_per_byte: float | None
    best_score: Score | None
    last_score: Score | None
    mem_len: int
    is_best_lost: bool = False
    has_valid: bool = True
    has_test: bool = False


Event = (
    Progress
    | Notice
    | Found
    | Planned
    | FirstLine
    | Ready
    | Stepped
    | Evaluated
    | Sampled
    | Saved
    | Skipped
    | Finished
)
