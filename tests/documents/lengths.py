"""A report, and no gate, of long pages and sentences over 35 words: `python tests/documents/lengths.py [--list]`."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
REFERENCE = ("api", "errors", "forms", "keys", "model-table", "objectives", "report-fields")  # any length
MAX_PAGE, MAX_README, MAX_ALL, MAX_SENTENCE = 700, 1500, 40_000, 35  # words
MADE_TABLE = re.compile(r"^<!-- table: .* -->\n\n(?:\|.*\n)+", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def num_words(text: str) -> int:
    """Words with a letter or a digit: no bars of tables, no arrows."""
    return sum(bool(re.search(r"\w", each)) for each in text.split())


def long_pages() -> list[str]:
    """Pages with more words than they may have, beside tables that a command writes."""
    limits = {page: MAX_PAGE for page in PAGES if page.stem not in REFERENCE} | {ROOT / "README.md": MAX_README}
    counts = {page: num_words(MADE_TABLE.sub("", page.read_text(encoding="utf-8"))) for page in limits}
    return [f"{page.relative_to(ROOT)}: {counts[page]:,} words" for page in limits if counts[page] > limits[page]]


def sentences(text: str) -> Iterator[str]:
    """Sentences of running text: no code blocks, headings and tables. An item of a list and a parameter begin anew."""
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.|\w+:) )", FENCE.sub("\n\n", text)):
        if not re.match(r"\s*(#|\||<!--|!\[|    )", block):
            plain = re.sub(r"\]\([^)]*\)", "]", block)
            yield from re.split(r"(?<=[.!?:])\s+(?=[A-Z`*\[])", " ".join(plain.split()))


def long_sentences() -> Iterator[str]:
    """Sentences of pages and of docstrings of public names that have too many words."""
    for page in [ROOT / "README.md", *PAGES]:
        for each in sentences(page.read_text(encoding="utf-8")):
            if len(each.split()) > MAX_SENTENCE:
                yield f"{page.relative_to(ROOT)}: {each}"
    package = ROOT / "src" / "treewise"
    for module, name in re.findall(r"^from \.([\w.]+) import (\w+)", (package / "__init__.pyi").read_text(), re.M):
        path = package / f"{module.replace('.', '/')}.py"
        tree = ast.parse((path if path.exists() else package / module.replace(".", "/") / "__init__.py").read_text())
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                for each in sentences(ast.get_docstring(node) or ""):
                    if len(each.split()) > MAX_SENTENCE:
                        yield f"treewise.{name}: {each}"


if __name__ == "__main__":
    long, total = list(long_sentences()), sum(num_words(page.read_text(encoding="utf-8")) for page in PAGES)
    print(
        f"docs: {total:,} words (at most {MAX_ALL:,}) in {len(PAGES)} pages; {len(long)} sentences over {MAX_SENTENCE}"
    )
    print(*(f"too long: {page}" for page in long_pages()), sep="\n")
    if "--list" in sys.argv:
        print(*long, sep="\n")
