"""Runs one job in the sandbox of a copy of its two files, for a user who cannot read the repository: `hostile_run.py FOLDER < JOB`.

Prints what `report_of` makes of the report.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def report_of(sandbox: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Run a job at its level; the statuses, what the first test returned, as text, and its error."""
    tests = [sandbox.Snippet("eval", text) for text in job["tests"]]
    limits = sandbox.Limits(**job["limits"])
    report = sandbox._run(job["program"], job["setup"], tests, limits, job["level"])
    first = report.outcomes[0]
    error = first.error or report.load.error
    return {
        "load": report.load.status,
        "tests": [outcome.status for outcome in report.outcomes],
        "value": repr(first.value),
        "error": None if error is None else [error.type, error.text, error.line],
        "output": report.load.output + first.output,
        "passes": first.status == "returned" and sandbox.matches(first.value, 42),
    }


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    import sandbox  # type: ignore[import-not-found]

    try:
        print(json.dumps(report_of(sandbox, json.load(sys.stdin))))
    except sandbox.SandboxError as error:
        print(json.dumps({"failed": str(error)}))
