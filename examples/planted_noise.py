"""Does attribution tell feedback that helps from feedback that is noise by construction?

Both tasks below add one field, `noise`, to the feedback about every answer: what the verifier would say about another problem, drawn
at random. It is written like a field that helps and has nothing to do with the answer. The script samples answers and prints the mean
energy and attribution weight of each field over the tokens of the wrong ones.

    python examples/planted_noise.py
    python examples/planted_noise.py --position first

`--task planted_noise:NoisyArithmetic` trains on it, in this folder.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict

import torch

from firedistill import SelfDistillConfig
from firedistill.attribution import Inspector
from firedistill.evaluation import answer_examples
from firedistill.memory import BatchLimit
from firedistill.models.states import unwrap
from firedistill.ops import Head
from firedistill.rollouts.load import load_engines
from firedistill.setup import load_setup
from firedistill.tasks import FeedbackField, Verdict
from firedistill.tasks.arithmetic import Arithmetic
from firedistill.tasks.code import failing_test_text
from firedistill.tasks.feedback import quoted, verifier_field
from firedistill.tasks.functions import Functions
from firedistill.teacher import Teacher

OTHERS = 256  # problems from which the noise is drawn


class Noisy:
    """A task with a further field, `noise`, in its feedback: what `noise` says about another problem.

    Args:
        position: "first" or "last", of the field.
    """

    def __init__(self, position="last"):
        super().__init__()
        self.position = position
        self.others = super().examples("train", OTHERS, seed=2**20)

    def feedback(self, example, response, verdict):
        rng = random.Random(f"{example.uid}/{response}")
        other = rng.choice([other for other in self.others if other.question != example.question])
        noise, fields = FeedbackField("noise", self.noise(other, rng)), super().feedback(example, response, verdict)
        return (noise, *fields) if self.position == "first" else (*fields, noise)


class NoisyArithmetic(Noisy, Arithmetic):
    """`arithmetic` with the verifier's line about another problem as a further field."""

    def noise(self, other, rng):
        wrong = str(int(other.answer) + rng.choice([-10, -2, -1, 1, 2, 10]))
        return verifier_field(Verdict(False, wrong, other.answer)).text


class NoisyFunctions(Noisy, Functions):
    """`functions` with a failing test of another problem as a further field."""

    def noise(self, other, rng):
        number, returned = rng.sample(range(len(other.metadata["tests"])), 2)
        test, value = other.metadata["tests"][number], other.metadata["tests"][returned].expected
        return failing_test_text(number + 1, test, quoted(repr(value)))


TASKS = {"arithmetic": NoisyArithmetic, "functions": NoisyFunctions}


def measure(model: str, task, problems: int, seed: int, max_new_tokens: int):
    """Energies and weights of each field, one entry per token of the wrong answers, and the number of these answers."""
    args = SelfDistillConfig(
        model=model,
        model_dtype="float32" if model == "lab" else "auto",
        use_cpu=not torch.cuda.is_available(),
        temperature=1.0,
        top_p=1.0,
        max_new_tokens=max_new_tokens,
        max_context_tokens=2048,
        eval_size=problems,
        eval_subset_seed=seed,
        seed=seed,
        output_dir="unused",
    )
    setup = load_setup(args, task=task, train=False)
    teacher = Teacher(setup.model, setup.task, setup.encoder, rate=args.ema_rate)
    limit = BatchLimit(problems, "problems", "lower problems")
    engine, _ = load_engines(setup.model, setup.tokenizer, setup.args, {"rollouts": limit, "evaluation": limit})
    inspector = Inspector(setup.args, setup.model, teacher, Head.of(unwrap(setup.model), 1.0), setup.encoder)
    rollouts, _ = answer_examples(
        engine, setup.task, setup.encoder, setup.eval_examples, args.sampling, setup.args.budget, seed
    )
    wrong = [rollout for rollout in rollouts if rollout.response_ids and not rollout.verdict.correct]
    found = defaultdict(lambda: ([], []))
    for rollout in wrong:
        inspection = inspector.inspect(rollout)
        for j, field in enumerate(inspection.rollout.feedback):
            found[field.name][0].extend(inspection.target.field_energy[j].tolist())
            found[field.name][1].extend(inspection.target.alpha[j + 1].tolist())
    return found, len(wrong)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="lab")
    parser.add_argument("--task", default="arithmetic", choices=TASKS)
    parser.add_argument("--position", default="last", choices=["first", "last"], help="of the noise among the fields")
    parser.add_argument("--problems", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--max_new_tokens", type=int, default=64)
    options = parser.parse_args()
    task = TASKS[options.task](options.position)
    for seed in options.seeds:
        found, wrong = measure(options.model, task, options.problems, seed, options.max_new_tokens)
        print(f"seed {seed}: {wrong} wrong answers of {options.problems}")
        for name, (energies, weights) in found.items():
            energy, weight = (sum(values) / len(values) for values in (energies, weights))
            print(f"  {name:12} energy {energy:.4f}  weight {weight:.4f}  over {len(weights)} tokens", flush=True)


if __name__ == "__main__":
    main()
