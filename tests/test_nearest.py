"""`make quick` finds the tests of a change: mirrored, by imports, features, public names, templates and pages."""

import pytest

from tests import nearest
from tests.nearest import ROOT, distances


def near(changed: str, most: int) -> set[str]:
    found = distances([ROOT / changed])
    return {str(path.relative_to(ROOT)) for path, distance in found.items() if distance <= most}


@pytest.mark.parametrize(
    ("changed", "most", "test"),
    [
        ("tests/planning/test_plans.py", 0, "tests/planning/test_plans.py"),
        ("src/treewise/nn/lm_head.py", 1, "tests/nn/test_lm_head.py"),
        ("src/treewise/nn/lm_head.py", 3, "tests/engine/test_engine.py"),  # through the engine's step
        ("src/treewise/nn/tensor_parallel.py", 2, "tests/trainer/test_meshes.py"),  # a feature
        ("src/treewise/objectives/sft.py", 2, "tests/engine/window/test_window.py"),  # by its public name
        ("tests/serve/servers.py", 1, "tests/serve/test_app.py"),  # what tests share
        ("src/treewise/report/html/templates/run.html.j2", 2, "tests/report/html/test_page.py"),
        ("docs/trl.md", 1, "tests/documents/test_pages.py"),
        ("src/treewise/tree/forest.py", 1, "tests/test_house.py"),
    ],
)
def test_what_a_change_touches_is_found(changed: str, most: int, test: str) -> None:
    assert test in near(changed, most)


def test_what_does_not_ask_for_a_change_is_not() -> None:
    found = distances([ROOT / "src" / "treewise" / "rl" / "replies" / "families.py"])
    assert ROOT / "tests" / "planning" / "test_plans.py" not in found
    assert len(found) < len(distances([ROOT / "src" / "treewise" / "tree" / "trajectory.py"])) / 2


def test_every_module_is_touched_by_a_test_that_is_about_code() -> None:
    """Also those that are loaded by a name that is put together, but for one that only `make hosts` loads."""
    house = ROOT / "tests" / "test_house.py"
    modules = [path for name, path in nearest.all_modules().items() if name.startswith("treewise.")]
    modules.remove(ROOT / "src" / "treewise" / "integrations" / "axolotl.py")
    assert not [path for path in modules if not distances([path]).keys() - {house}]
