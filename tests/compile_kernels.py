"""Compiles every Triton kernel for the compute capabilities in the arguments, without a GPU: `python compile_kernels.py 8.0 9.0`."""

from __future__ import annotations

import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from firedistill.models import kernels

# Heads, groups, size of a head: of Qwen2.5 1.5B, of SmolLM2, one head per group, many heads per group
SHAPES = [(12, 2, 128), (9, 3, 64), (2, 2, 16), (20, 1, 256)]
TYPES = {torch.bool: "i1", torch.int64: "i64", torch.bfloat16: "bf16", torch.float16: "fp16"}
TYPES |= {torch.float32: "fp32", torch.float64: "fp64"}


class Compiled:
    """Stands for a kernel: a launch compiles it for the types of the arguments, and runs nothing."""

    def __init__(self, kernel, target):
        self.kernel, self.target, self.sizes = kernel, target, []

    def __getitem__(self, grid):
        return self.compile

    def compile(self, *inputs, **constants):
        inputs = dict(zip(self.kernel.arg_names, inputs, strict=False))
        # Triton compiles ones as constants, too.
        constants |= {name: value for name, value in inputs.items() if isinstance(value, int) and value == 1}
        signature = {name: "constexpr" if name in constants else type_of(inputs[name]) for name in self.kernel.arg_names}
        places = {(self.kernel.arg_names.index(name),): value for name, value in constants.items()}
        code = triton.compile(ASTSource(self.kernel, signature, places), target=self.target).asm["cubin"]
        self.sizes.append(len(code))


def type_of(value):
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    return "i32" if isinstance(value, int) else "fp32"


def launch_all(dtype, shapes):
    for heads, groups, size in shapes:
        projected, cache = (
            torch.empty(2, 1, heads + 2 * groups, size, dtype=dtype),
            torch.empty(2, groups, 300, size, dtype=dtype),
        )
        angles, visible = torch.empty(2, 1, size, dtype=dtype), torch.empty(2, 1, 1, 300, dtype=torch.bool)
        kernels.one_query_attention(projected.transpose(1, 2)[:, :heads], cache, cache, visible, 0.1)
        kernels.new_token_attention(projected, angles, angles, cache, cache, torch.zeros(1, dtype=torch.int64), visible, 0.1)
        kernels.rotate(projected, angles, angles, heads + groups)
        kernels.rotate(projected, angles, angles, heads + groups, back=True)
    states, matrix = torch.empty(3, 64, dtype=dtype), torch.empty(96, 80, dtype=dtype)
    kernels.silu_product(states)
    kernels.silu_product_backward(states[:, :32], states)
    kernels.normalized(states, states[0], 1e-6)
    kernels.add_product(matrix, torch.empty(96, 16), torch.empty(16, 80), 2.0, matrix.clone())
    for vocabulary, width in ((9000, 1024), (kernels.MOST_CANDIDATES, kernels.MOST_CANDIDATES)):
        scores, best = torch.empty(2, vocabulary), torch.empty(2, width)
        kernels.nucleus_token(scores, best, best.long(), torch.empty(2, dtype=torch.float64), 0.95, 2**40, (-1, -2))


if __name__ == "__main__":
    own = {name: value for name, value in vars(kernels).items() if isinstance(value, triton.JITFunction)}
    for capability in sys.argv[1:]:
        target = GPUTarget("cuda", int(capability.replace(".", "")), 32)
        compiled = {name: Compiled(kernel, target) for name, kernel in own.items()}
        vars(kernels).update(compiled)
        launch_all(torch.bfloat16, SHAPES)
        launch_all(torch.float16, SHAPES[:1])
        for name, kernel in compiled.items():
            print(capability, name, *kernel.sizes)
