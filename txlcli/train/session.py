"""What a training holds in its hands: run, text, state, and how far all of it is saved."""

import errno
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from txlcli import UserError
from txlcli.checkpoint import (
    NonFiniteError,
    describe_weights,
    find_checkpoint,
    find_damage,
    newest_checkpoint,
    put_back,
    remedied,
    save_checkpoint,
    show_setting,
)
from txlcli.config import LEAVES, Config, SettingError, blame, flatten, read_settings
from txlcli.data import (
    Batches,
    CheckBeside,
    Counts,
    Split,
    StoreInfo,
    TokenStore,
    open_counts,
    open_split,
    read_store_info,
)
from txlcli.device import choose_device, choose_precision, environment
from txlcli.evaluate import Score
from txlcli.files import look_at, shell_name
from txlcli.plan import last_eval_is_whole
from txlcli.run import (
    Pointers,
    Run,
    append_metrics,
    cut_metrics,
    has_saved_metrics,
    list_checkpoints,
    metrics_length,
    open_run,
    prune_checkpoints,
    read_pointers,
    sweep_run,
    write_pointers,
)
from txlcli.tokenizer import Tokenizer, load_tokenizer
from txlcli.train.events import Event, Notice, Saved
from txlcli.train.optim import learning_rate
from txlcli.train.state import Counters, StepResult, TrainState, is_finite

INIT_REMEDY = "begin with the weights of another run"
RESTORE_REMEDY = "delete its folder to resume from the step before"

TRAINED: tuple[Split, ...] = ("train", "valid")
"""The parts of the text that a training reads."""

_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_PERMISSION = {errno.EACCES, errno.EPERM, errno.EROFS}


class NonFinite(ArithmeticError):
    """Training went non-finite and ended; the run's last good checkpoint is untouched."""


@dataclass
class Session:
    """What the loop holds in its hands while it runs."""

    run: Run
    config: Config
    state: TrainState
    tokenizer: Tokenizer
    info: StoreInfo
    valid: TokenStore | None
    counts: Counts | None
    check: CheckBeside
    notices: list[Notice] = field(default_factory=list)
    saved: tuple[int, int, bool] | None = None
    """How far the newest checkpoint is, as `progress` says it."""
    lost_best: int | None = None
    """The step of a best checkpoint that is damaged or gone, so that none may be sent to it."""
    best_score: Score | None = None
    last_score: Score | None = None

    @classmethod
    def open(cls, run: Run, config: Config, stack: ExitStack, *, is_checked: bool) -> "Session":
        """Open the store and build or restore the state; only for the run's one writer.

        Unless the ids are known to be sound, from here on they are checked in a thread.
        """
        left = sweep_run(run)
        device = choose_device(config.machine.device)
        precision = choose_precision(config.machine.precision, device, training=True)
        info, tokenizer = read_text(run)
        store = stack.enter_context(open_split(run.folder, "train"))
        valid = counts = None
        if "valid" in info.splits and info.splits["valid"].n_tokens >= 2:
            valid = stack.enter_context(open_split(run.folder, "valid"))
            counts = stack.enter_context(open_counts(run.folder, "valid"))
        batches = Batches(store, config.optim.batch_size, config.model.tgt_len)
        newest, notice = find_saved(run)
        try:
            with remedied(INIT_REMEDY):
                init = None
                if newest is None and config.data.init is not None:
                    init, _ = find_checkpoint(open_run(config.data.init))
                state = TrainState.start(
                    config, batches, tokenizer.n_vocab, device=device, precision=precision, init=init
                )
        except SettingError as error:  # a config.yaml changed by hand no longer fits the vocabulary
            raise blame(error, read_settings(run.config_path)) from None
        check = stack.enter_context(CheckBeside(run.folder, info, () if is_checked else TRAINED))
        session = cls(run, config, state, tokenizer, info, valid, counts, check)
        session.notices += [
            Notice(f"{path}: is left over, and cannot be removed; remove it by hand") for path in left
        ]
        if newest is not None:
            session.notices += [] if notice is None else [Notice(notice, is_damage=True)]
            with remedied(RESTORE_REMEDY):
                session.restore(newest)
        else:
            cut_metrics(run, 0)
        return session

    @property
    def progress(self) -> tuple[int, int, bool]:
        """How far the run is, in what a checkpoint must know: steps and evaluations."""
        counters = self.state.counters
        return counters.step, counters.evaluated_step, counters.is_scored_whole

    @property
    def steps(self) -> int:
        """Length of the run."""
        assert self.config.train.steps is not None
        return self.config.train.steps

    def is_due(self, every: int | None) -> bool:
        """Say whether something is due after the step just done; the last step is always due."""
        step = self.state.counters.step
        return step > 0 and (step == self.steps or (every is not None and step % every == 0))

    def is_evaluation_missing(self) -> bool:
        """Say whether an evaluation that is due after this step has not been completed."""
        if self.valid is None or not self.is_due(self.config.train.eval_every):
            return False
        counters = self.state.counters
        return counters.evaluated_step < counters.step or self.is_last_score_missing()

    def is_last_score_missing(self) -> bool:
        """Say whether the score of all held-out text that ends a run is due and has not been made."""
        counters = self.state.counters
        if self.valid is None or counters.step < self.steps or counters.is_scored_whole:
            return False
        return last_eval_is_whole(self.valid.n_tokens, counters.tokens)

    def environment(self) -> dict[str, str | int]:
        """Return what must be equal for a resumed run to repeat bit for bit."""
        compiled = "on" if self.config.machine.compile else "off"
        facts = environment(self.state.device, self.state.precision)
        return {**facts, "attention": self.state.model.attention_name, "compile": compiled}

    def lasting_settings(self) -> dict[str, object]:
        """Return the settings, as plain values, that must stay for the rest to be that of this run.

        Those of the text have done their part: it is prepared.
        """
        values = flatten(self.config)
        names = [item.name for item in LEAVES if not item.may_change and item.section != "data"]
        return {name: list(value) if isinstance(value := values[name], tuple) else value for name in names}

    def restore(self, path: Path) -> None:
        """Go back to a checkpoint: state, metrics.jsonl and the pointers."""
        values = self.state.restore(path)
        counters = self.state.counters
        if counters.step > self.steps:
            raise UserError(
                f"{path}: is past the length of the run; got step {counters.step} of {self.steps}; "
                f"resume with --steps {counters.step} or more"
            )
        self.saved = self.progress
        n_bytes, then = values.get("metrics_bytes", 0), values.get("environment", {})
        if type(n_bytes) is not int or n_bytes < 0 or not isinstance(then, dict):
            raise UserError(f"{path}: state.json: `metrics_bytes` or `environment` cannot be; damaged")
        if not cut_metrics(self.run, n_bytes):
            text = f"{self.run.metrics_path}: shorter than at step {counters.step}; its whole lines are kept"
            self.notices.append(Notice(text, is_damage=True))
        now = self.environment()
        changed = [
            f"{key} {then[key]!s:.40} -> {now[key]}" for key in now if key in then and then[key] != now[key]
        ]
        self.notices += self._changed_settings(values, path)
        if changed:
            self.notices.append(
                Notice(f"resuming elsewhere: {', '.join(changed)}; the rest will not repeat bit for bit")
            )
        self.lost_best, notices = look_for_best(self.run, counters)
        self.notices += notices
        settle(self.run, counters, self.config.train.keep, self.lost_best)

    def _changed_settings(self, values: Mapping[str, Any], path: Path) -> list[Notice]:
        """Say which settings that must stay have been changed by hand since a checkpoint was written."""
        then, now = values.get("settings", {}), self.lasting_settings()
        if not isinstance(then, dict):
            raise UserError(f"{path}: state.json: `settings` cannot be; damaged")
        changed = [
            f"{name} {show_setting(then[name])} -> {show_setting(value)}"
            for name, value in now.items()
            if name in then and then[name] != value
        ]
        if not changed:
            return []
        return [
            Notice(
                f"config.yaml changed since step {self.state.counters.step}: {', '.join(changed)}; "
                "the rest will not be what it would have been"
            )
        ]

    @property
    def is_best_lost(self) -> bool:
        """Whether the checkpoint of the best step is damaged or gone."""
        return self.lost_best is not None and self.lost_best == self.state.counters.best_step

    def last_good(self) -> str:
        """Name the newest checkpoint; empty where there is none."""
        return "" if self.saved is None else str(self.run.checkpoint_path(self.saved[0]))

    def how_to_go_on(self, error: OSError) -> str:
        """Say what is saved where the system ends a training, and what to do."""
        saved = "nothing is saved yet" if self.saved is None else f"step {self.saved[0]} is saved"
        mend = "see to the disk"
        if error.errno in _SPACE:
            mend = "free some space"
        elif error.errno in _PERMISSION:
            mend = "see to its permissions"
        return f"{saved}; {mend}, then `txl train --resume {shell_name(self.run.folder)}`"


def read_text(run: Run) -> tuple[StoreInfo, Tokenizer]:
    """Read what a run's store says of itself, and its tokenizer.

    Raises:
        UserError: they do not belong together.
    """
    info, tokenizer = read_store_info(run.folder), load_tokenizer(run.tokenizer_folder)
    if info.tokenizer != tokenizer.fingerprint() or info.n_vocab != tokenizer.n_vocab:
        raise UserError(
            f"{run.data_folder}: encoded with another tokenizer than "
            f"{run.tokenizer_folder / 'tokenizer.json'}; put the run's own tokenizer back"
        )
    return info, tokenizer


def find_saved(run: Run) -> tuple[Path | None, str | None]:
    """Find the checkpoint to go on from, as `newest_checkpoint`; None: the run was killed before it had one.

    Raises:
        UserError: it had some, and they are gone.
    """
    newest, notice = newest_checkpoint(run, with_state=True)
    is_pointed = look_at(run.pointers_path) is not None
    if newest is None and (is_pointed or has_saved_metrics(run)):
        last = None
        with suppress(UserError):  # damaged
            last = read_pointers(run).last
        was = f"pointers.json names step {last} as the last"
        if last is None:
            was = f"{'pointers.json' if is_pointed else 'metrics.jsonl'} tells of some"
        raise UserError(f"{run.checkpoints_folder}: has no checkpoint any more; {was}; {put_back(run)}")
    return newest, notice


def look_for_best(run: Run, counters: Counters) -> tuple[int | None, list[Notice]]:
    """Return the best step if its checkpoint is damaged or gone, and what to say of that.

    What counts as better than it stays the same: the training goes on as if nothing had happened to it.
    """
    best = counters.best_step
    if best is None or best == counters.step:
        return None, []
    if best in list_checkpoints(run):
        fault = find_damage(run.checkpoint_path(best), with_state=False)
    else:
        fault = f"{run.checkpoint_path(best)}: is not there any more"
    if fault is None:
        return None, []
    bar = "" if counters.best_nll is None else f" than its {counters.best_nll:.4f} nats"
    text = f"{fault}; it was the best, so best is last until an evaluation is better{bar}"
    return best, [Notice(text, is_damage=True)]


def settle(run: Run, counters: Counters, keep: int, lost_best: int | None) -> None:
    """Name best and last in the run folder, after their checkpoints are there; delete what is not kept."""
    is_lost = counters.best_step == lost_best
    best, best_nll = (None, None) if is_lost else (counters.best_step, counters.best_nll)
    pointers = Pointers(best, counters.step, best_nll)
    found = None
    with suppress(UserError):  # damaged, and now replaced
        found = read_pointers(run)
    if found != pointers:  # else they keep their time, which says when the run last saved
        write_pointers(run, pointers)
    prune_checkpoints(run, keep, counters.best_step)


def save(session: Session) -> Iterator[Event]:
    """Write a checkpoint of this step, then the pointers; then delete what is not kept.

    Raises:
        NonFinite: the weights are not finite; nothing was written.
    """
    state, run = session.state, session.run
    counters, tensors = state.counters, state.tensors()
    line_at = metrics_length(run)
    path = run.checkpoint_path(counters.step)
    # First the line, then its length in the checkpoint: a checkpoint and its line go or stay together.
    append_metrics(
        run, {"event": "save", "step": counters.step, "path": path.relative_to(run.folder).as_posix()}
    )
    try:
        if not is_finite(list(tensors.values())):
            raise NonFiniteError("the optimizer's state is not finite")
        save_checkpoint(
            run,
            state.model,
            step=counters.step,
            metadata=describe_weights(session.config.model, session.tokenizer),
            tensors=tensors,
            values={
                **state.values(),
                "environment": session.environment(),
                "settings": session.lasting_settings(),
                "metrics_bytes": metrics_length(run),
            },
        )
    except BaseException as error:
        cut_metrics(run, line_at)
        if not isinstance(error, NonFiniteError):
            raise
        rate = learning_rate(max(counters.step, 1), session.config.optim, session.steps)
        raise failure(session, "the weights are not finite", rate) from error
    session.saved = session.progress
    if session.lost_best == counters.step:
        session.lost_best = None
    settle(run, counters, session.config.train.keep, session.lost_best)
    yield Saved(counters.step, path)


def failure(
    session: Session,
    fault: str,
    rate: float,
    result: StepResult | None = None,
    remedy: str = "a lower --lr or a longer --warmup may help",
) -> NonFinite:
    """Word the end of a run whose numbers went wrong."""
    numbers = [f"rate {rate:.3g}"]
    if result is not None:
        numbers += [f"loss {result.loss:.3g}", f"gradient norm {result.grad_norm:.3g}"]
    return NonFinite(
        f"step {session.state.counters.step}: {fault}; {', '.join(numbers)}; "
        f"last good checkpoint: {session.last_good()}; {remedy}"
    )
