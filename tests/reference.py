"""The papers in float64 with loops: every score indexes its distance; no shift, no cache, no batch tricks.

The oracle for the package's attention and model. It reads a model's weights and nothing else of it.
"""

import math

import torch
from torch import Tensor


def sinusoid(distance: int, d_model: int) -> Tensor:
    angles = [distance / 10000 ** (2 * t / d_model) for t in range(d_model // 2)]
    return torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles], dtype=torch.float64)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    u: Tensor,
    w: Tensor,
    first: Tensor | None = None,
    values: Tensor | None = None,
) -> Tensor:
    """Return the attended values of [B, H, T, E] queries; r[h, d] and values[h, d] belong to distance d."""
    n_streams, n_head, n_queries, d_head = q.shape
    n_memory = k.shape[2] - n_queries
    out = torch.zeros_like(q)
    for b in range(n_streams):
        for h in range(n_head):
            for i in range(n_queries):
                begin = 0 if first is None else int(first[b, i])
                keys = range(begin, n_memory + i + 1)
                scores = torch.stack(
                    [
                        ((q[b, h, i] + u[h]) @ k[b, h, j] + (q[b, h, i] + w[h]) @ r[h, n_memory + i - j])
                        / math.sqrt(d_head)
                        for j in keys
                    ]
                )
                weights = scores.softmax(dim=0)
                for n, j in enumerate(keys):
                    out[b, h, i] += weights[n] * v[b, h, j]
                    if values is not None:
                        out[b, h, i] += weights[n] * values[h, n_memory + i - j]
    return out


def log_probs(model: torch.nn.Module, config, tokens: list[int], *, lengths=None) -> Tensor:
    """Score one text from the definitions: [len(tokens), V] log-probabilities after each token.

    Memory is defined directly: the token at position t of a text lies in the segment that starts at
    s = t - t % tgt_len and sees the inputs of each layer from max(0, s - mem_len) on. With memory_start zeros
    it sees them from s - mem_len on, and those before the text are 0.

    With reset_memory_at_documents it sees only inputs of its own document. A document ends with the last id,
    and the token after that begins the next one; what is before the text belongs to the first.
    """
    lengths = lengths or model.lengths
    weights = {name: value.double() for name, value in model.state_dict().items()}
    n_head, d_head, d_model = config.n_head, config.d_head, config.d_model

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + config.norm_eps).sqrt()
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def linear(x: Tensor, name: str) -> Tensor:
        y = x @ weights[f"{name}.weight"].T
        return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y

    rows = [weights["embed.weight"][token] * math.sqrt(d_model) for token in tokens]
    for t in range(len(tokens)):
        if config.position == "sinusoid":  # Vaswani et al. 2017, sec. 3.5
            position = t if config.absolute_positions == "continue" else t % lengths.tgt_len
            rows[t] = rows[t] + sinusoid(position, d_model)
        if config.position == "learned":
            rows[t] = rows[t] + weights["positions.weight"][t % lengths.tgt_len]
    n_before = lengths.mem_len if lengths.memory_start == "zeros" else 0
    document_starts = [0]
    for t, token in enumerate(tokens):
        is_end = config.reset_memory_at_documents and token == len(weights["embed.weight"]) - 1
        document_starts.append(n_before + t + 1 if is_end else document_starts[-1])
    for n in range(config.n_layer):
        name = f"layers.{n}.attention"
        rows = [torch.zeros(d_model, dtype=torch.float64)] * n_before + rows
        seen = [norm(x, f"{name}.norm") if config.norm == "pre" else x for x in rows]
        k = [linear(x, f"{name}.k").view(n_head, d_head) for x in seen]
        v = [linear(x, f"{name}.v").view(n_head, d_head) for x in seen]
        outputs = []
        for t, x in list(enumerate(rows))[n_before:]:
            q = linear(seen[t], f"{name}.q").view(n_head, d_head)
            begin = max(0, t - (t - n_before) % lengths.tgt_len - lengths.mem_len)
            if lengths.same_length != "off":
                begin = max(begin, t + 1 - lengths.mem_len - (lengths.same_length == "mem_len+1"))
            begin = max(begin, document_starts[t - n_before])
            attended = []
            for h in range(n_head):
                scores, read = [], []
                for j in range(begin, t + 1):
                    distance = t - j if lengths.clamp_len is None else min(t - j, lengths.clamp_len)
                    key, value, extra = k[j][h], v[j][h], 0.0
                    if config.position == "relative":  # Dai et al. 2019, sec. 3.3: terms (a) + (c), (b) + (d)
                        u, w = weights["content_bias"], weights["position_bias"]
                        u, w = (u[n][h], w[n][h]) if config.untie_r else (u[h], w[h])
                        r = linear(sinusoid(distance, d_model), f"{name}.r").view(n_head, d_head)
                        extra = u @ key + q[h] @ r[h] + w @ r[h]
                    if config.position == "shaw":  # Shaw et al. 2018, eq. 3 and 4
                        row = min(distance, config.max_relative_position)
                        key = key + weights[f"{name}.r.keys"][h, row]
                        if config.shaw_values:
                            value = value + weights[f"{name}.r.values"][h, row]
                    scores.append((q[h] @ key + extra) / math.sqrt(d_head))
                    read.append(value)
                p = torch.stack(scores).softmax(dim=0)
                attended.append(sum(p[i] * value for i, value in enumerate(read)))
            y = x + linear(torch.cat(attended), f"{name}.o")
            ff = f"layers.{n}.feedforward"
            if config.norm == "pre":
                y = y + linear(linear(norm(y, f"{ff}.norm"), f"{ff}.inner").relu(), f"{ff}.outer")
            else:
                y = norm(y, f"{name}.norm")
                y = norm(y + linear(linear(y, f"{ff}.inner").relu(), f"{ff}.outer"), f"{ff}.norm")
            outputs.append(y)
        rows = outputs
    hidden = torch.stack(rows)
    if config.norm == "pre" and config.final_norm:
        hidden = norm(hidden, "norm")
    head = weights.get("head.weight", weights["embed.weight"])
    return (hidden @ head.T + weights["head.bias"]).log_softmax(dim=-1)
