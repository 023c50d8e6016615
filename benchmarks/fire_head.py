"""What FIRE costs at the head: the literal equations, today's chunked functions, `fire_head_loss`, and plain self-distillation.

    python benchmarks/fire_head.py --tokens 256 --over 0 0.1 1 --output benchmarks/results/fire_head.json

Everything is timed in one process, the variants in turn, forward and backward, so that whatever else the machine does hits all of
them alike; with one thread, the processor time is what remains when other work takes its turns. Peak memory is measured in a process
per variant (Linux only), beyond what is in memory before the call. States and head are random; the step scale is chosen such that
the wanted fraction of tokens violates the radius. All tokens are of wrong responses.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from firedistill.functional import fire_target, reverse_kl
from firedistill.ops import Head, chunked_token_loss, fire_head_loss


@dataclass
class Setting:
    """One size of problem; `arguments` rebuilds it in another process."""

    head: Head
    student: Tensor
    full: Tensor
    without: Tensor
    step_scale: float = 1.0

    @property
    def token_weights(self) -> Tensor:
        return torch.full((len(self.student),), 1 / len(self.student))

    def teacher_logits(self, rows: slice) -> tuple[Tensor, Tensor]:
        """With all feedback `[C, V]`, and without field j `[B, C, V]` (as one matrix product: a batched one copies the head)."""
        without = self.without[:, rows]
        return self.head(self.full[rows]), self.head(without.flatten(0, 1)).unflatten(0, without.shape[:2])


def make_setting(tokens: int, vocabulary: int, width: int, fields: int, dtype: str, over: float) -> Setting:
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int, size: float = 1.0) -> Tensor:
        return (size * torch.randn(*shape, generator=generator)).to(getattr(torch, dtype))

    weight = torch.cat([noise(min(8192, vocabulary - start), width, size=0.05) for start in range(0, vocabulary, 8192)])
    student = noise(tokens, width)
    full = student + noise(tokens, width, size=0.3)
    setting = Setting(
        Head.of_weight(weight), student.requires_grad_(), full.detach(), full.detach() + noise(fields, tokens, width, size=0.2)
    )
    with torch.no_grad():
        output = fused(setting, attribution=False)
    violated_from = (output.rho / output.energy.sqrt()).sort().values  # step scales at which tokens begin to violate the radius
    bounds = torch.cat([violated_from[:1] * 0.98, violated_from, violated_from[-1:] * 1.02])
    position = round(over * tokens)
    setting.step_scale = max(1.0, float(bounds[position] + bounds[position + 1]) / 2)
    return setting


def fused(setting: Setting, lazy: bool = False, **more):
    tokens = len(setting.student)
    return fire_head_loss(
        setting.head,
        setting.student,
        setting.token_weights,
        token_ids=torch.zeros(tokens, dtype=torch.long),
        correct=torch.zeros(tokens, dtype=torch.bool),
        teacher_hidden=setting.full,
        loo_hidden=(lambda rows: setting.without[:, rows]) if lazy else setting.without,
        step_scale=setting.step_scale,
        **more,
    )


def fused_loss(setting: Setting) -> Tensor:
    return fused(setting).loss


def fused_lazy_loss(setting: Setting) -> Tensor:
    """Rows without a field asked for once the violations are known: the form that spares the teacher's forward passes."""
    return fused(setting, lazy=True).loss


def literal_fire(z: Tensor, q_c: Tensor, q_without: Tensor, step_scale: float) -> Tensor:
    """Eqs. fire_radius to fire_final_target and the KL of eq. fire_objective, each as it stands; `[C]`."""
    log_p_live = F.log_softmax(z, -1)
    with torch.no_grad():
        log_p = log_p_live.detach()
        p = log_p.exp()

        def induced(log_q: Tensor) -> Tensor:
            ratio = log_p - log_q
            return p * (ratio - (p * ratio).sum(-1, keepdim=True))

        log_q_c, log_q_without = F.log_softmax(q_c, -1), F.log_softmax(q_without, -1)
        rho = (1 - p.square().sum(-1)).sqrt() / step_scale
        g_c = induced(log_q_c)
        energy = g_c.square().sum(-1)
        field_energy = (g_c - induced(log_q_without)).square().sum(-1)
        chi = ((energy - rho.square()) / energy).clamp(min=0)
        evidence = torch.cat([rho.square().unsqueeze(0), chi * field_energy])
        alpha = evidence / evidence.sum(0)
        log_views = torch.cat([log_q_c.unsqueeze(0), log_q_without])
        log_q_A = F.log_softmax((alpha.unsqueeze(-1) * log_views).sum(0), -1)
        eta = (rho / induced(log_q_A).norm(dim=-1)).clamp(max=1).unsqueeze(-1)
        log_q_fire = F.log_softmax((1 - eta) * log_p + eta * log_q_A, -1)
    return (log_p_live.exp() * (log_p_live - log_q_fire)).sum(-1)


def literal_loss(setting: Setting, chunk: int = 32) -> Tensor:
    """All views at all tokens, autograd through the student's head; chunked only because nothing would fit otherwise."""
    total = torch.zeros(())
    for start in range(0, len(setting.student), chunk):
        rows = slice(start, start + chunk)
        with torch.no_grad():
            q_c, q_without = setting.teacher_logits(rows)
        loss = (
            setting.token_weights[rows] * literal_fire(setting.head(setting.student[rows]), q_c, q_without, setting.step_scale)
        ).sum()
        loss.backward()
        total += loss.detach()
    return total


def functions_loss(setting: Setting) -> Tensor:
    """`fire_target` inside `chunked_token_loss`, all views at all tokens."""

    def token_loss(logits: Tensor, rows: slice) -> Tensor:
        q_c, q_without = setting.teacher_logits(rows)
        return reverse_kl(logits, fire_target(logits.detach(), q_c, q_without, step_scale=setting.step_scale).log_probs)

    return chunked_token_loss(setting.head, setting.student, setting.token_weights, token_loss)


def full_context_loss(setting: Setting) -> Tensor:
    """Plain self-distillation: reverse KL to the full teacher."""
    return chunked_token_loss(
        setting.head,
        setting.student,
        setting.token_weights,
        lambda logits, rows: reverse_kl(logits, setting.head(setting.full[rows]).detach()),
    )


VARIANTS = {
    "literal": literal_loss,
    "functions": functions_loss,
    "fire_head_loss": fused_loss,
    "fire_head_loss, lazy": fused_lazy_loss,
    "full_context": full_context_loss,
}


def run(variant: str, setting: Setting) -> tuple[float, Tensor]:
    """Loss and gradient; `literal_loss` has gone backward already."""
    setting.student.grad = None
    loss = VARIANTS[variant](setting)
    if loss.requires_grad:
        loss.backward()
    return loss.item(), setting.student.grad.float()


def time_variants(setting: Setting, variants: list[str], repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds per token after one run of each: median, minimum and maximum of the wall clock, median of the processor time."""
    wall: dict[str, list[float]] = {variant: [] for variant in variants}
    processor: dict[str, list[float]] = {variant: [] for variant in variants}
    for repeat in range(repeats + 1):
        for variant in variants:
            wall_start, processor_start = time.perf_counter(), time.process_time()
            run(variant, setting)
            if repeat:
                wall[variant].append(1000 * (time.perf_counter() - wall_start) / len(setting.student))
                processor[variant].append(1000 * (time.process_time() - processor_start) / len(setting.student))
    return {
        variant: {
            "median": statistics.median(wall[variant]),
            "min": min(wall[variant]),
            "max": max(wall[variant]),
            "processor_median": statistics.median(processor[variant]),
        }
        for variant in variants
    }


def status_mib(field: str) -> float:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) / 1024


def peak_memory(options: argparse.Namespace, variant: str, tokens: int, over: float) -> float:
    """Peak resident memory beyond the inputs, in MiB, of one run in a process of its own."""
    sizes = ["--vocabulary", options.vocabulary, "--width", options.width, "--fields", options.fields, "--dtype", options.dtype]
    command = [
        sys.executable,
        __file__,
        "--measure",
        variant,
        "--tokens",
        tokens,
        "--over",
        over,
        "--threads",
        options.threads,
        *sizes,
    ]
    return float(subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--fields", type=int, default=4)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--over", type=float, nargs="+", default=[0.0, 0.1, 1.0], help="fractions of tokens that violate the radius"
    )
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--memory-tokens", type=int, nargs="*", default=[256, 1024], help="token counts at which memory is measured"
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--measure", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sizes = (options.vocabulary, options.width, options.fields, options.dtype)

    if options.measure:
        setting = make_setting(options.tokens, *sizes, options.over[0])
        setting.student.grad = torch.zeros_like(setting.student)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = status_mib("VmRSS")
        run(options.measure, setting)
        print(status_mib("VmHWM") - before)
        return

    results: dict = {
        "machine": {
            "cpus": os.cpu_count(),
            "architecture": platform.machine(),
            "threads": options.threads,
            "torch": torch.__version__,
        },
        "sizes": {name: getattr(options, name) for name in ("tokens", "vocabulary", "width", "fields", "dtype", "repeats")},
        "milliseconds_per_token": {},
        "peak_mib_beyond_inputs": {},
    }
    for over in options.over:
        setting = make_setting(options.tokens, *sizes, over)
        found = float((fused(setting).chi > 0).float().mean())
        times = time_variants(setting, options.variants, options.repeats)
        results["milliseconds_per_token"][str(over)] = times | {
            "fraction_over_the_radius": found,
            "step_scale": setting.step_scale,
        }
        print(f"{found:.1%} of tokens over the radius (step scale {setting.step_scale:.2f})")
        for variant, t in times.items():
            spread = f"{t['min']:.2f} to {t['max']:.2f}"
            print(f"  {variant:22} {t['median']:8.2f} ms/token ({spread}), processor {t['processor_median']:.2f}", flush=True)
    for tokens in options.memory_tokens:
        for variant in options.variants:
            if variant in ("fire_head_loss", "fire_head_loss, lazy") or tokens == options.memory_tokens[0]:
                peak = peak_memory(options, variant, tokens, options.over[-1])
                results["peak_mib_beyond_inputs"][f"{variant}, {tokens} tokens"] = peak
                print(f"  {variant:22} {tokens:5} tokens  {peak:8.0f} MiB beyond the inputs", flush=True)
    if options.output:
        options.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
