"""A task as a plain function: `@task`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from firedistill.tasks.table import TableTask


def task(
    data: Any = None,
    *,
    answer: str | None = None,
    columns: Mapping[str, str] | None = None,
    feedback: Mapping[str, Any] | None = None,
    eval_data: Any = None,
    bad_rows: str = "refuse",
    format_instruction: str | None = None,
    name: str | None = None,
) -> Callable[[Callable[..., Any]], TableTask]:
    """Make a task of a function that returns rows, or, for given `data`, of a verifier::

        @task(answer="numeric")
        def sums():
            return [{"question": f"What is {a} + {b}?", "answer": a + b} for a in range(9) for b in range(9)]

        @task("words.jsonl", feedback={"length": lambda row, response, verdict: f"The word has {len(row['word'])} letters."})
        def reverse(row, response):
            return response.strip() == row["word"][::-1]

    The first function is called once, and a fifth of its rows is held out by a fixed seed. A function with a parameter is called with
    "train" and "eval" instead. The second function judges a response to a row and returns True, False, or a `Verdict`; it may be
    `async def`.

    Args:
        data: what `TableTask` reads; None if the function returns the rows.
        answer, columns, feedback, eval_data, bad_rows, format_instruction: as in `TableTask`.
        name: of the task in uids and logs; by default the function's.

    Returns:
        A decorator that replaces the function by a `TableTask`.
    """

    def decorate(function: Callable[..., Any]) -> TableTask:
        return TableTask(
            function if data is None else data,
            answer=answer,
            columns=columns,
            feedback=feedback,
            eval_data=eval_data,
            bad_rows=bad_rows,
            format_instruction=format_instruction,
            name=name or function.__name__,
            verify=None if data is None else function,
        )

    return decorate
