"""A plugin of pytest: tests see two simulated GPUs, and runs of `tiny.run_config` use it."""

import os

import simulated_gpu

os.environ["FIREDISTILL_TEST_DEVICE"] = "cuda"
simulated_gpu.start(devices=2)
