"""Can the teacher read feedback? Of the held-out problems that the student gets wrong, how many does the teacher solve?

    python examples/teacher_check.py lab --eval_size 48

It takes a recipe and options like `firedistill train`. The student samples an answer, feedback is built for the wrong ones, and the
teacher answers greedily with that feedback in its prompt. The teacher is that of a run at its start: the student's own weights, or the
model or adapter that --teacher names. The feedback contains the expected answer: a teacher far below 100 % cannot use it, and
self-distillation would pull the student towards noise.
"""

import sys

from firedistill.cli.arguments import config_of, parse
from firedistill.config import SelfDistillConfig
from firedistill.evaluation import answer_examples
from firedistill.memory import scoring_limit
from firedistill.rollouts.hf import HFRolloutEngine
from firedistill.setup import load_setup
from firedistill.step import add_feedback
from firedistill.terminal import quiet_libraries

quiet_libraries()
options = parse("train", sys.argv[1:])
setup = load_setup(config_of(SelfDistillConfig, options.recipe, options.settings), train=False)
args, task = setup.args, setup.task
engine = HFRolloutEngine(setup.model, setup.tokenizer, args.eval_batch_size)
rollouts, _ = answer_examples(engine, task, setup.encoder, setup.eval_examples, args.sampling, args.budget, seed=1)
wrong = [rollout for rollout in rollouts if not rollout.verdict.correct]

teacher = setup.teacher(scoring_limit(args.tokens_per_forward))
if setup.teacher_model is not None:
    engine = HFRolloutEngine(setup.teacher_model, teacher.encoder.tokenizer, args.eval_batch_size)
about = [add_feedback(rollout, teacher, args.max_feedback_tokens)[0] for rollout in wrong]
prompts = [teacher.encode(rollout.example, rollout.feedback) for rollout in about]
answers = engine.generate(prompts, args.greedy, seed=0)
solved = sum(task.verify(rollout.example, answer.text).correct for rollout, answer in zip(wrong, answers, strict=True))
feedback = "with feedback" if args.teacher_feedback else "without feedback"
print(f"student, sampled: {len(rollouts) - len(wrong)} of {len(rollouts)} correct")
print(f"teacher, greedy, {feedback}: {solved} of the other {len(wrong)} correct")
