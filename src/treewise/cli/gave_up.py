"""A file by which processes of a job learn that one of them ended with an error that it explained.

The job names it (`TREEWISE_GAVE_UP`) and removes what an earlier job left. Loads nothing: those that are started anew
end before anything else is loaded.
"""

import os
from pathlib import Path

VARIABLE = "TREEWISE_GAVE_UP"
EXPLAINED = 2  # the exit code of an error that treewise explains


def has_given_up() -> bool:
    """Whether a process of this job did."""
    return VARIABLE in os.environ and Path(os.environ[VARIABLE]).exists()


def give_up() -> None:
    """This one does, where it is of a job."""
    if VARIABLE in os.environ:
        Path(os.environ[VARIABLE]).touch()
