"""A run on disk: its log, its checkpoints, how it is resumed and stopped."""
