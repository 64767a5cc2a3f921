"""The one exception tree. Each error is also the standard-library type that it replaces, so callers may catch either.

Messages name the place (file and line, trajectory, layer), the number that is wrong, and the way out.
"""


class TreewiseError(Exception):
    """Base of every error that treewise raises on purpose."""


class DataError(TreewiseError, ValueError):
    """A record, trajectory or file that cannot be trained on as it is."""


class PlanError(TreewiseError, ValueError):
    """A forest that cannot be cut into micro-batches under the given budget."""


class UnsupportedModelError(TreewiseError, NotImplementedError):
    """A model, layer or setting that cannot follow a tree; raised before any compute."""


class ConfigError(TreewiseError, ValueError):
    """A setting that is unknown, of the wrong type, or contradicts another one."""


class VerificationError(TreewiseError, AssertionError):
    """Tree and flat training differ by more than the tolerance."""


class OutOfMemoryError(TreewiseError, MemoryError):
    """A step that does not fit in memory at any budget, or whose gradients could not be kept apart."""


class NonFiniteError(TreewiseError, FloatingPointError):
    """A loss or gradient that is not a number; raised before the optimizer could spread it."""


class CheckpointError(TreewiseError, RuntimeError):
    """A checkpoint that is missing, incomplete or made by a different run."""


class LostRankError(TreewiseError, RuntimeError):
    """Another process of the run is gone, or does not answer. `exit_code` is 3."""

    exit_code: int = 3


class StoppedError(TreewiseError, InterruptedError):
    """A run that a signal ended, after it was saved. `exit_code` is 128 plus the signal's number, as shells have it."""

    exit_code: int = 130
