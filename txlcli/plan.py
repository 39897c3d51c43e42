"""What nobody set: sizes, rates, lengths and machine, each by a named rule.

A rule is a pure function of what is known (`Known`: what was set, and what earlier rules found) and of facts
about text and machine. It takes what is set as given and fits the rest around it; what it finds is a plain
value whose origin is `plan: <why>`. Only the number of steps may rest on a measurement.

With a configuration file the file and the defaults of `config` decide, and the plan only finds device,
precision and attention, derives cut-offs that are `auto`, fits the streams to a short text, and turns a
length into steps.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from txlcli import UserError
from txlcli.config import (
    FLAG,
    LENGTHS,
    Config,
    SettingError,
    Settings,
    Sourced,
    blame,
    build,
    flatten,
    shaping_leaves,
    value_of,
)
from txlcli.tokenizer import default_vocab_size

MINUTES = 10.0
"""Length of a run of which nothing is said."""

EVALUATIONS = 20
"""Evaluations, and saves, of a run."""

EVAL_SHARE = 0.05
"""All periodic evaluations together cost at most this share of the training."""

LAST_EVAL_SHARE = 0.1
"""The last evaluation scores all held-out text if that is at most this share of the tokens trained on."""

SENTENCEPIECE_FROM_BYTES = 1_000_000
"""Below, a text has too few characters to learn pieces of words from."""

WORDS_PER_PIECE = 4
"""A vocabulary of words is this much larger than one of pieces, or too many words are unknown."""

ADAPTIVE_FROM = 8_000
"""Below, one softmax over the whole vocabulary costs little beside the rest of a model."""

CLUSTER_STARTS = (0.05, 0.15, 0.4)
"""Shares of the vocabulary at which a cluster begins.

Where words follow Zipf's law these take a sixth to an eighth of one softmax's multiply-adds; on a CPU the
loss was 7 to 12 times faster for vocabularies of 8,000 to 268,000, and three tenths or more faster than at
the published 7.5, 15 and 75 %. About two thirds of the text stay in the first cluster.
"""

WARMUP_SHARE = 0.05
"""The rate rises over this share of the steps."""

LOG_LINES = 200
"""Lines of metrics.jsonl for the steps of a run, about."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the plan may depend on.

    Attributes:
        n_bytes: Bytes of the corpus, held-out part included.
        n_characters: Characters of the training part; None: the corpus is raw bytes.
        alphabet_size: Different characters of the training part.
        script: Its commonest script, such as `latin` or `cjk`.
        device_kind: `cpu`, `cuda` or `mps`.
        has_bf16: The device multiplies bf16 in hardware.
        has_muon: This torch has the Muon optimizer.
        attention: The form of attention that runs best here.
        n_vocab: Size of the vocabulary; 0: not made yet.
        n_train_tokens: Tokens of the training part; 0: not encoded yet.
        n_valid_tokens: Held-out tokens.
    """

    n_bytes: int
    n_characters: int | None
    alphabet_size: int
    script: str
    device_kind: str
    has_bf16: bool
    has_muon: bool
    attention: str = "eager"
    n_vocab: int = 0
    n_train_tokens: int = 0
    n_valid_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a few steps on this machine took, in seconds.

    Attributes:
        step_s: One optimizer step.
        eval_s: What an evaluation takes whatever its length, its line of sampled text included.
        eval_token_s: Scoring one held-out token.
        save_s: One checkpoint.
        spent_s: From the start of the command to the end of the measurement, and what begins the training.
        compile_s: Compiling, which is part of `spent_s`; the training finds again what was compiled.
        compile_fault: Why compiling failed, so that steps were timed uncompiled; None: it did not.
    """

    step_s: float
    eval_s: float
    eval_token_s: float
    save_s: float
    spent_s: float
    compile_s: float = 0.0
    compile_fault: str | None = None


class Known:
    """What has been set or found so far, by setting name."""

    def __init__(self, settings: Settings):
        self.settings = dict(settings)

    def has(self, name: str) -> bool:
        """Say whether the setting has a value; `auto` and none leave it to the plan."""
        sourced = self.settings.get(name)
        return sourced is not None and sourced.value not in (None, "auto")

    def says(self, name: str) -> bool:
        """Say whether the setting was set, be it to none."""
        return name in self.settings

    def value(self, name: str) -> object:
        """Return what is known, else the setting's default."""
        return value_of(self.settings, name)

    def number(self, name: str) -> float:
        """Return a known number."""
        value = self.value(name)
        assert isinstance(value, int | float), name
        return value

    def count(self, name: str) -> int:
        """Return a known whole number."""
        value = self.value(name)
        assert isinstance(value, int), name
        return value

    def add(self, found: Mapping[str, Sourced]) -> None:
        """Take what a rule found where nothing is set."""
        self.settings.update({name: sourced for name, sourced in found.items() if not self.has(name)})


Rule = Callable[[Known, Facts], dict[str, Sourced]]


def _planned(why: str, **values: object) -> dict[str, Sourced]:
    return {name: Sourced(value, f"plan: {why}") for name, value in values.items()}


def is_planned(sourced: Sourced | None) -> bool:
    """Say whether a rule found the value, so that another may still change it."""
    return sourced is not None and sourced.origin.startswith("plan: ")


def plan_text(settings: Settings, facts: Facts, *, from_file: bool = False) -> Settings:
    """Find all that can be known before the text is encoded.

    Args:
        settings: What is set.
        facts: Text and machine.
        from_file: A configuration file decides; only device, precision and attention are found.

    Raises:
        UserError: what is set contradicts itself, so that no plan can fit.
    """
    known = Known(settings)
    for rule in FILE_RULES if from_file else TEXT_RULES:
        known.add(rule(known, facts))
    # Whatever is wrong is said before the text is encoded, which may take long.
    build(known.settings)
    return known.settings


def machine(known: Known, facts: Facts) -> dict[str, Sourced]:
    """Device, precision and attention."""
    found = _planned(f"the {facts.device_kind} of this machine", device=facts.device_kind)
    if facts.has_bf16 and facts.device_kind in ("cpu", "cuda"):
        found |= _planned(f"this {facts.device_kind} has bf16 units", precision="bf16")
    else:
        found |= _planned(f"this {facts.device_kind} is not known to gain from bf16", precision="fp32")
    return found | _planned(f"{facts.attention} runs best here", attention=facts.attention)


def tokenizer(known: Known, facts: Facts) -> dict[str, Sourced]:
    """Pieces of words where the text is long enough to learn them, else characters; never bytes unasked.

    A rule for newlines or spaces that is asked for decides instead: it needs words, or characters.
    """
    if known.value("newlines") == "eos":
        return _planned("newlines eos", tokenizer="word")
    if known.value("newlines") == "drop" or known.value("spaces") == "underscore":
        rule = "newlines drop" if known.value("newlines") == "drop" else "spaces underscore"
        return _planned(rule, tokenizer="char")
    if facts.n_bytes >= SENTENCEPIECE_FROM_BYTES:
        return _planned("1 MB of text or more", tokenizer="sentencepiece")
    return _planned("less than 1 MB of text", tokenizer="char")


def vocabulary(known: Known, facts: Facts) -> dict[str, Sourced]:
    """A bound that follows the length of the text, for pieces and words; none for other units."""
    if known.value("tokenizer") == "sentencepiece" and facts.n_characters is not None:
        size = default_vocab_size(facts.n_characters, facts.alphabet_size)
        why = f"for {facts.n_characters:,} characters, {facts.alphabet_size:,} of them different"
        return _planned(why, vocab_size=size)
    if known.value("tokenizer") == "word" and facts.n_characters is not None and not known.says("vocab_size"):
        size = default_vocab_size(WORDS_PER_PIECE * facts.n_characters, 0)
        return _planned(f"for {facts.n_characters:,} characters", vocab_size=size)
    return {}


@dataclass(frozen=True)
class Size:
    """A model, and the text it sees in a step, that suit a kind of device."""

    n_layer: int
    d_model: int
    d_head: int
    tgt_len: int
    batch_size: int


SIZES = {
    "cpu": Size(n_layer=4, d_model=160, d_head=40, tgt_len=64, batch_size=16),
    "cuda": Size(n_layer=6, d_model=384, d_head=64, tgt_len=256, batch_size=32),
}


def size_for(facts: Facts) -> Size:
    """Return the size for a device; one of unmeasured speed counts as a CPU."""
    return SIZES.get(facts.device_kind, SIZES["cpu"])


def depth_and_width(known: Known, facts: Facts) -> dict[str, Sourced]:
    """Layers and widths that suit the device; a width that the heads asked for divide."""
    size = size_for(facts)
    width, why = size.d_model, f"{size.n_layer} layers of {size.d_model} on a {facts.device_kind}"
    found = _planned(why, n_layer=size.n_layer)
    if known.has("n_head") and not known.has("d_head"):
        # Even for the sinusoids, and a multiple of the heads.
        unit = math.lcm(2, known.count("n_head"))
        width = max(1, round(size.d_model / unit)) * unit
        why = f"near {size.d_model}, for {known.count('n_head')} heads"
    return found | _planned(why, d_model=width) | _planned("pre-norm trains more steadily", norm="pre")


def heads(known: Known, facts: Facts) -> dict[str, Sourced]:
    """Heads of about the width that suits the device, which divide d_model; four times d_model within."""
    d_model, wanted = known.count("d_model"), size_for(facts).d_head
    if known.has("n_head"):
        n_head = known.count("n_head")
    elif known.has("d_head"):
        n_head = max(1, round(d_model / known.count("d_head")))
    else:
        divisors = [n for n in range(1, min(d_model, 1024) + 1) if d_model % n == 0]
        n_head = min(divisors, key=lambda n: abs(n - d_model / wanted))
    found = _planned(f"heads of about {wanted} in {d_model}", n_head=n_head)
    if d_model % n_head == 0:
        found |= _planned("d_model over n_head", d_head=d_model // n_head)
    return found | _planned("4 x d_model", d_inner=4 * d_model)


def text_lengths(known: Known, facts: Facts) -> dict[str, Sourced]:
    """Segments that suit the device, a memory as long as the segment, and distances known from training.

    With a longer memory than in training, keys stand at distances that no query has learned; they share the
    encoding of the farthest well-known one, so that none is new. Half of a segment's queries see farther
    than mem_len + tgt_len / 2. Only the relative encoding needs that: shaw's rows end at
    max_relative_position, and absolute positions know no distance.
    """
    size = size_for(facts)
    tgt_len = known.count("tgt_len") if known.has("tgt_len") else size.tgt_len
    mem_len = known.count("mem_len") if known.has("mem_len") else tgt_len
    found = _planned(f"segments on a {facts.device_kind}", tgt_len=tgt_len)
    found |= _planned("as long as the segment", mem_len=mem_len)
    if known.says("clamp_len") or known.value("position") != "relative":
        return found
    return found | _planned("farther is rare in training", clamp_len=max(tgt_len, mem_len + tgt_len // 2))


def streams(known: Known, facts: Facts) -> dict[str, Sourced]:
    """Streams that suit the device, in the equal parts asked for."""
    size, parts = size_for(facts).batch_size, known.count("accumulate")
    n_stream = -(-size // parts) * parts
    why = f"streams on a {facts.device_kind}" if n_stream == size else f"near {size}, in {parts} equal parts"
    return _planned(why, batch_size=n_stream)


LEARNING_RATES = {"muon": 0.004, "adamw": 0.004, "adam": 0.004, "sgd": 0.3}
"""Peak rates; with muon that of all but the matrices, which take ten times as much."""


def optimization(known: Known, facts: Facts) -> dict[str, Sourced]:
    """Muon where torch has it, else AdamW; a rate that falls to zero along a cosine."""
    optimizer = "muon" if facts.has_muon else "adamw"
    why = "torch has it" if facts.has_muon else "this torch has no muon"
    found = _planned(why, optimizer=optimizer)
    chosen = known.value("optimizer") if known.has("optimizer") else optimizer
    found |= _planned(f"for {chosen}", lr=LEARNING_RATES[str(chosen)])
    return found | _planned("cosine to zero", schedule="cosine", lr_end=0.0)


TEXT_RULES: tuple[Rule, ...] = (
    machine,
    tokenizer,
    vocabulary,
    depth_and_width,
    heads,
    text_lengths,
    streams,
    optimization,
)


FILE_RULES: tuple[Rule, ...] = (machine,)


def plan_vocabulary(settings: Settings, facts: Facts, *, from_file: bool = False) -> Settings:
    """Find what depends on the size that the vocabulary has come to.

    Args:
        settings: What is set and what `plan_text` found.
        facts: With the size of the vocabulary.
        from_file: A configuration file decides; only an `auto` of it, or of a flag, is settled.

    Raises:
        UserError: cut-offs that were set lie beyond the vocabulary; the place is the flag or file line.
    """
    known = Known(settings)
    if known.says("cutoffs") or not from_file:
        known.add(cutoffs(known, facts))
    try:
        build(known.settings).model.check_vocabulary(facts.n_vocab)
    except SettingError as error:
        raise blame(error, known.settings) from None
    return known.settings


def cutoffs(known: Known, facts: Facts) -> dict[str, Sourced]:
    """Clusters of words (Grave et al. 2017), whose ids are sorted by frequency, where they are many.

    Asked for (`auto`), also of other tokens. As many as leave each cluster a width: that of cluster i is
    d_embed / div_val^i.
    """
    if not known.says("cutoffs") and known.value("tokenizer") != "word":
        return _planned("clusters are for vocabularies of words", cutoffs=())
    if facts.n_vocab < ADAPTIVE_FROM:
        return _planned(f"no gain from clusters below a vocabulary of {ADAPTIVE_FROM:,}", cutoffs=())
    width = known.count("d_embed") if known.has("d_embed") else known.count("d_model")
    n_clusters = sum(width >= known.count("div_val") ** i for i in range(1, len(CLUSTER_STARTS) + 1))
    # Two figures, so that a few words more or less move no cluster.
    found = tuple(int(float(f"{share * facts.n_vocab:.1e}")) for share in CLUSTER_STARTS[:n_clusters])
    why = f"for a vocabulary of {facts.n_vocab:,}"
    if n_clusters < len(CLUSTER_STARTS):
        why += f"; div_val {known.count('div_val')} leaves no width for more"
    return _planned(why, cutoffs=found)


def plan_length(
    settings: Settings,
    facts: Facts,
    measure: Callable[[Settings], Measured] | None = None,
    *,
    from_file: bool = False,
) -> Settings:
    """Fit the streams to the text, turn the length into steps, and find what scales with it.

    Args:
        settings: What is set and what `plan_text` found.
        facts: With the numbers of tokens.
        measure: Times the settings on this machine; called once, and only for a length in minutes. None:
            such a length stays as it is, and what scales with the steps is left open.
        from_file: A configuration file decides, so that warm-up has its value or its default.
    """
    known = Known(settings)
    known.settings.update(fit_streams(known, facts))
    n_steps = _steps_of_epochs(known, facts)
    if n_steps is None and not known.has("steps"):
        n_steps = _steps_of_minutes(known, facts, measure)
        if n_steps is None:
            return known.settings
    if n_steps is not None:
        for name in LENGTHS:
            known.settings.pop(name, None)
        known.settings["steps"] = n_steps
    steps = known.count("steps")
    known.add(intervals(known, facts, steps))
    if not from_file:
        known.add(_planned(f"{WARMUP_SHARE:.0%} of the steps", warmup=int(WARMUP_SHARE * steps)))
    return known.settings


def fit_streams(known: Known, facts: Facts) -> dict[str, Sourced]:
    """Take fewer streams for a short text.

    At most as many as there are predictions; where the plan chose their number, few enough for each to fill
    its memory and a segment.
    """
    asked, n_targets = known.count("batch_size"), max(facts.n_train_tokens - 1, 1)
    least = (
        known.count("tgt_len") + known.count("mem_len") if is_planned(known.settings.get("batch_size")) else 1
    )
    n_stream = min(asked, max(n_targets // least, 1))
    if n_stream == asked:
        return {}
    why = f"the text has only {facts.n_train_tokens:,} tokens"
    parts = math.gcd(n_stream, known.count("accumulate"))
    fitted = _planned(why, batch_size=n_stream)
    return fitted if parts == known.count("accumulate") else fitted | _planned(why, accumulate=parts)


def steps_per_epoch(known: Known, facts: Facts) -> int:
    """Return the segments of the longest stream."""
    longest = -(-max(facts.n_train_tokens - 1, 1) // known.count("batch_size"))
    return -(-longest // known.count("tgt_len"))


def step_tokens(known: Known, facts: Facts) -> float:
    """Return the mean number of tokens that a step predicts."""
    return max(facts.n_train_tokens - 1, 1) / steps_per_epoch(known, facts)


def _steps_of_epochs(known: Known, facts: Facts) -> Sourced | None:
    if not known.has("epochs"):
        return None
    epochs, per_epoch = known.number("epochs"), steps_per_epoch(known, facts)
    return Sourced(max(1, round(epochs * per_epoch)), f"plan: {epochs:g} epochs of {per_epoch:,} steps")


def _steps_of_minutes(
    known: Known, facts: Facts, measure: Callable[[Settings], Measured] | None
) -> Sourced | None:
    known.add(_planned("nothing said of the length", minutes=MINUTES))
    if measure is None:
        return None
    measured = measure(dict(known.settings))
    minutes = known.number("minutes")
    steps = steps_within(60 * minutes - measured.spent_s, known, facts, measured)
    return Sourced(steps, f"plan: {minutes_text(minutes)} at {measured.step_s:.3g} s a step")


def minutes_text(minutes: float) -> str:
    """Write a length in minutes."""
    return f"{minutes:g} minute{'' if minutes == 1 else 's'}"


def steps_within(seconds: float, known: Known, facts: Facts, measured: Measured) -> int:
    """Return the largest number of steps that end in time with their evaluations and saves; at least 1."""
    low, high = 1, max(2, int(seconds / measured.step_s) + 2)
    while high - low > 1:
        middle = (low + high) // 2
        if run_s(middle, known, facts, measured) <= seconds:
            low = middle
        else:
            high = middle
    return low


def run_s(steps: int, known: Known, facts: Facts, measured: Measured) -> float:
    """Return the seconds that a run of so many steps takes from its first step on."""
    whole = Known(known.settings)
    whole.add(intervals(known, facts, steps))
    n_saves = 2 + steps // whole.count("save_every")
    total_s = steps * measured.step_s
    if facts.n_valid_tokens >= 2:
        n_evals = -(-steps // whole.count("eval_every"))
        n_slice = min(whole.count("eval_tokens"), facts.n_valid_tokens)
        n_scored = n_evals * n_slice
        if n_slice < facts.n_valid_tokens and last_eval_is_whole(
            facts.n_valid_tokens, int(steps * step_tokens(known, facts))
        ):
            n_scored += facts.n_valid_tokens
        total_s += n_evals * measured.eval_s + n_scored * measured.eval_token_s
        # A best step is saved though no save is due; most evaluations of a run are its best.
        n_saves = max(n_saves, 2 + n_evals)
    return total_s + n_saves * measured.save_s


def last_eval_is_whole(n_valid_tokens: int, n_trained_tokens: int) -> bool:
    """Say whether the last evaluation scores all held-out text: if that is little against the training."""
    return n_valid_tokens <= LAST_EVAL_SHARE * n_trained_tokens


def intervals(known: Known, facts: Facts, steps: int) -> dict[str, Sourced]:
    """How often to evaluate, save and log, and how much of the held-out text to score."""
    every = -(-steps // EVALUATIONS)
    found = _planned(f"{EVALUATIONS} a run", save_every=every)
    found |= _planned(f"about {LOG_LINES} lines a run", log_every=-(-steps // LOG_LINES))
    if facts.n_valid_tokens < 2:
        return found
    found |= _planned(f"{EVALUATIONS} a run", eval_every=every)
    n_evals = -(-steps // (known.count("eval_every") if known.has("eval_every") else every))
    affordable = int(EVAL_SHARE * steps * step_tokens(known, facts) / (n_evals * eval_cost(known)))
    if affordable >= facts.n_valid_tokens or known.says("eval_tokens"):
        return found | _planned("all held-out tokens", eval_tokens=facts.n_valid_tokens)
    why = f"evaluations cost at most {EVAL_SHARE:.0%} of the run"
    return found | _planned(why, eval_tokens=max(2, affordable))


def eval_cost(known: Known) -> float:
    """Return what scoring a token costs in tokens trained on, never too low.

    It has no backward pass; but on a CPU it is fp32 where training may be bf16.
    """
    return 2 / 3 if known.value("precision") in ("bf16", "fp16") else 1 / 3


def take_from_run(settings: Settings, config: Config, run: str) -> Settings:
    """Take from another run what its weights and tokenizer fix (`--init`).

    Args:
        settings: What is set for the new run.
        config: The settings of the run to start from.
        run: Its name, for origins and errors.

    Raises:
        UserError: something is set otherwise than the weights have it; the place is the flag or file line.
    """
    theirs = flatten(config)
    shaping = shaping_leaves(config.model)
    for item in shaping:
        ours = settings.get(item.name)
        if ours is None or ours.value in ("auto", theirs[item.name]):
            continue
        place = item.flag_for(ours.value) if ours.origin == FLAG else f"{ours.origin}: {item.name}"
        also = "" if item.shapes_weights else " and its learned positions"
        raise UserError(
            f"{place}: comes with --init{also}; got {_text_of(ours.value)}, "
            f"{run} has {_text_of(theirs[item.name])}; leave it out"
        )
    return settings | {item.name: Sourced(theirs[item.name], f"init: {run}") for item in shaping}


def _text_of(value: object) -> str:
    """A setting's value as its flag takes it."""
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def changed_by_plan(before: Settings, after: Settings) -> Iterator[str]:
    """Say what the plan took otherwise than it was set, one line each."""
    for name, was in before.items():
        now = after.get(name)
        if now is None or now.value == was.value or was.value in (None, "auto") or is_planned(was):
            continue
        why = now.origin.removeprefix("plan: ")
        yield f"{name}: {was.value} asked for, {now.value} taken: {why}"
