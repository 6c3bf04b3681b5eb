"""Loss, optimizer, the pure step, the host's loop, checkpoints and metrics."""


class TrainingFailed(RuntimeError):
    """The work failed, through no fault of the command: one line. The command line prints it and exits with 1."""
