"""What an installed wheel can do: `python wheel_smoke.py PLACE`, a folder around it and outside of the repository."""

import sys
from pathlib import Path

import treewise as tw

assert tw.__file__.startswith(sys.argv[1]), tw.__file__
assert "torch" not in sys.modules

from treewise.cli.main import main  # noqa: E402
from treewise.nn.support_table import CapabilityTable  # noqa: E402
from treewise.testing import assert_equals_flat, tiny_model  # noqa: E402

assert_equals_flat(tiny_model("qwen3"), [tw.Trajectory([1, 2, 3, 4]), tw.Trajectory([1, 2, 5])], max_tokens=[None, 2])
assert CapabilityTable.load().rows
Path("rows.jsonl").write_text('{"token_ids": [1, 2, 3]}\n{"token_ids": [1, 2, 4]}\n', encoding="utf-8")
assert main(["inspect", "rows.jsonl", "--html", "report.html"]) == 0
assert "<script" in Path("report.html").read_text(encoding="utf-8")
