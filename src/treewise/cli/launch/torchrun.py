"""torchrun, as jobs of `treewise launch` start it: deaths are restarted, an error that the run explains ends the job.

torchrun starts its processes anew whatever their exit code, and ends with 1. So a process that ends with 2 leaves a
file (`treewise.cli.gave_up`), those that are started after it end at once, and torchrun's failure becomes exit code 2,
by which schedulers tell it from a death.
"""

import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from treewise.cli.gave_up import EXPLAINED


def main() -> int:
    """As `torchrun` with the words of the command line; its exit code."""
    try:
        run.main(sys.argv[1:])
    except ChildFailedError as error:
        if EXPLAINED in {failure.exitcode for failure in error.failures.values()}:
            return EXPLAINED  # its message stands above
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
