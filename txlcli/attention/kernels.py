# mypy: ignore-errors
"""Triton kernels of the attention operation: two forward passes, the two halves of the backward pass.

    score[i, j] = ((q_i + u) . k_j + (q_i + w) . r_{i-j}) / sqrt(E)              Dai et al. 2019, sec. 3.3
    p[i, j] = softmax(score[i])_j,   out_i = sum_j p[i, j] v_j

Each kernel walks over blocks of scores and never holds all of them (Dao et al. 2022, FlashAttention); the
softmax is a running maximum and sum, in powers of 2. Query i stands at key M + i and sees the keys first[i]
to M + i. `fused` prepares QU = q + u and QW = q + w in the type of q.

The position scores are a product by distance, X[i, c] = (q_i + w) . r for the distance S - 1 - c, and score
(i, j) needs column c = T - 1 - i + j of it. There are two ways to meet that:

- *workspace*: the host multiplies, with `width` >= S numbers from row to row. Then score (i, j) needs the
  number at T - 1 + i (width - 1) + j: the same memory, read with rows one number closer, is aligned with the
  keys. Backward writes d(score) in the same way. For one query distances and keys are one to one, so nothing
  is written twice and atomics are not needed.
- *gather*: a block of B queries and B keys meets 2B - 1 distances. With D = i0 + M - j0, the distance of its
  first query and key, let FAR[a, c] be the scores of the distances D + c and NEAR[a, c] those of D - B + c:

      X[a, b] = Y[a, (a - b) mod B],   Y[a, c] = FAR[a, c] if c <= a else NEAR[a, c],

  one selection and one rotation inside each row. The D of the next block of keys is smaller by B, so its FAR
  is this block's NEAR: each block costs one more product, and no memory.

Rows may lie anywhere (strides of stream, head and row); the E numbers of a row are neighbors, a multiple of
16. Blocks have `BLOCK_E` columns, E up to a power of two, by masks that vanish where E is one. Keys that a
query does not see count -1e38, far below where the running maximum starts: a block with no visible key adds
exp2(-huge) = 0, and infinities never meet.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
HIDDEN = tl.constexpr(-1e38)
LOWEST = tl.constexpr(-1e30)

# Sizes that differ from call to call; to specialize on their divisibility would only mean to compile again.
VARYING = ["n_streams", "n_queries", "n_keys", "width"]


@triton.jit
def load_rows(rows, start, n_rows, stride, BLOCK: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """Return rows start, start + 1, ... as a block [BLOCK, BLOCK_E]; 0 beyond the last row and column."""
    row = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, BLOCK_E)[None, :]
    inside = start + row < n_rows
    if E < BLOCK_E:
        inside = inside & (column < E)
    rows += tl.cast(start, tl.int64) * stride
    return tl.load(rows + (row * stride + column), mask=inside, other=0.0)


@triton.jit
def store_rows(
    block, rows, start, n_rows, stride, BLOCK: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr
):
    """Write a block [BLOCK, BLOCK_E] to rows start, start + 1, ... in their type."""
    row = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, BLOCK_E)[None, :]
    inside = start + row < n_rows
    if E < BLOCK_E:
        inside = inside & (column < E)
    rows += tl.cast(start, tl.int64) * stride
    tl.store(rows + (row * stride + column), block.to(rows.dtype.element_ty), mask=inside)


@triton.jit
def load_distances(R, nearest, n_keys, stride, BLOCK: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """Return the keys of the distances nearest, nearest + 1, ... as a block; 0 for those that are none.

    `R` points at the row of the farthest distance, S - 1.
    """
    step = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, BLOCK_E)[None, :]
    inside = (nearest + step >= 0) & (nearest + step < n_keys)
    if E < BLOCK_E:
        inside = inside & (column < E)
    R += tl.cast(n_keys - 1 - nearest, tl.int64) * stride
    return tl.load(R + (column - step * stride), mask=inside, other=0.0)


@triton.jit
def load_first(FIRST, query, n_queries, n_keys, HAS_FIRST: tl.constexpr):
    """Return the first key that each query may see; queries that do not exist see none."""
    if HAS_FIRST:
        first = tl.load(FIRST + query, mask=query < n_queries, other=n_keys)
    else:
        first = tl.zeros_like(query)
    return first


@triton.jit
def last_key(query, n_queries, n_keys):
    """Return the last key that each query sees; queries that do not exist see none."""
    return tl.where(query < n_queries, query + (n_keys - n_queries), -1)


@triton.jit
def is_seen(key, first, last, HAS_FIRST: tl.constexpr):
    """Return which keys each query sees, [queries, keys]."""
    seen = key[None, :] <= last[:, None]
    if HAS_FIRST:
        seen = seen & (key[None, :] >= first[:, None])
    return seen


@triton.jit
def load_aligned(BY_DISTANCE, query, j0, n_queries, width, BLOCK_N: tl.constexpr):
    """Return the position scores of the keys j0, j0 + 1, ... for these queries.

    For a key that is not seen it returns any number, or NaN; no mask is needed, since even that lies in the
    workspace or its slack.
    """
    row = tl.minimum(query, n_queries - 1).to(tl.int64)[:, None] * (width - 1)
    return tl.load(BY_DISTANCE + j0 + (row + tl.arange(0, BLOCK_N)[None, :])).to(tl.float32)


@triton.jit
def store_aligned(block, D_BY_DISTANCE, query, j0, seen, width, BLOCK_N: tl.constexpr):
    """Write what belongs to the keys j0, j0 + 1, ... at their distances, where a key is seen."""
    row = query.to(tl.int64)[:, None] * (width - 1)
    tl.store(D_BY_DISTANCE + j0 + (row + tl.arange(0, BLOCK_N)[None, :]), block, mask=seen)


@triton.jit
def softmax_step(score, seen, v, top, total, out, SCALE: tl.constexpr, PRECISION: tl.constexpr):
    """Take one block of scores into the running softmax; return the new maximum, sum and weighted values."""
    score = tl.where(seen, score, HIDDEN)
    new_top = tl.maximum(top, tl.max(score, 1) * (SCALE * LOG2E))
    p = tl.exp2(score * (SCALE * LOG2E) - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(p, 1)
    out = tl.dot(p.to(v.dtype), v, out * shrink[:, None], input_precision=PRECISION)
    return new_top, total, out


@triton.jit(do_not_specialize=VARYING)
def attend_workspace(
    QU, qu_stream, qu_head, qu_row,
    K, k_stream, k_head, k_row,
    V, v_stream, v_head, v_row,
    BY_DISTANCE,
    FIRST, first_stream,
    OUT, out_stream, out_head, out_row,
    LSE, lse_stream, lse_head,
    n_streams, n_queries, n_keys, width,
    SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    HAS_LSE: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend from one block of queries of one head; position scores come from a workspace, if there are any.

    They are BY_DISTANCE, [H, B, T, width]. LSE receives log2(sum_j exp(score_ij)), [B, H, T].
    """
    n_blocks = tl.cdiv(n_queries, BLOCK_M)
    head_and_stream = tl.program_id(0) // n_blocks
    # The last queries see the most keys; started first, they do not finish alone.
    i0 = (n_blocks - 1 - tl.program_id(0) % n_blocks) * BLOCK_M
    head, stream = (head_and_stream // n_streams).to(tl.int64), (head_and_stream % n_streams).to(tl.int64)
    QU += stream * qu_stream + head * qu_head
    K += stream * k_stream + head * k_head
    V += stream * v_stream + head * v_head
    OUT += stream * out_stream + head * out_head

    n_memory = n_keys - n_queries
    query = i0 + tl.arange(0, BLOCK_M)
    qu = load_rows(QU, i0, n_queries, qu_row, BLOCK_M, E, BLOCK_E)
    if HAS_BIAS:
        BY_DISTANCE += head_and_stream.to(tl.int64) * n_queries * width + n_queries - 1
    if HAS_FIRST:
        FIRST += stream * first_stream
    first = load_first(FIRST, query, n_queries, n_keys, HAS_FIRST)
    last = last_key(query, n_queries, n_keys)
    start = tl.maximum(tl.min(first, 0), 0) // BLOCK_N * BLOCK_N if HAS_FIRST else 0
    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    for j0 in range(start, tl.minimum(n_keys, i0 + BLOCK_M + n_memory), BLOCK_N):
        k = load_rows(K, j0, n_keys, k_row, BLOCK_N, E, BLOCK_E)
        v = load_rows(V, j0, n_keys, v_row, BLOCK_N, E, BLOCK_E)
        score = tl.dot(qu, tl.trans(k), input_precision=PRECISION)
        if HAS_BIAS:
            score += load_aligned(BY_DISTANCE, query, j0, n_queries, width, BLOCK_N)
        seen = is_seen(j0 + tl.arange(0, BLOCK_N), first, last, HAS_FIRST)
        top, total, out = softmax_step(score, seen, v, top, total, out, SCALE, PRECISION)
    store_rows(out / total[:, None], OUT, i0, n_queries, out_row, BLOCK_M, E, BLOCK_E)
    if HAS_LSE:
        LSE += stream * lse_stream + head * lse_head
        tl.store(LSE + query, top + tl.log2(total), mask=query < n_queries)


@triton.jit(do_not_specialize=VARYING)
def attend_gather(
    QU, qu_stream, qu_head, qu_row,
    QW, qw_stream, qw_head, qw_row,
    K, k_stream, k_head, k_row,
    V, v_stream, v_head, v_row,
    R, r_head, r_row,
    FIRST, first_stream,
    OUT, out_stream, out_head, out_row,
    LSE, lse_stream, lse_head,
    n_streams, n_queries, n_keys,
    SCALE: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    HAS_LSE: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend from one block of queries of one head; position scores are made block by block and rotated."""
    n_blocks = tl.cdiv(n_queries, BLOCK)
    head_and_stream = tl.program_id(0) // n_blocks
    # The last queries see the most keys; started first, they do not finish alone.
    i0 = (n_blocks - 1 - tl.program_id(0) % n_blocks) * BLOCK
    head, stream = (head_and_stream // n_streams).to(tl.int64), (head_and_stream % n_streams).to(tl.int64)
    QU += stream * qu_stream + head * qu_head
    QW += stream * qw_stream + head * qw_head
    K += stream * k_stream + head * k_head
    V += stream * v_stream + head * v_head
    R += head * r_head
    OUT += stream * out_stream + head * out_head

    n_memory = n_keys - n_queries
    query = i0 + tl.arange(0, BLOCK)
    qu = load_rows(QU, i0, n_queries, qu_row, BLOCK, E, BLOCK_E)
    qw = load_rows(QW, i0, n_queries, qw_row, BLOCK, E, BLOCK_E)
    if HAS_FIRST:
        FIRST += stream * first_stream
    first = load_first(FIRST, query, n_queries, n_keys, HAS_FIRST)
    last = last_key(query, n_queries, n_keys)
    start = tl.maximum(tl.min(first, 0), 0) // BLOCK * BLOCK if HAS_FIRST else 0
    row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    rotation = (row - column) & (BLOCK - 1)
    corner = i0 + n_memory - start
    r = load_distances(R, corner, n_keys, r_row, BLOCK, E, BLOCK_E)
    far = tl.dot(qw, tl.trans(r), input_precision=PRECISION)
    top = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    out = tl.zeros([BLOCK, BLOCK_E], tl.float32)
    for j0 in range(start, tl.minimum(n_keys, i0 + BLOCK + n_memory), BLOCK):
        r = load_distances(R, i0 + n_memory - j0 - BLOCK, n_keys, r_row, BLOCK, E, BLOCK_E)
        near = tl.dot(qw, tl.trans(r), input_precision=PRECISION)
        position = tl.gather(tl.where(column <= row, far, near), rotation, axis=1)
        k = load_rows(K, j0, n_keys, k_row, BLOCK, E, BLOCK_E)
        v = load_rows(V, j0, n_keys, v_row, BLOCK, E, BLOCK_E)
        score = tl.dot(qu, tl.trans(k), input_precision=PRECISION) + position
        seen = is_seen(j0 + tl.arange(0, BLOCK), first, last, HAS_FIRST)
        top, total, out = softmax_step(score, seen, v, top, total, out, SCALE, PRECISION)
        far = near
    store_rows(out / total[:, None], OUT, i0, n_queries, out_row, BLOCK, E, BLOCK_E)
    if HAS_LSE:
        LSE += stream * lse_stream + head * lse_head
        tl.store(LSE + query, top + tl.log2(total), mask=query < n_queries)


@triton.jit(do_not_specialize=VARYING)
def differentiate_queries(
    QU, qu_stream, qu_head, qu_row,
    K, k_stream, k_head, k_row,
    V, v_stream, v_head, v_row,
    BY_DISTANCE,
    FIRST, first_stream,
    OUT, out_stream, out_head, out_row,
    D_OUT, d_out_stream, d_out_head, d_out_row,
    LSE, lse_stream, lse_head,
    DELTA,
    D_QU, d_qu_stream, d_qu_head, d_qu_row,
    D_BY_DISTANCE,
    n_streams, n_queries, n_keys, width,
    SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return what one block of queries gets back through the content scores, and d(score) by distance.

        delta_i = out_i . d_out_i,   d(score)[i, j] = p_ij (d_out_i . v_j - delta_i)
        d(q_i + u) = sum_j d(score)[i, j] k_j / sqrt(E)

    d(score) / sqrt(E) goes to D_BY_DISTANCE, laid out as BY_DISTANCE is, where a key is seen; `clear_unseen`
    writes the rest. These are two memories, since the threads that load a number need not be those that store
    in its place. DELTA, laid out as LSE is, is kept for `differentiate_keys`.
    """
    n_blocks = tl.cdiv(n_queries, BLOCK_M)
    head_and_stream = tl.program_id(0) // n_blocks
    i0 = (n_blocks - 1 - tl.program_id(0) % n_blocks) * BLOCK_M
    head, stream = (head_and_stream // n_streams).to(tl.int64), (head_and_stream % n_streams).to(tl.int64)
    QU += stream * qu_stream + head * qu_head
    K += stream * k_stream + head * k_head
    V += stream * v_stream + head * v_head
    OUT += stream * out_stream + head * out_head
    D_OUT += stream * d_out_stream + head * d_out_head
    D_QU += stream * d_qu_stream + head * d_qu_head
    LSE += stream * lse_stream + head * lse_head
    DELTA += stream * lse_stream + head * lse_head

    n_memory = n_keys - n_queries
    query = i0 + tl.arange(0, BLOCK_M)
    is_query = query < n_queries
    out = load_rows(OUT, i0, n_queries, out_row, BLOCK_M, E, BLOCK_E)
    d_out = load_rows(D_OUT, i0, n_queries, d_out_row, BLOCK_M, E, BLOCK_E)
    delta = tl.sum(out.to(tl.float32) * d_out.to(tl.float32), 1)
    tl.store(DELTA + query, delta, mask=is_query)
    delta *= SCALE
    qu = load_rows(QU, i0, n_queries, qu_row, BLOCK_M, E, BLOCK_E)
    lse = tl.load(LSE + query, mask=is_query, other=0.0)
    if HAS_BIAS:
        BY_DISTANCE += head_and_stream.to(tl.int64) * n_queries * width + n_queries - 1
        D_BY_DISTANCE += head_and_stream.to(tl.int64) * n_queries * width + n_queries - 1
    if HAS_FIRST:
        FIRST += stream * first_stream
    first = load_first(FIRST, query, n_queries, n_keys, HAS_FIRST)
    last = last_key(query, n_queries, n_keys)
    start = tl.maximum(tl.min(first, 0), 0) // BLOCK_N * BLOCK_N if HAS_FIRST else 0
    d_qu = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    for j0 in range(start, tl.minimum(n_keys, i0 + BLOCK_M + n_memory), BLOCK_N):
        k = load_rows(K, j0, n_keys, k_row, BLOCK_N, E, BLOCK_E)
        v = load_rows(V, j0, n_keys, v_row, BLOCK_N, E, BLOCK_E)
        score = tl.dot(qu, tl.trans(k), input_precision=PRECISION)
        if HAS_BIAS:
            score += load_aligned(BY_DISTANCE, query, j0, n_queries, width, BLOCK_N)
        seen = is_seen(j0 + tl.arange(0, BLOCK_N), first, last, HAS_FIRST)
        p = tl.where(seen, tl.exp2(score * (SCALE * LOG2E) - lse[:, None]), 0.0)
        d_p = tl.dot(d_out, tl.trans(v), input_precision=PRECISION)
        d_score = (p * (d_p * SCALE - delta[:, None])).to(k.dtype)
        if HAS_BIAS:
            store_aligned(d_score, D_BY_DISTANCE, query, j0, seen, width, BLOCK_N)
        d_qu = tl.dot(d_score, k, d_qu, input_precision=PRECISION)
    store_rows(d_qu, D_QU, i0, n_queries, d_qu_row, BLOCK_M, E, BLOCK_E)


@triton.jit(do_not_specialize=VARYING)
def differentiate_keys(
    QU, qu_stream, qu_head, qu_row,
    K, k_stream, k_head, k_row,
    V, v_stream, v_head, v_row,
    BY_DISTANCE,
    FIRST, first_stream,
    D_OUT, d_out_stream, d_out_head, d_out_row,
    LSE, lse_stream, lse_head,
    DELTA,
    D_K, d_k_stream, d_k_head, d_k_row,
    D_V, d_v_stream, d_v_head, d_v_row,
    n_streams, n_queries, n_keys, width,
    SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return what one block of keys and values gets back from all queries.

    d(v_j) = sum_i p_ij d_out_i,   d(k_j) = sum_i d(score)[i, j] (q_i + u) / sqrt(E)
    """
    n_blocks = tl.cdiv(n_keys, BLOCK_N)
    head_and_stream = tl.program_id(0) // n_blocks
    j0 = tl.program_id(0) % n_blocks * BLOCK_N
    head, stream = (head_and_stream // n_streams).to(tl.int64), (head_and_stream % n_streams).to(tl.int64)
    QU += stream * qu_stream + head * qu_head
    K += stream * k_stream + head * k_head
    V += stream * v_stream + head * v_head
    D_OUT += stream * d_out_stream + head * d_out_head
    D_K += stream * d_k_stream + head * d_k_head
    D_V += stream * d_v_stream + head * d_v_head
    if HAS_FIRST:
        FIRST += stream * first_stream
    LSE += stream * lse_stream + head * lse_head
    DELTA += stream * lse_stream + head * lse_head
    if HAS_BIAS:
        BY_DISTANCE += head_and_stream.to(tl.int64) * n_queries * width + n_queries - 1

    n_memory = n_keys - n_queries
    key = j0 + tl.arange(0, BLOCK_N)
    k = load_rows(K, j0, n_keys, k_row, BLOCK_N, E, BLOCK_E)
    v = load_rows(V, j0, n_keys, v_row, BLOCK_N, E, BLOCK_E)
    d_k = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    d_v = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    for i0 in range(tl.maximum(0, j0 - n_memory) // BLOCK_M * BLOCK_M, n_queries, BLOCK_M):
        query = i0 + tl.arange(0, BLOCK_M)
        is_query = query < n_queries
        qu = load_rows(QU, i0, n_queries, qu_row, BLOCK_M, E, BLOCK_E)
        d_out = load_rows(D_OUT, i0, n_queries, d_out_row, BLOCK_M, E, BLOCK_E)
        lse = tl.load(LSE + query, mask=is_query, other=0.0)
        delta = tl.load(DELTA + query, mask=is_query, other=0.0)
        score = tl.dot(qu, tl.trans(k), input_precision=PRECISION)
        if HAS_BIAS:
            score += load_aligned(BY_DISTANCE, query, j0, n_queries, width, BLOCK_N)
        first = load_first(FIRST, query, n_queries, n_keys, HAS_FIRST)
        last = last_key(query, n_queries, n_keys)
        seen = is_seen(key, first, last, HAS_FIRST)
        p = tl.where(seen, tl.exp2(score * (SCALE * LOG2E) - lse[:, None]), 0.0)
        d_v = tl.dot(tl.trans(p.to(d_out.dtype)), d_out, d_v, input_precision=PRECISION)
        d_p = tl.dot(d_out, tl.trans(v), input_precision=PRECISION)
        d_score = (p * (d_p - delta[:, None]) * SCALE).to(qu.dtype)
        d_k = tl.dot(tl.trans(d_score), qu, d_k, input_precision=PRECISION)
    store_rows(d_k, D_K, j0, n_keys, d_k_row, BLOCK_N, E, BLOCK_E)
    store_rows(d_v, D_V, j0, n_keys, d_v_row, BLOCK_N, E, BLOCK_E)


@triton.jit(do_not_specialize=VARYING)
def clear_unseen(
    D_BY_DISTANCE,
    FIRST, first_stream,
    n_streams, n_queries, width,
    HAS_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write 0 for the distances that a query does not see, columns below T - 1 - i + first[i].

    A kernel of its own, because `differentiate_queries` would need more registers for it.
    """
    n_blocks = tl.cdiv(n_queries, BLOCK_M)
    head_and_stream = tl.program_id(0) // n_blocks
    query = tl.program_id(0) % n_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    n_unseen = tl.where(query < n_queries, n_queries - 1 - query, 0)
    if HAS_FIRST:
        FIRST += (head_and_stream % n_streams).to(tl.int64) * first_stream
        first = tl.load(FIRST + query, mask=query < n_queries, other=0)
        n_unseen += tl.maximum(first, 0)
    D_BY_DISTANCE += head_and_stream.to(tl.int64) * n_queries * width
    zeros = tl.zeros([BLOCK_M, BLOCK_N], D_BY_DISTANCE.dtype.element_ty)
    for c0 in range(0, tl.max(n_unseen, 0), BLOCK_N):
        column = c0 + tl.arange(0, BLOCK_N)[None, :]
        element = query[:, None] * width + column
        tl.store(D_BY_DISTANCE + element, zeros, mask=column < n_unseen[:, None])
