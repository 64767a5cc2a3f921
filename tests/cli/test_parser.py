"""The parsers of all commands: what their help costs."""

import json
import subprocess
import sys

from treewise.cli.parser import COMMANDS

# Of every command: its help, an unknown flag and, of each flag with choices, one that there is not. Prints the exit
# codes of each command, and which modules were imported by then.
PROGRAM = """
import contextlib, io, json, sys
from treewise.cli.main import main
from treewise.cli.parser import COMMANDS, make_parsers

def code(*words):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            return main(words)
        except SystemExit as end:
            return end.code

codes = {}
for name, parser in make_parsers(*COMMANDS)[1].items():
    chosen = [each.option_strings[0] for each in parser._actions if each.choices and each.option_strings]
    codes[name] = [code(name, "--help"), code(name, "--no_such", "1"), *(code(name, each, "no") for each in chosen)]
    codes[name].append([each for each in ("torch", "transformers") if each in sys.modules])
print(json.dumps(codes))
"""


def test_help_and_what_a_parser_refuses_import_neither_torch_nor_transformers() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert list(found) == list(COMMANDS)
    assert {name: codes for name, codes in found.items() if codes != [0, *[2] * (len(codes) - 2), []]} == {}
    assert len(found["bench"]) > 9  # choices were found
