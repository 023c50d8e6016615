"""The teacher: its weights, its prompts, and the states of responses under them."""

from firedistill.teacher.teacher import Teacher

__all__ = ["Teacher"]
