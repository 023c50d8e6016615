"""The paper's experiments as lists of runs: plans on disk that can be stopped and continued at any point."""
