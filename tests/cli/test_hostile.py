"""Wrong input of every kind to every command: one line that names it, exit code 2, and nothing left behind."""

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.helpers import save_tiny_model, write_rows
from treewise.cli.config import with_checksum
from treewise.cli.main import main

pytestmark = pytest.mark.xdist_group("cli/test_hostile")

GOOD = [
    {"token_ids": [1, 2, 3, 4], "loss_weights": [0, 0, 1, 1], "group": "a", "reward": 1.0},
    {"token_ids": [1, 2, 5], "loss_weights": [0, 0, 1], "group": "a", "reward": 0.0},
]
RUN = "model: model\ndata: good.jsonl\noutput_dir: out\nreport_to: none\n"
FILES: dict[str, bytes] = {
    "binary.jsonl": bytes(range(256)),
    "twice.jsonl": b'{"token_ids": [1, 2, 3], "token_ids": [4, 5, 6]}\n',
    "none.jsonl": b'{"foo": 1}\n',
    "negative.jsonl": b'{"token_ids": [1, -2, 3]}\n',
    "beyond.jsonl": b'{"token_ids": [-1, 9223372036854775808]}\n',
    "vocabulary.jsonl": b'{"token_ids": [1, 96, 97], "reward": 1}\n',
    "chat.jsonl": b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n',
    "d\u00e4t\u00e4 \u2603.jsonl": b'{"token_ids": [1, -1]}\n',
    "a.txt": b"text",
    "a.pkl": b"\x80\x04.",
    "prompts.jsonl": b'{"prompt": [1], "completion": [1], "advantage": 1, "step": 1}\n',
    "noweights/config.json": b"",  # copied below
    "broken/config.json": b"{",
    "deep/adapter_config.json": b"[" * 100_000,
    "log_deep/trainer_state.json": b"[" * 100_000,
    "online/journal/iteration-00001.jsonl": b"{}\n",
    "recorded/resolved_config.yaml": with_checksum("model: model\ndata: good.jsonl\n").encode(),
    "rank/adapter_config.json": b'{"peft_type": "LORA", "base_model_name_or_path": "model", "r": "x"}',
    "null.py": b"def even(**_):\n    return 1\0\n",
    "keys.yaml": b"? [a]\n: b",
    "object.yaml": b"model: !!python/object/apply:os.system ['id']\n",
    "aliases.yaml": RUN.encode()
    + b"".join(b"a%d: &a%d [%s]\n" % (i, i, b", ".join([b"*a%d" % (i - 1)] * 10) if i else b"1") for i in range(15)),
    "digits.yaml": RUN.encode() + b"seed: " + b"9" * 5000,
    "lora.yaml": RUN.encode() + b"lora: {r: 4, r: 8}\n",
    "run.yaml": RUN.encode(),
    "null.yaml": RUN.replace("output_dir: out", 'output_dir: "a\\0b"').encode(),
}

CASES: list[tuple[str, str]] = [
    # command, part of the message
    ("inspect binary.jsonl", "binary.jsonl:1:1: not valid JSON"),
    ("inspect twice.jsonl", "twice.jsonl:1: the key 'token_ids' is given twice"),
    ("inspect negative.jsonl", "negative.jsonl:1: token id -2 at position 1"),
    ("inspect beyond.jsonl", "beyond.jsonl:1: token id -1 at position 0"),
    ("inspect d\u00e4t\u00e4\N{NO-BREAK SPACE}\u2603.jsonl", "\u2603.jsonl:1: token id -1"),
    ("inspect folder", "holds no .jsonl"),
    ("inspect missing.jsonl", "no such file"),
    (f"inspect {'a' * 300}.jsonl", "too long"),
    ("inspect @", "a data path is empty"),
    ("inspect chat.jsonl", "needs a tokenizer; give one (--model or --tokenizer"),
    ("inspect good.jsonl --max_tokens 0", "--max_tokens is 0"),
    (f"inspect good.jsonl --max_tokens {'9' * 5000}", "invalid int value"),
    ("inspect good.jsonl --thinking loud", "invalid choice: 'loud'"),
    ("inspect good.jsonl --html report.pdf", "name it report.html"),
    ("inspect good.jsonl --model broken", "broken: cannot be loaded"),
    ("inspect good.jsonl --model @", "the model's name is empty"),
    ("inspect good.jsonl --model heads", "heads: cannot be loaded"),
    ("inspect --run folder", "no trainer_state.json"),
    ("inspect --run good.jsonl", "good.jsonl: a file, not a folder; give the output_dir"),
    ("inspect --run log_deep", "not the log of a run"),
    ("plan good.jsonl --max_tokens -3", "max_tokens is -3"),
    ("plan good.jsonl --model nothing", "nothing/config.json: num_hidden_layers is -1; it must be from 1 to 10,000"),
    (
        "plan good.jsonl --model endless",
        "endless/config.json: num_hidden_layers is 1000000000; it must be from 1 to",
    ),
    ("plan good.jsonl --model mute", "mute/config.json: vocab_size is 0; it must be from 1 to 2,147,483,647"),
    ("verify good.jsonl --model rank", "rank/adapter_config.json: r is 'x'; it must be a positive whole number"),
    ("verify good.jsonl", "give --model, or a run's configuration with it: --config RUN.yaml"),
    ("verify good.jsonl --model noweights", "model.safetensors"),
    ("verify good.jsonl --model damaged", "damaged: cannot be loaded"),
    ("verify good.jsonl --model deeper", "the weights lack model.layers.2.input_layernorm.weight and 8 more"),
    ("verify good.jsonl --model wider", "another shape of lm_head.weight"),
    ("verify good.jsonl --model model --limit -1", "--limit is -1"),
    ("verify good.jsonl --model model --device meta", "runs on cpu and cuda"),
    ("verify good.jsonl --model model --tokenizer folder", "folder: no config.json"),
    ("verify vocabulary.jsonl --model model", "token id 97 at position 2 is outside the vocabulary of 97"),
    ("doctor --device foo", "which is not a device"),
    ("models broken", "broken/config.json: names no model_type"),
    ("models folder", "folder: no config.json, so this is no folder of a model"),
    ("models ./away", "./away: no config.json, so this is no folder of a model"),
    ("schema foo", "COMMAND: invalid choice: 'foo' (choose from"),
    ("import good.jsonl", "required: -o/--output"),
    ("import good.jsonl -o rows.jsonl", "matches no known format"),
    ("import a.pkl -o rows.jsonl", "pickles"),
    ("import prompts.jsonl -o rows.jsonl", "prompt must be a list of messages"),
    ("import good.jsonl --from verl -o a.txt/rows.jsonl", "does not have the shape|cannot be written"),
    ("train missing.yaml", "cannot be read"),
    ("train /dev/zero", "/dev/zero: the configuration cannot be read (a pipe or a device;"),
    ("serve --model model --device foo", "which is not a device|treewise serve needs"),
    ("doctor --gpu --device cpu --max_seconds nan", "--max_seconds is nan; it must be positive"),
    ("verify good.jsonl --model deep", "deep/adapter_config.json: damaged (RecursionError: maximum recursion depth"),
    ("train keys.yaml", "a key must be a word"),
    ("train null.yaml", "output_dir 'a\\x00b' holds a null byte"),
    ("train object.yaml", "not valid YAML"),
    ("train aliases.yaml", "aliases.yaml: its aliases stand for more than 100,000 values"),
    ("train digits.yaml", "not valid YAML"),
    ("train lora.yaml", "lora.yaml:5: lora.r is given twice"),
    ("train run.yaml --output_dir @", "output_dir is empty"),
    ("train run.yaml --seed -1", "seed=-1 must be"),
    (f"train run.yaml --seed {'9' * 5000}", "seed must be an integer"),
    ("train run.yaml --max_steps 0", "max_steps is 0; give a number of steps, or -1 for no limit"),
    ("plan good.jsonl --model model --gpu_memory -1", "--gpu_memory '-1': give a size like 80GiB"),
    ("plan good.jsonl --model model --gpu_memory inf", "--gpu_memory 'inf': give a size like 80GiB"),
    ("train run.yaml --log_level loud", "log_level='loud' is unknown; choose one of"),
    (
        "train run.yaml --lr_scheduler_kwargs.x 1",
        "lr_scheduler_type linear with lr_scheduler_kwargs {'x': 1}: get_linear",
    ),
    ("train run.yaml --lr_scheduler_type cosine_with_min_lr", "with lr_scheduler_kwargs {}: One of min_lr or"),
    ("train run.yaml --optim sgd --optim_args foo", "optim sgd with optim_args 'foo': not enough values"),
    ("train run.yaml --load_best_model_at_end --save_strategy no", "load_best_model_at_end needs evaluations"),
    ("train run.yaml --num_train_epochs 0", "nothing would be trained"),
    ("train run.yaml --ddp_timeout -1", "ddp_timeout is -1; it must be positive, in seconds"),
    ("train run.yaml --lr_scheduler_kwargs {", "lr_scheduler_kwargs must be a mapping or nothing, found '{' (text)"),
    (
        "train run.yaml --lr_scheduler_kwargs [1]",
        "lr_scheduler_kwargs must be a mapping or nothing, found '[1]' (text)",
    ),
    (
        "train run.yaml --fsdp_config broken/config.json",
        "fsdp_config: 'broken/config.json' cannot be read (not valid J",
    ),
    ("train run.yaml --accelerator_config /dev/zero", "accelerator_config: '/dev/zero' cannot be read (a pipe"),
    ("train run.yaml --learning_rate -1", "learning_rate=-1 must be"),
    ("train run.yaml --learning_rate", "--learning_rate needs a value"),
    ("train run.yaml --tp_size 2", "tp_size"),  # no second process, or no meshes
    ("train run.yaml --optim adamw_8bit", "bitsandbytes"),
    ("train run.yaml --report_to wandb", "report_to: WandbCallback requires wandb to be installed"),
    ("train run.yaml --eval_data good.jsonl --metric_for_best_model acc", "measures eval_loss alone"),
    ("train run.yaml --model noweights", "model.safetensors"),
    ("train run.yaml --output_dir online --resume", "output_dir online holds an online run"),
    ("rl --tasks sum --model model --output_dir recorded", "output_dir recorded holds a run on recorded data"),
    ("rl --tasks sum --model model --output_dir online", "no checkpoint was saved; choose another, --resume to go on"),
    ("rl --tasks good.jsonl --reward_functions null.py:even --model model --output out", "cannot contain null bytes"),
    ("rl --unknown 1", "unknown key 'unknown'"),
    ("rl --data good.jsonl --model model --output out", "give --objective"),
    ("rl --data good.jsonl --model model --output out --objective grpo --beta x", "beta must be a number"),
    ("rl --data good.jsonl --model model --output out --objective grpo --beta 1 --reference nowhere", "nowhere"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hostile")
    write_rows(root / "good.jsonl", GOOD)
    for name, content in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    (root / "folder").mkdir()
    config = json.loads((save_tiny_model(root / "model") / "config.json").read_text())
    for name, change in (
        ("heads", {"num_attention_heads": 3}),
        ("nothing", {"num_hidden_layers": -1}),
        ("endless", {"num_hidden_layers": 10**9}),
        ("mute", {"vocab_size": 0}),
        ("noweights", {}),
        ("damaged", {}),
        ("deeper", {"num_hidden_layers": 3}),
        ("wider", {"vocab_size": 98}),
    ):
        (root / name).mkdir(exist_ok=True)
        (root / name / "config.json").write_text(json.dumps(config | change))
        if name in ("damaged", "deeper", "wider"):
            shutil.copy(root / "model" / "model.safetensors", root / name)
    with (root / "damaged" / "model.safetensors").open("r+b") as stream:
        stream.truncate(1000)
    return root


def contents(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


@pytest.mark.parametrize(("command", "message"), CASES, ids=[command[:60] for command, _ in CASES])
def test_one_line_and_nothing_left(
    folder: Path, command: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = contents(folder)
    words = ["" if word == "@" else word.replace("\N{NO-BREAK SPACE}", " ") for word in command.split(" ")]
    assert main(words) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("error: ")
    assert len(said.splitlines()) == 1, said
    assert len(said) < 700
    assert any(part in said for part in message.split("|")), said
    assert contents(folder) == before


def test_a_launcher_that_gives_no_number_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "two")
    assert main(["train", str(folder / "run.yaml")]) == 2
    assert capsys.readouterr().err.startswith("error: WORLD_SIZE is 'two', not a number")


def test_a_disk_that_refuses_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from treewise.cli.commands import inspect

    def refuse(args: object) -> int:
        raise OSError(28, "No space left on device", "rows.jsonl")

    monkeypatch.setattr(inspect, "run", refuse)
    assert main(["inspect", "good.jsonl"]) == 2
    assert capsys.readouterr().err == "error: rows.jsonl: No space left on device\n"


def test_weights_that_a_model_leaves_out_are_said(
    folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    config = json.loads((folder / "model" / "config.json").read_text())
    shutil.copytree(folder / "model", folder / "shallow")
    (folder / "shallow" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    assert main(["verify", str(folder / "good.jsonl"), "--model", str(folder / "shallow")]) == 0
    assert "9 of its weights are not used, the first model.layers.1.input_layernorm.weight" in caplog.text
    assert all(
        line.startswith("comparing ") for line in capsys.readouterr().err.splitlines()
    )  # nothing of transformers
