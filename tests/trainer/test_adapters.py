"""Adapters whose settings are drawn together, on models with tied and with separate tables of tokens, from making to
merging: what is taken trains as flat training does, is saved, loaded, gone on from and merged; the rest is refused by
name, before anything is computed."""

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.needs import TIED_LORA, require
from tests.trainer.helpers import losses
from treewise import SFT, Forest, Trajectory, TreeEngine, TreeTrainer, TreeTrainingArguments
from treewise.errors import ConfigError, UnsupportedModelError
from treewise.models.load_model import load_config, load_shapes, load_weights
from treewise.nn.adapters import parted_table
from treewise.rl.samplers.server_weights import whole_weights
from treewise.testing.families import tiny_model
from treewise.testing.oracle import flat_sft, gradients_of

pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of PEFT, on tied tables and on what it saves
    pytest.mark.filterwarnings("ignore::peft.utils.warning.PeftWarning"),
]

NUM_DRAWS = 64
# By PEFT, or since PEFT would not keep what was trained.
REFUSED = {*(11, 12, 19, 26, 28, 29, 39), *(45, 48, 52, 53, 54, 56, 59)}
NUM_TOKENS, NUM_MORE = 64, 2
TOLERANCE = 1e-6  # in float64, but for norms
ROLLOUTS = [
    [Trajectory([3, 4, 5, 6, 7, 8, 40, 50]), Trajectory([3, 4, 5, 9, 10])],
    [Trajectory([3, 4, 11, 12, 13, 14, 15, 63]), Trajectory([3, 4, 11, 12, 20])],
]
PROBE = torch.tensor([[3, 4, 5, 6, 7, 8, 40, 50, 63]])
EMBEDDINGS, HEAD = "embed_tokens", "lm_head"
REFUSALS = (
    "already marked to be trained fully|cannot be applied to modules of type|No modules were targeted|"
    "Cannot ensure weight tying|cannot be used when|ties such adapters only until|"
    "wraps an unknown layer type|resized from 64 tokens"
)


def drawn(seed: int) -> tuple[bool, int, dict[str, Any]]:
    """Whether the tables are tied, tokens that are added, and settings of adapters."""
    rng = random.Random(seed)
    settings: dict[str, Any] = {"r": rng.choice([2, 4]), "lora_alpha": rng.choice([4, 16])}
    targets = [["q_proj"], ["q_proj"], ["q_proj", "down_proj"], "all-linear", r".*\.(q|v)_proj", "v_proj"]
    targets += [["q_proj", EMBEDDINGS], [HEAD], [EMBEDDINGS, HEAD], ["q_proj", HEAD]]
    settings["target_modules"] = rng.choice(targets)
    if variant := rng.choice([None, "use_dora", "use_rslora"]):
        settings[variant] = True
    tables = rng.random()
    if tables < 0.5:
        settings["modules_to_save"] = rng.choice([[EMBEDDINGS], [HEAD], [EMBEDDINGS, HEAD], ["norm"]])
    elif tables < 0.8:
        both = {EMBEDDINGS: [3, 40], HEAD: [3, 40]}
        others = [{EMBEDDINGS: [3, 40]}, {HEAD: [5, 63]}, {EMBEDDINGS: [3, 40], HEAD: [3, 63]}]
        settings["trainable_token_indices"] = rng.choice([[3, 40, 63], both, *others])
    if rng.random() < 0.5:
        settings["ensure_weight_tying"] = True
    if rng.random() < 0.25 and isinstance(settings["target_modules"], list):
        settings["layers_to_transform"] = rng.choice([0, [0, 2]])
    return rng.random() < 0.6, rng.choice([0, 0, NUM_MORE]), settings


def based(folder: Path, num_more: int, *, is_tied: bool, dtype: str = "float32") -> Any:
    """A model that was saved, with tokens added after it was loaded."""
    if not folder.exists():
        torch.manual_seed(0)
        tiny_model(tie_word_embeddings=is_tied).save_pretrained(folder)
    model: Any = load_weights(str(folder), dtype=dtype)
    if num_more:
        torch.manual_seed(1)
        model.resize_token_embeddings(NUM_TOKENS + num_more, mean_resizing=False)
    return model


def run(model: Any, folder: Path, settings: dict[str, Any] | None, steps: int = 3, resume: Path | None = None) -> Any:
    """A few steps of AdamW on trees, of new adapters where there are settings."""
    args = TreeTrainingArguments(
        output_dir=str(folder), max_steps=steps, save_steps=2, learning_rate=0.02, use_cpu=True, report_to="none",
        per_device_train_batch_size=1, disable_tqdm=True, logging_steps=1, seed=3,
    )  # fmt: skip
    trainer = TreeTrainer(model, args=args, train_dataset=ROLLOUTS, peft_config=copy.deepcopy(settings))
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=PROBE).logits
    return found


def check_steps(model: Any) -> None:
    """Log-probs, loss and every trained gradient, whole and under a budget, in float64."""
    items = [item for tree in ROLLOUTS for item in tree]
    loss, logprobs, expected = flat_sft(model, items)
    whole = sum(float(grad.square().sum()) for grad in expected.values()) ** 0.5
    forest = Forest.from_trajectories(items)
    for max_tokens in (None, 4):
        model.zero_grad()
        engine = TreeEngine(model, max_tokens)
        with torch.no_grad():
            for ours, theirs in zip(engine.logprobs(forest), logprobs, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)
        assert engine.step(forest, SFT()).loss == pytest.approx(loss, rel=TOLERANCE)
        computed = gradients_of(model)
        assert computed.keys() == expected.keys()
        for name, grad in expected.items():
            assert float((computed[name] - grad).norm()) <= TOLERANCE * (float(grad.norm()) + 0.1 * whole), name


def check_merged(model: Any, folder: Path) -> None:
    """Merged by PEFT, saved and loaded again; and as servers get it. Refused where the tables would not be one."""
    expected = logits(model)
    if parted_table(model.get_base_model()) is not None:
        with pytest.raises(ConfigError, match="shares its weights with another layer"):
            list(whole_weights(model))
        return
    sent = {name: each.clone() for name, each in whole_weights(model)}
    merged = copy.deepcopy(model).merge_and_unload()
    merged.save_pretrained(folder)
    again = load_weights(str(folder))
    torch.testing.assert_close(logits(again), expected, rtol=2e-4, atol=2e-4)
    TreeEngine(merged).evaluate(ROLLOUTS[1])  # PEFT's copy of a tied head says that it has other sizes
    assert {name for name, _ in again.named_parameters()} <= set(sent)
    again.load_state_dict(sent, strict=False)  # tied tables have one name
    torch.testing.assert_close(logits(again), expected, rtol=2e-4, atol=2e-4)


@pytest.mark.representatives("0", "1", "2", "3")
@pytest.mark.parametrize("seed", range(NUM_DRAWS))
def test_drawn_adapters(seed: int, tmp_path: Path) -> None:
    is_tied, num_more, settings = drawn(seed)
    if settings.get("ensure_weight_tying") and settings.get("modules_to_save") == [HEAD]:
        require(TIED_LORA)
    base = tmp_path / "base"

    def model() -> Any:
        return based(base, num_more, is_tied=is_tied)

    if seed in REFUSED:
        with pytest.raises((ConfigError, UnsupportedModelError), match=REFUSALS):
            run(model(), tmp_path / "whole", settings)
        return
    whole = run(model(), tmp_path / "whole", settings)
    trained = {name for name, each in whole.model.named_parameters() if each.requires_grad}
    # It goes on from its second step to the same weights.
    resumed = run(model(), tmp_path / "whole", settings, resume=tmp_path / "whole" / "checkpoint-2")
    assert losses(resumed)[-1] == losses(whole)[-1]
    assert torch.equal(logits(resumed.model), logits(whole.model))
    # What it saves is a model.
    whole.save_model(str(tmp_path / "saved"))
    again = load_weights(str(tmp_path / "saved"))
    assert torch.equal(logits(again), logits(whole.model))
    assert {name for name, each in again.named_parameters() if each.requires_grad} == trained
    assert load_config(str(tmp_path / "saved")).vocab_size == NUM_TOKENS + num_more
    shapes = {name: each.shape for name, each in load_shapes(str(tmp_path / "saved")).named_parameters()}
    assert shapes == {name: each.shape for name, each in again.named_parameters()}
    further = run(again, tmp_path / "further", None, steps=1)
    check_merged(further.model, tmp_path / "merged")
    check_steps(further.model.double())


def test_every_setting_is_drawn() -> None:
    draws = [drawn(seed) for seed in range(NUM_DRAWS)]
    assert {is_tied for is_tied, *_ in draws} == {False, True}
    names = {name for *_, settings in draws for name in settings}
    assert names >= {"use_dora", "use_rslora", "modules_to_save", "trainable_token_indices", "layers_to_transform"}
