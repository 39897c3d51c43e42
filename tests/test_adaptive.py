import itertools
import math

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tolerance import assert_as_accurate, assert_same
from txlcli.adaptive import AdaptiveEmbedding, AdaptiveHead, Clusters

N_VOCAB = 19
CUTOFFS = [(), (5,), (3, 7, 12)]
WIKITEXT = {"n_vocab": 267_735, "cutoffs": (20_000, 40_000, 200_000), "proj_same_dim": True}


def clusters_of(**changes):
    sizes = {"n_vocab": N_VOCAB, "d_model": 16, "d_embed": 16, "cutoffs": (3, 7, 12)}
    return Clusters(**{**sizes, "div_val": 1, "proj_same_dim": True, **changes})


def build(clusters, *, tied=True, tie_projs="tail", dtype=torch.float64):
    torch.manual_seed(1)
    embed, head = AdaptiveEmbedding(clusters), AdaptiveHead(clusters, tied=tied, tie_projs=tie_projs)
    for parameter in (*embed.parameters(), *head.parameters()):
        parameter.data = torch.randn(parameter.shape, dtype=torch.float64).mul(0.4).to(dtype)
    return embed, head


def draw(n_streams=2, length=7, d_model=16, dtype=torch.float64):
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(n_streams, length, d_model, generator=generator, dtype=torch.float64).to(dtype)
    return hidden, torch.randint(N_VOCAB, (n_streams, length), generator=generator)


def each_setting():
    """Yield every combination; 64 / 4 = 16, so that a tail cluster may be as wide as d_model."""
    for cutoffs, div_val, d_embed in itertools.product(CUTOFFS, [1, 2, 4], [16, 64]):
        if d_embed < div_val ** len(cutoffs):  # no width left
            continue
        for same_dim, tied, tie_projs in itertools.product(
            [True, False], [True, False], ["none", "tail", "all"]
        ):
            clusters = clusters_of(cutoffs=cutoffs, div_val=div_val, d_embed=d_embed, proj_same_dim=same_dim)
            yield pytest.param(
                clusters,
                tied,
                tie_projs,
                id=f"{len(cutoffs)}-{div_val}-{d_embed}-{same_dim}-{tied}-{tie_projs}",
            )


class Oracle:
    """The module's formulas in Python floats, one word at a time, from the parameters' names and values."""

    def __init__(self, clusters, embed, head, tied, tie_projs):
        self.c, self.tied, self.tie_projs = clusters, tied, tie_projs
        self.embed = {name: value.tolist() for name, value in embed.named_parameters()}
        self.head = {name: value.tolist() for name, value in head.named_parameters()}
        self.starts = [0, *clusters.cutoffs, clusters.n_vocab]
        self.is_one = clusters.div_val == 1 or not clusters.cutoffs

    def cluster(self, word):
        return sum(word >= cutoff for cutoff in self.c.cutoffs)

    def row(self, values, word):
        i = self.cluster(word)
        return values["weight"][word] if self.is_one else values[f"weights.{i}"][word - self.starts[i]]

    def is_projected(self, i):
        width = self.c.d_embed // self.c.div_val**i
        return width != self.c.d_model or (not self.is_one and self.c.proj_same_dim)

    def input_projection(self, i):
        return self.embed[f"projections.{0 if self.is_one else i}"]

    def vector(self, word):
        """h(w) = P_i E_i[w]"""
        i, row = self.cluster(word), self.row(self.embed, word)
        return [dot(p, row) for p in self.input_projection(i)] if self.is_projected(i) else row

    def narrowed(self, h, i):
        """P_i' h"""
        if not self.is_projected(i):
            return h
        is_tied = self.tie_projs == "all" or (self.tie_projs == "tail" and i > 0)
        projection = self.input_projection(i) if is_tied else self.head[f"projections.{i}"]
        return [dot(column, h) for column in zip(*projection, strict=True)]

    def score(self, h, word):
        """One word's logit, within its cluster."""
        i = self.cluster(word)
        row = self.row(self.embed if self.tied else self.head, word)
        return dot(row, self.narrowed(h, i)) + self.head["bias"][word]

    def log_probs(self, h):
        n_tail = len(self.c.cutoffs)
        gates = [
            dot(self.head["cluster_weight"][i], self.narrowed(h, 0)) + self.head["cluster_bias"][i]
            for i in range(n_tail)
        ]
        scores = [self.score(h, word) for word in range(self.c.n_vocab)]
        first = log_sum_exp(scores[: self.starts[1]] + gates)
        out = []
        for word, score in enumerate(scores):
            i = self.cluster(word)
            if i == 0:
                out.append(score - first)
            else:
                inner = log_sum_exp(scores[self.starts[i] : self.starts[i + 1]])
                out.append(gates[i - 1] - first + score - inner)
        return out


def dot(a, b):
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def log_sum_exp(values):
    return math.log(math.fsum(math.exp(v) for v in values))


@pytest.mark.parametrize(("clusters", "tied", "tie_projs"), list(each_setting()))
def test_input_and_output_are_the_formulas(clusters, tied, tie_projs):
    embed, head = build(clusters, tied=tied, tie_projs=tie_projs)
    oracle = Oracle(clusters, embed, head, tied, tie_projs)
    words = torch.arange(N_VOCAB).flip(0)
    expected = torch.tensor([oracle.vector(word) for word in words.tolist()], dtype=torch.float64)
    assert_same(embed(words[None])[0], expected)

    hidden, _ = draw(1, 2)
    expected = torch.tensor([oracle.log_probs(h) for h in hidden[0].tolist()], dtype=torch.float64)
    actual = head.log_probs(hidden[0], embed)
    assert_same(actual, expected)
    assert_same(actual.exp().sum(-1), torch.ones(2, dtype=torch.float64))

    # Every word as a target, the cut-offs' neighbors among them, in no order.
    shuffled = torch.randperm(N_VOCAB)
    for h, row in zip(hidden[0], expected, strict=True):
        nll = head.nll(h.expand(1, N_VOCAB, -1), shuffled[None], embed)
        assert_same(nll[0], -row[shuffled])


@pytest.mark.parametrize(
    "targets",
    [
        [[4]],
        [[18], [0], [2]],
        [[0, 3, 7, 12], [2, 6, 11, 18]],  # the cut-offs and their neighbors
        [[13, 18, 12, 17, 13]],  # one cluster, not the head
        [[1, 0, 2]],  # the head alone
        [[5, 4, 5, 6, 0, 1, 18]],  # one cluster without targets
        [[], []],
    ],
)
@pytest.mark.parametrize("div_val", [1, 2])
def test_nll_is_the_log_probability_of_each_target_in_order(targets, div_val):
    embed, head = build(clusters_of(div_val=div_val))
    targets = torch.tensor(targets, dtype=torch.long)
    hidden, _ = draw(*targets.shape)
    expected = -head.log_probs(hidden, embed).gather(-1, targets[..., None])[..., 0]
    assert_same(head.nll(hidden, targets, embed), expected)


def test_permuted_tokens_give_permuted_results():
    embed, head = build(clusters_of(div_val=2))
    hidden, targets = draw(1, 40)
    order = torch.randperm(40)
    assert_same(
        head.nll(hidden[:, order], targets[:, order], embed), head.nll(hidden, targets, embed)[:, order]
    )
    assert_same(embed(targets[:, order]), embed(targets)[:, order])


@pytest.mark.parametrize("max_logits", [1, 6, 7, 13, 50, 10**9])
@pytest.mark.parametrize("cutoffs", CUTOFFS)
def test_parts_give_the_same_as_all_at_once(cutoffs, max_logits):
    embed, head = build(clusters_of(cutoffs=cutoffs))
    hidden, targets = draw(3, 11)
    parameters = (*embed.parameters(), *head.parameters())
    results = []
    for limit in (None, max_logits):
        nll = head.nll(hidden, targets, embed, limit)
        results.append((nll, *torch.autograd.grad(nll.square().sum(), parameters)))
    for whole, parts in zip(*results, strict=True):
        assert_same(parts, whole)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("half", [None, torch.bfloat16])
def test_one_cluster_is_the_plain_softmax_bit_for_bit(tied, half):
    embed, head = build(clusters_of(cutoffs=(), d_model=48, d_embed=48), tied=tied, dtype=torch.float32)
    hidden, targets = draw(3, 11, 48, torch.float32)
    hidden.requires_grad_()
    table = embed.weight if tied else head.weight

    with torch.autocast("cpu", dtype=half, enabled=half is not None):
        logits = F.linear(hidden, table, head.bias)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        actual = head.nll(hidden, targets, embed)
        assert torch.equal(head.log_probs(hidden, embed), logits.log_softmax(-1))
        assert torch.equal(embed(targets), F.embedding(targets, embed.weight))
    assert torch.equal(actual, expected)
    leaves = (hidden, table, head.bias)
    gradients = [torch.autograd.grad(nll.square().mean(), leaves) for nll in (actual, expected)]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("div_val", [1, 2])
@pytest.mark.parametrize("tied", [True, False])
def test_gradients_are_those_of_finite_differences(div_val, tied):
    clusters = clusters_of(n_vocab=7, cutoffs=(2, 4), d_model=3, d_embed=4, div_val=div_val)
    embed, head = build(clusters, tied=tied)
    tokens, targets = torch.tensor([[6, 0, 4, 1, 2]]), torch.tensor([[5, 1, 2, 0, 4]])

    def loss(*_):
        return head.nll(embed(tokens), targets, embed)

    assert torch.autograd.gradcheck(loss, (*embed.parameters(), *head.parameters()))


def dense_nll(embed, head, words, dtype):
    """Feed words and score them, from all the logits of a tied model; matrix products in `dtype`."""
    clusters, bounds = embed.clusters, [0, *embed.clusters.cutoffs, embed.clusters.n_vocab]
    one_table = embed.weight is not None
    tables = [
        embed.weight[i:j] if one_table else embed.weights[n] for n, (i, j) in enumerate(clusters.ranges)
    ]
    projections = [None if one_table else embed.projections[str(i)] for i in range(len(tables))]

    vectors = [
        table if p is None else F.linear(table.to(dtype), p.to(dtype)).to(table.dtype)
        for table, p in zip(tables, projections, strict=True)
    ]
    hidden = torch.cat(vectors)[words].to(dtype)

    if not one_table:
        projections[0] = head.projections["0"]
    tables[0] = torch.cat([tables[0], head.cluster_weight])
    biases = [head.bias[i:j] for i, j in clusters.ranges]
    biases[0] = torch.cat([biases[0], head.cluster_bias])
    log_probs = []
    for table, bias, p in zip(tables, biases, projections, strict=True):
        logits = F.linear(hidden if p is None else hidden @ p.to(dtype), table.to(dtype), bias.to(dtype))
        log_probs.append(logits.to(torch.promote_types(dtype, torch.float32)).log_softmax(-1))
    first = log_probs[0]
    tails = [first[..., bounds[1] + i, None] + tail for i, tail in enumerate(log_probs[1:])]
    return -torch.cat([first[..., : bounds[1]], *tails], -1).gather(-1, words[..., None])[..., 0]


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("div_val", [1, 2])
def test_half_precision_is_as_accurate_as_its_matrix_products(half, div_val):
    _, words = draw(5, 9)

    def with_gradients(nll, *modules):
        parameters = [p for module in modules for p in module.parameters()]
        return [nll.detach(), *torch.autograd.grad(nll.sum(), parameters)]

    parts = build(clusters_of(div_val=div_val), dtype=torch.float32)
    embed, head = parts
    with torch.autocast("cpu", dtype=half):
        hidden = embed(words)
        nll = head.nll(hidden, words, embed)
        assert hidden.dtype == nll.dtype == head.log_probs(hidden, embed).dtype == torch.float32
    fast = with_gradients(nll, *parts)
    plain = with_gradients(dense_nll(*parts, words, half), *parts)
    doubles = [part.double() for part in parts]
    exact = with_gradients(dense_nll(*doubles, words, torch.float64), *doubles)
    for n, values in enumerate(zip(fast, plain, exact, strict=True)):
        assert torch.isfinite(values[0]).all()
        assert_as_accurate(*values, factor=3 if n else 2)


def test_gradients_reach_the_output_of_the_targets_clusters_alone():
    embed, head = build(clusters_of(div_val=2), tied=False, tie_projs="none")
    hidden, _ = draw(1, 3)
    head.nll(hidden, torch.tensor([[1, 13, 18]]), embed).sum().backward()
    without = {"weights.1", "weights.2", "projections.1", "projections.2"}
    assert {name for name, p in head.named_parameters() if p.grad is None} == without
    assert head.bias.grad[3:12].count_nonzero() == 0
    assert all(p.grad is None for p in embed.parameters())


def test_gradients_reach_the_rows_of_the_tokens_alone():
    embed, _ = build(clusters_of(div_val=2))
    embed(torch.tensor([[4, 5, 4]])).sum().backward()
    assert [p.grad.count_nonzero(1).bool().tolist() for p in embed.weights] == [
        [False] * 3,
        [False, True, True, False],
        [False] * 5,
        [False] * 7,
    ]


def test_one_table_gets_gradients_in_the_rows_of_the_tokens_clusters_alone():
    embed, head = build(clusters_of())
    hidden, _ = draw(1, 2)
    head.nll(hidden, torch.tensor([[13, 18]]), embed).sum().backward()
    touched = embed.weight.grad.count_nonzero(dim=1) > 0
    assert touched.tolist() == [True] * 3 + [False] * 9 + [True] * 7


@pytest.mark.parametrize("div_val", [1, 2])
def test_nothing_is_written_into_what_is_handed_in(div_val):
    embed, head = build(clusters_of(div_val=div_val), tied=False)
    hidden, targets = draw()
    held = [hidden, targets, *embed.parameters(), *head.parameters()]
    before = [tensor.detach().clone() for tensor in held]
    versions = [tensor._version for tensor in held]
    embed(targets)
    head.nll(hidden, targets, embed, 20).sum().backward()
    head.log_probs(hidden, embed)
    assert versions == [tensor._version for tensor in held]
    assert all(torch.equal(a, b) for a, b in zip(before, held, strict=True))


def test_no_tokens_give_no_embeddings():
    for div_val in (1, 2):
        embed, _ = build(clusters_of(div_val=div_val))
        assert embed(torch.empty(2, 0, dtype=torch.long)).shape == (2, 0, 16)


NAMES = [
    # clusters, tied, tie_projs: what the embedding has, what the head has
    ({"cutoffs": ()}, True, "tail", {"weight": (19, 16)}, {"bias": (19,)}),
    ({"cutoffs": ()}, False, "tail", {"weight": (19, 16)}, {"weight": (19, 16), "bias": (19,)}),
    (
        {"cutoffs": (5,)},
        True,
        "all",
        {"weight": (19, 16)},
        {"bias": (19,), "cluster_weight": (1, 16), "cluster_bias": (1,)},
    ),
    (
        {"cutoffs": (5,), "d_embed": 8},
        True,
        "tail",
        {"weight": (19, 8), "projections.0": (16, 8)},
        {"bias": (19,), "cluster_weight": (1, 8), "cluster_bias": (1,), "projections.0": (16, 8)},
    ),
    (
        {"cutoffs": (5,), "d_embed": 8},
        False,
        "none",
        {"weight": (19, 8), "projections.0": (16, 8)},
        {
            "weight": (19, 8),
            "bias": (19,),
            "cluster_weight": (1, 8),
            "cluster_bias": (1,),
            "projections.0": (16, 8),
            "projections.1": (16, 8),
        },
    ),
    (
        {"cutoffs": (5, 9), "div_val": 2},
        True,
        "tail",
        {
            "weights.0": (5, 16),
            "weights.1": (4, 8),
            "weights.2": (10, 4),
            "projections.0": (16, 16),
            "projections.1": (16, 8),
            "projections.2": (16, 4),
        },
        {"bias": (19,), "cluster_weight": (2, 16), "cluster_bias": (2,), "projections.0": (16, 16)},
    ),
    (
        {"cutoffs": (5, 9), "div_val": 2, "proj_same_dim": False},
        False,
        "none",
        {
            "weights.0": (5, 16),
            "weights.1": (4, 8),
            "weights.2": (10, 4),
            "projections.1": (16, 8),
            "projections.2": (16, 4),
        },
        {
            "bias": (19,),
            "cluster_weight": (2, 16),
            "cluster_bias": (2,),
            "weights.0": (5, 16),
            "weights.1": (4, 8),
            "weights.2": (10, 4),
            "projections.1": (16, 8),
            "projections.2": (16, 4),
        },
    ),
]


@pytest.mark.parametrize(("changes", "tied", "tie_projs", "of_embed", "of_head"), NAMES)
def test_parameters_have_the_names_and_shapes_of_the_layout(changes, tied, tie_projs, of_embed, of_head):
    clusters = clusters_of(**changes)
    embed, head = build(clusters, tied=tied, tie_projs=tie_projs)
    assert {name: tuple(p.shape) for name, p in embed.named_parameters()} == of_embed
    assert {name: tuple(p.shape) for name, p in head.named_parameters()} == of_head
    assert clusters.n_embedding == sum(p.numel() for p in embed.parameters())


@pytest.mark.parametrize(
    ("sizes", "layers", "published"),
    [
        # n_layer, d_model, n_head x d_head, d_inner of the authors' models on WikiText-103, and their sizes
        ({"d_model": 410, "d_embed": 410, "div_val": 1}, (16, 410, 410, 2100), 151_107_538),
        ({"d_model": 1024, "d_embed": 1024, "div_val": 4}, (18, 1024, 1024, 4096), 285_170_506),
    ],
)
def test_the_authors_models_have_their_published_sizes(sizes, layers, published):
    clusters = Clusters(**WIKITEXT, **sizes)
    with torch.device("meta"):
        embed, head = AdaptiveEmbedding(clusters), AdaptiveHead(clusters, tied=True, tie_projs="tail")
    vocabulary = sum(p.numel() for part in (embed, head) for p in part.parameters())
    n_layer, d, he, f = layers
    one_layer = 5 * d * he + 2 * d * f + f + d + 4 * d  # q, k, v, r, o; feed-forward; two LayerNorms
    assert vocabulary + n_layer * one_layer + 2 * he == published


def test_sizes_derived_from_the_clusters():
    clusters = clusters_of(d_embed=64, div_val=4, proj_same_dim=False)
    assert clusters.ranges == ((0, 3), (3, 7), (7, 12), (12, 19))
    assert clusters.widths == (64, 16, 4, 1)
    assert [clusters.has_projection(i) for i in range(4)] == [True, False, True, True]
    assert clusters.widest == 7
    assert clusters_of(cutoffs=(9, 17)).widest == 11
    assert clusters_of(cutoffs=()).widest == 19
    assert clusters_of(cutoffs=()).macs == 19 * 16
    # 3 words and 3 clusters of width 64 and a projection; a thirtieth of each tail
    assert clusters.macs == 6 * 64 + 64 * 16 + round((4 * 16 + (5 + 16) * 4 + (7 + 16) * 1) / 10)


class Shapes(TorchDispatchMode):
    """Record the shape of every tensor that an operation newly makes."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            for tensor in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(tensor, torch.Tensor):
                    self.shapes.append(tuple(tensor.shape))
        return out

    def logits(self):
        """Return the shapes that are neither a matrix's of the model nor a bias's."""
        return {shape for shape in self.shapes if len(shape) == 2 and shape[1] != 8 and shape[0] > 1}


def test_memory_is_linear_in_the_clusters_touched():
    clusters = clusters_of(n_vocab=5000, cutoffs=(50, 150, 1100), d_model=8, d_embed=8)
    embed, head = build(clusters, dtype=torch.float32)
    targets = torch.cat([torch.arange(40), torch.tensor([60, 70, 2000, 3000, 4000])])[None]
    hidden, _ = draw(1, 45, 8, torch.float32)
    with Shapes() as made:
        head.nll(hidden, targets, embed).sum().backward()
    assert made.logits() == {(45, 53), (2, 100), (3, 3900)}
    # The table's gradient is joined once, from gradients of its slices.
    assert made.shapes.count((5000, 8)) == 1

    with Shapes() as made, torch.no_grad():
        head.nll(hidden, targets, embed, 2 * 3900)
    assert made.logits() == {(45, 53), (2, 100), (2, 3900)}  # 3,900 numbers for the third, left out as a bias
