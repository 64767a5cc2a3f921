"""Importers: dumps of other training stacks and recorded agent logs, turned into records that `load_trees` reads.

`treewise.data.io.formats.FORMATS` says how a dump is recognised and what reads it; `convert` reads files and reports
what became of them.
"""

from treewise.data.importers.convert import Dumps, ImportReport, import_rollouts
from treewise.data.io.formats import FORMATS, detect_format

__all__ = ["import_rollouts", "ImportReport", "Dumps", "FORMATS", "detect_format"]
