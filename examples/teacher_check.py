"""Can the teacher read feedback? Of the held-out problems that the student gets wrong, how many does the teacher solve?

    python examples/teacher_check.py quickstart --eval_size 48

takes a recipe and options like `firedistill train`. The student samples an answer, feedback is built for the wrong ones, and the
teacher (the same weights, at the start of a run) answers greedily with that feedback in its prompt. The feedback holds the expected
answer: a teacher far below 100 % cannot use what it is told, and self-distillation will pull the student towards noise.
"""

import sys

from firedistill.cli.arguments import config_of
from firedistill.config import SelfDistillConfig
from firedistill.evaluation import answer_examples
from firedistill.prompts import teacher_messages
from firedistill.terminal import quiet_libraries
from firedistill.trainer import SelfDistillTrainer

quiet_libraries()
config = config_of(SelfDistillConfig, sys.argv[1:])
trainer = SelfDistillTrainer(args=config)
task, encoder = trainer.task, trainer.encoder

rollouts, _ = answer_examples(
    trainer.rollout_engine, task, encoder, trainer.eval_examples, config.sampling, config.budget, seed=1
)
wrong = [rollout for rollout in rollouts if not rollout.verdict.correct]
prompts = []
for rollout in wrong:
    feedback = task.feedback(rollout.example, rollout.response.text, rollout.verdict)
    prompts.append(encoder.encode(teacher_messages(task, rollout.example, feedback)))
answers = trainer.eval_engine.generate(prompts, config.greedy, seed=0)
solved = sum(task.verify(rollout.example, answer.text).correct for rollout, answer in zip(wrong, answers, strict=True))
print(f"student, sampled: {len(rollouts) - len(wrong)} of {len(rollouts)} right")
print(f"teacher, greedy, with feedback: {solved} of the {len(wrong)} others right")
