"""Triton kernels of decoder layers and of the draw of a token, for GPUs.

- Attention of one query per head, for sampling, which reads one token per sequence. It reads keys and values in parts, side by side,
  and only the parts that hold a visible one; it can rotate the query and the new key, and write the latter to the cache.
- Rotation and the product of the gates, forward and backward, and root-mean-square norms, for any number of tokens.
- The sum of a matrix and the product of two factors, which merges an adapter.
- The draw from a nucleus.

They compute in float32 and round once, except that attention rounds rotated queries and keys, and the weights of the values that it
reads, to their type, and the draw cumulates integers. `docs/performance-gpu.md` has measurements.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from firedistill.memory import is_out_of_memory

try:
    import triton
    import triton.language as tl
except ImportError:  # PyTorch brings it along on Linux
    triton = None

logger = logging.getLogger(__name__)

BLOCK = 64  # columns read at once
PARTS = 64  # of the columns, at most
# Of one row or token, computed by one block of threads
GATES_PER_BLOCK, HEADS_PER_BLOCK, SCORES_PER_BLOCK = 1024, 16, 4096
TILE, RANKS = (64, 64), 16  # rows and columns of a matrix that one block of threads computes; ranks of its factors read at once
MOST_CANDIDATES = 4096  # of a draw
LEAST = -1e30  # below every score; finite, so that no difference of two is NaN


def takes_heads(states: Tensor) -> bool:
    """Whether the kernels take heads `[..., size]` of this device, type and size."""
    size = states.shape[-1]
    return takes_states(states) and 16 <= size <= 256 and size & (size - 1) == 0


def takes_states(states: Tensor) -> bool:
    """Whether the kernels take states of this device and type."""
    return states.dtype in (torch.bfloat16, torch.float16) and is_usable(states)


def takes_product(matrix: Tensor, second: Tensor, first: Tensor) -> bool:
    """Whether `add_product` takes a matrix and factors of this device, type and layout."""
    return takes_states(matrix) and all(x.dtype == torch.float32 for x in (second, first)) and matrix.is_contiguous()


def takes_scores(scores: Tensor, width: int) -> bool:
    """Whether `nucleus_token` takes scores of this device and type, and so many candidates."""
    return scores.dtype == torch.float32 and width <= MOST_CANDIDATES and is_usable(scores)


def is_usable(tensor: Tensor) -> bool:
    """Whether Triton makes kernels for a tensor. Not for one without memory, of a pass that is estimated (`firedistill.footprint`)."""
    return type(tensor) is Tensor and tensor.is_cuda and compiles(tensor.device)


@cache
def compiles(device: torch.device) -> bool:
    """Whether Triton makes kernels for this device. It needs a C compiler, and a GPU of compute capability 8.0 or above here.

    Raises:
        torch.OutOfMemoryError: there is no memory to try it.
    """
    if triton is None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        silu_product(torch.zeros(1, 2, dtype=torch.bfloat16, device=device))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        logger.warning("PyTorch's kernels are used instead of those of Triton: %s", " ".join(str(error).split())[:200])
        return False
    return True


def one_query_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    scale: float,
    of_new_token: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """`softmax(scale Q K^T) V` of one query per head.

    Args:
        query: `[B, heads, 1, size]`.
        key, value: `[B, groups, W, size]`; heads of the same group are neighbours.
        visible: `[B, 1, 1, W]`, true where a key is visible, at least once per sequence.
        of_new_token: `cos`, `sin` and `column`, as `new_token_attention` takes them, where the new keys and values lie behind the
            queries in memory.

    Returns:
        `[B, 1, heads, size]`.
    """
    count, heads, _, size = query.shape
    groups, columns = key.shape[1:3]
    visible = visible.expand(count, 1, 1, columns)
    span = BLOCK * triton.cdiv(columns, BLOCK * PARTS)
    parts, per_group = triton.cdiv(columns, span), heads // groups
    sums = torch.empty(count, heads, parts, size, dtype=torch.float32, device=query.device)
    statistics = torch.empty(count, heads, parts, 2, dtype=torch.float32, device=query.device)
    found = query.new_empty(count, 1, heads, size)
    cos, sin, column = of_new_token or (query, query, query)
    with on_device_of(query):
        _attend[(count * groups, parts)](
            *(query, query.stride(0), query.stride(1)),
            *(key, *key.stride()[:3]),
            *(value, *value.stride()[:3]),
            *(visible, visible.stride(0)),
            *(cos, cos.stride(0), sin, sin.stride(0), column),
            *(sums, statistics, columns, span, scale),
            GROUPS=groups,
            PER_GROUP=per_group,
            ROWS=max(16, triton.next_power_of_2(per_group)),
            BLOCK=BLOCK,
            SIZE=size,
            LEAST=LEAST,
            IS_NEW=of_new_token is not None,
        )
        _combine[(count * heads,)](sums, statistics, found, parts, PARTS=triton.next_power_of_2(parts), SIZE=size, LEAST=LEAST)
    return found


def new_token_attention(
    projected: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, column: Tensor, visible: Tensor, scale: float
) -> Tensor:
    """Rotary embedding (pairs of coordinates i and i + size / 2), write to the cache, and attention, of a token per sequence.

    Args:
        projected: `[B, 1, heads + 2 groups, size]`: queries, keys, values.
        cos, sin: of the angles, `[B or 1, 1, size]`.
        keys, values: `[B, groups, W, size]`, of all tokens; those of this one are written to a column.
        column: `[1]` int64.
        visible: `[B, 1, 1, W]`, true where a key is visible, as it is at this column.

    Returns:
        `[B, 1, heads, size]`.
    """
    count, _, heads, size = projected.shape
    query = projected.contiguous().transpose(1, 2)[:, : heads - 2 * keys.shape[1]]
    cos, sin = cos.contiguous().expand(count, 1, size), sin.contiguous().expand(count, 1, size)
    return one_query_attention(query, keys, values, visible, scale, (cos, sin, column))


def rotate(states: Tensor, cos: Tensor, sin: Tensor, turned: int, back: bool = False) -> Tensor:
    """Rotary embedding of the first heads (pairs of coordinates i and i + size / 2); the others are copied.

    Args:
        states: `[B, T, heads, size]`.
        cos, sin: of the angles, `[B or 1, T, size]`.
        turned: how many heads are turned.
        back: turn them back, by the transposed matrix: what the backward pass does to a gradient.
    """
    count, length, heads, size = states.shape
    states = states if states.stride(3) == 1 else states.contiguous()
    cos, sin = (x.contiguous().expand(count, length, size) for x in (cos, sin))
    found = states.new_empty(states.shape)
    with on_device_of(states):
        _rotate[(count * length, triton.cdiv(heads, HEADS_PER_BLOCK))](
            *(states, *states.stride()[:3], cos, *cos.stride()[:2], sin, *sin.stride()[:2]),
            *(found, length, heads, turned),
            BACK=back,
            BLOCK=HEADS_PER_BLOCK,
            HALF=size // 2,
        )
    return found


def silu_product(states: Tensor) -> Tensor:
    """`silu(gate) * up` `[..., I]` of the two halves of `states` `[..., 2 I]`."""
    states = states.contiguous()
    width = states.shape[-1] // 2
    found = states.new_empty(*states.shape[:-1], width)
    with on_device_of(states):
        _silu_product[(found.numel() // width, triton.cdiv(width, GATES_PER_BLOCK))](
            states, found, width, BLOCK=GATES_PER_BLOCK
        )
    return found


def silu_product_backward(gradient: Tensor, states: Tensor) -> Tensor:
    """The gradient of the states `[..., 2 I]`, from that of `silu_product` `[..., I]`."""
    gradient, states = gradient.contiguous(), states.contiguous()
    width, found = gradient.shape[-1], torch.empty_like(states)
    with on_device_of(states):
        _silu_product_backward[(gradient.numel() // width, triton.cdiv(width, GATES_PER_BLOCK))](
            gradient, states, found, width, BLOCK=GATES_PER_BLOCK
        )
    return found


def normalized(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm of `[..., H]`: states over the square root of (the mean of their squares + eps), times the weight."""
    states, weight = states.contiguous(), weight.contiguous()
    width, found = states.shape[-1], torch.empty_like(states)
    with on_device_of(states):
        _normalize[(states.numel() // width,)](states, weight, found, width, eps, BLOCK=triton.next_power_of_2(width))
    return found


def add_product(matrix: Tensor, second: Tensor, first: Tensor, scale: float, found: Tensor) -> None:
    """Write `matrix + scale second first` to `found`.

    Args:
        matrix, found: `[rows, columns]`, contiguous.
        second, first: `[rows, R]` and `[R, columns]`.
    """
    rows, columns = matrix.shape
    second, first = second.contiguous(), first.contiguous()
    with on_device_of(matrix):
        _add_product[(triton.cdiv(rows, TILE[0]), triton.cdiv(columns, TILE[1]))](
            *(matrix, second, first, found, rows, columns, first.shape[0], scale), ROWS=TILE[0], COLUMNS=TILE[1], RANKS=RANKS
        )


def nucleus_token(
    scores: Tensor, values: Tensor, tokens: Tensor, uniforms: Tensor, top_p: float, unit: int, codes: tuple[int, int]
) -> Tensor:
    """Draw a token of each row from its nucleus: the best tokens, up to the first one at which their mass reaches `top_p`.

    Args:
        scores: `[B, V]` float32, divided by the temperature.
        values, tokens: `[B, K]`, the K largest scores in descending order, and their indices.
        uniforms: `[B]` float64 in [0, 1), which decide the draws.
        unit: of the weights that are cumulated as integers.
        codes: what stands for a nucleus that may have more than K tokens, and for a largest score that is not finite.

    Returns:
        `[B]` token ids or codes.
    """
    scores, values, tokens, uniforms = (x.contiguous() for x in (scores, values, tokens, uniforms))
    (count, vocabulary), width = scores.shape, values.shape[-1]
    parts = triton.cdiv(vocabulary, SCORES_PER_BLOCK)
    sums = torch.empty(count, parts, dtype=torch.float64, device=scores.device)
    found = torch.empty(count, dtype=torch.long, device=scores.device)
    with on_device_of(scores):
        _sum_weights[(count, parts)](scores, values, width, sums, vocabulary, BLOCK=SCORES_PER_BLOCK)
        _draw_from_nucleus[(count,)](
            *(values, tokens, sums, uniforms, found, width, parts),
            TOP_P=top_p,  # numbers that are not constants are float32
            UNIT=float(unit),
            TOO_FEW=codes[0],
            NOT_FINITE=codes[1],
            IS_ALL=width == vocabulary,
            WIDTH=triton.next_power_of_2(width),
            PARTS=triton.next_power_of_2(parts),
        )
    return found


def on_device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Triton starts kernels on the current device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()  # on a CPU in Triton's interpreter


def jit(function: Any) -> Any:
    return function if triton is None else triton.jit(function)


@jit
def _attend(
    QUERY, query_of_sequence, query_of_head,
    KEY, key_of_sequence, key_of_group, key_of_column,
    VALUE, value_of_sequence, value_of_group, value_of_column,
    VISIBLE, visible_of_sequence,
    COS, cos_of_sequence, SIN, sin_of_sequence, COLUMN,
    SUMS, STATISTICS, columns, span, scale,
    GROUPS: tl.constexpr, PER_GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, LEAST: tl.constexpr,
    IS_NEW: tl.constexpr,
):  # fmt: skip
    """One group of heads and one part of the columns: largest score, sum of weights and weighted sum of values of each head.

    Of a new token, the query and the key are rotated, and the part that holds its column writes key and value to the cache.
    """
    sequence, group = tl.program_id(0) // GROUPS, tl.program_id(0) % GROUPS
    part, parts = tl.program_id(1), tl.num_programs(1)
    rows, at = tl.arange(0, ROWS), tl.arange(0, SIZE)
    is_head = rows < PER_GROUP
    head = group * PER_GROUP + rows
    queries = QUERY + sequence * query_of_sequence + head[:, None] * query_of_head
    query = tl.load(queries + at[None, :], mask=is_head[:, None], other=0.0)
    keys = KEY + tl.cast(sequence, tl.int64) * key_of_sequence + group * key_of_group
    values = VALUE + tl.cast(sequence, tl.int64) * value_of_sequence + group * value_of_group
    largest = tl.full([ROWS], LEAST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, SIZE], tl.float32)
    if IS_NEW:
        partner = (at + SIZE // 2) % SIZE
        cos = tl.load(COS + sequence * cos_of_sequence + at).to(tl.float32)
        sin = tl.load(SIN + sequence * sin_of_sequence + at).to(tl.float32) * tl.where(at < SIZE // 2, -1.0, 1.0)
        other = tl.load(queries + partner[None, :], mask=is_head[:, None], other=0.0).to(tl.float32)
        query = (query.to(tl.float32) * cos[None, :] + other * sin[None, :]).to(query.dtype)
        new = QUERY + sequence * query_of_sequence + (GROUPS * PER_GROUP + group) * query_of_head
        new_key = (tl.load(new + at).to(tl.float32) * cos + tl.load(new + partner).to(tl.float32) * sin).to(query.dtype)
        new_value = tl.load(new + GROUPS * query_of_head + at)
        new_column = tl.load(COLUMN)
        if new_column // span == part:
            tl.store(keys + new_column * key_of_column + at, new_key)
            tl.store(values + new_column * value_of_column + at, new_value)
            largest = tl.sum(query.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * scale
            total += 1
            sums += new_value.to(tl.float32)[None, :]
    for start in range(part * span, min(part * span + span, columns), BLOCK):
        column = start + tl.arange(0, BLOCK)
        exists = column < columns
        if IS_NEW:
            exists = exists & (column != new_column)
        visible = tl.load(VISIBLE + sequence * visible_of_sequence + column, mask=exists, other=0) != 0
        if tl.max(visible.to(tl.int32), 0) > 0:
            key = tl.load(keys + column[:, None] * key_of_column + at[None, :], mask=exists[:, None], other=0.0)
            value = tl.load(values + column[:, None] * value_of_column + at[None, :], mask=exists[:, None], other=0.0)
            scores = tl.where(visible[None, :], tl.dot(query, tl.trans(key)) * scale, LEAST)
            before = largest
            largest = tl.maximum(before, tl.max(scores, 1))
            shrink, weights = tl.exp(before - largest), tl.exp(scores - largest[:, None])
            total = total * shrink + tl.sum(weights, 1)
            sums = sums * shrink[:, None] + tl.dot(weights.to(value.dtype), value)
    place = ((sequence * GROUPS + group) * PER_GROUP + rows) * parts + part
    tl.store(STATISTICS + place * 2, largest, mask=is_head)
    tl.store(STATISTICS + place * 2 + 1, total, mask=is_head)
    tl.store(SUMS + place[:, None] * SIZE + at[None, :], sums, mask=(is_head & (total != 0))[:, None])


@jit
def _combine(SUMS, STATISTICS, FOUND, parts, PARTS: tl.constexpr, SIZE: tl.constexpr, LEAST: tl.constexpr):
    """One head: the mean of values over all parts."""
    head = tl.program_id(0)
    part, at = tl.arange(0, PARTS), tl.arange(0, SIZE)
    place, exists = head * parts + part, part < parts
    largest = tl.load(STATISTICS + place * 2, mask=exists, other=LEAST)
    total = tl.load(STATISTICS + place * 2 + 1, mask=exists, other=0.0)
    sums = tl.load(SUMS + place[:, None] * SIZE + at[None, :], mask=(exists & (total != 0))[:, None], other=0.0)
    weight = tl.exp(largest - tl.max(largest, 0))
    mean = tl.sum(sums * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(FOUND + head * SIZE + at, mean.to(FOUND.dtype.element_ty))


@jit
def _rotate(
    STATES, state_of_sequence, state_of_token, state_of_head,
    COS, cos_of_sequence, cos_of_token,
    SIN, sin_of_sequence, sin_of_token,
    FOUND, length, heads, turned,
    BACK: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Some heads of one token."""
    row = tl.cast(tl.program_id(0), tl.int64)
    sequence, token = row // length, row % length
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists, turns = (head < heads)[:, None], (head < turned)[:, None]
    first = tl.arange(0, HALF)[None, :]
    second = HALF + first
    states = STATES + sequence * state_of_sequence + token * state_of_token + head[:, None] * state_of_head
    x, y = tl.load(states + first, mask=exists, other=0.0), tl.load(states + second, mask=exists, other=0.0)
    cos = COS + sequence * cos_of_sequence + token * cos_of_token
    sin = SIN + sequence * sin_of_sequence + token * sin_of_token
    below, above = tl.load(sin + first).to(tl.float32), tl.load(sin + second).to(tl.float32)
    to_first, to_second = -below, above
    if BACK:  # by the transposed matrix
        to_first, to_second = above, -below
    turned_x = x.to(tl.float32) * tl.load(cos + first).to(tl.float32) + y.to(tl.float32) * to_first
    turned_y = y.to(tl.float32) * tl.load(cos + second).to(tl.float32) + x.to(tl.float32) * to_second
    found = FOUND + (row * heads + head[:, None]) * 2 * HALF
    tl.store(found + first, tl.where(turns, turned_x.to(x.dtype), x), mask=exists)
    tl.store(found + second, tl.where(turns, turned_y.to(x.dtype), y), mask=exists)


@jit
def _silu_product(STATES, FOUND, width, BLOCK: tl.constexpr):
    """A block of one row."""
    row = tl.cast(tl.program_id(0), tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = at < width
    gate = tl.load(STATES + row * 2 * width + at, mask=exists, other=0.0).to(tl.float32)
    up = tl.load(STATES + row * 2 * width + width + at, mask=exists, other=0.0).to(tl.float32)
    tl.store(FOUND + row * width + at, (gate * tl.sigmoid(gate) * up).to(FOUND.dtype.element_ty), mask=exists)


@jit
def _silu_product_backward(GRADIENT, STATES, FOUND, width, BLOCK: tl.constexpr):
    """A block of one row."""
    row = tl.cast(tl.program_id(0), tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = at < width
    gradient = tl.load(GRADIENT + row * width + at, mask=exists, other=0.0).to(tl.float32)
    gate = tl.load(STATES + row * 2 * width + at, mask=exists, other=0.0).to(tl.float32)
    up = tl.load(STATES + row * 2 * width + width + at, mask=exists, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    of_gate, of_up = gradient * up * share * (1 + gate * (1 - share)), gradient * gate * share
    tl.store(FOUND + row * 2 * width + at, of_gate.to(FOUND.dtype.element_ty), mask=exists)
    tl.store(FOUND + row * 2 * width + width + at, of_up.to(FOUND.dtype.element_ty), mask=exists)


@jit
def _normalize(STATES, WEIGHT, FOUND, width, eps, BLOCK: tl.constexpr):
    """One row."""
    row, at = tl.cast(tl.program_id(0), tl.int64), tl.arange(0, BLOCK)
    exists = at < width
    states = tl.load(STATES + row * width + at, mask=exists, other=0.0).to(tl.float32)
    weight = tl.load(WEIGHT + at, mask=exists, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(states * states, 0) / width + eps)
    tl.store(FOUND + row * width + at, (states * scale * weight).to(FOUND.dtype.element_ty), mask=exists)


@jit
def _add_product(
    MATRIX, SECOND, FIRST, FOUND, rows, columns, rank, scale, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr
):
    """A tile of the matrix."""
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    exists = (row < rows)[:, None] & (column < columns)[None, :]
    product = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, rank, RANKS):
        at = start + tl.arange(0, RANKS)
        second = tl.load(
            SECOND + row[:, None] * rank + at[None, :], mask=(row < rows)[:, None] & (at < rank)[None, :], other=0.0
        )
        first = tl.load(
            FIRST + at[:, None] * columns + column[None, :], mask=(at < rank)[:, None] & (column < columns)[None, :], other=0.0
        )
        product = tl.dot(second, first, product, input_precision="ieee")
    place = tl.cast(row, tl.int64)[:, None] * columns + column[None, :]
    matrix = tl.load(MATRIX + place, mask=exists, other=0.0)
    tl.store(FOUND + place, (matrix.to(tl.float32) + scale * product).to(matrix.dtype), mask=exists)


@jit
def _sum_weights(SCORES, VALUES, width, SUMS, vocabulary, BLOCK: tl.constexpr):
    """A part of one row: the sum of `exp(score - largest)`."""
    row, part = tl.program_id(0), tl.program_id(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    scores = tl.load(SCORES + tl.cast(row, tl.int64) * vocabulary + at, mask=at < vocabulary, other=float("-inf"))
    weights = tl.exp(scores - tl.load(VALUES + row * width))
    tl.store(SUMS + row * tl.num_programs(1) + part, tl.sum(weights.to(tl.float64), 0))


@jit
def _draw_from_nucleus(
    VALUES, TOKENS, SUMS, UNIFORMS, FOUND, width, parts,
    TOP_P: tl.constexpr, UNIT: tl.constexpr, TOO_FEW: tl.constexpr, NOT_FINITE: tl.constexpr,
    IS_ALL: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One row: the first token whose cumulated weight is above the threshold, among those before which less than `top_p` lies."""
    row, at, part = tl.program_id(0), tl.arange(0, WIDTH), tl.arange(0, PARTS)
    exists = at < width
    best = tl.load(VALUES + row * width)
    values = tl.load(VALUES + row * width + at, mask=exists, other=float("-inf"))
    weights = (tl.exp(values - best).to(tl.float64) * UNIT).to(tl.int64)
    total = tl.sum(tl.load(SUMS + row * parts + part, mask=part < parts, other=0.0), 0) * UNIT
    cumulated = tl.cumsum(weights, 0)
    inside = exists & (((cumulated - weights).to(tl.float64) < tl.full([], TOP_P, tl.float64) * total) | (at == 0))
    mass = tl.max(tl.where(inside, cumulated, 0), 0)
    drawn = (tl.load(UNIFORMS + row) * mass.to(tl.float64)).to(tl.int64)
    place = tl.sum((inside & (cumulated <= tl.minimum(drawn, mass - 1))).to(tl.int32), 0)
    token = tl.load(TOKENS + row * width + tl.minimum(place, width - 1))
    if not IS_ALL:
        token = tl.where(tl.sum((inside & (at == width - 1)).to(tl.int32), 0) > 0, TOO_FEW, token)
    token = tl.where((best == best) & (tl.abs(best) != float("inf")), token, NOT_FINITE)
    tl.store(FOUND + row, token)
