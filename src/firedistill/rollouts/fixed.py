"""Decoding with every tensor at a fixed address: the host starts many tokens and looks at them together, and a GPU replays a graph.

One step of `Decoder` reads a token per row, draws the next one, and depends on no value that the host would have to know. On a GPU it
is captured once as a CUDA graph, for each width of the cache that attention reads; elsewhere the same operations run one by one.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, StaticLayer

from firedistill.memory import is_out_of_memory
from firedistill.models.attention import attends_by_position, own_attention
from firedistill.models.kernels import takes_heads
from firedistill.models.states import is_sharded
from firedistill.rollout import Sampling
from firedistill.rollouts.decoding import Prompts, next_logits
from firedistill.rollouts.sampling import TOO_FEW, choose_tokens, draw, penalize_repetition

logger = logging.getLogger(__name__)

LOOK_EVERY = 16  # tokens per row between two looks of the host
BUCKET = 256  # attention reads a multiple of this number of columns; see `bucket_of`
CANDIDATES = 1024  # a row whose draw needs more tokens than these costs a step again
GRAPHS = 64  # kept at most


def can_fix(model: PreTrainedModel) -> bool:
    """Whether `Decoder` can run a model for which `can_decode` holds.

    False for what `attends_by_position` excludes, and for weights that are spread over processes.
    """
    return attends_by_position(model) and not is_sharded(model)


def power_of_two(rows: int) -> int:
    """The rows of the tensors for a number of sequences."""
    return 1 << (rows - 1).bit_length()


def bucket_of(columns: int) -> int:
    """The least bucket that holds this number of columns."""
    # Each bucket has its own graph. Wider steps keep those of long answers few: 22 for 16,384 tokens. On average, attention reads half
    # a step in vain.
    step = BUCKET if columns <= 8 * BUCKET else 4 * BUCKET
    return -(-columns // step) * step


class FixedLayer(StaticLayer):
    """Keys and values `[rows, heads, columns, size]` of a layer; `column` `[1]` says where the next ones are written."""

    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor, column: Tensor):
        super().__init__(keys.shape[-2])
        self.buffers, self.column, self.is_initialized = (keys, values), column, True
        self.show(*keys.shape[:3:2])

    def show(self, rows: int, columns: int) -> None:
        """Let attention read this number of rows and columns."""
        self.keys, self.values = (buffer[:rows, :, :columns] for buffer in self.buffers)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        # A single index cannot collide, and CUDA's deterministic kernel copies the whole view and sorts.
        mode = torch.get_deterministic_debug_mode()
        torch.set_deterministic_debug_mode(0)
        try:
            self.keys.index_copy_(2, self.column, key_states)
            self.values.index_copy_(2, self.column, value_states)
        finally:
            torch.set_deterministic_debug_mode(mode)
        return self.keys, self.values


class Decoder:
    """The tensors of `FixedBatch`, which stay where they are from call to call, and the graphs that use them.

    Args:
        model: a causal language model for which `can_fix` holds.
        pad_id: left padding of shorter prompts; it is masked.
        stop_ids: tokens that end a response.

    Attributes:
        rows, columns: sequences, and tokens of prompt and response together, that there is room for.
        kind: stands for sampling parameters and addresses of the weights.
        graphs: by rows, bucket and kind; None for a step that has run once.
    """

    def __init__(self, model: PreTrainedModel, pad_id: int, stop_ids: Sequence[int]):
        self.model, self.pad_id, self.stop_ids = model, pad_id, stop_ids
        self.captures = model.device.type == "cuda"
        self.numbers = itertools.count()
        self.stream: Any = None  # of all captures, on the model's device
        self.release()

    def release(self) -> None:
        """Free everything."""
        self.rows = self.columns = 0
        self.shown = (0, 0)
        self.addresses: tuple[int, ...] = ()  # of the weights
        self.kind = -1
        self.layers: list[FixedLayer] = []
        self.tensors: dict[str, Tensor] = {}
        self.drop_graphs()

    def drop_graphs(self) -> None:
        """Free all graphs, and their pool with them: PyTorch refuses captures into a pool that no graph uses any more."""
        self.graphs: dict[tuple[int, int, int], torch.cuda.CUDAGraph | None] = {}
        self.kinds: dict[Any, int] = {}  # never two of the same number: the present kind may not be among them
        self.pool: Any = None  # memory that all graphs use, one after the other

    def reserve(self, like: Sequence[tuple[Tensor, Tensor]], rows: int, columns: int, vocabulary: int) -> None:
        """Make room for `rows` and `columns`, with keys and values `like` these of each layer. Drops all graphs if it grows."""
        if self.rows >= rows and self.columns >= columns:
            return
        rows, columns = max(rows, self.rows), max(columns, self.columns)
        self.release()
        self.rows, self.columns = rows, columns
        device = self.model.device
        self.tensors = {
            "column": torch.zeros(1, dtype=torch.long, device=device),
            "step": torch.zeros(1, dtype=torch.long, device=device),
            "padding": torch.zeros(rows, 1, dtype=torch.long, device=device),
            "visible": torch.zeros(rows, 1, 1, columns, dtype=torch.bool, device=device),
            "tokens": torch.zeros(rows, dtype=torch.long, device=device),
            "responses": torch.zeros(rows, columns, dtype=torch.long, device=device),
            "uniforms": torch.zeros(rows, columns, dtype=torch.float64, device=device),
            "seen": torch.zeros(rows, vocabulary, dtype=torch.bool, device=device),
            "stops": torch.tensor(self.stop_ids, dtype=torch.long, device=device),
        }
        for states in like:
            keys, values = (x.new_zeros(rows, x.shape[1], columns, x.shape[3]) for x in states)
            self.layers.append(FixedLayer(keys, values, self.tensors["column"]))

    def choose_kind(self, sampling: Sampling) -> None:
        """Let `advance` use the graphs of these parameters and of the current weights."""
        self.addresses = tuple(tensor.data_ptr() for tensor in (*self.model.parameters(), *self.model.buffers()))
        key = replace(sampling, max_new_tokens=0), self.addresses
        if key not in self.kinds:
            self.kinds[key] = next(self.numbers)
        self.kind = self.kinds[key]

    def forward(self, rows: int, bucket: int) -> Tensor:
        """Logits `[rows, V]` after the present token of each row, whose keys and values are written to the present column."""
        at = self.tensors
        at["visible"].index_fill_(3, at["column"], True)
        mask, keys = at["visible"][:rows, :, :, :bucket], self.layers[0].keys
        # PyTorch's attention adds it to the scores, and would convert it in every layer.
        if mask.is_cuda and not takes_heads(keys):
            dtype = keys.dtype
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)
        ids = at["tokens"][:rows, None].clamp(min=0)
        return next_logits(self.model, ids, mask, at["column"] - at["padding"][:rows], Cache(layers=[*self.layers]))

    def step(self, rows: int, bucket: int, sampling: Sampling, exact: bool = False) -> None:
        """Read the present token of each row and draw the next one. A row whose response has ended repeats its last token.

        Args:
            exact: never leave a draw open; the host waits for that.
        """
        at = self.tensors
        before = at["tokens"][:rows]
        ended = (before.unsqueeze(-1) == at["stops"]).any(-1)
        scores = self.forward(rows, bucket)
        if sampling.repetition_penalty != 1:
            at["seen"][:rows].scatter_(-1, before.unsqueeze(-1).clamp(min=0), True)
            scores = penalize_repetition(scores, at["seen"][:rows], sampling.repetition_penalty)
        uniforms = at["uniforms"][:rows].index_select(1, at["step"]).squeeze(1)
        tokens = choose_tokens(scores, sampling, uniforms) if exact else draw(scores, sampling, uniforms, CANDIDATES)
        self.put(torch.where(ended, before, tokens))

    def put(self, tokens: Tensor) -> None:
        """Make these tokens the present ones of the first rows, and advance by one column."""
        at, rows = self.tensors, len(tokens)
        at["responses"][:rows].index_copy_(1, at["step"], tokens.unsqueeze(-1))
        at["tokens"][:rows].copy_(tokens)
        at["step"] += 1
        at["column"] += 1

    def bucket(self, rows: int, column: int) -> int:
        """Let attention read `rows` and the bucket that holds this column; returns its columns."""
        bucket = min(bucket_of(column + 1), self.columns)
        if self.shown != (rows, bucket):
            self.shown = rows, bucket
            for layer in self.layers:
                layer.show(rows, bucket)
        return bucket

    def advance(self, rows: int, column: int, sampling: Sampling) -> None:
        """`step` at this column, from a graph where there is one."""
        bucket = self.bucket(rows, column)
        key = rows, bucket, self.kind
        # The first step of its kind runs by itself, so that libraries allocate what they keep outside of a graph.
        if self.captures and key in self.graphs:
            self.graphs[key] = graph = self.graphs[key] or self.capture(rows, bucket, sampling)
            if graph is not None:
                return graph.replay()  # on the device of the capture, whichever is current
        elif self.captures:
            if len(self.graphs) == GRAPHS:
                self.drop_graphs()
            self.graphs[key] = None
        self.step(rows, bucket, sampling)

    def capture(self, rows: int, bucket: int, sampling: Sampling) -> torch.cuda.CUDAGraph | None:
        """A graph of the step; None, now and later, if the model cannot be captured."""
        try:
            graph = torch.cuda.CUDAGraph()
            self.pool = self.pool or torch.cuda.graph_pool_handle()
            self.stream = self.stream or torch.cuda.Stream(self.model.device)
            # The default stream of captures is on the device of the process's first one. Where a capture does not begin or end,
            # `torch.cuda.graph` leaves its stream current.
            with (
                torch.cuda.device(self.model.device),
                torch.cuda.stream(torch.cuda.current_stream()),
                torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"),
            ):
                self.step(rows, bucket, sampling)
        except Exception as error:
            self.clean_up()
            cause = error.__context__ or error  # of a step that failed, and whose capture could not be ended either
            if is_out_of_memory(cause):
                raise cause from None
            logger.warning("sampling runs without a CUDA graph: %s", " ".join(str(cause).split())[:200])
            self.captures = False
            return None
        return graph

    def clean_up(self) -> None:
        """Undo what a failed capture leaves behind: allocation in the pool, of which it is a user, and a generator in its middle."""
        device: Any = self.model.device.index
        with suppress(Exception):
            torch._C._cuda_endAllocateToPool(device, self.pool)  # raises if the capture has ended it
            torch._C._cuda_releasePool(device, self.pool)
        with suppress(Exception):
            generator = torch.cuda.default_generators[device]
            generator.graphsafe_set_state(generator.clone_state())
        self.drop_graphs()


class FixedBatch:
    """A batch whose tensors belong to a `Decoder`. Its rows stay until all are finished.

    Args:
        decoder: used by one batch at a time.
        uniforms: `[B, max(limits)]` float64 numbers in [0, 1): row b decides the draws of response b, independently of the batch.
    """

    def __init__(self, decoder: Decoder, prompts: Sequence[list[int]], sampling: Sampling, uniforms: Tensor):
        self.decoder, self.sampling = decoder, sampling
        self.count, self.steps = len(prompts), uniforms.shape[-1]
        self.rows = power_of_two(self.count)  # the others repeat the first one: few sizes, few graphs
        model = decoder.model
        read = Prompts(prompts, decoder.pad_id, model.device)
        self.width = read.ids.shape[-1]
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        scores = next_logits(model, read.ids, read.mask, (read.mask.cumsum(-1) - 1).clamp(min=0), cache)
        columns = -(-(self.width + self.steps) // BUCKET) * BUCKET
        states = [(layer.keys, layer.values) for layer in cast(Any, cache).layers]
        decoder.reserve(states, self.rows, columns, scores.shape[-1])
        at, spare = decoder.tensors, self.rows - self.count
        expansion = torch.tensor(read.expansion + read.expansion[:1] * spare, device=model.device)
        decoder.choose_kind(sampling)
        for layer, pair in zip(decoder.layers, states, strict=True):
            for buffer, read_states in zip(layer.buffers, pair, strict=True):
                buffer[: self.rows, :, : self.width] = read_states[expansion]
                buffer[: self.rows, :, self.width :] = 0  # an earlier batch may have left NaN there, which no mask hides
        at["visible"].fill_(False)
        at["visible"][: self.rows, 0, 0, : self.width] = read.mask[expansion].bool()
        at["padding"][: self.rows] = (read.mask == 0).sum(-1, keepdim=True)[expansion]
        at["uniforms"][: self.count, : self.steps] = uniforms.to(model.device)
        at["uniforms"][self.count : self.rows] = at["uniforms"][:1]
        at["column"].fill_(self.width - 1)
        at["step"].zero_()
        self.prompts_seen: Tensor | None = None
        scores = scores[expansion]
        if sampling.repetition_penalty != 1:
            self.prompts_seen = read.seen(scores.shape[-1])[expansion]
            self.see(0)
            scores = penalize_repetition(scores, at["seen"][: self.rows], sampling.repetition_penalty)
        decoder.put(choose_tokens(scores, sampling, at["uniforms"][: self.rows, 0]))
        self.done, self.told = 1, 0  # tokens per row that are drawn, and that the caller knows

    def next_tokens(self) -> list[list[int]]:
        until = min(self.told + LOOK_EVERY, self.steps)
        while True:
            with own_attention(self.decoder.model):
                for done in range(self.done, until):
                    self.decoder.advance(self.rows, self.width + done - 1, self.sampling)
            self.done = until
            found = self.decoder.tensors["responses"][: self.count, self.told : until].tolist()  # the look
            wanting = [row.index(TOO_FEW) for row in found if TOO_FEW in row]
            if not wanting:
                self.told = until
                return found
            self.draw_again(self.told + min(wanting))

    def draw_again(self, step: int) -> None:
        """Go back to this step and choose its tokens from as many candidates as that takes."""
        at, rows = self.decoder.tensors, self.rows
        at["step"].fill_(step)
        at["column"].fill_(self.width + step - 1)
        at["visible"][..., self.width + step :] = False
        at["tokens"][:rows] = at["responses"][:rows, step - 1]
        if self.prompts_seen is not None:
            self.see(step - 1)
        with own_attention(self.decoder.model):
            self.decoder.step(rows, self.decoder.bucket(rows, self.width + step - 1), self.sampling, exact=True)
        self.done = step + 1

    def see(self, step: int) -> None:
        """Mark the tokens of the prompts and of the first `step` ones of the responses as seen."""
        at, rows = self.decoder.tensors, self.rows
        assert self.prompts_seen is not None
        at["seen"][:rows] = self.prompts_seen
        at["seen"][:rows].scatter_(-1, at["responses"][:rows, :step].clamp(min=0), True)

    def keep(self, rows: list[int]) -> bool:
        return False
