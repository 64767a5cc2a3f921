"""Trees of images against flat training: each trajectory alone, by the model's own forward, on real small pictures."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import treewise as tw
from tests.image_capability import trajectory
from tests.image_models import FAMILIES, IMAGE_TOKEN, num_rows, png, row_inputs, seeing_model
from treewise.data.images import decoded
from treewise.distributed import same_plan
from treewise.engine import engine as engine_module
from treewise.nn.flops import FlopModel
from treewise.nn.model_flops import flop_model
from treewise.nn.vision import VisionModel, tower
from treewise.testing import assert_equals_flat, gradient_error, gradients_of, tiny_model
from treewise.testing.oracle import FlatGradients, wide_copy
from treewise.tree.images import ImageSpan
from treewise.tree.trajectory import Trajectory

A, B, C = png(1), png(2, 30, 20), png(3, 16, 40)
# Text ((seed, number of tokens)) and images: forks before, between and after images, one image at two places, a
# trajectory that ends behind an image, the last of two images alone, and no image at all.
HISTORIES = (
    [(1, 5), A, (2, 4), B, (3, 3)],
    [(1, 5), A, (2, 4), B, (4, 5)],
    [(1, 5), A, (2, 4), C, (3, 3)],
    [(1, 5), B, (2, 4), (5, 3)],
    [(1, 5), A, (6, 4), A, (7, 2)],
    [(1, 5), A, (11, 1), A, (8, 3)],
    [(1, 5), A, (2, 2)],
    [(9, 6), (10, 3)],
)


def trajectories(model: Any, images: Any, histories: Sequence[Any] = HISTORIES) -> list[Trajectory]:
    pictures = {each for history in histories for each in history if isinstance(each, bytes)}
    rows_of = {data: num_rows(model, images, data) for data in pictures}
    return [trajectory(history, rows_of) for history in histories]


def flat_logprobs(model: Any, images: Any, item: Trajectory) -> torch.Tensor:
    """[n - 1] log-probs of a trajectory's tokens by the model's own forward."""
    ids = torch.from_numpy(item.token_ids.astype(np.int64))[None]
    logits = model(input_ids=ids, use_cache=False, **row_inputs(model, images, item)).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]


def flat_gradients(
    model: Any, images: Any, items: Sequence[Trajectory]
) -> tuple[float, list[torch.Tensor], FlatGradients]:
    """Loss, log-probs and gradients of the mean over trained tokens, one trajectory after the other."""
    total = sum(float(item.loss_weights.sum()) for item in items)
    model.zero_grad()
    loss, logprobs = 0.0, []
    for item in items:
        values = flat_logprobs(model, images, item)
        part = -(values * torch.from_numpy(item.loss_weights[1:])).sum() / total
        part.backward()
        loss, logprobs = loss + part.item(), [*logprobs, values.detach()]
    gradients = FlatGradients(gradients_of(model), lambda: flat_gradients(wide_copy(model), images, items)[2])
    return loss, logprobs, gradients


def assert_equals(model: Any, images: Any, items: Sequence[Trajectory], budgets: Sequence[int | None]) -> None:
    loss, logprobs, gradients = flat_gradients(model, images, items)
    exact = flat_gradients(wide_copy(model), images, items)[2]
    gradients = FlatGradients(gradients, lambda: exact)
    for budget in budgets:
        engine = tw.TreeEngine(model, budget, processor=images)
        for ours, flat in zip(engine.logprobs(items), logprobs, strict=True):
            assert torch.allclose(ours, flat, atol=1e-5)
        model.zero_grad()
        assert engine.step(items).loss == pytest.approx(loss, rel=1e-5)
        found = gradients_of(model)
        assert gradient_error(found, gradients) < gradients.tolerance
        for part in ("vision", "visual", "projector", "connector", "merger"):  # each alone: a tower's gradient is small
            own = {name: each for name, each in gradients.items() if part in name}
            if own:
                alone = FlatGradients(own, lambda part=part: {name: exact[name] for name in exact if part in name})
                assert gradient_error({name: found[name] for name in own}, alone) < alone.tolerance


def test_loss_logprobs_and_gradients_are_those_of_flat_training():
    model, images = seeing_model("llava"), FAMILIES["llava"].images()
    items = trajectories(model, images)
    assert len(tw.Forest.from_trajectories(items).images.sources) == 3
    assert_equals(model, images, items, (None, 11))


@pytest.mark.representatives("reference", "cascade")
@pytest.mark.parametrize("attention", ["reference", "cascade", "flex"])
def test_images_that_attend_both_ways_in_every_implementation(attention):
    model, images = seeing_model("gemma3"), FAMILIES["gemma3"].images()
    items = trajectories(model, images, HISTORIES[:2])
    assert_equals_flat(model, items, max_tokens=20, attention=attention, processor=images)


def test_two_images_that_touch_are_refused_where_the_model_takes_them_for_one():
    model, images = seeing_model("gemma3"), FAMILIES["gemma3"].images()
    items = trajectories(model, images, [[(1, 5), A, B, (3, 3)]])
    with pytest.raises(tw.errors.DataError, match="two images touch at tree position 21"):
        tw.TreeEngine(model, processor=images).step(items)
    touching = trajectories(seeing_model("llava"), FAMILIES["llava"].images(), [[(1, 5), A, B, (3, 3)]])
    assert tw.TreeEngine(seeing_model("llava"), processor=FAMILIES["llava"].images()).step(touching).loss > 0


def test_the_tower_runs_once_for_each_distinct_image():
    model, images = seeing_model("llava"), FAMILIES["llava"].images()
    items = trajectories(model, images)
    size = tw.Forest.from_trajectories(items).num_tokens
    loss, _, gradients = flat_gradients(model, images, items)
    seen = []
    hook = model.model.vision_tower.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    found = {}
    # One micro-batch, with room for the tower's graph and without; several, with room and without; a frozen tower.
    for budget, is_frozen in ((None, False), (10 * size, False), (size, False), (size - 1, False), (12, True)):
        for parameter in (*model.model.vision_tower.parameters(), *model.model.multi_modal_projector.parameters()):
            parameter.requires_grad_(not is_frozen)
        engine = tw.TreeEngine(model, budget, processor=images, check=False)
        model.zero_grad()
        seen.clear()
        assert engine.step(items).loss == pytest.approx(loss, rel=1e-5)
        plan = engine.plan(items)
        found[budget] = sum(seen), plan.is_whole, flop_model(engine.lm.model).keeps_images(plan)
        if not is_frozen:
            assert gradient_error(gradients_of(model), gradients) < gradients.tolerance
    hook.remove()
    assert found[None] == found[10 * size] == (3, True, True)
    assert found[12][0] == 3
    for budget in (size, size - 1):
        assert found[budget][0] == (3 if found[budget][2] else 6)


def test_the_tower_s_graph_is_kept_beside_micro_batches_where_both_fit(monkeypatch):
    model, images = seeing_model("llava"), FAMILIES["llava"].images()
    items = trajectories(model, images, HISTORIES[:3])
    gradients = flat_gradients(model, images, items)[2]
    passes = []
    hook = model.model.vision_tower.register_forward_pre_hook(lambda _, given: passes.append(len(given[0])))
    # Of a row's budget that is next to nothing, and of a whole micro-batch's, in a whole tree and in parts.
    for per_row, budget, count in ((0.01, 20, 3), (5.0, 20, 6), (6.0, 70, 6), (0.01, 70, 3)):
        monkeypatch.setattr(FlopModel, "tokens_per_row", per_row)
        for objective in (None, _squares):
            model.zero_grad()
            passes.clear()
            tw.TreeEngine(model, budget, processor=images, check=False).step(items, objective)
            if objective is None:
                assert sum(passes) == count
                assert gradient_error(gradients_of(model), gradients) < gradients.tolerance
        found = gradients_of(model)
        model.zero_grad()
        _squares(tw.TreeEngine(model, None, processor=images, check=False).logprobs(items)).backward()
        assert gradient_error(found, gradients_of(model)) < 1e-5
    hook.remove()


def test_what_is_trained_of_a_tower_need_not_reach_its_features():
    """LLaVA takes the features of the tower's layer before the last."""
    model, images = seeing_model("llava"), FAMILIES["llava"].images()
    items = trajectories(model, images, HISTORIES[:3])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("language_model" in name)
    [*model.model.vision_tower.modules()][-1].requires_grad_(True)  # the norm behind the last layer
    gradients = flat_gradients(model, images, items)[2]
    assert all("language_model" in name for name in gradients)
    for budget in (None, 70, 11):
        model.zero_grad()
        tw.TreeEngine(model, budget, processor=images, check=False).step(items)
        found = gradients_of(model)
        assert {name for name, each in found.items() if each.any()} == gradients.keys()
        assert gradient_error(found, gradients) < gradients.tolerance


def test_an_image_is_decoded_once_for_all_walks_over_a_forest(monkeypatch):
    model, images = seeing_model("qwen2_vl"), FAMILIES["qwen2_vl"].images()
    forest = tw.Forest.from_trajectories(trajectories(model, images))
    read = []
    monkeypatch.setattr("treewise.data.images.decoded", lambda data, name: read.append(data) or decoded(data, name))
    engine = tw.TreeEngine(model, 12, processor=images, check=False)
    for objective in (None, _squares):
        engine.step(forest, objective)
    engine.logprobs(forest)
    assert sorted(read) == sorted([A, B, C])
    other = tw.Forest.from_trajectories(trajectories(model, images, HISTORIES[:1]))
    engine.step(other)
    engine.step(forest)
    assert len(read) == 3 + 2 + 3  # those of the latest forest alone are kept


def test_pairs_with_images_equal_dpo_of_each_trajectory_alone():
    model, images = seeing_model("llava"), FAMILIES["llava"].images()
    pairs = [
        ([(1, 5), A, (2, 4), seen, (seed, 3)], [(1, 5), A, (2, 4), seen, (seed + 1, 5)])
        for seen, seed in ((B, 3), (C, 6))
    ]
    items, terms = [], []
    for group, pair in enumerate(pairs):
        ratios = []
        for reward, item in zip((1.0, 0.0), trajectories(model, images, pair), strict=True):
            is_trained = np.arange(len(item)) >= item.images[-1].end
            reference = np.where(is_trained, -np.random.default_rng(group).random(len(item)), 0.0)
            changes = {"loss_weights": is_trained * 1.0, "ref_logprobs": reference, "group": group, "reward": reward}
            items.append(replace(item, **changes, rollout=f"{group} {reward}"))
            logprobs = flat_logprobs(model, images, item)[is_trained[1:]]
            ratios.append((logprobs - torch.from_numpy(reference[is_trained]).float()).sum())
        terms.append(-torch.nn.functional.logsigmoid(0.1 * (ratios[0] - ratios[1])))
    model.zero_grad()
    expected = torch.stack(terms).mean()
    expected.backward()
    gradients = gradients_of(model)
    for budget in (None, 12):
        model.zero_grad()
        loss = tw.TreeEngine(model, budget, processor=images, check=False).step(items, tw.DPO()).loss
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        assert gradient_error(gradients_of(model), gradients) < 1e-5


def _squares(logprobs: list[torch.Tensor]) -> torch.Tensor:
    return -torch.stack([each.square().mean() for each in logprobs]).sum()


def test_what_cannot_be_computed_is_named():
    model, images = seeing_model("llava"), FAMILIES["llava"].images()
    items = trajectories(model, images, HISTORIES[:1])
    with pytest.raises(tw.errors.ConfigError, match="processor"):
        tw.TreeEngine(model).step(items)
    with pytest.raises(tw.errors.PlanError, match="an image has 4 tokens"):
        tw.TreeEngine(model, 3, processor=images).step(items)
    with pytest.raises(tw.errors.UnsupportedModelError, match="holds token 60"):
        tw.TreeEngine(model, processor=images).step([*items, Trajectory([5, IMAGE_TOKEN, 6])])
    wrong = Trajectory([5, *[IMAGE_TOKEN] * 3, 6], images=(ImageSpan(A, 1, 4),))
    with pytest.raises(tw.errors.UnsupportedModelError, match="Image features and image tokens do not match"):
        tw.TreeEngine(model, processor=images).step([wrong])
    with pytest.raises(tw.errors.UnsupportedModelError, match=r"4 feature rows .* are 3"):
        tw.TreeEngine(model, processor=images, check=False).step([wrong])
    with pytest.raises(tw.errors.UnsupportedModelError, match="takes no images"):
        tw.TreeEngine(tiny_model("llama"), processor=images).step([wrong])


def test_models_on_meshes_refuse_images(monkeypatch):
    model, images = seeing_model("llava"), FAMILIES["llava"].images()
    one = SimpleNamespace(tensor=SimpleNamespace(size=lambda: 1), needs_lockstep=False)
    monkeypatch.setattr(engine_module, "mesh_of", lambda model: one)
    monkeypatch.setattr(same_plan, "check_same_plan", lambda *_: None)
    with pytest.raises(tw.errors.UnsupportedModelError, match="tp_size or ep_size"):
        tw.TreeEngine(model, processor=images).step(trajectories(model, images, HISTORIES[:1]))


@pytest.mark.representatives("gemma3")
@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl"])
def test_the_probe_computes_images(family, monkeypatch):
    model, images = seeing_model(family), FAMILIES[family].images()
    items = trajectories(model, images, HISTORIES[:2])
    with torch.no_grad():
        for parameter in model.parameters():  # tiny random models hardly look back
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)
    tw.TreeEngine(model, processor=images).evaluate(items)
    if family == "gemma3":
        monkeypatch.setattr(tower, "_BOTH_WAYS", {})
    else:  # without the features of further layers
        own = VisionModel.arguments
        monkeypatch.setattr(
            VisionModel, "arguments", lambda self, rows: own(self, (rows[0], *(0 * x for x in rows[1:])))
        )
    with pytest.raises(tw.errors.UnsupportedModelError, match="computes something with images"):
        tw.TreeEngine(model, processor=images).evaluate(items)
    tw.TreeEngine(model, processor=images, check=False).evaluate(items)


def test_the_probe_puts_no_placeholder_into_its_text():
    model, images = seeing_model("llava"), FAMILIES["llava"].images()
    span = ImageSpan(A, 1, 5)
    ids = [[5, *[IMAGE_TOKEN] * 4, 6, 7, *[IMAGE_TOKEN - 1] * 12, last] for last in (8, 9)]
    assert tw.TreeEngine(model, processor=images).evaluate([Trajectory(each, images=(span,)) for each in ids]).loss > 0


def test_videos_and_sounds_are_refused_by_name():
    model, images = seeing_model("qwen2_vl"), FAMILIES["qwen2_vl"].images()
    model.config.video_token_id, model.config.audio_token_id = 61, 62
    items = trajectories(model, images, HISTORIES[:1])
    for token, name in ((61, "video_token_id"), (62, "audio_token_id")):
        with pytest.raises(
            tw.errors.UnsupportedModelError, match=rf"holds token {token}, the {name} of .*videos and sounds"
        ):
            tw.TreeEngine(model, processor=images).step([*items, Trajectory([5, token, 6])])
