"""Does attribution tell feedback that helps from feedback that is noise by construction?

Both tasks add one field, `noise`, to the feedback about every answer: what a verifier would say about another problem, drawn at
random. It is written like the fields that help and has nothing to do with the answer.

    cd examples
    firedistill train lab --task planted_noise:NoisyArithmetic --max_steps 60 --eval_steps 60 --output_dir runs/noise-0
    python planted_noise.py runs/noise-0
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from statistics import fmean

from firedistill.run.log import read_jsonl
from firedistill.tasks import FeedbackField, Verdict
from firedistill.tasks.arithmetic import Arithmetic
from firedistill.tasks.code import failing_test_text
from firedistill.tasks.feedback import verifier_field
from firedistill.tasks.functions import Functions
from firedistill.tasks.sandbox import Outcome

OTHERS = 256  # problems from which the noise is drawn


class NoisyArithmetic(Arithmetic):
    """`arithmetic` with the verifier's line about another problem as a further field."""

    def __init__(self):
        super().__init__()
        self.others = super().examples("train", OTHERS, seed=2**20)

    def feedback(self, example, response, verdict):
        rng = random.Random(f"{example.uid}/{response}")
        other = rng.choice([other for other in self.others if other.question != example.question])
        wrong = str(int(other.answer) + rng.choice([-10, -2, -1, 1, 2, 10]))
        line = verifier_field(self, other, "", Verdict(False, wrong, other.answer))
        return (*super().feedback(example, response, verdict), FeedbackField("noise", line.text))


class NoisyFunctions(Functions):
    """`functions` with a failing test of another problem as a further field."""

    def __init__(self):
        super().__init__()
        self.others = super().examples("train", OTHERS, seed=2**20)

    def feedback(self, example, response, verdict):
        rng = random.Random(f"{example.uid}/{response}")
        other = rng.choice([other for other in self.others if other.question != example.question])
        number, returned = rng.sample(range(len(other.metadata["tests"])), 2)
        test, value = other.metadata["tests"][number], other.metadata["tests"][returned].expected
        text = failing_test_text(number + 1, test, Outcome("returned", value), self.limits)
        return (*super().feedback(example, response, verdict), FeedbackField("noise", text))


def main(runs: list[str]) -> None:
    """Print the mean attribution weight and field energy of each field over all steps, one line per run."""
    for run in runs:
        rows = read_jsonl(Path(run) / "metrics.jsonl")
        names = sorted({name for row in rows for name in row if name.startswith("alpha_") and name != "alpha_full"})
        print(run)
        for name in names:
            energy = f"field_energy_{name.removeprefix('alpha_')}"
            weights = [row[name] for row in rows if row.get(name) == row.get(name) and name in row]
            energies = [row[energy] for row in rows if energy in row and row[energy] == row[energy]]
            print(
                f"  {name.removeprefix('alpha_'):12} weight {fmean(weights):.4f}  energy {fmean(energies):.3f}  {len(weights)} steps"
            )


if __name__ == "__main__":
    main(sys.argv[1:])
