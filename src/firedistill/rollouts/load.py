"""The rollout engines that the settings name."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate.utils import gather_object
from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from firedistill.config import SelfDistillConfig
from firedistill.memory import BatchLimit, free_memory, unused_memory
from firedistill.metrics import Metrics
from firedistill.models.attention import has_bfloat16
from firedistill.models.states import positions, unwrap
from firedistill.rollouts.engine import RolloutEngine
from firedistill.rollouts.hf import HFRolloutEngine
from firedistill.rollouts.padding import PaddingError, padding_on_cpu
from firedistill.rollouts.remote import supports_temperature
from firedistill.rollouts.server import VLLMServerEngine
from firedistill.rollouts.vllm import VLLMEngine, cache_bytes
from firedistill.rollouts.weights import AdapterError, check_adapter
from firedistill.run.directory import ROLLOUT_ADAPTERS

logger = logging.getLogger(__name__)


def load_engines(
    model: PeftModel, tokenizer: PreTrainedTokenizerBase, args: SelfDistillConfig, limits: Mapping[str, BatchLimit]
) -> tuple[RolloutEngine, RolloutEngine]:
    """The engine of the training rollouts, and the one of evaluations; with vLLM they are one.

    Args:
        limits: how many prompts the student itself samples at once: "rollouts" and "evaluation".

    Raises:
        ValueError: the engine cannot run the adapter, or sample at the temperature.
        ImportError: vLLM is not installed.
    """
    if args.rollouts == "hf":
        student = HFRolloutEngine(model, tokenizer, limits["rollouts"], merge_adapter=None if args.merge_adapter else False)
        return student, student.sharing(limits["evaluation"])
    if not supports_temperature(args.temperature):
        raise ValueError(f"temperature is {args.temperature:g}: vLLM supports 0 (greedy) and 0.01 to 2; use --rollouts hf")
    context, sequences = engine_context(model, args), max(args.rollout_batch_size, args.eval_batch_size)
    engine: RolloutEngine
    if args.rollouts == "vllm":
        engine = VLLMEngine(model, tokenizer, context=context, sequences=sequences, weights=args.vllm_weights)
    else:
        folder, process = Path(args.run_dir) / ROLLOUT_ADAPTERS, args.process_index
        engine = VLLMServerEngine(
            model, tokenizer, args.rollout_servers, folder, context=context, sequences=sequences, process=process
        )
    return engine, engine


def engine_context(model: PeftModel, args: SelfDistillConfig) -> int:
    """The largest number of tokens of prompt and response, which vLLM limits to the model's positions."""
    return min(args.max_context_tokens, positions(model) or args.max_context_tokens)


def choose_engine(model: PeftModel, args: SelfDistillConfig) -> str:
    """`vllm` where every process has it, can run the adapter, and has room for a second copy of the base model; else `hf`."""
    base = unwrap(model)
    try:
        check_adapter(model)
        if args.device.type == "cpu":
            padding_on_cpu(base.config.get_text_config())
        reason = None if importlib.util.find_spec("vllm") else "vLLM is not installed"
        if base.dtype == torch.bfloat16 and not has_bfloat16(args.device) and args.device.type == "cuda":
            reason = "vLLM does not emulate bfloat16, which this GPU does not multiply"
        if not supports_temperature(args.temperature):
            reason = reason or f"temperature is {args.temperature:g}, and vLLM supports 0 and 0.01 to 2"
    except (AdapterError, PaddingError) as error:
        reason = str(error)
    if reason is None:
        sequences = (
            max(args.rollout_batch_size, args.eval_batch_size) if args.device.type == "cpu" else 1
        )  # a GPU's cache shrinks
        copy = sum(p.nbytes for p in base.parameters() if not p.requires_grad)
        need = 2.2 * copy + cache_bytes(base.config.get_text_config(), base.dtype, engine_context(model, args), sequences)
        free = free_memory(args.device)
        if args.device.type == "cuda" and copy > (host := unused_memory(torch.device("cpu"))):
            reason = f"while vLLM sleeps, its weights take {copy / 1e9:.1f} GB of the host's memory, and {host / 1e9:.1f} GB are free"
        elif need > free:
            reason = (
                f"two copies of the model and vLLM's cache take about {need / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
            )
    reason = next(filter(None, gather_object([reason])), None)
    if reason is not None:
        logger.warning("--rollouts auto: the student samples, not vLLM: %s", reason)
    return "vllm" if reason is None else "hf"


def metrics_of(engine: RolloutEngine) -> Metrics:
    """What an engine has measured since the last call; nothing for engines that measure nothing."""
    return getattr(engine, "take_metrics", Metrics)()


@contextmanager
def in_use(engine: RolloutEngine) -> Iterator[None]:
    """Close the engine at the end."""
    try:
        yield
    finally:
        close(engine)


def close(engine: RolloutEngine) -> None:
    """End the processes of an engine, and free what it keeps from call to call."""
    getattr(engine, "close", lambda: None)()
