"""Compiles every Triton kernel of the package for a GPU that need not be there: `python triton_compile.py 90`."""

from __future__ import annotations

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from firedistill.ops import triton_fire_head

TYPES = dict.fromkeys(("products", "full", "views"), "*bf16")
TYPES |= dict.fromkeys(("rows", "token_ids"), "*i64") | {"tops": "*i32"}
TYPES |= dict.fromkeys(
    ("floors", "full_floors", "view_floors", "shift", "token_weights", "out", "field_energy", "alpha"), "*fp32"
)
TYPES |= dict.fromkeys(("stride", "full_stride", "view_stride", "tokens", "vocabulary", "group"), "i32")
TYPES |= dict.fromkeys(("step_scale", "log_prob_floor"), "fp32")

PLAIN, CAPPED = (1.0, 0.0, 1.0), (0.5, 30.0, 0.7)
SETTINGS = dict(DIFFERENTIATE=True, PROJECT=True, DEFER=False, FIELDS=3, BLOCK=triton_fire_head.BLOCK)


def compile_kernel(kernel, architecture: int, **constants) -> None:
    constants = {name: value for name, value in (SETTINGS | constants).items() if name in kernel.arg_names}
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else TYPES[name] for name in kernel.arg_names},
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
    )
    triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": triton_fire_head.WARPS})
    print(kernel.__name__)


def main(architecture: int) -> None:
    compile_kernel(triton_fire_head.floors_kernel, architecture, TEACHER=PLAIN)
    compile_kernel(triton_fire_head.correct_rows_kernel, architecture, STUDENT=CAPPED)
    full = dict(shift=None, floors=None, PROJECT=False, DEFER=True)
    compile_kernel(triton_fire_head.wrong_rows_kernel, architecture, STUDENT=PLAIN, TEACHER=PLAIN, **full)
    compile_kernel(triton_fire_head.wrong_rows_kernel, architecture, STUDENT=PLAIN, TEACHER=PLAIN)
    compile_kernel(triton_fire_head.field_energies_kernel, architecture, STUDENT=PLAIN, TEACHER=CAPPED)
    compile_kernel(triton_fire_head.weighted_residuals_kernel, architecture, TEACHER=PLAIN)


if __name__ == "__main__":
    main(int(sys.argv[1]))
