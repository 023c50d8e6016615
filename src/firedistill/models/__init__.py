"""The student and its EMA teacher."""
