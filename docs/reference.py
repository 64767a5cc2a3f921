"""Writes what the code says into the reference pages: `python docs/reference.py`; a test holds the pages to it.

keys.md is made as a whole; in forms.md, objectives.md and errors.md what stands between two markers is.
"""

import dataclasses
import inspect
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from typing_extensions import Doc

from treewise import errors
from treewise.cli import keys
from treewise.cli.aliases import names_of
from treewise.cli.launch.settings import LaunchSettings
from treewise.data import RenderOptions
from treewise.data.io.forms import FORMS
from treewise.errors import parts_of
from treewise.objectives import PolicyGradient
from treewise.rl.agents.record_settings import RecordSettings
from treewise.rl.agents.settings import AgentSettings
from treewise.rl.online import OnlineSettings
from treewise.serve.settings import ServeSettings
from treewise.trainer import TreeTrainingArguments

DOCS = Path(__file__).parent
HEAD = """\
# Keys and flags

For people who write a configuration or a command line. `docs/reference.py` makes this page from the code.

A key stands in `CONFIG.yaml`, or as a flag (`--key value`), which wins. Mappings take `--lora.r 16`. Other keys of
`transformers.TrainingArguments` work, too, or are errors that say why not.
`treewise schema train` prints a JSON schema for editors, `treewise COMMAND --help` the same sentences.
`eval "$(treewise completion bash)"` completes commands and keys in a shell; so for `zsh` and `tcsh`
(`pip install 'shtab>=1.10'`).
"""
SETTINGS = {  # headings: a dataclass, and where its sentences stand
    "agent_settings, of `treewise rl --agent`": (AgentSettings, ("rl/agents/settings.py", "AgentSettings")),
    "Flags of `treewise record`": (RecordSettings, None),
    "Flags of `treewise serve`": (ServeSettings, None),
    "Flags of `treewise launch`": (LaunchSettings, None),
}


def keys_page() -> str:
    """All keys of `treewise train` and `treewise rl` by group, and the settings of agents and servers."""
    known = [*keys.key_names(keys.RL | keys.TASKS), *keys.declared(*keys.ONLINE)]
    defaults = {**_defaults(OnlineSettings), **_defaults(TreeTrainingArguments), **_defaults(RenderOptions)}
    defaults |= _defaults(keys.RunKeys)
    aliases: dict[str, list[str]] = {}
    for alias, name in names_of(known).items():
        aliases.setdefault(name.split(".")[0], []).append(f"`{alias}`")
    listed = {key for group in keys.GROUPS.values() for key in group}
    theirs = set(keys.declared(*keys.TRAINING[0]))
    groups = {**keys.GROUPS, keys.ONLINE_GROUP: [key for key in known if key not in theirs and key not in listed]}
    parts = [HEAD]
    for title, members in groups.items():
        rows = [
            (f"`{key}`", keys.help_of(key), ", ".join(aliases.get(key, [])), defaults.get(key, ""))
            for key in dict.fromkeys(members)
        ]
        parts.append(f"## {title}\n\n{_table(('key', 'meaning', 'other names', 'default'), rows)}")
    for title, (kind, heading) in SETTINGS.items():
        texts = keys.declared("treewise", *heading) if heading else _docs(kind)
        own = _defaults(kind)
        rows = [(f"`{name}`", text, own.get(name, "")) for name, text in texts.items()]
        parts.append(f"## {title}\n\n{_table(('key', 'meaning', 'default'), rows)}")
    return "\n".join(parts)


def forms_table() -> str:
    """Every form of records."""
    rows = [(form.text, ", ".join(f"`{key}`" for key in form.needs), f"`{form.example}`") for form in FORMS.values()]
    return _table(("form", "keys that it needs", "an example"), rows)


def settings_table() -> str:
    """What every policy gradient can be set to."""
    own = _defaults(PolicyGradient)
    texts = keys.declared(*keys.POLICY_GRADIENT)
    rows = [(f"`{name}`", text, own.get(name, "")) for name, text in texts.items() if name in own or text]
    return _table(("setting", "meaning", "default"), rows)


def errors_table() -> str:
    """Every exception with the standard one that it is, too."""
    rows = []
    for name, kind in inspect.getmembers(errors, inspect.isclass):
        if issubclass(kind, errors.TreewiseError) and kind is not errors.TreewiseError:
            standard = next(base.__name__ for base in kind.__bases__ if base.__module__ == "builtins")
            text = " ".join((kind.__doc__ or "").split()).split(". ")[0].rstrip(".")
            rows.append((f"`{name}`", f"`{standard}`", text.partition("; ")[0]))
    return _table(("error", "is also a", "what it is"), rows)


TABLES = {"forms": forms_table, "objectives": settings_table, "errors": errors_table}


def filled(name: str, text: str) -> str:
    """A page with its made table between the markers."""
    begin, end = f"<!-- made: {name} -->\n", "<!-- /made -->"
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n{TABLES[name]()}\n{end}{rest.partition(end)[2]}"


def _defaults(kind: Any) -> dict[str, str]:
    found = {}
    for field in dataclasses.fields(kind):
        value = field.default
        if value is not dataclasses.MISSING and value is not None and field.init:
            found[field.name] = f"`{str(value).lower() if isinstance(value, bool) else value}`" if value != "" else ""
    return found


def _docs(kind: Any) -> Mapping[str, str]:
    hints = get_type_hints(kind, include_extras=True)
    return {
        name: next(each.documentation for _, about in parts_of(hint) for each in about if isinstance(each, Doc))
        for name, hint in hints.items()
    }


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    cells = [[re.sub(r"(?<!\\)\|", r"\\|", " ".join(cell.split())) for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def pages() -> dict[Path, str]:
    """Every page that the code makes, as it should be."""
    made = {DOCS / f"{name}.md": filled(name, (DOCS / f"{name}.md").read_text(encoding="utf-8")) for name in TABLES}
    return {DOCS / "keys.md": keys_page(), **made}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
