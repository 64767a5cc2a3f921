"""Importers: dumps of other training stacks and recorded agent logs, turned into records that `load_trees` reads.

Each format has a module of its own with its public names and nothing else; `formats` detects which one a record
has, `convert` reads files and reports what became of them.
"""

from treewise.data.importers.convert import ImportReport, import_rollouts
from treewise.data.importers.formats import FORMATS, detect_format

__all__ = ["import_rollouts", "ImportReport", "FORMATS", "detect_format"]
