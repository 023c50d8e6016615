"""Word problems whose answer is a number: GSM8K and ASDiv (paper, appendix "Per-dataset Templates")."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from firedistill.tasks.answers.numbers import count_numbers, lenient_numeric_correct, numeric_equal, numeric_gold, read_numeric
from firedistill.tasks.answers.text import CALCULATOR_MARK
from firedistill.tasks.sources import PARQUET_EXPORT, DataError, optional_text, text_field
from firedistill.tasks.task import Task
from firedistill.tasks.types import Example, Verdict

MATH_INSTRUCTION = (
    "Work through the problem step by step, showing your arithmetic. Then, on a new final line, write the final answer as "
    "`#### ` followed by the number only (for example `#### 42`). Write nothing after that line."
)

_PLAIN_ARITHMETIC = re.compile(r"[\d\s.+\-*/()=]+")
_OPERATOR = re.compile(r"(?<=[\d)])\s*([-+*/=])\s*(?=[\d(.-])")


class NumericTask(Task):
    """A task whose answers are numbers after `####`, compared exactly. A subclass defines only `example`."""

    type_name = "math"
    answer_type = "numeric"
    checker_mode = "numeric-equivalence"
    final_marker = "####"
    format_instruction = MATH_INSTRUCTION

    def verify(self, example: Example, response: str) -> Verdict:
        """Correct if the response's answer equals the gold exactly, as a rational number."""
        gold = str(example.answer)  # a subclass may leave a number of JSON
        answer = read_numeric(response, gold)
        return Verdict(
            correct=numeric_equal(answer.value, gold),
            submitted=answer.value,
            expected=gold,
            well_formed=answer.well_formed,
            lenient_correct=lenient_numeric_correct(response, gold),
        )


class GSM8K(NumericTask):
    """Grade-school word problems (Cobbe et al., 2021).

    A row: {"question": "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many
    clips did Natalia sell altogether in April and May?", "answer": "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\\nNatalia
    sold 48+24 = <<48+24=72>>72 clips altogether in April and May.\\n#### 72"}

    The solution is the dataset's own working without calculator marks.
    """

    name = "gsm8k"
    hub_id = "openai/gsm8k"
    hub_config = "main"

    def example(self, row: Mapping[str, Any], uid: str) -> Example:
        working, marker, final = text_field(row, "answer").rpartition("####")
        if not marker or count_numbers(final) == 0:
            raise DataError("field 'answer': expected working that ends with a line `#### <number>`; add that line")
        gold = numeric_gold(final.strip())
        working = CALCULATOR_MARK.sub("", working).strip()
        return Example(uid=uid, question=text_field(row, "question"), answer=gold, solution=f"{working}\n#### {gold}".lstrip())


class ASDiv(NumericTask):
    """Diverse arithmetic word problems (Miao et al., 2020).

    A row: {"body": "Seven red apples and two green apples are in the basket.", "question": "How many apples are in the
    basket?", "solution_type": "Addition", "answer": "9 (apples)", "formula": "7+2=9"}

    The dataset has one published split, `validation` (2,305 rows). The 56 rows whose answer contains no digit (`Mrs. Hilt`,
    `They are equal`) are dropped; the other 2,249 are divided. Golds of several values (`8; 40`), ratios and times are kept, and
    must match in full.

    The solution is the published formula, one step per line.
    """

    name = "asdiv"
    hub_id = "EleutherAI/asdiv"
    hub_config = "asdiv"
    hub_revision = PARQUET_EXPORT
    train_split = eval_split = "validation"
    division_seed = 17029

    def usable(self, row: Mapping[str, Any]) -> bool:
        return count_numbers(text_field(row, "answer")) > 0

    def division_key(self, row: Mapping[str, Any]) -> str:
        return self._question(row)

    def example(self, row: Mapping[str, Any], uid: str) -> Example:
        answer = text_field(row, "answer")
        if count_numbers(answer) == 0:
            raise DataError(f"field 'answer': expected a number with an optional unit, found {answer!r}; remove the row")
        gold = numeric_gold(answer)
        formula = optional_text(row, "formula")
        solution = f"{_steps(formula)}\n#### {gold}" if formula else None
        return Example(uid=uid, question=self._question(row), answer=gold, solution=solution)

    @staticmethod
    def _question(row: Mapping[str, Any]) -> str:
        return f"{text_field(row, 'body', empty=True)}\n{text_field(row, 'question')}".lstrip()


def _steps(formula: str) -> str:
    """`3*4=12; 12-2=10` as one step per line, with spaces around the operators of plain arithmetic."""
    steps = [" ".join(step.split()) for step in formula.split(";")]
    return "\n".join(_OPERATOR.sub(r" \1 ", step) if _PLAIN_ARITHMETIC.fullmatch(step) else step for step in steps if step)
