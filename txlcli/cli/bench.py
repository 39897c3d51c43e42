"""`txl bench`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from txlcli import UserError
from txlcli import config as settings_of
from txlcli.cli.app import command
from txlcli.cli.errors import Failed
from txlcli.cli.flags import (
    AttentionFlag,
    DeterministicFlag,
    DeviceFlag,
    JsonFlag,
    PrecisionFlag,
    QuietFlag,
    RunFlag,
    ThreadsFlag,
    option,
    setting,
)
from txlcli.cli.signals import Interruption, listening
from txlcli.report import (
    Screen,
    Stages,
    bench_table,
    column_names,
    comparison_table,
    count_text,
    json_text,
)

if TYPE_CHECKING:
    from txlcli.bench import Comparison, Measured, Options, Report, Subject

_KINDS = ("training", "scoring", "generation", "attention")
_LEAST_REPEATS = 3
_EXCLUDED = "warm-up, reading text, evaluating, saving and logging"
_HOW = {
    "training": "forward, backward, clipping and optimizer, on random tokens, nothing is learned",
    "scoring": "a segment of each stream and the nats of its tokens, as in txl eval",
    "generation": "one token after the other, each drawn as in txl generate",
    "attention": "one layer's operation at the shape of training, with all its gradients in +backward",
}
_PEAK = "the most that this work held at once, weights included, Python and torch not"
_LIMIT = "share of this machine's best matrix product at that precision"

SIZES = "Sizes"


@command(
    examples=[
        "txl bench",
        "txl bench -c enwik8-base --batch-size 2 --only training,attention",
        "txl bench --run runs/books --mem-len 640 --json",
    ]
)
def bench(
    *,
    run: RunFlag = None,
    config_file: Annotated[
        str | None, option("--config", "-c", metavar="NAME|FILE", help="a preset or YAML file, fresh weights")
    ] = None,
    vocab_size: Annotated[
        str | None,
        option("--vocab-size", metavar="N", help="vocabulary of --config; else its own or assumed"),
    ] = None,
    only: Annotated[
        str | None, option("--only", metavar="LIST", help=f"some of {','.join(_KINDS)}; else all")
    ] = None,
    is_json: JsonFlag = False,
    is_quiet: QuietFlag = False,
    repeats: Annotated[
        int,
        option(
            "--repeats", metavar="N", help="repetitions of a row, at least 3", number=int, has_default=True
        ),
    ] = 5,
    seconds: Annotated[
        float,
        option("--seconds", metavar="F", help="seconds of a row, about", number=float, has_default=True),
    ] = 3.0,
    batch_size: Annotated[
        str | None,
        option(
            "--batch-size",
            metavar="N",
            help="streams, of generation always 1; else as trained or scored",
            panel=SIZES,
        ),
    ] = None,
    tgt_len: Annotated[
        str | None, option("--tgt-len", metavar="N", help="segment; else as trained", panel=SIZES)
    ] = None,
    mem_len: Annotated[
        str | None, option("--mem-len", metavar="N", help="memory; else as trained", panel=SIZES)
    ] = None,
    device: DeviceFlag = "auto",
    precision: PrecisionFlag = "auto",
    attention: AttentionFlag = "auto",
    threads: ThreadsFlag = None,
    is_deterministic: DeterministicFlag = False,
) -> None:
    """Measure speed and memory of a model on this machine.

    Takes a run, which is only read, or a preset with fresh weights; times training, scoring, generation and
    attention alone in turn with the plain (eager) form of attention; and checks that all forms of attention
    that run here agree with it. Where one does not, the exit code is 1.
    """
    sizes = {"batch_size": batch_size, "tgt_len": tgt_len, "mem_len": mem_len}
    changes = settings_of.from_flags(sizes)
    n_vocab = setting("vocab_size", vocab_size)
    kinds = _parse_kinds(only)
    if run is not None and config_file is not None:
        raise UserError("--config: cannot go with --run; give one of them")
    if n_vocab is not None and config_file is None:
        raise UserError("--vocab-size: goes with --config only; a run has its own vocabulary")
    if repeats < _LEAST_REPEATS:
        raise UserError(f"--repeats: must be {_LEAST_REPEATS} or more; got {repeats}")
    if not 0 < seconds <= 3600:
        raise UserError(f"--seconds: must be above 0 and at most 3600; got {seconds:g}")
    machine = {
        "device": setting("device", device),
        "precision": setting("precision", precision),
        "attention": setting("attention", attention),
        "threads": setting("threads", threads),
        "is_deterministic": is_deterministic,
    }
    screen, out = Screen.of(sys.stderr, is_quiet=is_quiet), Screen.of(sys.stdout)
    with listening("stopping; once more to stop at once") as interruption:
        from txlcli.bench import Options

        options = Options(
            kinds=kinds,
            repeats=repeats,
            seconds=seconds,
            n_stream=None if batch_size is None else setting("batch_size", batch_size),
            **machine,
        )
        subject = _subject(run, config_file, n_vocab, changes)
        report = _measure(subject, options, screen, interruption)
        if is_json:
            out.write_text(json_text(_document(subject, report), indent=1).encode() + b"\n")
        else:
            _write_tables(subject, report, out)
    if report.disagreeing:
        names = report.disagreeing
        verb = "does" if len(names) == 1 else "do"
        raise Failed(f"attention: {', '.join(names)} {verb} not agree with eager; see the table")


def _parse_kinds(only: str | None) -> tuple[str, ...]:
    """Read `training,attention`."""
    if only is None:
        return _KINDS
    names = [name.strip() for name in only.split(",")]
    for name in names:
        if name not in _KINDS:
            raise UserError(f"--only: must be some of {','.join(_KINDS)}; got `{name[:20]}`")
    return tuple(names)


def _subject(
    run: str | None, config_file: str | None, n_vocab: int | None, changes: settings_of.Settings
) -> "Subject":
    from txlcli.bench import preset_subject, run_subject
    from txlcli.run import latest_run, open_run

    if config_file is None:
        return run_subject(latest_run() if run is None else open_run(run), changes)
    path = settings_of.find_preset(config_file)
    settings = settings_of.override(settings_of.read_settings(path), changes)
    if n_vocab is None and path.name == "config.yaml":
        n_vocab = _vocabulary_beside(path)
    return preset_subject(config_file, settings, n_vocab)


def _vocabulary_beside(path: Path) -> int | None:
    """Return the size of the vocabulary of the run whose settings a file holds; None: it is no run's."""
    from txlcli.run import Run, vocabulary_size

    run = Run(path.parent)
    is_run = (run.tokenizer_folder / "tokenizer.json").exists() or run.conversion_path.exists()
    return vocabulary_size(run) if is_run else None


def _measure(subject: "Subject", options: "Options", screen: Screen, interruption: Interruption) -> "Report":
    from contextlib import closing

    from txlcli.bench import Report, bench

    stages = Stages(screen)
    with closing(stages), closing(bench(subject, options)) as events:
        for event in events:
            if isinstance(event, Report):
                return event
            stages.show(event.stage, event.done, event.total, event.unit)
            interruption.leave()
    raise AssertionError("a measurement ends with its report")


def _document(subject: "Subject", report: "Report") -> dict[str, object]:
    """The document that --json prints."""
    environment = {key: report.environment[key] for key in ("processor", "torch", "threads")}
    return {
        "device": report.device,
        "precision": report.precision,
        "attention": report.attention,
        **environment,
        "deterministic": report.is_deterministic,
        "model": subject.name,
        "step": subject.step,
        "n_vocab": subject.n_vocab,
        "rows": [_row_document(row) for row in report.rows],
        "backends": [_comparison_document(compared) for compared in report.comparisons],
        "matmul_limits": report.matmul_limits,
        "excluded": _EXCLUDED,
        "notices": list(report.notices),
    }


def _row_document(row: "Measured") -> dict[str, object]:
    return {
        "what": row.what,
        "shape": {
            "n_stream": row.n_stream,
            "n_query": row.n_query,
            "tgt_len": row.tgt_len,
            "mem_len": row.mem_len,
        },
        "precision": row.precision,
        "attention": row.attention,
        "repeats": len(row.tokens_per_s),
        "steps_per_repeat": row.n_steps,
        "tokens_per_s_mean": row.tokens_per_s_mean,
        "tokens_per_s_sd": row.tokens_per_s_sd,
        "peak_memory_bytes": row.peak_memory_bytes,
        "ratio_to_eager": row.ratio_to_eager,
        "share_of_matmul_limit": row.share_of_matmul_limit,
        "flops_per_token": row.flops_per_token,
        "tokens_per_s": row.tokens_per_s,
        "eager_tokens_per_s": row.eager_tokens_per_s,
        "eager_peak_memory_bytes": row.eager_peak_memory_bytes,
    }


def _comparison_document(compared: "Comparison") -> dict[str, object]:
    errors = compared.errors
    return {
        "attention": compared.attention,
        "precision": compared.precision,
        "agrees": compared.agrees,
        "reason": compared.reason,
        "forward_error": None if errors is None else errors.forward,
        "forward_allowed": None if errors is None else errors.forward_allowed,
        "gradient_error": None if errors is None else errors.gradient,
        "gradient_allowed": None if errors is None else errors.gradient_allowed,
        "gradient_of": None if errors is None else errors.gradient_of,
        "tokens_per_s_mean": compared.tokens_per_s_mean,
        "ratio_to_eager": compared.ratio_to_eager,
    }


def _write_tables(subject: "Subject", report: "Report", out: Screen) -> None:
    """Print the tables, then what their numbers rest on."""
    table = bench_table(report.rows, out.width)
    out.draw(table)
    out.write("")
    if report.comparisons:
        out.draw(comparison_table(report.comparisons))
        out.write("")
    out.explain(_facts(subject, report, column_names(table)))


def _facts(subject: "Subject", report: "Report", shown: Sequence[str]) -> list[tuple[str, str]]:
    model, lengths, machine = subject.config.model, subject.lengths, report.environment
    weights = "fresh weights" if subject.step is None else f"step {subject.step:,}"
    size = f"{model.n_layer} layers of {model.d_model} · {model.n_head} heads of {model.d_head}"
    assumed = " (assumed; --vocab-size N)" if subject.is_assumed else ""
    threads = f"{machine['threads']} thread{'' if machine['threads'] == 1 else 's'}"
    limits = " · ".join(f"{name} {count_text(limit)}FLOP/s" for name, limit in report.matmul_limits.items())
    form = "" if report.attention == "mixed" else f" · attention {report.attention}"
    form += " · deterministic" if report.is_deterministic else ""
    kinds = dict.fromkeys(row.what.partition("+")[0] for row in report.rows)
    repeats = sorted({len(row.tokens_per_s) for row in report.rows})
    turns = f"{'–'.join(map(str, dict.fromkeys((repeats[0], repeats[-1]))))} repetitions"
    if any(row.eager_tokens_per_s for row in report.rows):
        turns += ", in turn with eager"
    deviation = "and standard deviation " if "± sd" in shown else ""
    unable = [(c.attention, c.reason) for c in report.comparisons if c.reason is not None]
    return [
        ("model", f"{subject.name} · {weights}"),
        ("", f"{size} · {model.position} · vocabulary {subject.n_vocab:,}{assumed}"),
        ("lengths", f"tgt_len {lengths.tgt_len:,} · mem_len {lengths.mem_len:,}, memory full"),
        ("machine", f"{report.device} · {machine['processor']} · {threads} · torch {machine['torch']}{form}"),
        *((kind, _HOW[kind]) for kind in kinds),
        ("tokens/s", f"mean {deviation}of {turns}; without {_EXCLUDED}"),
        ("× eager", "ratio of median speeds"),
        ("peak memory", _PEAK + ("; then eager's" if "eager peak" in shown else "")),
        *([("matmul limit", f"{_LIMIT}: {limits}")] if "of matmul limit" in shown else []),
        *([("agrees", _RULE)] if report.comparisons else []),
        *((name, f"cannot run here: {reason}") for name, reason in unable),
        *(("note" if i == 0 else "", notice) for i, notice in enumerate(report.notices)),
    ]


_RULE = (
    "error against float64, of the largest number: at most twice that of eager in the same type, three times "
    "for gradients, and one unit in the last place"
)
