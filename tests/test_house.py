"""The layout is the architecture, and these rules hold it beside the import contract of pyproject.toml."""

import ast
import importlib
import io
import re
import tokenize
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import numpy as np
import pytest

from tests.faults import all_faults

pytestmark = pytest.mark.xdist_group("test_house")

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "treewise"
MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_ROOMS = 21  # doors at the top of the package
MAX_CODE_LINES = 400  # of a file, without comments, docstrings and blank lines
MAX_FUNCTION_LINES_P90 = 30

# Tests of several modules at once: what they hold, by path below tests/. All others bear the name of a module.
CROSS_CUTTING = {
    "test_nearest": "tests/nearest.py, which picks the tests of `make quick`",
    "test_cuda_first": "everything that runs on a GPU, for the first machine that has one",
    "test_count_code": "what `benchmarks/count_code.py` counts",
    "test_gpu_script": "the stages of `make gpu`",
    "test_attention_kernels": "the stage of `make gpu` that compares attention's kernels",
    "test_layer_kernels": "benchmarks/layer_kernels.py: launches of compiled layers",
    "test_cuda_pretend": "waits for a GPU, counted on tensors that claim to be on one",
    "test_house": "the layout",
    "test_predicted_steps": "benchmarks/predict_gpu.py: recorded steps and their predicted seconds",
    "test_package": "the package as installed: names, imports, types",
    "test_wheel": "what is shipped",
    "test_types": "how much of the package mypy knows nothing of",
    "test_whose_warnings": "which warnings are errors",
}
# Tests of what several modules of one package do together.
WHOLE_PACKAGE = {
    "rl/recorder/test_drivers": "an environment and an agent as drivers of the same turns",
    "advantages/test_tree_credit": "each rule against one that compares prefixes",
    "advantages/test_unbiased": "expected gradients over all rollouts that can be drawn",
    "engine/test_onednn": "which kernels multiply in bfloat16 on a CPU",
    "rl/tasks/of_others/verifiers_env/test_shipped": "environments that the wheel of verifiers ships",
    "rl/agents/test_runs": "online runs with an agent",
    "rl/agents/test_ranks": "several processes with an agent against one",
    "rl/agents/frameworks/test_frameworks": "agents of frameworks from PyPI",
    "rl/agents/wire/test_sdks": "the official SDKs against the endpoint",
    "rl/online/test_meshes": "runs of policies that no process has whole",
    "trainer/checkpoint/test_resumption": "what a run that goes on may change",
    "engine/test_inputs": "what the engine takes",
    "experimental/grow/test_families": "copied width and identity layers in every family",
    "nn/attention/test_row_blocks": "row blocks of masks against every pair of tokens",
    "nn/attention/test_flex_kernels": "generated Triton kernels, interpreted",
    "nn/test_adapters": "every adapter on head and layers against flat training",
    "nn/test_private_names": "private names of other libraries",
    "nn/test_gateway_bytes": "predicted bytes of gateways against real ones",
    "cli/test_keys": "every key of every command, from flag or file to what computes",
    "cli/test_hostile": "files and flags that are wrong, through the commands",
    "data/importers/test_routes": "experts in dumps",
    "data/test_routes": "recorded experts, from records to trees",
    "rl/samplers/test_routes": "experts that the sampler in this process records",
    "rl/samplers/test_server_routes": "experts in the answers of servers",
    "rl/online/test_routing_replay": "online runs through recorded experts",
    "data/test_page": "the examples of docs/forms.md",
    "data/render/test_doubled_tokens": "begin and end tokens of texts, contents, templates and rows",
    "data/render/test_families": "every role and field through the templates of eleven families",
    "data/test_rollouts": "dumps to trajectories",
    "distributed/placement/test_brute_force": "placements against the best of all on small steps",
    "integrations/decoder/test_contracts": "how projects call their models that need GPUs themselves",
    "integrations/decoder/test_ranks": "two processes under DDP against one",
    "integrations/decoder/test_sharded_ranks": "two processes under FSDP2 against the same loop without the line",
    "integrations/trl/test_examples": "the TRL examples run",
    "integrations/trl/test_trainers": "SFT, DPO, KTO, GRPO and RLOO with and without the line",
    "nn/recurrent/test_hybrids": "hybrid models against flat training",
    "nn/recurrent/test_memory": "memory of a recurrent layer on a tree",
    "objectives/test_objectives_contract": "what every objective keeps",
    "objectives/test_objectives_trl": "losses against TRL's own",
    "integrations/test_verl_ray": "verl's trainer on Ray",
    "serve/test_browser": "the page of the server in a browser",
    "serve/test_crowd": "20 clients, malformed requests and kills at once",
    "rl/online/test_ahead_on_servers": "sampling ahead on servers",
    "rl/online/test_ranks": "several processes against one",
    "rl/branching/test_policies": "branching policies on simulated rollouts",
    "report/html/test_browser": "the page in a browser",
    "trainer/test_adapters": "drawn adapters, from making to merging",
    "trainer/test_checkpoints": "interrupted and resumed runs",
    "trainer/test_launchers": "torchrun and accelerate",
    "trainer/test_meshes": "runs on meshes of processes against one process",
    "trainer/test_images": "trees of images: steps, resumed and killed runs, several processes",
    "trainer/test_prepared_batches": "batches that are prepared a step ahead",
    "trainer/test_ranks": "several processes against one",
    "trainer/test_ranks_that_end": "a process that is killed",
    "trainer/test_steps": "steps against flat training",
    "tree/test_streams": "the table of per-token streams, through data, trainer and reports",
    "trainer/test_torn": "saves that are killed",
}
CROSS_CUTTING_FOLDERS = {
    "cluster": "jobs of several machines",
    "crossings": "settings drawn together",
    "documents": "pages",
    "engines": "servers and clients of other projects",
    "examples": "examples/",
    "first_day": "what a user's first day runs, on every set of versions",
    "hosts": "trainers of others, each in an environment of its own",
}


def own_name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def code_lines(source: str) -> frozenset[int]:
    """Lines with code: neither blank nor comment nor docstring."""
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in layout:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            assert node.end_lineno is not None
            lines -= set(range(node.lineno, node.end_lineno + 1))
    return frozenset(lines)


def test_a_reader_can_keep_the_top_in_the_head() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    rooms |= {path.name for path in PACKAGE.glob("[!_]*.py")}
    assert len(rooms) <= MAX_ROOMS, sorted(rooms)


def test_no_folder_imports_what_imports_it() -> None:
    """At any depth; what is imported for types alone, and the modules at the top, count for none."""
    imports: dict[str, set[str]] = {}
    names = {path: ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in MODULES}
    folders = {name.removesuffix(".__init__"): name.rpartition(".")[0] for name in names.values()}
    for path, name in names.items():
        tree = ast.parse(path.read_text())
        for_types = {
            id(each)
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for each in ast.walk(node)
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or id(node) in for_types:
                continue
            for found in (f"{node.module}.{each.name}" for each in node.names):
                folder = folders.get(found, folders.get(str(node.module), "treewise"))
                if "treewise" not in (folder, own := name.rpartition(".")[0]) and folder != own:
                    imports.setdefault(own, set()).add(folder)
    tuple(TopologicalSorter(imports).static_order())  # raises `CycleError` with the folders of a circle


def test_imports_and_loggers_stand_at_the_top() -> None:
    for path in MODULES:
        is_below = False
        for node in ast.parse(path.read_text()).body:
            is_below |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            is_logger = isinstance(node, ast.Assign) and ast.unparse(node).startswith("logger = ")
            is_import = isinstance(node, ast.Import | ast.ImportFrom)
            assert not (is_below and (is_logger or is_import)), f"{own_name(path)}:{node.lineno}"


def test_faults_fit_the_code() -> None:
    """What `make faults` puts in takes the place of a text that stands once in its file."""
    texts = {fault.file: (PACKAGE / fault.file).read_text(encoding="utf-8") for fault in all_faults()}
    assert not [fault for fault in all_faults() if texts[fault.file].count(fault.before) != 1]


def test_headings_are_whole() -> None:
    """One that was cut where it met the margin has no room for a rule behind it."""
    for path in MODULES:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.match(r" *# -- ", line):
                assert re.search(r"\w.*\S -{20,}$", line), f"{own_name(path)}:{number}: {line}"


def test_files_are_short() -> None:
    lengths = {own_name(path): len(code_lines(path.read_text(encoding="utf-8"))) for path in MODULES}
    assert not {name: length for name, length in lengths.items() if length >= MAX_CODE_LINES}


def test_nine_functions_of_ten_are_short() -> None:
    lengths = []
    for path in MODULES:
        source = path.read_text(encoding="utf-8")
        code = code_lines(source)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno is not None
                lengths.append(len(code & set(range(node.lineno, node.end_lineno + 1))))
    assert np.quantile(lengths, 0.9) <= MAX_FUNCTION_LINES_P90


def test_no_module_bears_the_name_of_a_public_function_of_its_package() -> None:
    """`treewise.plan` is a function: as a module, too, it would be either, depending on what was imported first."""
    shadowed = []
    for folder in sorted({path.parent for path in MODULES}):
        if not (folder / "__init__.py").is_file():
            continue
        package = ".".join(folder.relative_to(PACKAGE.parent).parts)
        public = getattr(importlib.import_module(package), "__all__", ())
        names = {path.stem for path in folder.glob("*.py")}
        names |= {path.name for path in folder.iterdir() if (path / "__init__.py").is_file()}
        shadowed += [
            f"{package}.{name}" for name in names & set(public) if name not in ("advantages", "errors")
        ]  # are modules
    assert not shadowed


def test_a_public_class_bears_a_name_of_its_own() -> None:
    """Of all folders, but for parts of one protocol that stand side by side (`ReplyStream`)."""
    folders: dict[str, set[Path]] = {}
    for path in MODULES:
        for name in re.findall(r"^class ([A-Z]\w*)", path.read_text(encoding="utf-8"), re.M):
            folders.setdefault(name, set()).add(path.parent)
    assert {name for name, found in folders.items() if len(found) > 1} == set()


def test_tests_mirror_the_source() -> None:
    """tests/a/b/test_c.py tests src/treewise/a/b/c.py, or a package c; tests/a/b/test_b.py the package b."""
    strangers = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        below = path.relative_to(ROOT / "tests")
        name = below.stem.removeprefix("test_")
        if below.parts[0] in CROSS_CUTTING_FOLDERS or below.with_suffix("").as_posix() in CROSS_CUTTING:
            continue
        folder = PACKAGE.joinpath(*below.parts[:-1])
        is_named = folder.name == name or (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file()
        if not is_named and not (below.with_suffix("").as_posix() in WHOLE_PACKAGE and folder.is_dir()):
            strangers.append(below.as_posix())
    assert not strangers


def test_the_lists_of_cross_cutting_tests_are_current() -> None:
    for name in (*CROSS_CUTTING, *WHOLE_PACKAGE):
        assert (ROOT / "tests" / f"{name}.py").is_file(), name
    for name in CROSS_CUTTING_FOLDERS:
        assert (ROOT / "tests" / name).is_dir(), name


def test_a_docstring_says_more_than_the_name() -> None:
    """Words of the name alone, in whatever order, tell a reader nothing."""
    filling = {"a", "an", "the", "of", "its", "it", "itself", "and", "in", "to", "is", "this"}
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(node):
                known = {word.rstrip("s").lower() for word in re.findall(r"[A-Z]?[a-z]+", node.name)} | filling
                words = {word.rstrip("s").lower() for word in re.findall(r"\w+", ast.get_docstring(node) or "")}
                assert words - known - {word.rstrip("s") for word in filling}, f"{own_name(path)}:{node.lineno}"
