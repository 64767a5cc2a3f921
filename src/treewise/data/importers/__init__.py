"""Importers: dumps of other training stacks and recorded agent logs, turned into records that `load_trees` reads.

`treewise.data.io.forms.FORMATS` says how a dump is recognised; `token_dumps`, `traces` and `openai_log` read them,
`convert` reads files and reports what became of them.
"""

from treewise.data.importers.convert import ImportReport, import_rollouts
from treewise.data.io.forms import FORMATS, detect_format

__all__ = ["import_rollouts", "ImportReport", "FORMATS", "detect_format"]
