"""TrOPD (Xing et al., arXiv 2606.01249): trust the sampled-token reward only where the teacher would have accepted the token.

The reverse-KL reward of a sampled token is cheap, and has high variance where teacher and student disagree. TrOPD keeps it where the
acceptance test of speculative decoding passes; at the other tokens the student imitates the teacher's most likely tokens by forward
KL. One more response per prompt starts from a prefix that the teacher wrote, imitated with a small weight; its longest length shrinks
to 0 over training.

    P_t = min(1, q(y_t) / p_old(y_t)),   M_t ~ Bernoulli(P_t)
    trusted:  - sg[log q(y_t) - log p_old(y_t)] log p(y_t)          (a score function: the reward is not differentiated)
    outlier:  sum over the teacher's top k of q_t(v) (log q_t(v) - log p_t(v))          (not renormalized)
    prefix:   - beta log p(y_t)
    longest prefix at step k of K:  round(max_prefix (1 + cos(pi k / (K - 1))) / 2)

Losses are averaged over all tokens of the responses to a prompt, then over prompts. The teacher is the EMA with feedback. Its draft
uses feedback on an empty response; the finished guided response gets feedback of its own. Draft and continuation count as generated
tokens, the prefix is not counted twice. No draft is made once the longest prefix is 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from firedistill.config import TeacherKind
from firedistill.metrics import Metrics
from firedistill.objectives.base import Objective, setting
from firedistill.objectives.batches import MicroBatch, Step, token_log_probs
from firedistill.objectives.distributions import entropy, finite_logits, log_softmax
from firedistill.objectives.registry import register
from firedistill.rollout import Prompt, Rollout
from firedistill.rollouts.sampler import Sampler


def trust_acceptance(teacher_logp: Tensor, old_logp: Tensor) -> Tensor:
    """`min(1, q / p_old)`, the probability to trust a sampled token; the shape of its arguments, detached."""
    return (teacher_logp - old_logp).detach().clamp(max=0.0).exp()


def tropd_token_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    old_logp: Tensor,
    token_ids: Tensor,
    trusted: Tensor,
    prefix: Tensor,
    top_k: int = 64,
    beta: float = 1e-3,
) -> Tensor:
    """The loss of every token by its class; `[...]`, differentiable in `student_logits`.

    Args:
        student_logits, teacher_logits: `[..., V]`.
        old_logp: `[...]`, frozen log-probability of the sampled token.
        token_ids: `[...]`.
        trusted: `[...]` bool, the outcome of the acceptance test.
        prefix: `[...]` bool, tokens of the teacher's prefix, whatever `trusted` says of them; the remaining tokens are outliers.
        top_k: how many of the teacher's tokens an outlier imitates; at most V are there.
        beta: weight of the prefix.
    """
    log_p, log_q = log_softmax(finite_logits(student_logits)), log_softmax(finite_logits(teacher_logits.detach()))
    ids = token_ids.unsqueeze(-1)
    log_p_y, log_q_y = log_p.gather(-1, ids).squeeze(-1), log_q.gather(-1, ids).squeeze(-1)
    reward = log_q_y - old_logp.detach()
    top, top_ids = log_q.topk(min(top_k, log_q.shape[-1]), dim=-1)
    imitation = (top.exp() * (top - log_p.gather(-1, top_ids))).sum(-1)
    return torch.where(prefix.bool(), -beta * log_p_y, torch.where(trusted.bool(), -reward * log_p_y, imitation))


@dataclass(frozen=True)
class Prepared:
    """Response tokens of the group, and the draws `[T]` of the acceptance test."""

    group_tokens: int
    uniform: Tensor


@register("tropd")
@dataclass
class TrOPD(Objective):
    """Sampled-token reward where trusted, top-k forward KL elsewhere, and guided responses."""

    logits_held: ClassVar[int] = 10

    group_size: int = setting(4, "Ordinary responses per prompt; one guided response comes on top.")
    beta: float = setting(1e-3, "Guidance coefficient: weight of the teacher's prefix.", at_least=0, below=math.inf)
    max_prefix: int = setting(384, "Longest guided prefix at the first step, in tokens; 0 turns guidance off.", at_least=0)
    top_k: int = setting(64, "Number of the teacher's most likely tokens in the forward KL of untrusted tokens.", at_least=1)

    @property
    def responses_per_prompt(self) -> int:
        return self.group_size + 1

    def check_teacher(self, kind: TeacherKind, feedback: bool) -> None:
        if self.max_prefix > 0 and kind in ("adapter", "model"):
            raise ValueError(
                f"method tropd lets the teacher write the beginning of a response, which the rollout engine samples from the student's "
                f"modules, and teacher is another {kind}: use --method_settings.max_prefix 0, or teacher ema, student or initial"
            )

    def prefix_cap(self, progress: float) -> int:
        """The longest guided prefix at this share of training."""
        return round(self.max_prefix * 0.5 * (1 + math.cos(math.pi * progress)))

    def sample(self, sampler: Sampler, prompts: Sequence[Prompt], progress: float) -> list[Rollout]:
        cap = min(self.prefix_cap(progress), sampler.sampling.max_new_tokens - 1)
        drafts = sampler.teacher_drafts(prompts) if cap > 0 else [[] for _ in prompts]
        prefixes = [draft[: max(0, min(cap, len(draft) - 1))] for draft in drafts]  # never the draft's end-of-sequence
        unguided: list[list[int]] = [[]] * self.group_size
        rollouts = sampler.student(
            [prompt for prompt in prompts for _ in range(self.responses_per_prompt)],
            [ids for prefix in prefixes for ids in [*unguided, prefix]],
        )
        guided = dict(zip(rollouts[self.group_size :: self.responses_per_prompt], drafts, strict=True))
        return [replace(r, draft_tokens=len(guided[r])) if r in guided else r for r in rollouts]

    def prepare(self, step: Step) -> tuple[list[Prepared], Metrics]:
        generator = torch.Generator().manual_seed(step.seed)
        tokens: dict[int, int] = {}
        for rollout in step.rollouts:
            tokens[rollout.prompt_index] = tokens.get(rollout.prompt_index, 0) + len(rollout.response_ids)
        return [
            Prepared(tokens[rollout.prompt_index], torch.rand(len(rollout.response_ids), generator=generator))
            for rollout in step.rollouts
        ], Metrics()

    def loss(self, batch: MicroBatch) -> tuple[Tensor, Metrics]:
        metrics, head, full = Metrics(), batch.teacher.head, batch.teacher.full(batch.rollouts, keep=False)
        token_ids = batch.token_ids()
        uniform = batch.per_token([prepared.uniform for prepared in batch.prepared])
        prefix = batch.per_token([torch.arange(len(r.response_ids)) < r.prefix_length for r in batch.rollouts]) > 0
        group_tokens = batch.per_token([prepared.group_tokens for prepared in batch.prepared])

        def token_loss(student_logits: Tensor, chunk: slice) -> Tensor:
            ids, in_prefix = token_ids[chunk], prefix[chunk]
            teacher_logits = head(full.hidden[chunk])
            old_logp = token_log_probs(student_logits.detach(), ids)  # one update per batch: the student is its own past
            teacher_logp = token_log_probs(teacher_logits, ids)
            trusted = (uniform[chunk] < trust_acceptance(teacher_logp, old_logp)) & ~in_prefix
            metrics.mean(
                tropd_trusted=trusted[~in_prefix].float(),
                tropd_reward=(teacher_logp - old_logp)[trusted],
                tropd_prefix_share=in_prefix,
                entropy=entropy(student_logits.detach()),
            )
            return tropd_token_loss(student_logits, teacher_logits, old_logp, ids, trusted, in_prefix, self.top_k, self.beta)

        return batch.token_loss(1 / (group_tokens * batch.prompts), token_loss), metrics
