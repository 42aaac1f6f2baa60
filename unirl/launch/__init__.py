"""A plan run in a run folder: runner, logs, checkpoints, evaluations, and an end in good order."""

from unirl.launch.run import RunResult as RunResult
from unirl.launch.run import run as run
