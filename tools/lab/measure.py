"""Measure the lab model on held-out problems; prints the numbers of its model card.

    python tools/lab/measure.py --model lab --problems 400

It answers three questions:

* How many problems does the model solve, greedily and sampled?
* How many of the wrong answers (sampled as in the recipe `lab`) does the teacher solve, given feedback?
* Does the teacher disagree with a wrong answer at the first wrong token? Student and teacher score the wrong answer as in
  training, once per teacher view; the result is the probability of the gold token where the answer first differs from the gold
  solution.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch

from firedistill import load_task
from firedistill.evaluation import answer_examples, summarize
from firedistill.models.loading import load_model_and_tokenizer
from firedistill.models.states import score_responses
from firedistill.models.tokens import end_of_turn_id
from firedistill.prompts import PromptEncoder, TokenBudget, View, teacher_messages
from firedistill.rollout import Rollout, Sampling
from firedistill.rollouts.hf import HFRolloutEngine

GREEDY = Sampling(temperature=0.0, top_p=1.0, max_new_tokens=64)
SAMPLINGS = {
    "greedy": GREEDY,
    "sampled, temperature 0.8, top-p 0.95 (the default of a run)": Sampling(max_new_tokens=64),
    "sampled, temperature 1, top-p 1 (the recipe lab)": Sampling(temperature=1.0, top_p=1.0, max_new_tokens=64),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="lab")
    parser.add_argument("--tasks", nargs="+", default=["arithmetic", "arithmetic:easy", "arithmetic:medium", "arithmetic:hard"])
    parser.add_argument("--problems", type=int, default=400, help="per task")
    parser.add_argument("--show", type=int, default=0, help="number of sampled answers to print")
    settings = parser.parse_args()
    torch.set_num_threads(1)

    model, tokenizer = load_model_and_tokenizer(settings.model)
    encoder, engine, budget = PromptEncoder(tokenizer), HFRolloutEngine(model, tokenizer, batch_size=100), TokenBudget()
    for name in settings.tasks:
        task = load_task(name)
        examples = task.examples("eval", settings.problems)
        print(f"{name}, {len(examples)} held-out problems")
        for label, sampling in SAMPLINGS.items():
            rollouts, _ = answer_examples(engine, task, encoder, examples, sampling, budget, seed=1)
            summary = summarize(rollouts)
            print(
                f"  {label}: {summary['accuracy']:.1%} right (± {summary['stderr']:.1%}), "
                f"{summary['well_formed_rate']:.1%} well-formed, {summary['response_length']:.1f} tokens"
            )
        wrong = [
            replace(r, feedback=task.feedback(r.example, r.response.text, r.verdict)) for r in rollouts if not r.verdict.correct
        ]
        for rollout in rollouts[: settings.show]:
            print(f"{rollout.example.question}\n{rollout.response.text}\n(gold: {rollout.example.solution!r})\n")

        if not wrong:
            continue
        names = [field.name for field in wrong[0].feedback]
        views: list[tuple[str, View]] = [("all fields", "full"), *((f"without {n}", i) for i, n in enumerate(names))]
        for label, view in views:
            prompts = [encoder.encode(teacher_messages(task, r.example, r.feedback, view)) for r in wrong]
            answers = engine.generate(prompts, GREEDY, seed=0)
            solved = sum(task.verify(r.example, a.text).correct for r, a in zip(wrong, answers, strict=True))
            print(f"  teacher, greedy, {label}: solves {solved} of the {len(wrong)} that the sampled student got wrong")
        for label, view in [("student", "none"), *views]:
            gold, sampled_token = divergence(model, encoder, task, wrong, view)
            print(
                f"  where the wrong answer leaves the gold one, {label}: gold token {gold:.2f}, student's token {sampled_token:.2f}"
            )


def divergence(model, encoder: PromptEncoder, task, wrong: list[Rollout], view: View) -> tuple[float, float]:
    """Mean probabilities under a view of the gold and the sampled token where a wrong answer first differs from the gold one."""
    end = end_of_turn_id(encoder.tokenizer)
    places = []
    for rollout in wrong:
        gold = [*encoder.encode_text(rollout.example.solution), end]
        pairs = zip(gold, rollout.response_ids, strict=False)
        place = next((i for i, (right, sampled) in enumerate(pairs) if right != sampled), None)
        if place is not None:
            places.append((rollout, place, gold[place]))
    prompts = [encoder.encode(teacher_messages(task, rollout.example, rollout.feedback, view)) for rollout, _, _ in places]
    with torch.no_grad():
        states = score_responses(model, prompts, [rollout.response_ids for rollout, _, _ in places], max_tokens=8192)
        hidden = torch.stack([h[place] for h, (_, place, _) in zip(states.hidden.split(states.lengths), places, strict=True)])
        probabilities = model.lm_head(hidden).float().softmax(-1)
    rows = torch.arange(len(places))
    gold = probabilities[rows, torch.tensor([token for _, _, token in places])]
    sampled = probabilities[rows, torch.tensor([rollout.response_ids[place] for rollout, place, _ in places])]
    return gold.mean().item(), sampled.mean().item()


if __name__ == "__main__":
    main()
