"""What every test shares: one thread, fixed seeds, no network, its own cache, checked shapes."""

import gc
import os
import random
import sys
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path

# Before torch and transformers are imported, which read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TREEWISE_KEEP_FREED_MEMORY"] = "0"  # tests of memory run in the same process
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")  # models of the tests are tiny: more threads only wait for one another

from tests.whose_warnings import name_callers, pardon_collections

gc.disable()  # until all is imported, of which nothing is garbage
name_callers()  # before others are imported, which may take `warnings.warn` along
pardon_collections()

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from tests import needs
from tests.stated_shapes import check_stated_shapes

check_stated_shapes("treewise.nn", "treewise.engine", "treewise.objectives")

settings.register_profile(
    "ci", deadline=None, derandomize=True, max_examples=6, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("quick", parent=settings.get_profile("ci"), max_examples=3)
settings.register_profile("all", parent=settings.get_profile("ci"), max_examples=50)
settings.register_profile("thorough", parent=settings.get_profile("ci"), derandomize=False, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


class Missing(pytest.Module):
    """A file whose imports are not all installed."""

    def collect(self) -> Iterable[pytest.Item]:
        pytest.skip(needs.missing_at(self.path), allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skips files that cannot be imported here, by the names of the packages."""
    return Missing.from_parent(parent, path=module_path) if needs.missing_at(module_path) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Parameters that `representatives` leaves out are exhaustive; skips `gpu` where there is no CUDA device; leaves
    `engines`, `environments`, `agents` and `cluster` out unless they are asked for (`make engines`, `make verl`,
    `make environments`, `make agents`, `make cluster`)."""
    for apart in ("engines", "environments", "agents", "cluster"):
        if apart not in (config.option.markexpr or ""):
            items[:] = [item for item in items if not item.get_closest_marker(apart)]
    parameters: dict[tuple[str, ...], set[str]] = {}
    for item in items:
        if mark := item.get_closest_marker("representatives"):
            parameters.setdefault((item.nodeid.partition("[")[0], *mark.args), set()).add(item.callspec.id)
            if item.callspec.id not in mark.args:
                item.add_marker("exhaustive")
    for (name, *wanted), there in parameters.items():
        if set(wanted) - there and len(there) > 1:  # one alone was asked for by its name
            raise pytest.UsageError(f"{name} has no parameters {sorted(set(wanted) - there)}; it has {sorted(there)}")
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    """Skips what an older transformers lacks, by its name."""
    try:
        yield
    except Exception as error:
        if why := needs.later_release(error):
            pytest.skip(why)
        raise


def pytest_collection_finish() -> None:
    """Leaves what the imports made out of every later collection of garbage, of which each costs half a second."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 20, 50)
    gc.enable()


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - transformers draws from the global generator
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def _models_are_tied() -> Iterator[None]:
    """Of two loads at once, in threads of a test, transformers may leave `PreTrainedModel.tie_weights` empty; then that
    test fails, and not those after it."""
    loading = sys.modules.get("transformers.modeling_utils")
    own = None if loading is None else loading.PreTrainedModel.tie_weights
    yield
    if loading is not None and loading.PreTrainedModel.tie_weights is not own:
        loading.PreTrainedModel.tie_weights = own
        pytest.fail("PreTrainedModel.tie_weights was replaced: were two models loaded at once, in threads?")


@pytest.fixture(autouse=True, scope="module")
def _own_user_files() -> None:
    """Worker processes load the users' files that this one has loaded: not those of other tests, of which some import
    torch."""
    if "treewise.rl.tasks.calls" in sys.modules:
        sys.modules["treewise.rl.tasks.calls"]._FILES.clear()


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TREEWISE_CACHE", str(tmp_path_factory.mktemp("treewise_cache")))
        yield
