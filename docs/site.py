"""Hook of mkdocs: pages may link to files of the repository outside of docs/, which then become part of the site.

A link `../benchmarks/results/x.json` in docs/performance.md is right for a reader of the repository. In the site, docs/
is the top, so the linked file is added to it and the link shortened. Pages of the repository (README.md, ...) are added
as they are, and their links to docs/ shortened.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
START = "start.md"  # README.md in the site, where that name would mean index.html
PAGES = (
    *("README.md", "DESIGN.md", "CHANGELOG.md", "CONTRIBUTING.md", "AGENTS.md", "LOG.md", "examples/README.md"),
    *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "benchmarks" / "reports").glob("*.md"))),
)
LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(?=\))")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages of the repository, and whatever files any page links to."""
    sources = [*(ROOT / page for page in PAGES), *(ROOT / "docs").glob("*.md")]
    wanted = set(PAGES)
    for source in sources:
        for match in LINK.finditer(source.read_text(encoding="utf-8")):
            target = (source.parent / match[2]).resolve()
            if target.is_file() and target.is_relative_to(ROOT) and not target.is_relative_to(ROOT / "docs"):
                wanted.add(target.relative_to(ROOT).as_posix())
    for name in sorted(wanted):
        place = START if name == "README.md" else name
        files.append(File.generated(config, place, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links as the site has them: docs/ is the top."""
    name = "README.md" if page.file.src_uri == START else page.file.src_uri
    folder = posixpath.dirname(name if name in PAGES else f"docs/{name}")

    def shortened(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[2]))
        if (ROOT / target).is_dir():
            readme = posixpath.join(target, "README.md")
            if not (ROOT / readme).is_file():
                readme = posixpath.join(posixpath.dirname(target), "README.md")
            target = readme
        target = START if target == "README.md" else target
        here = posixpath.dirname(name) or "."
        return f"{match[1]}{posixpath.relpath(target.removeprefix('docs/'), here)}{match[3] or ''}"

    return LINK.sub(shortened, markdown)
