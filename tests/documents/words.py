"""Words that plain English does without: `python tests/documents/words.py` lists where each stands.

Software does not speak, keep company or pay. A word is listed where it has no other use here, so that a hit is a
mistake; what it stands for is in the second column.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "docs", "examples", "benchmarks")
# LOG.md and CHANGELOG.md are history and stay as they were written.
PAGES = ("README.md", "DESIGN.md", "CONTRIBUTING.md", "AGENTS.md")
BANNED = {
    r"keeps?(?: the)?(?: others?| other ranks)? company|refuses company": "run empty passes until the others are done",
    r"dear(?:er|est)?": "expensive",
    r"pric(?:e|es|ed|ing)": "cost",
    r"(?:is|are|was|were|be|been|and) said": "log, warn, state",
    r"is told|are told|be told|told (?:from|by|apart)": "determined, distinguished",
    r"(?:that|which|who) (?:is|are) none": "invalid",
    r"hangs? off": "is below",
    r"knows? nothing of|knows? of": "does not import, does not depend on",
    r"without a word": "silently",
    r"(?:is|are) asked (?:about|of)": "is called with",
    r"no word of": "no mention of",
    r"the machine at hand": "this machine",
    r"pays?|paid": "gains, costs",
    r"the way out": "what to do",
}
PATTERN = re.compile("|".join(rf"(?P<w{index}>\b(?:{words})\b)" for index, words in enumerate(BANNED)), re.IGNORECASE)


def hits(path: Path) -> list[str]:
    """`path:line: 'word': better` of each banned word in a file."""
    instead = list(BANNED.values())
    text = path.read_text(encoding="utf-8")
    return [
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}: "
        f"{match[0]!r}: {instead[int(str(match.lastgroup)[1:])]}"
        for match in PATTERN.finditer(text)
    ]


def all_hits() -> list[str]:
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")) if path.suffix in (".py", ".md")]
    files += [ROOT / name for name in PAGES if (ROOT / name).is_file()]
    return [line for path in files for line in hits(path)]


if __name__ == "__main__":
    lines = all_hits()
    print(*lines, sep="\n")
    sys.exit(bool(lines))
