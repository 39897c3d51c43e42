"""Compare the speed and memory of this package with two other implementations, on this machine's CPU.

    python tests/peers.py --authors FOLDER --hugging-face FOLDER

The peers are not part of this repository and nothing of theirs is copied: their code is imported from the
folders given.

    --authors       a checkout of the Transformer-XL authors' code (kimiyoung/transformer-xl), or its folder
                    `pytorch`; it runs on this interpreter's torch
    --hugging-face  a virtual environment with transformers 4.35, which has TransfoXL, or a folder to import
                    it from; torch should be the same version

What is compared, all in one model (6 layers, d_model 256, 4 heads, d_inner 1024, post-norm, 256 symbols):

    training    a whole step of Adam with clipping: 16 streams, T = M = 128, no dropout. Ours goes through
                `TrainState` and `optimize`, in fp32 and in the precision that `auto` picks
    memory      the peak of resident memory in that training, above that after `import torch`
    generation  one text, token by token, with memory full: ours through `generate`, Hugging Face by feeding
                each drawn token with `mems`. Also ours alone: speed late in a text over that early in it
    scoring     4 streams, T = 64, M = 640, with memory full: ours through `evaluate`, the authors' by the
                forward of their evaluation

Each side runs in a process of its own, which sets up and warms up once and then times blocks of work when
asked to: one block of each side after the other, round after round, so that what slows the machine for a
while slows all sides. A ratio is that of medians; beside it stand the least and greatest ratio of a round.
The comparison stops where sides differ in their number of weights or threads, or where a loss on the text
that all train on does not begin near ln 256 and fall. The whole takes some minutes on two cores.

Not collected by pytest: a timing is no test.
"""

import argparse
import dataclasses
import datetime
import functools
import itertools
import json
import math
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# No torch here: a child's peak of memory begins with what its parent held when it was started.

CLIP = 0.25
RATE = 0.001
N_VOCAB = 256
SECTIONS = ("training", "memory", "generation", "scoring")

Block = Callable[..., dict[str, Any]]


@dataclass(frozen=True)
class Settings:
    """The work of all sides."""

    n_layer: int = 6
    d_model: int = 256
    n_head: int = 4
    d_head: int = 64
    d_inner: int = 1024
    # Training.
    n_stream: int = 16
    tgt_len: int = 128
    mem_len: int = 128
    warm_steps: int = 4
    block_steps: int = 2
    # Scoring.
    score_streams: int = 4
    score_tgt_len: int = 64
    score_mem_len: int = 640
    score_tokens: int = 2_000_000
    score_steps: int = 8
    # Generation: lengths of memory, and tokens of Hugging Face in a block, so that it takes about a second.
    # Ours takes whole segments, since its time for a token depends on the place in the segment.
    mem_lens: tuple[int, ...] = (128, 512, 2048)
    peer_tokens: tuple[int, ...] = (96, 32, 8)
    early_token: int = 1_000
    late_token: int = 20_000
    constancy_segments: int = 5


SMALL = Settings(
    n_layer=2,
    d_model=32,
    d_head=8,
    d_inner=64,
    tgt_len=16,
    mem_len=16,
    score_tgt_len=8,
    score_mem_len=40,
    score_tokens=100_000,
    mem_lens=(16, 64, 128),
    early_token=100,
    late_token=1_000,
)


# The text, and the segments that the peers read from it


def write_text(path: Path, n_tokens: int) -> None:
    """Write ids that can be predicted in part: each is 1, 2, 3 or 5 above the one before, modulo 256."""
    steps = random.Random(0).choices((1, 2, 3, 5), k=n_tokens)
    path.write_bytes(bytes(total % N_VOCAB for total in itertools.accumulate(steps)))


def segments(path: Path, n_stream: int, tgt_len: int) -> Iterator[tuple[Any, Any]]:
    """Cut a text into parallel streams as our `Batches` does; yield inputs and targets, [B, T] each."""
    import torch

    ids = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()
    length = (len(ids) - 1) // n_stream
    inputs, targets = (ids[i : i + n_stream * length].view(n_stream, length) for i in (0, 1))
    for begin in range(0, length - tgt_len + 1, tgt_len):
        yield inputs[:, begin : begin + tgt_len], targets[:, begin : begin + tgt_len]


# Our side


def our_model_config(work: Settings) -> Any:
    """Return the settings of our model that make it the authors'."""
    from txlcli.config import ModelConfig

    return ModelConfig(
        n_layer=work.n_layer,
        d_model=work.d_model,
        n_head=work.n_head,
        d_head=work.d_head,
        d_inner=work.d_inner,
        tgt_len=work.tgt_len,
        mem_len=work.mem_len,
        norm="post",
    )


def our_text(path: Path) -> Any:
    """Open a text as the store of a run."""
    from txlcli.data import TokenStore

    return TokenStore(path, dtype="uint8", n_tokens=path.stat().st_size, n_vocab=N_VOCAB)


def our_model(work: Settings) -> tuple[Any, dict[str, Any]]:
    """Build a model for inference."""
    import torch

    from txlcli.model import TransformerXL

    torch.manual_seed(0)
    model = TransformerXL(our_model_config(work), N_VOCAB).eval()
    return model, {"n_weights": count_weights(model), "attention": model.use_attention("auto").name}


def our_training(work: Settings, text: Path, precision: str) -> tuple[dict[str, Any], Block]:
    """Set up our training."""
    import torch

    from txlcli.config import Config, MachineConfig, OptimConfig
    from txlcli.data import Batches
    from txlcli.device import choose_precision
    from txlcli.train.state import TrainState, optimize

    config = Config(
        model=our_model_config(work),
        optim=OptimConfig(batch_size=work.n_stream, optimizer="adam", lr=RATE, clip=CLIP),
        machine=MachineConfig(device="cpu"),
    )
    device = torch.device("cpu")
    chosen = choose_precision(precision, device, training=True)
    batches = Batches(our_text(text), work.n_stream, work.tgt_len)
    state = TrainState.start(config, batches, N_VOCAB, device=device, precision=chosen)

    def block(n_steps: int) -> dict[str, Any]:
        losses = [optimize(state, rate=RATE, clip=config.optim.clip).loss for _ in range(n_steps)]
        return {"n_tokens": n_steps * work.n_stream * work.tgt_len, "losses": losses}

    attention = state.model.use_attention(config.machine.attention).name
    return {"n_weights": count_weights(state.model), "precision": chosen, "attention": attention}, block


def our_generation(work: Settings, text: Path) -> tuple[dict[str, Any], Block]:
    """Set up our generation: any number of texts, each continued when its name is called."""
    from txlcli.generate import Piece, Prompt, SamplingOptions, generate

    model, facts = our_model(work)
    texts: dict[tuple[str, int], Iterator[Any]] = {}

    def begin(mem_len: int) -> Iterator[Any]:
        # Whole segments that fill the memory, so that a block of T tokens is a whole segment too.
        n_tokens = -(-mem_len // work.tgt_len) * work.tgt_len
        prompt = Prompt("", our_text(text).read(0, n_tokens))
        options = SamplingOptions(max_tokens=1 << 30, seed=0, mem_len=mem_len)
        events = generate(model, OneCharacter(), prompt, options)
        next(events)  # the first token comes out of the prompt
        return events

    def block(name: str, mem_len: int, n_tokens: int) -> dict[str, Any]:
        if (name, mem_len) not in texts:
            texts[name, mem_len] = begin(mem_len)
        for event in itertools.islice(texts[name, mem_len], n_tokens):
            assert isinstance(event, Piece)
            assert len(event.text) == 1
        return {"n_tokens": n_tokens}

    return facts, block


class OneCharacter:
    """As much of a tokenizer as generation asks for, with a character for each id.

    With the tokenizer of bytes a token can give no text, and then no event to count tokens by.
    """

    control_ids = ()

    def decode(self, ids: Sequence[int], after: int | None = None) -> bytes:
        return "".join(map(chr, ids)).encode()


def our_scoring(work: Settings, text: Path) -> tuple[dict[str, Any], Block]:
    """Set up our scoring: one evaluation of a long text, a few steps of which are a block."""
    from txlcli.evaluate import evaluate
    from txlcli.model import Lengths

    model, facts = our_model(work)
    lengths = Lengths(work.score_tgt_len, work.score_mem_len)
    events = evaluate(model, our_text(text), lengths=lengths, n_stream=work.score_streams)
    done = 0

    def block(n_steps: int) -> dict[str, Any]:
        nonlocal done
        n_before = done
        for event in itertools.islice(events, n_steps):
            done = event.done
        n_tokens = done - n_before
        assert n_tokens == n_steps * work.score_streams * work.score_tgt_len, "not the streams asked for"
        return {"n_tokens": n_tokens}

    # In its first steps an evaluation scores one stream, while the others warm up.
    block(lengths.warm_segments(work.n_layer))
    return facts, block


# The authors' code


def authors_model(work: Settings, folder: Path, *, tgt_len: int, mem_len: int) -> Any:
    """Import the authors' model and draw its weights as they do."""
    import torch

    inside = folder / "pytorch"
    folder = inside if (inside / "mem_transformer.py").exists() else folder
    sys.path[:0] = [str(folder), str(folder / "utils")]
    # It reads the version of CUDA at import, which a torch for CPUs does not have.
    torch.version.cuda = torch.version.cuda or "0.0"
    # Its masks are bytes, which torch no longer takes for masks.
    for name in ("masked_fill", "masked_fill_"):
        setattr(torch.Tensor, name, with_bool_mask(getattr(torch.Tensor, name)))
    from mem_transformer import MemTransformerLM

    torch.manual_seed(0)
    model = MemTransformerLM(
        N_VOCAB,
        work.n_layer,
        work.n_head,
        work.d_model,
        work.d_head,
        work.d_inner,
        dropout=0.0,
        dropatt=0.0,
        tgt_len=tgt_len,
        ext_len=0,
        mem_len=mem_len,
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias") and weight.ndim == 1:
                weight.zero_()
            else:
                weight.normal_(1.0 if "norm" in name else 0.0, 0.02)
    return model


def with_bool_mask(fill: Callable[..., Any]) -> Callable[..., Any]:
    """Let a method of tensors that takes a mask take one of bytes."""

    @functools.wraps(fill)
    def fill_by_bool(tensor: Any, mask: Any, value: Any) -> Any:
        return fill(tensor, mask.bool(), value)

    return fill_by_bool


def authors_training(work: Settings, text: Path, folder: Path) -> tuple[dict[str, Any], Block]:
    """Set up a training of the authors' model."""
    model = authors_model(work, folder, tgt_len=work.tgt_len, mem_len=work.mem_len)

    def forward(tokens: Any, targets: Any, memory: Any) -> tuple[Any, Any]:
        nll, *memory = model(tokens.t().contiguous(), targets.t().contiguous(), *memory)
        return nll.mean(), memory

    return peer_training(work, text, model, forward, memory=())


def authors_scoring(work: Settings, text: Path, folder: Path) -> tuple[dict[str, Any], Block]:
    """Set up scoring by the authors' model."""
    import torch

    model = authors_model(work, folder, tgt_len=work.score_tgt_len, mem_len=work.score_mem_len).eval()
    memory: Sequence[Any] = ()
    rest = segments(text, work.score_streams, work.score_tgt_len)

    def block(n_steps: int) -> dict[str, Any]:
        nonlocal memory
        total = 0.0
        with torch.no_grad():
            for tokens, targets in itertools.islice(rest, n_steps):
                nll, *memory = model(tokens.t().contiguous(), targets.t().contiguous(), *memory)
                total += nll.mean().item()
        return {"n_tokens": n_steps * work.score_streams * work.score_tgt_len}

    block(-(-work.score_mem_len // work.score_tgt_len) + 1)
    assert len(memory[0]) == work.score_mem_len
    return {"n_weights": count_weights(model)}, block


# Hugging Face's


def hugging_face_model(work: Settings) -> Any:
    """Build Hugging Face's model."""
    import warnings

    import torch

    warnings.simplefilter("ignore", FutureWarning)  # of torch, about how transformers registers its types
    from transformers import TransfoXLConfig, TransfoXLLMHeadModel

    torch.manual_seed(0)
    config = TransfoXLConfig(
        vocab_size=N_VOCAB,
        cutoffs=[],
        div_val=1,
        d_model=work.d_model,
        d_embed=work.d_model,
        n_head=work.n_head,
        d_head=work.d_head,
        d_inner=work.d_inner,
        n_layer=work.n_layer,
        mem_len=work.mem_len,
        clamp_len=-1,
        same_length=False,
        untie_r=False,
        dropout=0.0,
        dropatt=0.0,
        trainer_compatible=True,
    )
    return TransfoXLLMHeadModel(config)


def hugging_face_training(work: Settings, text: Path) -> tuple[dict[str, Any], Block]:
    """Set up a training of Hugging Face's model.

    Its loss shifts the labels inside a segment and so leaves out one target of each stream; the token is
    counted nevertheless.
    """
    model = hugging_face_model(work)

    def forward(tokens: Any, targets: Any, memory: Any) -> tuple[Any, Any]:
        out = model(tokens, mems=memory, labels=tokens)
        return out.loss, out.mems

    return peer_training(work, text, model, forward, memory=None)


def hugging_face_generation(work: Settings, text: Path) -> tuple[dict[str, Any], Block]:
    """Set up generation by Hugging Face's model, whose memory has all its rows from the first token on."""
    import torch

    model = hugging_face_model(work).eval()
    memory: dict[int, Any] = {}
    token = torch.zeros(1, 1, dtype=torch.int64)

    def block(name: str, mem_len: int, n_tokens: int) -> dict[str, Any]:
        nonlocal token
        model.reset_memory_length(mem_len)
        with torch.inference_mode():
            for _ in range(n_tokens):
                out = model(token, mems=memory.get(mem_len))
                memory[mem_len] = out.mems
                token = torch.multinomial(out.prediction_scores[:, -1].exp(), 1)
        assert len(out.mems[0]) == mem_len
        return {"n_tokens": n_tokens}

    return {"n_weights": count_weights(model)}, block


# What both peers share


def peer_training(
    work: Settings, text: Path, model: Any, forward: Callable[..., tuple[Any, Any]], memory: Any
) -> tuple[dict[str, Any], Block]:
    """Train a model in fp32 by plain Adam; `forward` returns the mean loss and the new memory."""
    import torch

    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    rest = segments(text, work.n_stream, work.tgt_len)

    def block(n_steps: int) -> dict[str, Any]:
        nonlocal memory
        losses = []
        for tokens, targets in itertools.islice(rest, n_steps):
            model.zero_grad()
            loss, memory = forward(tokens, targets, memory)
            loss.backward()
            losses.append(loss.item())
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
        return {"n_tokens": n_steps * work.n_stream * work.tgt_len, "losses": losses}

    return {"n_weights": count_weights(model), "precision": "fp32"}, block


def count_weights(model: Any) -> int:
    """Count the numbers in a model's parameters, tied ones once."""
    return sum(weight.numel() for weight in model.parameters())


# A child: one side of a comparison


def serve(job: dict[str, Any]) -> None:
    """Set up one side; then, for each line of stdin, run a block with its arguments and reply its seconds."""
    # Only replies go to the parent; whatever a library prints goes to stderr.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    if job["path"] is not None:
        sys.path.insert(0, job["path"])
    import torch

    torch.set_num_threads(job["threads"])
    rss_before = peak_rss()

    work, text = Settings(**job["work"]), Path(job["text"])
    setups: dict[str, Callable[[], tuple[dict[str, Any], Block]]] = {
        "training ours fp32": lambda: our_training(work, text, "fp32"),
        "training ours auto": lambda: our_training(work, text, "auto"),
        "training authors": lambda: authors_training(work, text, Path(job["folder"])),
        "training hugging-face": lambda: hugging_face_training(work, text),
        "generation ours": lambda: our_generation(work, text),
        "generation hugging-face": lambda: hugging_face_generation(work, text),
        "scoring ours": lambda: our_scoring(work, text),
        "scoring authors": lambda: authors_scoring(work, text, Path(job["folder"])),
    }
    facts, block = setups[job["name"]]()

    def reply(values: dict[str, Any]) -> None:
        replies.write(json.dumps({**values, "peak_bytes": peak_rss() - rss_before}) + "\n")
        replies.flush()

    reply({**facts, "torch": torch.__version__, "threads": torch.get_num_threads()})
    for line in sys.stdin:
        arguments = json.loads(line)
        begun = time.perf_counter()
        result = block(**arguments)
        reply({**result, "seconds": time.perf_counter() - begun})


def peak_rss() -> int:
    """Return the largest resident memory of this process so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# The parent


@dataclass
class Child:
    """A child process that has set up its side, and what it replied so far."""

    name: str
    process: "subprocess.Popen[str]"
    facts: dict[str, Any] = field(default_factory=dict)
    replies: list[dict[str, Any]] = field(default_factory=list)

    def read(self) -> dict[str, Any]:
        """Wait for the next reply."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"peers: {self.name}: ended early; its error stands above")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def run(self, **arguments: Any) -> dict[str, Any]:
        """Let the child run a block."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(arguments) + "\n")
        self.process.stdin.flush()
        self.replies.append(self.read())
        return self.replies[-1]

    @property
    def speeds(self) -> list[float]:
        """Tokens per second of each block since `replies` was emptied."""
        return [reply["n_tokens"] / reply["seconds"] for reply in self.replies]

    @property
    def peak_bytes(self) -> int:
        """Peak of resident memory up to the last block."""
        return max(reply["peak_bytes"] for reply in self.replies)


@dataclass(frozen=True)
class Row:
    """A line of the report: our numbers and a peer's, round by round, with the target for their ratio."""

    what: str
    unit: str
    ours: list[float]
    peer: list[float]
    floor: float
    goal: float
    is_less_better: bool = False

    @property
    def ratio(self) -> float:
        """Ratio of medians, ours over the peer's."""
        return statistics.median(self.ours) / statistics.median(self.peer)

    @property
    def ratios(self) -> list[float]:
        """Ratio of each round."""
        return [a / b for a, b in zip(self.ours, self.peer, strict=True)]

    @property
    def verdict(self) -> str:
        """What the ratio reaches."""
        sign = -1 if self.is_less_better else 1
        for name, target in (("goal", self.goal), ("floor", self.floor)):
            if sign * self.ratio >= sign * target:
                return name
        return "neither"


@dataclass
class Comparison:
    """The whole comparison: settings, children, and rows found so far."""

    options: argparse.Namespace
    work: Settings
    folder: Path
    rows: list[Row] = field(default_factory=list)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def start(self, name: str, text: Path, stack: ExitStack) -> Child:
        """Start a child and wait until it has set up; it ends with the stack."""
        say(f"setting up {name}")
        python, path = sys.executable, None
        if "ours" in name:
            path = str(Path(__file__).resolve().parents[1])
        elif "hugging-face" in name:
            given = self.options.hugging_face
            inside = given / "bin" / "python"
            python, path = (str(inside), None) if inside.exists() else (python, str(given))
        threads = self.options.threads
        job = {
            "name": name,
            "work": dataclasses.asdict(self.work),
            "text": str(text),
            "path": path,
            "folder": None if self.options.authors is None else str(self.options.authors),
            "threads": threads,
        }
        process = subprocess.Popen(
            [python, __file__, "--child", json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)},
        )
        child = Child(name, process)
        stack.callback(process.wait)
        stack.callback(process.kill)
        child.facts = self.facts[name] = child.read()
        say("  " + ", ".join(f"{key} {value}" for key, value in child.facts.items()))
        return child

    def refuse_unequal(self, children: Sequence[Child]) -> None:
        """Stop where children do not do the same work."""
        for what in ("n_weights", "threads"):
            if len({child.facts[what] for child in children}) > 1:
                listed = ", ".join(f"{child.name} {child.facts[what]:,}" for child in children)
                raise SystemExit(f"peers: {what} differ: {listed}")
        if len({child.facts["torch"] for child in children}) > 1:
            versions = ", ".join(f"{child.name} {child.facts['torch']}" for child in children)
            say(f"  NOTE: versions of torch differ: {versions}")

    def has(self, peer: str) -> bool:
        """Say whether a peer's folder was given."""
        return getattr(self.options, peer) is not None

    # The sections

    def training(self) -> None:
        """Compare training, and its memory if asked for."""
        work, has_time = self.work, "training" in self.options.only
        n_rounds = self.options.repeats if has_time else 1
        n_steps = work.warm_steps + n_rounds * work.block_steps
        text = self.folder / "training.ids"
        write_text(text, n_steps * work.n_stream * work.tgt_len + 1)
        names = ["ours fp32", "ours auto"]
        names += [peer for peer in ("authors", "hugging-face") if self.has(peer.replace("-", "_"))]
        with ExitStack() as stack:
            children = {name: self.start(f"training {name}", text, stack) for name in names}
            self.refuse_unequal(list(children.values()))
            first: dict[str, float] = {}
            for name, child in children.items():
                first[name] = child.run(n_steps=work.warm_steps)["losses"][0]
                child.replies.clear()
            in_turn(list(children.values()), n_rounds, lambda _: {"n_steps": work.block_steps})
            for name, child in children.items():
                last = child.replies[-1]["losses"][-1]
                child.facts["losses"] = [first[name], last]
                say(f"  {name}: loss {first[name]:.3f} at step 1, {last:.3f} at step {n_steps}")
                # With tied embeddings the token just read begins more probable than others: up to 0.5 above.
                if abs(first[name] - math.log(N_VOCAB)) > 1 or not last < first[name]:
                    raise SystemExit(f"peers: {name}: its loss does not begin near ln {N_VOCAB} and fall")
        precision = children["ours auto"].facts["precision"]
        auto = f"auto ({precision})" if precision == "bf16" else f"auto ({precision}: no bf16 units here)"
        targets = [
            ("ours fp32", "authors", "fp32, authors", 1.5, 1.7),
            ("ours fp32", "hugging-face", "fp32, Hugging Face", 2.4, 2.7),
            ("ours auto", "authors", f"{auto}, authors fp32", 2.8, 3.4),
        ]
        for ours, peer, what, floor, goal in targets:
            if has_time and peer in children:
                speeds = children[ours].speeds, children[peer].speeds
                self.rows.append(Row(f"training {what}", "tokens/s", *speeds, floor, goal))
        if "memory" in self.options.only and "authors" in children:
            for ours, what in (("ours fp32", "fp32"), ("ours auto", auto)):
                gigabytes = [[children[name].peak_bytes / 1e9] for name in (ours, "authors")]
                row = Row(f"memory {what}, authors fp32", "GB", *gigabytes, 0.8, 0.5, is_less_better=True)
                self.rows.append(row)

    def generation(self) -> None:
        """Compare generation, then our speed late in a text with that early in it."""
        work = self.work
        text = self.folder / "prompt.ids"
        write_text(text, max(work.mem_lens) + work.tgt_len)
        with ExitStack() as stack:
            ours = self.start("generation ours", text, stack)
            if self.has("hugging_face"):
                peer = self.start("generation hugging-face", text, stack)
                self.refuse_unequal([ours, peer])
                targets = ((2.5, 4.0), (6.0, 10.0), (25.0, 40.0))
                for mem_len, n_peer, target in zip(work.mem_lens, work.peer_tokens, targets, strict=True):
                    n_tokens = {ours.name: work.tgt_len, peer.name: n_peer}

                    def arguments(
                        child: Child, mem_len: int = mem_len, n_tokens: dict[str, int] = n_tokens
                    ) -> dict[str, Any]:
                        return {"name": "speed", "mem_len": mem_len, "n_tokens": n_tokens[child.name]}

                    in_turn([ours, peer], 1, arguments)
                    for child in (ours, peer):
                        child.replies.clear()
                    in_turn([ours, peer], self.options.repeats, arguments)
                    what = f"generation mem_len {mem_len}, Hugging Face"
                    self.rows.append(Row(what, "tokens/s", ours.speeds, peer.speeds, *target))
            self.constancy(ours)

    def constancy(self, ours: Child) -> None:
        """Time whole segments around an early and a late token of one text.

        In the second row the early tokens are those of another text, whose segments take turns with the late
        ones of the first: seconds lie between the two instead of the time of the whole text.
        """
        work = self.work
        n_segments, n_around = work.constancy_segments, work.constancy_segments // 2
        early, late = (n // work.tgt_len - n_around for n in (work.early_token, work.late_token))
        say(f"generating {work.late_token:,} tokens")

        def go_on(name: str, n_segments: int) -> list[float]:
            ours.replies.clear()
            for _ in range(n_segments):
                ours.run(name=name, mem_len=work.mem_len, n_tokens=work.tgt_len)
            return ours.speeds

        go_on("first", early)
        early_speeds = go_on("first", n_segments)
        go_on("first", late - early - n_segments)
        go_on("second", early)
        pairs = [(go_on("first", 1)[0], go_on("second", 1)[0]) for _ in range(n_segments)]
        late_speeds, early_in_turn = (list(speeds) for speeds in zip(*pairs, strict=True))
        what = f"generation at token {work.late_token:,} over {work.early_token:,}"
        self.rows.append(Row(f"{what}, one text", "tokens/s", late_speeds, early_speeds, 0.95, 1.0))
        self.rows.append(Row(f"{what}, in turn", "tokens/s", late_speeds, early_in_turn, 0.95, 1.0))

    def scoring(self) -> None:
        """Compare scoring."""
        if not self.has("authors"):
            return
        work = self.work
        text = self.folder / "scoring.ids"
        write_text(text, work.score_tokens)
        with ExitStack() as stack:
            ours, peer = (self.start(f"scoring {name}", text, stack) for name in ("ours", "authors"))
            self.refuse_unequal([ours, peer])
            in_turn([ours, peer], 1, lambda _: {"n_steps": 1})
            for child in (ours, peer):
                child.replies.clear()
            in_turn([ours, peer], self.options.repeats, lambda _: {"n_steps": work.score_steps})
            what = f"scoring T {work.score_tgt_len}, mem_len {work.score_mem_len}, authors"
            self.rows.append(Row(what, "tokens/s", ours.speeds, peer.speeds, 1.8, 2.4))


def in_turn(children: Sequence[Child], n_rounds: int, arguments: Callable[[Child], dict[str, Any]]) -> None:
    """Let each child run a block, one after the other, `n_rounds` times."""
    for n in range(n_rounds):
        speeds = []
        for child in children:
            child.run(**arguments(child))
            speeds.append(f"{child.name} {child.speeds[-1]:,.1f}")
        say(f"  round {n + 1} of {n_rounds}: {', '.join(speeds)} tokens/s")


def say(text: str) -> None:
    """Tell how far we are."""
    sys.stderr.write(text + "\n")


def processor() -> str:
    """Name this machine's processor."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def table(rows: Sequence[Row]) -> str:
    """Lay out the rows."""
    lines = [["", "ours", "peer", "", "ratio", "rounds", "floor", "goal", "reached"]]
    for row in rows:
        digits = ",.2f" if row.unit == "GB" else ",.1f" if statistics.median(row.peer) < 100 else ",.0f"
        lines.append(
            [
                row.what,
                format(statistics.median(row.ours), digits),
                format(statistics.median(row.peer), digits),
                row.unit,
                f"{row.ratio:.2f}",
                f"{min(row.ratios):.2f}-{max(row.ratios):.2f}",
                f"{row.floor:g}",
                f"{row.goal:g}",
                row.verdict,
            ]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    is_left = (True, False, False, True, False, False, False, False, True)
    return "\n".join(
        "  ".join(
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(line, widths, is_left, strict=True)
        ).rstrip()
        for line in lines
    )


def compare(options: argparse.Namespace) -> None:
    """Run the sections asked for, and report."""
    work = SMALL if options.small else Settings()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        comparison = Comparison(options, work, Path(folder))
        if {"training", "memory"} & set(options.only):
            comparison.training()
        for section in ("generation", "scoring"):
            if section in options.only:
                getattr(comparison, section)()
    facts = comparison.facts
    found = {
        "machine": {
            "processor": processor(),
            "cores": os.cpu_count(),
            "threads": options.threads,
            "torch": sorted({fact["torch"] for fact in facts.values()}),
            "attention": sorted({fact["attention"] for fact in facts.values() if "attention" in fact}),
            "date": datetime.date.today().isoformat(),
            "rounds": options.repeats,
            "elapsed_s": round(time.monotonic() - begun),
        },
        "work": dataclasses.asdict(work),
        "children": facts,
        "rows": [
            {**dataclasses.asdict(row), "ratio": row.ratio, "ratios": row.ratios, "reached": row.verdict}
            for row in comparison.rows
        ],
    }
    listed = "; ".join(
        f"{key} {', '.join(value) if isinstance(value, list) else value}"
        for key, value in found["machine"].items()
    )
    sys.stdout.write(f"{listed}\n\n{table(comparison.rows)}\n")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Read the command line; in a child, serve the parent."""
    parser = argparse.ArgumentParser(description="Compare speed and memory with two peers, on the CPU.")
    parser.add_argument("--authors", type=Path, metavar="FOLDER", help="checkout of the authors' code")
    parser.add_argument(
        "--hugging-face", type=Path, metavar="FOLDER", help="environment of transformers 4.35"
    )
    parser.add_argument("--repeats", type=int, default=9, metavar="N", help="rounds (default: %(default)s)")
    parser.add_argument("--only", default=",".join(SECTIONS), metavar="LIST", help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers here")
    parser.add_argument("--small", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        serve(json.loads(options.child))
        return
    options.only = options.only.split(",")
    for section in options.only:
        if section not in SECTIONS:
            parser.error(f"--only: no section is called {section!r}; choose from {', '.join(SECTIONS)}")
    if options.repeats < 1 or options.threads < 1:
        parser.error("--repeats and --threads must be 1 or more")
    if options.authors is None and options.hugging_face is None:
        parser.error("give --authors, --hugging-face or both")
    for folder in (options.authors, options.hugging_face):
        if folder is not None and not folder.is_dir():
            parser.error(f"{folder}: no such folder")
    compare(options)


if __name__ == "__main__":
    main()
