"""A run directory: its log and its checkpoints, and how a run is stopped and resumed."""
