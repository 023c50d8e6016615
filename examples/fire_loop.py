"""Algorithm 1 of the paper as a plain loop: FIRE on the lab model and the arithmetic task, without a Trainer.

    python examples/fire_loop.py --steps 20

It prints the losses that `firedistill train lab --max_steps 20 --use_cpu true` logs. Read it beside the paper: symbols and order are
those of Algorithm 1, and every name is a piece of the package that works on its own.
"""

import argparse
from dataclasses import replace

import torch

from firedistill import load_task
from firedistill.models.loading import load_model_and_tokenizer
from firedistill.models.lora import add_lora
from firedistill.models.states import score_responses, unwrap
from firedistill.ops import Head, first_pass
from firedistill.prompts import PromptEncoder, TokenBudget
from firedistill.rollout import Sampling
from firedistill.rollouts.hf import HFRolloutEngine
from firedistill.rollouts.sampler import Sampler, fitting_prompts
from firedistill.step import TrainingOrder, learning_rate_factor, step_seed
from firedistill.teacher import Teacher
from firedistill.terminal import quiet_libraries

SEED, PROMPTS = 0, 8
PEAK_RATE = NOMINAL_RATE = 3e-4  # a_k at its peak, and a_0
WARMUP = 10
EMA_RATE = 0.03  # 1 - mu
LOG_PROB_FLOOR = -23.025850929940457  # log 1e-10, under the teacher's probabilities
SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=64)
BUDGET = TokenBudget(prompt=1280, feedback=768, context=2048)


def train(steps: int) -> list[float]:
    """Run `steps` optimizer steps; the loss of each."""
    # ---- Student pi_theta, EMA teacher pi_theta-bar, verifier omega and feedback builder F (the task), minibatches B
    task = load_task("arithmetic")
    model, tokenizer = load_model_and_tokenizer("lab", dtype="float32")
    torch.manual_seed(SEED)
    model = add_lora(model, r=16, alpha=32)
    encoder, engine, head = PromptEncoder(tokenizer), HFRolloutEngine(model, tokenizer), Head.of(unwrap(model))
    teacher = Teacher(model, task, encoder, rate=EMA_RATE)
    order = TrainingOrder(task.examples("train", seed=SEED), steps * PROMPTS, SEED)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.01, fused=True)

    losses = []
    for k in range(steps):
        a_k = PEAK_RATE * learning_rate_factor(k + 1, WARMUP, steps)
        step_scale = max(1.0, a_k / NOMINAL_RATE)  # s = max(1, a_k / a_0)

        # ---- Line 2: one on-policy response y_i per prompt x_i, judged by the verifier
        examples = [order[k * PROMPTS + i] for i in range(PROMPTS)]
        prompts, _ = fitting_prompts(task, encoder, examples, SAMPLING, BUDGET)
        sampler = Sampler(engine, task, encoder, SAMPLING, BUDGET, seed=step_seed(SEED, k))
        rollouts = [rollout for rollout in sampler.student(prompts) if rollout.response_ids]

        # ---- Line 8: feedback c_i = (b_1, ..., b_B) about each wrong response
        for i, rollout in enumerate(rollouts):
            if not rollout.verdict.correct:
                feedback = task.feedback(rollout.example, rollout.response.text, rollout.verdict)
                rollouts[i] = replace(rollout, feedback=feedback)
        rollouts.sort(key=lambda rollout: len(rollout.prompt_ids) + len(rollout.response_ids))  # less padding
        wrong = [rollout for rollout in rollouts if not rollout.verdict.correct]

        # ---- Line 3: the live student's hidden states at the response positions; the head turns them into p and rho
        model.train()
        student = score_responses(model, [r.prompt_ids for r in rollouts], [r.response_ids for r in rollouts])
        # ---- Line 9: the teacher on the same responses, under the full feedback c: q_c
        full = teacher.full(wrong)
        # ---- Lines 5 and 6 for correct responses: beta and Fisher-weighted SFT. For wrong ones, lines 10 and 11 as far as q_c alone
        # decides them: E_c and the gate chi. The tokens with chi > 0 are `first.over`.
        first = first_pass(
            head,
            student.hidden,
            student.token_weights() / PROMPTS,  # 1 / (|B| M_i)
            token_ids=torch.tensor([token for rollout in rollouts for token in rollout.response_ids]),
            correct=student.per_token([rollout.verdict.correct for rollout in rollouts]).bool(),
            teacher_hidden=full.hidden,
            step_scale=step_scale,
            log_prob_floor=LOG_PROB_FLOOR,
        )
        # ---- Line 9: the teacher without each field, q_-j, only where the gate is open
        views = teacher.states_without_fields(wrong, full, first.over)
        # ---- Lines 10 to 13: E_j, the weights alpha, the target q_A, its contraction eta, and KL(p || q_FIRE)
        output = first.attribute(views)

        # ---- Lines 16 and 17: the loss over |B|, and the optimizer step at rate a_k
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.param_groups[0]["lr"] = a_k
        optimizer.step()
        optimizer.zero_grad()
        # ---- Line 18: theta-bar <- mu theta-bar + (1 - mu) theta
        teacher.update()

        right = sum(rollout.verdict.correct for rollout in rollouts)
        over = len(first.over) / max(len(first.wrong), 1)
        losses.append(float(output.loss.detach()))
        print(f"step {k + 1:>3}  loss {losses[-1]:.6f}  correct {right}/{len(rollouts)}  tokens over rho {over:.1%}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    quiet_libraries()
    train(options.steps)
