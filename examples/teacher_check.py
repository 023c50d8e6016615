"""Can the teacher read feedback? Of the held-out problems that the student gets wrong, how many does the teacher solve?

    python examples/teacher_check.py quickstart --eval_size 48

It takes a recipe and options like `firedistill train`. The student samples an answer, feedback is built for the wrong ones, and the
teacher (the same weights, at the start of a run) answers greedily with that feedback in its prompt. The feedback contains the expected
answer: a teacher far below 100 % cannot use it, and self-distillation would pull the student towards noise.
"""

import sys

from firedistill.cli.arguments import config_of, parse
from firedistill.config import SelfDistillConfig
from firedistill.evaluation import answer_examples
from firedistill.prompts import teacher_messages
from firedistill.rollouts.hf import HFRolloutEngine
from firedistill.setup import load_setup
from firedistill.terminal import quiet_libraries

quiet_libraries()
options = parse("train", sys.argv[1:])
setup = load_setup(config_of(SelfDistillConfig, options.recipe, options.settings), train=False)
args, task, encoder = setup.args, setup.task, setup.encoder
engine = HFRolloutEngine(setup.model, setup.tokenizer, args.eval_batch_size)

rollouts, _ = answer_examples(engine, task, encoder, setup.eval_examples, args.sampling, args.budget, seed=1)
wrong = [rollout for rollout in rollouts if not rollout.verdict.correct]
prompts = []
for rollout in wrong:
    feedback = task.feedback(rollout.example, rollout.response.text, rollout.verdict)
    prompts.append(encoder.encode(teacher_messages(task, rollout.example, feedback)))
answers = engine.generate(prompts, args.greedy, seed=0)
solved = sum(task.verify(rollout.example, answer.text).correct for rollout, answer in zip(wrong, answers, strict=True))
print(f"student, sampled: {len(rollouts) - len(wrong)} of {len(rollouts)} correct")
print(f"teacher, greedy, with feedback: {solved} of the other {len(wrong)} correct")
