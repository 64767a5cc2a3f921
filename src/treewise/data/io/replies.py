"""What records and messages may say of a reply besides its text. What the words mean is in `endings`."""

from treewise.errors import DataError

REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
STOP_SEQUENCE = "stop_sequence"  # a text that the caller named stopped the model, which is not in the reply
TRUNCATED = "truncated"
KEYS = frozenset({"finish_reason", "stop_reason", STOP_SEQUENCE, "is_truncated", TRUNCATED})  # of how it ended


class UnusableError(DataError):
    """A reply or row with nothing that may be trained: left out and counted, whatever is done with bad records."""

    def __init__(self, location: str, reason: str) -> None:
        super().__init__(f"{location}: {reason}.")
        self.location, self.reason = location, reason
