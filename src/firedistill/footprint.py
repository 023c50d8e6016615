"""How much memory a step takes, before it is made: the student's and the teacher's passes run on tensors without values.

Every operation runs with the shapes, types and kernels of the step, so that whatever model and adapter keep for the backward pass is
counted, and nothing is computed. What the head, the cache and the optimizer take follows from their sizes.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any
from unittest.mock import patch

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel, masking_utils

from firedistill.config import SelfDistillConfig
from firedistill.memory import held_memory
from firedistill.models.sharding import local
from firedistill.models.states import inference_mode, is_sharded, last_hidden_states, unwrap
from firedistill.objectives import Objective, load_objective
from firedistill.ops import fire_head
from firedistill.ops.head import CHUNK_ELEMENTS, CHUNK_ELEMENTS_GPU
from firedistill.rollouts.fixed import BUCKET, can_fix, power_of_two
from firedistill.rollouts.hf import causal_lm_for_decoding
from firedistill.rollouts.merging import can_pack, merged_bytes
from firedistill.rollouts.padding import cache_bytes_per_token
from firedistill.teacher.prefix_cache import shares_prefixes
from firedistill.teacher.teacher import packed_tokens

logger = logging.getLogger(__name__)

LIBRARIES = 50_000_000  # bytes of code and caches of libraries that the first step adds to a process on a CPU; measured
BLOCKS = 10  # float32 tensors of `BLOCK_ELEMENTS` that FIRE's head holds at the same time
# Float32 tensors `[C, V]` that are held at the same time: for log-probabilities and entropies, and to compare two policies
MEASURED, COMPARED = 5, 12
SCORES = 6  # tensors `[B, V]` in float32 that sampling holds at the same time


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations inside the block have made, as long as they are referenced.

    Attributes:
        now, peak: bytes at present, and at most.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: dict[int, weakref.ref] = {}

    def add(self, tensor: Tensor, made: bool = True) -> None:
        """Count the storage of a tensor once; with `made` false, never."""
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes() if made else 0
        if key in self.known:
            return

        def gone(reference: weakref.ref) -> None:
            self.now -= size
            del self.known[key]

        self.known[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        return result


@contextmanager
def counted(model: nn.Module) -> Iterator[LiveBytes]:
    """Run operations on tensors without values inside the block, and count what they make; the model's own tensors are not counted."""
    # transformers looks at the values of positions for packed sequences, and without values builds a mask that the step does not have.
    no_packing = patch.object(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)
    with no_packing, FakeTensorMode(allow_non_fake_inputs=True) as fake, LiveBytes() as live:
        own = [fake.from_tensor(tensor) for tensor in (*model.parameters(), *model.buffers())]
        for tensor in own:
            live.add(tensor, made=False)
        yield live


@contextmanager
def recomputing(model: PreTrainedModel, wanted: bool) -> Iterator[None]:
    """The model in training mode, recomputing activations if `wanted`; restored afterwards."""
    new = hasattr(model, "activation_checkpointing_enable")
    training = {module: module.training for module in model.modules()}
    try:
        model.train()
        if wanted:
            (model.activation_checkpointing_enable if new else model.gradient_checkpointing_enable)()
        yield
    finally:
        if wanted:
            (model.activation_checkpointing_disable if new else model.gradient_checkpointing_disable)()
        for module, mode in training.items():
            module.training = mode


def over_layers(
    model: PreTrainedModel, measure: Callable[[], tuple[float, ...]], roughly: tuple[float, ...]
) -> Sequence[float]:
    """What `measure` finds for the whole model, from what it finds for its first two and four layers.

    It is `roughly` for a model that is spread over processes, or that has operations which need values.
    """
    if is_sharded(model):
        return roughly
    try:
        return _over_layers(model, measure)
    except Exception as error:  # whatever the kernels of another package raise
        logger.info("memory is estimated roughly: %s", " ".join(str(error).split())[:200])
        return roughly


def _over_layers(model: PreTrainedModel, measure: Callable[[], tuple[float, ...]]) -> Sequence[float]:
    count = model.config.get_text_config().num_hidden_layers
    found = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if count <= 4 or len(found) != 1:
        return measure()
    (layers,) = found
    every, results = layers._modules, []
    try:
        for few in (2, 4):
            layers._modules = dict(islice(every.items(), few))
            results.append(measure())
    finally:
        layers._modules = every
    return [two + (count - 2) * (four - two) / 2 for two, four in zip(*results, strict=True)]


def memory_of_step(
    args: SelfDistillConfig, model: PeftModel, checkpointing: bool, teacher: PreTrainedModel | PeftModel | None = None
) -> dict[str, float]:
    """Bytes by purpose, on the device of the run. It assumes the longest contexts that the settings allow, so it errs high.
    Hidden states of the views without a field are not in it: 2.7 GB for each copy with a hidden size of 5,120 in half precision, 8
    responses of 8,192 tokens and four fields.

    Args:
        teacher: a second model that reads the teacher's prompts, whose weights are not counted; None if it is the student.

    Returns:
        "model"; "program" (libraries, data; on CPUs only); "adapter, teacher, optimizer"; and the larger one of "sampling" and
        "training", what these phases add at their peak. Merged copies and caches that a GPU keeps between the phases are in "kept".
    """
    device = args.device  # where the model is, or will be
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(local(p).nbytes for p in model.parameters() if not p.requires_grad)
    held = held_memory(device)
    copies, caches, prompts = sampling_memory(args, model)
    training = training_memory(args, model, checkpointing, teacher)
    keeps = device.type == "cuda" and args.rollouts == "hf"
    sampling = prompts + (0 if keeps else copies + caches)
    return {
        "model": frozen,
        **({"program": max(0, held - frozen - 4 * trained) + LIBRARIES} if device.type == "cpu" else {}),
        "adapter, teacher, optimizer": 5 * 4 * trained,
        **({"kept": copies + caches} if keeps else {}),
        **({"sampling": sampling} if sampling > training else {"training": training}),
    }


def sampling_memory(args: SelfDistillConfig, model: PeftModel) -> tuple[float, float, float]:
    """Bytes of merged copies, of a step's keys and values, and of reading the prompts with what evaluation adds; of rollouts `hf`."""
    if args.rollouts != "hf":
        return 0, 0, 0
    causal_lm = unwrap(model)
    asked = args.per_device_train_batch_size * args.gradient_accumulation_steps
    rows = min(asked * load_objective(args.method, args.method_settings).responses_per_prompt, args.rollout_batch_size)
    attributed = min(8 * args.attribution_examples, args.rollout_batch_size)
    evaluated, read = (min(args.eval_size * count, args.eval_batch_size) for count in (max(1, args.eval_samples), 1))
    most, read = max(rows, evaluated, attributed), max(min(rows, asked), read, attributed)
    width = min(args.max_prompt_tokens, args.max_context_tokens - args.max_new_tokens)
    config, head = causal_lm.config.get_text_config(), causal_lm.get_output_embeddings()
    copies = 0
    if args.merge_adapter:
        copies = merged_bytes(model) + (head.weight.nbytes if head is not None and can_pack(head.weight) else 0)
    columns, first, per_token = width + args.max_new_tokens, 0.0, cache_bytes_per_token(config, causal_lm.dtype)
    if args.device.type == "cuda" and (decoded := causal_lm_for_decoding(model)) is not None and can_fix(decoded):
        # `rollouts/fixed.py`: few sizes, and the prompts are read into keys and values of their own first.
        rows, most, columns = power_of_two(rows), power_of_two(most), -(-columns // BUCKET) * BUCKET
        first = read * width * per_token
        if read > 1:  # prompts of different lengths: a mask of bytes, PyTorch's of numbers, and its padded copy
            first += read * width**2 * (1 + 2 * causal_lm.dtype.itemsize)
    first += (most - rows) * columns * per_token + SCORES * 4 * most * config.vocab_size
    if args.device.type == "cuda":
        first += most * expert_bytes(config, causal_lm.dtype)
    return copies, rows * columns * per_token, first + pass_memory(model, read, width)


def expert_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of the weights that a token's experts have in a layer, which decoding on a GPU copies for every row; 0 without experts."""
    if not (chosen := getattr(config, "num_experts_per_tok", None)):
        return 0
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    return 3 * chosen * config.hidden_size * width * dtype.itemsize


def pass_memory(model: PreTrainedModel | PeftModel, sequences: int, tokens: int) -> float:
    """Bytes at the peak of a forward pass without gradient."""

    def measure() -> tuple[float]:
        with inference_mode(model), counted(model) as live:
            last_hidden_states(model, torch.zeros(sequences, tokens, dtype=torch.long, device=unwrap(model).device))
        return (live.peak,)

    roughly = sequences * tokens * block_bytes_per_token(unwrap(model))
    return over_layers(unwrap(model), measure, (roughly,))[0]


def training_memory(
    args: SelfDistillConfig, model: PeftModel, checkpointing: bool, teacher: PreTrainedModel | PeftModel | None = None
) -> float:
    """Bytes at the peak of a micro-batch: the student's activations, with the teacher's pass, the head or the backward pass.

    Or of what is scored before and after them: the responses of the step, or samples of an evaluation, without activations.
    """
    causal_lm, objective, reader = unwrap(model), load_objective(args.method, args.method_settings), teacher or model
    config, width = causal_lm.config.get_text_config(), causal_lm.dtype.itemsize
    sequences = args.per_device_train_batch_size * objective.responses_per_prompt
    longest = args.max_context_tokens
    length = min(args.max_prompt_tokens + args.max_new_tokens, longest)
    # Responses whose views may share a pass
    together = sequences * args.gradient_accumulation_steps if prepares(objective) else sequences
    shares = shares_prefixes(args.share_prefixes, reader, args.device)
    tokens = packed_tokens(args.tokens_per_forward, args.device) if shares else args.tokens_per_forward
    prefix = longest * cache_bytes_per_token(unwrap(reader).config.get_text_config(), unwrap(reader).dtype) if shares else 0
    views = together * views_per_response(args, objective)
    read = pass_memory(reader, int(min(views, max(1, tokens // longest))), longest)
    head = head_memory(args.device, objective, sequences * args.max_new_tokens, config.vocab_size, causal_lm.dtype)

    def measure() -> tuple[float, float]:
        with counted(model) as live, torch.enable_grad():
            states = last_hidden_states(model, torch.zeros(sequences, length, dtype=torch.long, device=causal_lm.device))
            kept = live.now
            trained = [p for p in model.parameters() if p.requires_grad]
            torch.autograd.grad(states, trained, torch.ones_like(states), allow_unused=True)
        return kept, live.peak

    of_block = sequences * length * block_bytes_per_token(causal_lm)
    of_input = sequences * length * config.hidden_size * width
    roughly = config.num_hidden_layers * (of_input if checkpointing else of_block)
    with recomputing(causal_lm, checkpointing):
        kept, peak = over_layers(causal_lm, measure, (roughly, roughly + of_block))
    scored = scoring_memory(args, model, objective)
    return max(peak, scored, read + together * prefix, kept + max(read + sequences * prefix, head))


def scoring_memory(args: SelfDistillConfig, model: PeftModel, objective: Objective) -> float:
    """Bytes at the peak of scoring given responses without activations: those of the step, or the samples of an evaluation."""
    config, compares = unwrap(model).config.get_text_config(), bool(args.policy_kl_every or args.policy_step_radius)
    step = args.per_device_train_batch_size * objective.responses_per_prompt * args.gradient_accumulation_steps
    responses = max(step if prepares(objective) or compares else 0, args.eval_size * args.eval_samples)
    if not responses:
        return 0
    length = min(args.max_prompt_tokens + args.max_new_tokens, args.max_context_tokens)
    logits = chunk_memory(args.device, COMPARED if compares else MEASURED, responses * args.max_new_tokens * config.vocab_size)
    return max(logits, pass_memory(model, min(responses, max(1, args.tokens_per_forward // length)), length))


def prepares(objective: Objective) -> bool:
    """Whether the method computes over all responses of a step before the first micro-batch."""
    return type(objective).prepare is not Objective.prepare


def views_per_response(args: SelfDistillConfig, objective: Objective) -> float:
    """How many views of a response the teacher reads, at most; two where a method neither attributes nor overrides `views`."""
    attributes = getattr(objective, "attribution", type(objective).views is not Objective.views)
    return 1 + (args.attribution_views or math.inf) if attributes else 2


def head_memory(device: torch.device, objective: Objective, tokens: int, vocabulary: int, dtype: torch.dtype) -> float:
    """Bytes of the tensors of logits that the loss of a micro-batch holds at its peak.

    Args:
        tokens: of its responses.
        dtype: of the model.
    """
    gpu, logits = device.type == "cuda", tokens * vocabulary
    if objective.logits_held:
        return chunk_memory(device, objective.logits_held, logits)
    chunk = min(logits, fire_head.default_chunk(vocabulary, gpu) * vocabulary)
    if fire_head.is_compiled(device, dtype):  # up to three float32 tensors of a chunk and its gradient
        rows = 4 * 4 * chunk
    else:
        rows = BLOCKS * 4 * min(logits, fire_head.BLOCK_ELEMENTS_GPU if gpu else fire_head.BLOCK_ELEMENTS)
    return (4 if gpu else 3) * dtype.itemsize * chunk + rows  # on GPUs, views are copied if their number is not a power of two


def chunk_memory(device: torch.device, tensors: int, logits: int) -> float:
    """Bytes of so many float32 tensors of a chunk of `ops.head`, or of all logits if they are fewer."""
    return tensors * 4 * min(logits, CHUNK_ELEMENTS_GPU if device.type == "cuda" else CHUNK_ELEMENTS)


def block_bytes_per_token(model: PreTrainedModel) -> float:
    """Roughly the bytes per token within a block."""
    config = model.config.get_text_config()
    wide = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return (10 * config.hidden_size + 3 * wide) * model.dtype.itemsize
