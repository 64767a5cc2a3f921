"""`sharing.verify(batch)`: a yes where trees are right, a no where they are not, and nothing else changes."""

import pytest
import torch

import treewise as tw
from tests.integrations.decoder.test_seam import model_of, padded
from treewise.errors import ConfigError, VerificationError
from treewise.testing.families import tiny_model


@pytest.mark.parametrize("options", [{}, {"max_tokens": 6}])
def test_equal(options):
    model = model_of()
    sharing = tw.share_prefixes(model, **options)
    report = sharing.verify(padded())
    assert report.passed, report
    assert report.share_ratio > 1.5
    assert str(report).startswith("equal")
    without_labels = {name: value for name, value in padded().items() if name != "labels"}
    assert sharing.verify(without_labels).passed
    assert all(each.grad is None for each in model.parameters())


def test_in_low_precision_beside_float32():
    report = tw.share_prefixes(tiny_model("llama", torch.bfloat16)).verify(padded())
    assert report.passed, report
    assert report.own_gradient_error is not None


def test_different(monkeypatch):
    from treewise.integrations.decoder import seam

    own = seam.GatheredRows.apply
    monkeypatch.setattr(seam.GatheredRows, "apply", lambda rows, place: own(rows * 1.001, place))
    report = tw.share_prefixes(model_of()).verify(padded())
    assert not report.passed
    with pytest.raises(VerificationError, match="DIFFERENT"):
        report.raise_if_failed()


def test_a_batch_that_is_left_says_why():
    inputs = padded()
    inputs["attention_mask"][0, 2] = 0
    report = tw.share_prefixes(model_of()).verify(inputs)
    assert report.passed
    assert "padding stands between" in report.left
    assert "not shared: padding" in str(report)


def test_no_loss():
    with pytest.raises(ConfigError, match="no loss with a gradient"):
        tw.share_prefixes(model_of()).verify(padded(), loss_of=lambda out: out.loss.detach())
