"""Source that is nested deeply. The tests repeat its last line."""

value = 0  # NESTED
