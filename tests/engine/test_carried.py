"""What a gradient has to reach above a micro-batch: the trained parts of a model against flat training, one by one.

Below a budget a piece may hold nothing that is trained: the tower is above it, or the decay of a recurrence. Every case
is compared with each trajectory alone; without the walk's decision the same cases are wrong by more than a tenth.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

import treewise as tw
from tests.crossings import judged
from tests.image_models import FAMILIES, IMAGE_TOKEN, seeing_model
from tests.needs import IMAGES
from tests.nn.recurrent.hybrids import HYBRIDS, hybrid
from tests.nn.recurrent.wide import widened
from tests.nn.vision.test_forest_images import HISTORIES, trajectories
from treewise.engine import carried, step
from treewise.engine.carried import carried_by
from treewise.nn.attention import ANCHOR, EVERYTHING, NOTHING, Gateway
from treewise.nn.model import split_model
from treewise.planning.planner import plan
from treewise.planning.plans import FORWARD
from treewise.testing import flat_sft, gradient_error, gradients_of, tiny_model
from treewise.tree.trajectory import Trajectory

TOLERANCE = 1e-5  # float32 against flat float32, as in tests.nn.vision.test_forest_images.py
EXACT = 1e-9  # float64 throughout, where only the order of sums differs
LOST = 0.1
TOWER, PROJECTOR = r"vision_tower|vision_model|visual|projector|connector|merger", r"projector|connector|merger"
EMBEDDINGS, HEAD = r"embed|wte|wpe", r"lm_head|embed_out"
LAYER = r"(?:layers|h)\.{}\."
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing.*:FutureWarning", "ignore:None of the inputs have requires_grad:UserWarning"
)


def train_only(model: Any, pattern: str) -> Any:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(re.search(pattern, name) is not None)
    assert any(each.requires_grad for each in model.parameters())
    return model


def with_adapters(model: Any, targets: str, saved: Sequence[str] = ()) -> Any:
    """LoRA on modules whose path matches, and modules that are trained whole."""
    config = LoraConfig(target_modules=targets, modules_to_save=list(saved), r=4, init_lora_weights=False)
    return get_peft_model(model, config)


def tree_gradients(model: Any, items: Sequence[Trajectory], max_tokens: int, **options: Any) -> Any:
    model.zero_grad()
    tw.TreeEngine(model, max_tokens, check=False, **options).step(list(items))
    return gradients_of(model)


def seeing_case(family: str, histories: Any = HISTORIES) -> tuple[Any, Any, list[Trajectory], int]:
    """A model, what makes its images, trees, and a budget of one image and a few tokens."""
    model, images = seeing_model(family), FAMILIES[family].images()
    items = trajectories(model, images, histories)
    return model, images, items, tw.Forest.from_trajectories(items).images.largest + 3


def conversations(seed: int = 0) -> list[Trajectory]:
    """Trees of several levels, forks in pieces and in what is open, a prefix, and a trunk short enough to be held."""
    rng = np.random.default_rng(seed)
    trunk, short = rng.integers(3, 64, 21), rng.integers(3, 64, 3)
    shapes = ((trunk, 3), (trunk, 8), (trunk[:9], 12), (short, 4), (short, 4), (short, 5))
    items = [Trajectory(np.append(above, rng.integers(3, 64, new))) for above, new in shapes]
    return [*items, Trajectory(items[1].token_ids[:-4])]


SEEING = {"family": "llava", "images": "prompt", "budget": "tiny"}
PIECES_ABOVE_IMAGES = [
    {**SEEING, **changes}
    for changes in (
        {"trained": "projector", "hold": "never"},
        {"trained": "tower", "hold": "always", "attention": "reference"},
        *({"trained": "lora_projector", "hold": hold} for hold in ("never", "always")),
        *({"trained": "projector", "checkpoints": each} for each in ("on", "reentrant")),
        {"trained": "projector", "objective": "function", "offload": True},
        {"trained": "projector", "objective": "function", "interface": "logprobs"},
        {"trained": "last_layer", "objective": "function"},
        {"trained": "lora"},
    )
]


# -- images ---------------------------------------------------------------------------------------------------------


@IMAGES
@pytest.mark.parametrize("changes", PIECES_ABOVE_IMAGES, ids=str)
def test_a_projector_or_a_tower_alone(changes: dict[str, Any]) -> None:
    assert judged(**changes).kind == "equal", judged(**changes).text


@pytest.mark.parametrize("objective", [tw.SFT(), lambda logprobs: -torch.cat(logprobs).mean()], ids=["sft", "function"])
def test_text_alone_gives_a_tower_nothing(objective: Any) -> None:
    model, images, items, _ = seeing_case("llava", HISTORIES[-1:])
    train_only(model, TOWER)
    for budget in (None, 4):
        engine = tw.TreeEngine(model, budget, check=False, processor=images)
        assert engine.step(items, objective).loss == pytest.approx(engine.evaluate(items).loss)
        assert not gradients_of(model)


# -- text -----------------------------------------------------------------------------------------------------------

TEXT = {
    "embeddings": EMBEDDINGS,
    "head": HEAD,
    "first layer": LAYER.format(0),
    "middle layer": LAYER.format(1),
    "last layer": LAYER.format(2),
    "norms": r"norm|ln_",
    "last norm": r"(model\.norm|ln_f|final_layer_?norm|norm_f)\.",
    "queries": r"q_proj|Wqkv|c_attn|query_key_value",
    "one projection": r"1\..*(v_proj|out_proj|x_proj)",
    "feed-forward": r"mlp|feed_forward|moe|experts",
    "decays": r"A_log|recurrent_param",
    "time steps": r"dt_bias|dt_proj\.bias",
    "convolutions": r"conv",
    "one mixer": r"2\..*(mamba|mixer|linear_attn|temporal_block|conv)",
    "one expert": r"1\..*experts\.0\.",
}
QUICK = [
    ("llama", "middle layer"),
    ("qwen3_moe", "last layer"),
    ("nemotron_h", "decays"),
    ("jamba", "decays"),
    ("qwen3_next", "one mixer"),
    ("gpt2", "last norm"),
]


def text_model(family: str) -> Any:
    return widened(hybrid(family) if family in HYBRIDS else tiny_model(family))


def assert_text_trains(family: str, part: str) -> None:
    model, items = text_model(family), conversations()
    if not any(re.search(TEXT[part], name) for name, _ in model.named_parameters()):
        pytest.skip(f"{family} has no {part}")
    _, _, expected = flat_sft(train_only(model, TEXT[part]), items)
    for hold in ("never", "always"):
        assert gradient_error(tree_gradients(model, items, 10, hold=hold), expected) < EXACT


@pytest.mark.parametrize(("family", "part"), QUICK)
def test_parts_of_models_of_text(family: str, part: str) -> None:
    assert_text_trains(family, part)


def test_an_expert_that_few_tokens_reach() -> None:
    """Adapters of one expert: in a piece that sends it no token nothing is trained, but something is above."""
    model, items = tiny_model("llama"), conversations()
    layer = model.model.layers[0]

    class Routed(torch.nn.Module):
        """Two experts; the second one, which is trained, takes the tokens whose first number is large."""

        def __init__(self, mlp: Any) -> None:
            super().__init__()
            self.mlp, self.expert = mlp, torch.nn.Linear(32, 32, bias=False)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            out, chosen = self.mlp(rows), (rows[0, :, 0] > 1.0).nonzero()[:, 0]
            return out.index_add(1, chosen, self.expert(rows[:, chosen])) if len(chosen) else out

    layer.mlp = Routed(layer.mlp)
    _, _, expected = flat_sft(train_only(model, r"expert\."), items)
    assert gradient_error(tree_gradients(model, items, 6, hold="never"), expected) < TOLERANCE


# -- what the walk decides ------------------------------------------------------------------------------------------


@IMAGES
@pytest.mark.parametrize("case", ["decays", "expert"])
def test_these_cases_notice_a_gradient_that_is_lost(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "EVERYTHING", NOTHING)
    monkeypatch.setattr(step, "carried_by", lambda *_, **__: NOTHING)
    with pytest.raises(AssertionError) as error:
        assert_text_trains("nemotron_h", "decays") if case == "decays" else test_an_expert_that_few_tokens_reach()
    assert float(re.findall(r"assert ([\d.e-]+) <", str(error.value))[0]) > LOST
    assert judged(**PIECES_ABOVE_IMAGES[0], probe=False).kind == "wrong"


@pytest.mark.parametrize(
    ("pattern", "num_before"),
    [
        (HEAD, None), (r"^model\.norm", None), (LAYER.format(2), 2), (LAYER.format(1), 1), (LAYER.format(0), 0),
        ("layernorm", 0), (EMBEDDINGS, "input"),
    ],
)  # fmt: skip
def test_gradients_are_carried_from_the_first_trained_layer_on(pattern: str, num_before: Any) -> None:
    model = train_only(tiny_model(), pattern)
    found = carried_by(split_model(model), with_images=False)
    layers = model.model.layers
    assert (found == EVERYTHING) == (num_before == "input")
    assert (found == NOTHING) == (num_before is None)
    if isinstance(num_before, int):
        assert [found.includes(each.self_attn, 0) for each in layers] == [index >= num_before for index in range(3)]
        assert all(found.includes(each.self_attn, 1) for each in layers)
    assert carried_by(split_model(model), with_images=True) == found


def test_gradients_are_carried_to_a_tower_where_there_are_images() -> None:
    lm = split_model(train_only(seeing_model("llava"), PROJECTOR))
    assert carried_by(lm, with_images=False) == NOTHING
    assert carried_by(lm, with_images=True) == EVERYTHING


def test_frozen_lower_layers_get_no_gradient_and_no_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    model, items = train_only(tiny_model(), LAYER.format(2)), conversations()
    added, anchored, add = [], [], Gateway.add_gradients
    monkeypatch.setattr(
        Gateway, "add_gradients", lambda self, call, *rest: added.append(call) or add(self, call, *rest)
    )
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, _, out: anchored.append((module, out.requires_grad)))
    for pattern, trained in ((LAYER.format(2), {2}), (HEAD, set())):
        train_only(model, pattern)
        tree_gradients(model, items, 10, hold="never")
        assert {each.layer_idx for each, _ in added} == trained
        assert {module.self_attn.layer_idx for module, requires in anchored if requires} == trained
        added.clear()
        anchored.clear()


def test_only_what_is_below_an_image_carries_gradients_to_it() -> None:
    """A tree of text beside one with an image, under a trained projector: no graph, as in flat training."""
    model, images, items, budget = seeing_case("llava", [HISTORIES[0], HISTORIES[2], HISTORIES[-1]])
    train_only(model, PROJECTOR)
    forest = tw.Forest.from_trajectories(items)
    engine = tw.TreeEngine(model, budget, check=False, processor=images, hold="never")
    run, seen = engine.plan(forest), []
    layer = model.model.language_model.layers[0]
    layer.register_forward_hook(lambda _, given, out: seen.append((given[0].shape[1], out.requires_grad)))
    engine.step(forest)
    sees = np.isin(forest.token_ids, [IMAGE_TOKEN])
    for position in range(forest.num_tokens):  # parents come first
        sees[position] |= forest.parent[position] >= 0 and sees[forest.parent[position]]
    steps = [run.micro_batches[step.micro_batch] for step in run.schedule]
    expected = [
        (each.num_tokens, bool(sees[each.positions()].any()) and step.action != FORWARD)
        for step, each in zip(run.schedule, steps, strict=True)
    ]
    assert seen == expected
    assert {requires for _, requires in expected} == {True, False}


def test_an_adapter_that_is_not_in_use_is_still_an_error() -> None:
    model = with_adapters(tiny_model(), ".*q_proj")
    for budget in (None, 10):
        engine = tw.TreeEngine(model, budget, check=False)
        with model.disable_adapter():
            for each in model.parameters():
                each.requires_grad_(each.ndim > 1)
            train_only(model, "lora")
            with pytest.raises(tw.errors.UnsupportedModelError, match=r"nothing that .* requires a gradient"):
                engine.step(conversations())
    assert ANCHOR.grad is None


def test_the_last_norm_of_a_family_comes_after_its_layers() -> None:
    """`walk` knows it by name; here its output is that of the decoder."""
    for family in ("llama", "gpt2", "gpt_neox", "nemotron_h", "falcon_h1"):
        lm = split_model(text_model(family))
        names = [name for name, _ in lm.decoder.named_children() if name in carried._LAST_NORMS]
        assert len(names) == 1
        norm = lm.decoder.get_submodule(names[0])
        norm.register_forward_hook(lambda _module, _inputs, out: 0 * out + 7)
        assert (lm.decoder(torch.tensor([[3, 4, 5]])).last_hidden_state == 7).all()


def test_a_plan_of_one_micro_batch_carries_nothing() -> None:
    items = conversations()
    lm = split_model(tiny_model())
    assert step.Walk(lm, plan(tw.Forest.from_trajectories(items)), "cascade")._carried == NOTHING
