"""The pages: links lead somewhere, figures are current, and what is marked as runnable runs as it stands.

A block below `<!-- run -->` is run in a folder of its page's own: Python blocks (of statements, or of `>>>` examples)
share one namespace, lines of console blocks are commands. The first block of a page is one of these, or says what it
needs that is not here (`<!-- not run: ... -->`). Where a page names `rollouts.jsonl`, `my-model`,
`runs/first`, `model`, `trajectories` and the like without making them, the folder and the namespace hold them; the
README and the concepts begin with nothing.
"""

import doctest
import gzip
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

import treewise as tw
from treewise.cli.main import main
from treewise.testing import tiny_model

STANDALONE = ("README.md", "concepts.md")
TOKENIZER = Path(__file__).parents[1] / "data" / "fixtures" / "smollm2"
ROOT = Path(__file__).parents[2]
REPORTS = (ROOT / "benchmarks" / "reports").glob("*.md")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *REPORTS, ROOT / "examples" / "README.md"])
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s#]*)(?:#([^)\s]*))?\)")
FIRST_BLOCK = re.compile(r"^(?:(<!-- .* -->)\n)?```(?!bibtex)", re.MULTILINE)
REFERENCE = ("api.md", "forms.md", "index.md", "keys.md", "model-table.md", "objectives.md", "report-fields.md")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
RUNNABLE = re.compile(r"^<!-- run -->\n```(python|console)\n(.*?)^```", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
RUN_PAGES = [page for page in PAGES if RUNNABLE.search(page.read_text(encoding="utf-8"))]
IDS = [str(page.relative_to(ROOT)) for page in PAGES]


def anchors_of(page: Path) -> set[str]:
    """The anchors of headings, as GitHub and mkdocs make them."""
    headings = HEADING.findall(FENCE.sub("", page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", text).strip().lower().replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        linked = (page.parent / target).resolve() if target else page
        assert linked.exists(), f"{target} does not exist"
        assert linked.is_relative_to(ROOT)
        assert not anchor or anchor in anchors_of(linked), f"{target}#{anchor}: no such heading"


def at_hand(folder: Path) -> dict[str, object]:
    """The reader's own things: rollouts, a model with its tokenizer and a run in the folder, the rest by name."""
    model = tiny_model(vocab_size=49152, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    model.save_pretrained(folder / "my-model")
    for path in TOKENIZER.iterdir():
        content = path.read_bytes()
        (folder / "my-model" / path.name.removesuffix(".gz")).write_bytes(
            gzip.decompress(content) if path.suffix == ".gz" else content
        )
    prompt = list(range(500, 530))
    rows = [
        {"token_ids": prompt + answer, "loss_weights": [0] * 30 + [1] * len(answer), "reward": reward, "group": "task"}
        for answer, reward in (([50, 51, 52], 1.0), ([50, 51, 60], 0.0), ([70, 71], 0.0))
    ]
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "runs" / "first").mkdir(parents=True)
    log = {"log_history": [{"step": 1, "loss": 2.0}], "global_step": 1, "max_steps": 1}
    (folder / "runs" / "first" / "trainer_state.json").write_text(json.dumps(log))
    trajectories = [tw.Trajectory(**row) for row in rows]
    return {
        "model": model,
        "tokenizer": AutoTokenizer.from_pretrained(folder / "my-model"),
        "trajectories": trajectories,
        "engine": tw.TreeEngine(model),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "num_updates": 2,
        "forests": [tw.Forest.from_trajectories(trajectories)],
        "objective": tw.SFT(),
    }


@pytest.mark.representatives("concepts.md", "README.md", "objectives.md", "training.md")
@pytest.mark.parametrize("page", RUN_PAGES, ids=lambda page: page.name)
def test_runnable_blocks_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TREEWISE_CACHE", str(tmp_path / "cache"))
    namespace: dict[str, object] = {"__name__": "page"}
    if page.name not in STANDALONE:
        namespace |= at_hand(tmp_path)
    for kind, block in RUNNABLE.findall(page.read_text(encoding="utf-8")):
        if ">>> " in block:
            example = doctest.DocTestParser().get_doctest(block, namespace, page.name, str(page), 0)
            runner = doctest.DocTestRunner()
            assert runner.run(example, clear_globs=False).failed == 0, capsys.readouterr().out
        elif kind == "python":
            exec(compile(block, str(page), "exec"), namespace)
        elif kind == "console":
            with ExitStack() as servers:
                for line in block.splitlines():
                    run_line(line, servers, capsys)


def run_line(line: str, servers: ExitStack, capsys: pytest.CaptureFixture[str]) -> None:
    """A line of a console block: a command of ours in this process, a server up to the end of the block, another."""
    words = shlex.split(line, comments=True)
    assert words[0] == "$", line
    if words[1] == "treewise" and words[-1] != "&":
        assert main(words[2:]) == 0, f"{line}\n{capsys.readouterr().err}"
        return
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if words[-1] != "&":
        command = line[2:].replace("torchrun", f"{sys.executable} -m torch.distributed.run")
        done = subprocess.run(command, shell=True, env={**os.environ, "PATH": path}, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        return
    server = subprocess.Popen([sys.executable, "-m", *words[1:-1]], stdout=subprocess.DEVNULL)
    servers.callback(server.wait)
    servers.callback(server.terminate)
    while True:
        assert server.poll() is None, f"{line}: it has ended"
        with (
            suppress(ConnectionRefusedError),
            socket.create_connection(("127.0.0.1", int(words[words.index("--port") + 1]))),
        ):
            return
        time.sleep(0.1)


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_the_first_block_of_a_page_runs_or_says_what_it_needs(page: Path) -> None:
    first = FIRST_BLOCK.search(page.read_text(encoding="utf-8"))
    if first is not None and page.name not in REFERENCE:
        assert re.fullmatch(r"<!-- (run|not run: needs .+) -->", first[1] or ""), page.name


def test_the_readme_has_runnable_blocks_of_both_kinds() -> None:
    kinds = [kind for kind, _ in RUNNABLE.findall((ROOT / "README.md").read_text(encoding="utf-8"))]
    assert kinds.count("python") >= 3
    assert "console" in kinds


def test_python_blocks_that_are_not_run_are_python() -> None:
    for page in PAGES:
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
            if ">>>" not in block:
                compile(block, str(page), "exec")


def test_the_index_and_the_site_list_every_page() -> None:
    names = {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert names == {target for target, _ in LINK.findall(index) if "/" not in target}
    assert all(f"{name}" in site for name in names)


def test_figures_are_what_their_code_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ROOT / "docs" / "figures"
    monkeypatch.syspath_prepend(str(folder))
    import draw

    drawn = {f"{name}.svg": make().svg() for name, make in draw.FIGURES.items()}
    assert drawn == {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.svg")}


def test_tables_and_plots_are_those_of_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import tables

    stale = []
    monkeypatch.setattr(Path, "write_text", lambda path, text: text == path.read_text() or stale.append(path))
    tables.main()
    assert stale == []


def test_the_figure_of_the_way_names_each_room_once() -> None:
    figure = (ROOT / "docs" / "figures" / "way.svg").read_text(encoding="utf-8").split("</desc>")[1]
    rooms = re.findall(r"(\w+)/(?=[<\s])", figure)
    assert len(rooms) == len(set(rooms))
    assert set(rooms) == {path.parent.name for path in (ROOT / "src" / "treewise").glob("*/__init__.py")}


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="needs mkdocs-material: pip install 'treewise[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    start, results = ((tmp_path / f"{name}.html").read_text(encoding="utf-8") for name in ("start", "results"))
    assert "One interval per key" in (tmp_path / "concepts.html").read_text(encoding="utf-8")
    assert 'href="benchmarks/results/' in results
    assert 'src="figures/overview.svg"' in start
    assert 'src="iframe-worker.js"' in start  # search from a disk
    assert not re.search(r'<(?:script|link|img)[^>]*(?:src|href)="https?:(?![^>]*rel="(?:prev|next|canonical))', start)
