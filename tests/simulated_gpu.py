"""CUDA devices in the memory of the host, for a machine without a GPU.

    python tests/simulated_gpu.py train lab --max_steps 3            # a command of firedistill
    python -m torch.distributed.run --nproc-per-node 2 tests/simulated_gpu.py train lab --max_steps 3
    PYTHONPATH=tests python -m pytest -p on_simulated_gpu tests/test_resume.py

Tensors are on `cuda:0` and so on, and operators that mix devices fail. Operators run on the CPU (`simulated_gpu.cpp`, compiled with
g++), Triton kernels in Triton's interpreter, CUDA graphs as lists of operators, and collectives by gloo. Times, the rounding of a GPU,
streams that run at once and compiled code are not simulated.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NAME = "simulated_gpu_device"
FLAGS = ["-std=c++20", "-O1", "-shared", "-fPIC", f"-DTORCH_EXTENSION_NAME={NAME}"]
LIBRARIES = ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
MEMORY = 140 << 30
AS_IMPORTED = ("bitsandbytes", "transformers.training_args", "peft", "torch._inductor.utils")
"""Modules that look for a GPU when they are imported, and then for libraries of CUDA."""

WAITS: Counter[str] = Counter()
"""Waits of the host for a device, by line of firedistill and operator."""
LAUNCHES: Counter[str] = Counter()
"""Launches of Triton kernels, by name."""


def build(torch_folder: Path) -> Path:
    """The library for the PyTorch in this folder; compiled if it is not there yet, in about 20 s."""
    source = Path(__file__).with_suffix(".cpp")
    of_torch = str(torch_folder).encode() + (torch_folder / "version.py").read_bytes()
    digest = hashlib.sha256(source.read_bytes() + of_torch + sys.version.encode()).hexdigest()[:16]
    library = source.parent / "__pycache__" / f"{NAME}-{digest}.so"
    if not library.exists():
        library.parent.mkdir(exist_ok=True)
        include = torch_folder / "include"
        folders = [include, include / "torch/csrc/api/include", sysconfig.get_paths()["include"]]
        finished = library.with_suffix(f".{os.getpid()}")
        options = [
            *FLAGS,
            *(f"-I{folder}" for folder in folders),
            f"-L{torch_folder / 'lib'}",
            f"-Wl,-rpath,{torch_folder / 'lib'}",
        ]
        subprocess.run(["g++", *options, source, *LIBRARIES, "-o", finished], check=True)
        finished.replace(library)
    return library


def start(devices: int = 1) -> Any:
    """Make this process see so many GPUs; returns the module of the library.

    Raises:
        RuntimeError: PyTorch was imported before, or is a build for CUDA.
    """
    if "torch" in sys.modules:
        raise RuntimeError("simulated GPUs must be started before PyTorch is imported: it looks for CUDA only once")
    os.environ["TRITON_INTERPRET"] = "1"
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent
    if (folder / "lib" / "libtorch_cuda.so").exists():
        raise RuntimeError("simulated GPUs need a CPU build of PyTorch")
    library = build(folder)
    ctypes.CDLL(str(folder / "lib" / "libtorch_global_deps.so"), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library))
    import torch  # noqa: F401

    found = importlib.util.spec_from_file_location(NAME, library)
    assert found is not None and found.loader is not None
    device = importlib.util.module_from_spec(found)
    found.loader.exec_module(device)
    for name in AS_IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    device.set_devices(devices)
    replace_torch_cuda(device, devices)
    replace_storages(device)
    count_waits(device)
    interpret_kernels(device)
    fuse_attention(device)
    count_integers()
    use_gloo(device)
    return device


def count_integers() -> None:
    """`torch.histc` of integers, which CPUs do not have."""
    import torch

    histc = torch.histc

    def of_any_type(values: Any, *arguments: Any, **options: Any) -> Any:
        return histc(values.float(), *arguments, **options).to(values.dtype)

    torch.histc = of_any_type


def replace_torch_cuda(device: Any, devices: int) -> None:
    """The functions and classes of `torch.cuda` that PyTorch, its users and firedistill call."""
    import torch

    generators = tuple(device.default_generator(index) for index in range(devices))

    def index_of(which: Any) -> int:
        index = which if isinstance(which, int) else torch.device(which or "cuda").index
        return device.current() if index is None or index < 0 else index

    @contextlib.contextmanager
    def on_device(which: Any) -> Iterator[None]:
        before = device.current()
        device.set_current(index_of(which))
        try:
            yield
        finally:
            device.set_current(before)

    @contextlib.contextmanager
    def capture(graph: Any, pool: Any = None, stream: Any = None, capture_error_mode: str = "global") -> Iterator[None]:
        graph.begin()
        try:
            yield
        finally:
            graph.end()

    class Stream:
        def __init__(self, which: Any = None, **settings: Any):
            self.device, self.cuda_stream = torch.device("cuda", index_of(which)), 0

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Stream) and self.device == other.device

        def __hash__(self) -> int:
            return hash(self.device)

        def record_event(self, event: Any = None) -> Any:
            event = event or Event()
            event.record()
            return event

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            WAITS[f"{place()} stream"] += 1

        def wait_stream(self, other: Any) -> None:
            """Streams run one after the other."""

        wait_event = wait_stream

    class Event:
        def __init__(self, **settings: Any):
            self.time = 0.0

        def record(self, stream: Any = None) -> None:
            self.time = time.perf_counter()

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            WAITS[f"{place()} event"] += 1

        def wait(self, stream: Any = None) -> None:
            """See `Stream.wait_stream`."""

        def elapsed_time(self, other: Any) -> float:
            return (other.time - self.time) * 1e3

    properties = SimpleNamespace(
        name="simulated", total_memory=MEMORY, major=9, minor=0, multi_processor_count=132, warp_size=32
    )
    changes = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_compiled": lambda: True,
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "device_count": lambda: devices,
        "current_device": device.current,
        "set_device": lambda which: device.set_current(index_of(which)),
        "device": on_device,
        "device_of": lambda tensor: on_device(tensor.device if tensor.is_cuda else None),
        "get_device_name": lambda *_: properties.name,
        "get_device_capability": lambda *_: (properties.major, properties.minor),
        "get_device_properties": lambda *_: properties,
        "is_bf16_supported": lambda *_, **__: True,
        "mem_get_info": lambda *_: (MEMORY - device.memory_allocated(), MEMORY),
        "memory_allocated": lambda *_: device.memory_allocated(),
        "memory_reserved": lambda *_: device.memory_allocated(),
        "max_memory_allocated": lambda *_: device.max_memory_allocated(),
        "max_memory_reserved": lambda *_: device.max_memory_allocated(),
        "reset_peak_memory_stats": lambda *_: device.reset_peak(),
        "memory_stats": lambda *_: {},
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
        "manual_seed": lambda seed: generators[device.current()].manual_seed(seed),
        "manual_seed_all": lambda seed: [generator.manual_seed(seed) for generator in generators],
        "default_generators": generators,
        "get_rng_state": lambda which=None: generators[index_of(which)].get_state(),
        "set_rng_state": lambda state, which=None: generators[index_of(which)].set_state(state),
        "get_rng_state_all": lambda: [generator.get_state() for generator in generators],
        "set_rng_state_all": lambda states: [
            generator.set_state(state) for generator, state in zip(generators, states, strict=True)
        ],
        "synchronize": lambda *_: WAITS.update([f"{place()} synchronize"]),
        "Stream": Stream,
        "Event": Event,
        "stream": contextlib.nullcontext,
        "current_stream": Stream,
        "default_stream": Stream,
        "CUDAGraph": device.Graph,
        "graph": capture,
        "graph_pool_handle": lambda: (0, 1),
        "is_current_stream_capturing": lambda: device.capturing() is not None,
    }
    for name, value in changes.items():
        setattr(torch.cuda, name, value)
    torch._dynamo.config.disable = True  # type: ignore[attr-defined]


def replace_storages(device: Any) -> None:
    """Storages are copied and resized without the dispatcher."""
    import torch

    clone, resize = torch.UntypedStorage.clone, torch.UntypedStorage.resize_

    def all_of(storage: Any) -> Any:
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def clone_storage(self: Any) -> Any:
        return all_of(self).clone().untyped_storage() if self.device.type == "cuda" else clone(self)

    def resize_storage(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, size)
        device.resize_storage(all_of(self), size)
        return self

    torch.UntypedStorage.clone, torch.UntypedStorage.resize_ = clone_storage, resize_storage  # type: ignore[method-assign]


def count_waits(device: Any) -> None:
    """Count them, and warn or fail where `torch.cuda.set_sync_debug_mode` asks for it."""
    import torch

    mode = 0

    def set_mode(value: int) -> None:
        nonlocal mode
        mode = value

    def on_wait(operator: str) -> None:
        WAITS[f"{place()} {operator}"] += 1
        if mode == 1:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
        elif mode == 2:
            raise RuntimeError("called a synchronizing CUDA operation")

    device.on_wait(on_wait)
    torch._C._cuda_set_sync_debug_mode = set_mode  # type: ignore[attr-defined]
    torch._C._cuda_get_sync_debug_mode = lambda: mode  # type: ignore[attr-defined]


def place() -> str:
    """The innermost line of firedistill that is running."""
    for frame in reversed(traceback.extract_stack()):
        if "/firedistill/" in frame.filename:
            return f"{frame.filename.rsplit('/firedistill/', 1)[1]}:{frame.lineno}"
    return "elsewhere"


def interpret_kernels(device: Any) -> None:
    """Launch Triton kernels in its interpreter, with bfloat16, whose products it computes wrongly and to which it truncates."""
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

    launch, product, cast = GridExecutor.__call__, InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def launch_on_host(self: Any, *args: Any, **kwargs: Any) -> None:
        pointers = {x.device for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)}
        if len(pointers) != 1:
            raise RuntimeError(f"{self.fn.__name__}: pointers to memory of {pointers}")
        LAUNCHES[self.fn.__name__] += 1
        args, kwargs = tuple(map(on_host, args)), {name: on_host(x) for name, x in kwargs.items()}
        if (graph := device.capturing()) is not None:
            for x in (*args, *kwargs.values()):
                if isinstance(x, torch.Tensor):
                    graph.save(x)
            graph.add(lambda: launch(self, *args, **kwargs))
        launch(self, *args, **kwargs)

    def on_host(value: Any) -> Any:
        return device.on_host(value) if isinstance(value, torch.Tensor) else value

    def widened(bits: Any) -> Any:
        return (bits.astype(np.uint32) << 16).view(np.float32)

    def rounded(numbers: Any) -> Any:
        bits = torch.from_numpy(np.ascontiguousarray(numbers)).bfloat16().view(torch.uint16)
        return bits.numpy().reshape(np.shape(numbers))

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        a, b = (TensorHandle(widened(x.data), tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return product(self, a, b, *others)

    def cast_impl(self: Any, source: Any, to: Any) -> Any:
        types = source.dtype.scalar, to.scalar
        if types == (tl.bfloat16, tl.float32):
            return TensorHandle(widened(source.data), tl.float32)
        if types == (tl.float32, tl.bfloat16):
            return TensorHandle(rounded(source.data), tl.bfloat16)
        return cast(self, source, to)

    GridExecutor.__call__, InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = launch_on_host, create_dot, cast_impl


def fuse_attention(device: Any) -> None:
    """Let attention store no scores where PyTorch's kernels for GPUs store none, also in a pass without values.

    Flash attention takes half precision without a mask, the memory-efficient one takes heads that share no keys.
    """
    import torch

    aten, plain = torch.ops.aten, torch.nn.functional.scaled_dot_product_attention

    def as_on(place: Any, compute: Any, *inputs: Any) -> list[Any]:
        """What the function computes on the host of inputs on this device, on the device; a capture records it."""

        def write(results: Any) -> None:
            for target, tensor in zip(found, results, strict=True):
                device.on_host(target).copy_(tensor)

        results = compute()
        found = [torch.empty(tensor.shape, dtype=tensor.dtype, device=place) for tensor in results]
        write(results)
        if (graph := device.capturing()) is not None:
            for tensor in (*inputs, *found):
                graph.save(tensor)
            graph.add(lambda: write(compute()))
        return found

    def forward(query: Any, key: Any, value: Any, bias: Any, is_causal: bool, scale: float | None) -> tuple[Any, Any]:
        inputs = [query, key, value] if bias is None else [query, key, value, bias]
        shared, on_host = query.shape[1] // key.shape[1], [device.on_host(x) for x in inputs]

        def compute() -> tuple[Any, Any]:
            queries, keys, values, *mask = on_host
            repeated = [x.repeat_interleave(shared, 1) for x in (keys, values)]
            found, sums = aten._scaled_dot_product_flash_attention_for_cpu(
                queries, *repeated, 0.0, is_causal, attn_mask=mask[0] if mask else None, scale=scale
            )
            return found.transpose(1, 2), sums

        found, sums = as_on(query.device, compute, *inputs)
        return found.transpose(1, 2), sums

    def backward(tensors: tuple[Any, ...], is_causal: bool, scale: float | None) -> list[Any]:
        gradient, query, key, value, found, sums = map(device.on_host, tensors)
        shared = query.shape[1] // key.shape[1]

        def compute() -> list[Any]:
            repeated = [x.repeat_interleave(shared, 1) for x in (key, value)]
            to_query, *others = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                gradient, query, *repeated, found, sums, 0.0, is_causal, scale=scale
            )
            return [to_query, *(x.unflatten(1, (-1, shared)).sum(2) for x in others)]

        return as_on(tensors[0].device, compute, *tensors)

    # Arguments and results are those of PyTorch's operators; those of dropout are not used.
    def flash(query, key, value, dropout=0.0, is_causal=False, debug=False, *, scale=None):
        unused = torch.empty(0, dtype=torch.uint64, device="cuda")
        found = forward(query, key, value, None, is_causal, scale)
        return *found, None, None, query.shape[2], key.shape[2], unused, unused, unused

    def flash_backward(gradient, query, key, value, found, sums, a, b, c, d, dropout, is_causal, e, f, *, scale=None):
        return tuple(backward((gradient, query, key, value, found, sums), is_causal, scale))

    def efficient(query, key, value, bias, with_sums, dropout=0.0, is_causal=False, *, scale=None):
        unused = torch.empty(0, dtype=torch.int64, device="cuda")
        return *forward(query, key, value, bias, is_causal, scale), unused, unused

    def efficient_backward(gradient, query, key, value, bias, found, sums, a, b, dropout, c, is_causal=False, *, scale=None):
        return *backward((gradient, query, key, value, found, sums), is_causal, scale), None

    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        inputs = query, key, value
        if query.device.type == "cuda" and query.dim() == 4 and not dropout_p:
            if attn_mask is None and query.dtype in (torch.float16, torch.bfloat16):
                return aten._scaled_dot_product_flash_attention(*inputs, is_causal=is_causal, scale=scale)[0]
            differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
            if query.shape[1] == key.shape[1] and not (differentiated and attn_mask is not None):
                if attn_mask is not None and attn_mask.dtype == torch.bool:
                    attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
                bias = None if attn_mask is None else attn_mask.expand(*query.shape[:3], key.shape[2])
                return aten._scaled_dot_product_efficient_attention(
                    *inputs, bias, differentiated, is_causal=is_causal, scale=scale
                )[0]
        return plain(*inputs, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    device.attention = torch.library.Library("aten", "IMPL")  # its kernels go with it
    kernels = {"flash": (flash, flash_backward), "efficient": (efficient, efficient_backward)}
    for name, (kernel, of_gradient) in kernels.items():
        device.attention.impl(f"_scaled_dot_product_{name}_attention", kernel, "CUDA")
        device.attention.impl(f"_scaled_dot_product_{name}_attention_backward", of_gradient, "CUDA")
    torch.nn.functional.scaled_dot_product_attention = attention


def use_gloo(device: Any) -> None:
    """Let process groups of the backend for CUDA, which a CPU build lacks, use that for CPUs."""
    import torch

    begin = torch.distributed.init_process_group

    def init_process_group(backend: str | None = None, **settings: Any) -> None:
        settings.pop("device_id", None)
        device.run_collectives_on_the_cpu()
        begin("gloo" if backend in (None, "nccl") else backend, **settings)

    torch.distributed.init_process_group = init_process_group


if __name__ == "__main__":
    device = start(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    from firedistill.cli.main import main

    status = main(sys.argv[1:])
    of_memory = f"simulated cuda:{device.current()}: tensors of at most {device.max_memory_allocated():,} bytes"
    print(f"{of_memory}; the host waited {sum(WAITS.values()):,} times, most often at:", file=sys.stderr)
    for where, times in WAITS.most_common(12):
        print(f"{times:>8,}  {where}", file=sys.stderr)
    for kernel, times in LAUNCHES.most_common():
        print(f"{times:>8,}  launches of {kernel}", file=sys.stderr)
    sys.exit(status)
