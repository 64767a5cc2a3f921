"""Features are plugged in: a plain step does without them all, and asking for one that is gone is one error."""

import ast
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import treewise
from tests.rl.online.helpers import digest, new_trainer, tiny_policy
from treewise.base import features
from treewise.base.features import FEATURES, is_there
from treewise.errors import ConfigError
from treewise.rl.samplers import SampleRequest, TransformersSampler, sampler_named
from treewise.rl.tasks import EnvironmentTask, GuessNumber

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TREE = [
    treewise.Trajectory(token_ids=[5, 6, 7, last, last + 1], loss_weights=[0, 0, 0, 1, 1], reward=float(last))
    for last in (8, 9, 10)
]
# A run from trajectories to a checkpoint, and a step of the engine alone; `HIDDEN` cannot be imported.
PLAIN_RUN = """
import json, sys

HIDDEN = json.loads(sys.argv[1])

class Missing:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if any(name == each or name.startswith(each + ".") for each in HIDDEN):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing)
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import treewise

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**json.loads(sys.argv[2])))
tree = [
    treewise.Trajectory(token_ids=[5, 6, 7, last, last + 1], loss_weights=[0, 0, 0, 1, 1], reward=float(last))
    for last in (8, 9, 10)
]
result = treewise.TreeEngine(model, max_tokens=4).step(tree)
loss = float(result.loss)
model.zero_grad()
args = treewise.TreeTrainingArguments(
    sys.argv[3], max_tokens=64, max_steps=2, report_to="none", use_cpu=True, logging_steps=1, save_steps=2
)
trainer = treewise.TreeTrainer(model, args, train_dataset=[tree])
trainer.train()
print(json.dumps([loss, trainer.state.log_history[0]["loss"]]))
"""


class _Missing:
    """A finder for which some modules do not exist."""

    def __init__(self, *names: str):
        self.names = names

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if any(name == each or name.startswith(each + ".") for each in self.names):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.fixture
def take_out(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Takes the module of a feature out of this process, until the test ends."""

    def take(name: str) -> None:
        module = FEATURES[name][0]
        for loaded in [each for each in sys.modules if each == module or each.startswith(module + ".")]:
            monkeypatch.delitem(sys.modules, loaded)
        monkeypatch.setattr(sys, "meta_path", [_Missing(module), *sys.meta_path])

    return take


def _llama() -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def _hooked() -> PreTrainedModel:
    model = _llama()
    next(model.parameters()).register_hook(lambda grad: grad)
    return model


def _of(model_type: str, **settings: object) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES, **settings))


def _arguments(path: Path, **settings: object) -> treewise.TreeTrainingArguments:
    return treewise.TreeTrainingArguments(
        str(path), **({"max_tokens": 64, "report_to": "none", "use_cpu": True} | settings)
    )


def test_a_plain_run_does_without_every_feature(tmp_path: Path):
    hidden = json.dumps([module for module, _ in FEATURES.values()])
    run = subprocess.run(
        [sys.executable, "-c", PLAIN_RUN, hidden, json.dumps(SIZES), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert run.returncode == 0, run.stderr
    of_engine, of_trainer = json.loads(run.stdout.splitlines()[-1])
    model, ids = _llama(), torch.tensor(np.array([each.token_ids for each in TREE]))
    flat = torch.log_softmax(model(ids).logits[:, 2:4], -1).gather(-1, ids[:, 3:, None]).neg().mean().item()
    assert of_engine == pytest.approx(flat, rel=1e-5)
    assert of_trainer == pytest.approx(flat, rel=1e-4)  # rounded by transformers' log
    assert (tmp_path / "checkpoint-2" / "model.safetensors").exists()


# By a run that rewards completions of one turn, samples from the model in training, and does not go on.
NOT_ASKED_FOR = (
    *("ahead", "angles", "copied_weights", "heard_decoders", "many_turns", "servers", "seen_prompts"),
    *("images", "image_records", "fsdp", "mesh", "resume", "saved_weights"),
)


def test_an_online_run_loads_nothing_that_it_does_not_ask_for(take_out: Callable[[str], None], tmp_path: Path):
    for name in NOT_ASKED_FOR:
        take_out(name)
    trainer = new_trainer(tmp_path, model=tiny_policy(), iterations=1)
    trainer.train()
    assert digest(trainer.model) != digest(tiny_policy())


def test_the_online_loop_is_imported_without_them():
    loop = "import treewise.rl.online.loop, treewise.rl.online.tasks_by_name, sys; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", loop], capture_output=True, text=True, check=True)
    loaded = run.stdout.split()
    assert "treewise.rl.online.trees" in loaded
    without = [f"treewise.rl.tasks.{name}" for name in ("episode", "environment", "single_turn")]
    without += [FEATURES[name][0] for name in NOT_ASKED_FOR]
    assert not {*loaded} & {*without}


# What a user writes to get a feature.
ASKS: dict[str, Callable[[Path], object]] = {
    "ahead": lambda path: new_trainer(path, max_staleness=1).train(),
    "angles": lambda path: new_trainer(
        path, curriculum="gain", curriculum_settings={"force": True}, num_items=4, check_items=0, eval_every=0
    ).train(),
    "adapters": lambda path: treewise.TreeTrainer(
        _llama(), _arguments(path), train_dataset=[TREE], peft_config=peft.LoraConfig(target_modules="all-linear")
    ),
    "attention_needs": lambda path: treewise.TreeEngine(_llama(), attention="flash").step(TREE),
    "budget": lambda path: treewise.TreeEngine(_llama(), max_tokens="auto").step(TREE),
    "compilation": lambda path: _arguments(path, torch_compile=True),
    "context": lambda path: _arguments(path, context_size=2),
    "copied_weights": lambda path: new_trainer(path, max_staleness=1),
    "fsdp": lambda path: _arguments(path, sharded=True),
    "gradient_hooks": lambda path: treewise.TreeEngine(_hooked(), max_tokens=64).step(TREE),
    "heard_decoders": lambda path: TransformersSampler(_llama()).sample([SampleRequest((5,), want_routes=True)]),
    "host_memory": lambda path: treewise.TreeEngine(_llama(), max_tokens=64, offload=True),
    "load_model": lambda path: treewise.TreeTrainer(str(path), _arguments(path), train_dataset=[TREE]),
    "many_turns": lambda path: new_trainer(path, EnvironmentTask(GuessNumber)).train(),
    "mesh": lambda path: _arguments(path, tp_size=2),
    "nodes": lambda path: treewise.Forest.from_nodes([-1], [[1, 2]]),
    "objectives": lambda path: treewise.TreeEngine(_llama(), max_tokens=64).step(TREE, "reinforce"),
    "recurrent": lambda path: treewise.TreeEngine(_of("mamba2", num_heads=4, head_dim=16, state_size=8), max_tokens=64),
    "resume": lambda path: treewise.TreeTrainer(_llama(), _arguments(path), train_dataset=[TREE]).train(
        resume_from_checkpoint=True
    ),
    "routes": lambda path: treewise.Trajectory([5, 6], routed_experts=[[[0]], [[1]]]),
    "servers": lambda path: sampler_named("vllm", {}, _llama()),
    "router_loss": lambda path: treewise.TreeEngine(
        _of("mixtral", num_key_value_heads=4, num_local_experts=4, output_router_logits=True), max_tokens=64
    ).step(TREE),
    "edge_values": lambda path: treewise.TreeEngine(_llama(), max_tokens=64).logprobs(TREE),
    "values": lambda path: treewise.TreeEngine(_llama(), max_tokens=64).logprobs(TREE),
}


@pytest.mark.parametrize("name", sorted(ASKS))
def test_asking_for_a_feature_that_is_gone_is_one_error(name: str, take_out: Callable[[str], None], tmp_path: Path):
    module, who = FEATURES[name]
    take_out(name)
    with pytest.raises(ConfigError) as caught:
        ASKS[name](tmp_path)
    assert str(caught.value) == f"{who} need {module}, which this installation of treewise was made without."


def test_types_know_every_feature_by_its_module():
    tree = ast.parse(Path(str(features.__file__)).read_text())
    typed = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in typed.body if isinstance(node, ast.ImportFrom)]
    known = {alias.asname or alias.name: f"{node.module}.{alias.name}" for node in imports for alias in node.names}
    assert known == {name: module for name, (module, _) in FEATURES.items()}


@pytest.mark.parametrize("name", sorted(FEATURES))
def test_a_feature_is_there_or_named(name: str, take_out: Callable[[str], None]):
    assert is_there(name)
    assert getattr(features, name).__name__ == FEATURES[name][0]
    take_out(name)
    assert not is_there(name)
    with pytest.raises(ConfigError, match=r"which this installation of treewise was made without\.$"):
        getattr(features, name)


def test_a_package_that_a_feature_needs_is_named_by_its_own_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A module that is there, but lacks a package, is no feature that was taken out."""
    (tmp_path / "plugged.py").write_text("import a_package_that_is_not_there")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(FEATURES, "plugged", ("plugged", "tests"))
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        getattr(features, "plugged")  # noqa: B009
