"""Parts that a torch lacks, and one that no test ran with."""

import pytest
import torch

from treewise.errors import ConfigError
from treewise.nn.platform.versions import part_of_torch, untested_torch_named, warn_of_untested_torch


def test_a_part_that_a_torch_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert part_of_torch("ops.aten.add.Tensor") is torch.ops.aten.add.Tensor
    monkeypatch.setattr(torch, "__version__", "2.15.0+cpu")
    for path in ("ops.aten._no_such_kernel", "ops.aten.add.no_overload", "_no_such_module.name"):
        with pytest.raises(ConfigError, match=rf"torch 2\.15\.0\+cpu has no torch\.{path}, .* install torch >=2\.11"):
            part_of_torch(path)


@pytest.mark.parametrize(("version", "is_named"), [("2.13.1+cpu", False), ("2.11.0", False), ("2.15.0a0+git1", True)])
def test_errors_inside_of_a_torch_that_no_test_ran_with_name_it(
    version: str, is_named: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(TypeError, match="unexpected keyword") as found, untested_torch_named():
        raise TypeError("unexpected keyword")
    notes = [f"torch {version}: tests run with torch >=2.11,<2.14"] * is_named
    assert getattr(found.value, "__notes__", []) == notes
    warn_of_untested_torch.cache_clear()
    for _ in range(2):
        warn_of_untested_torch()
    assert [each.startswith(notes[0]) for each in caplog.messages] == [True] * is_named
    warn_of_untested_torch.cache_clear()
