"""Windows by themselves: loops of accelerate that accumulate gradients, against the same loops without the line."""

import weakref

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments

import treewise as tw
from treewise.integrations.batches import accumulation
from treewise.testing.families import tiny_model

IGNORED = -100
PROMPTS = [[5, 6, 7, 8, 9, 20, 21], [40, 41, 42, 43, 44, 45, 46]]
ANSWERS = [[10, 11], [10, 12, 13], [14], [15, 16, 17, 18], [10, 12, 19]]
ROWS = [(prompt, answer) for prompt in PROMPTS for answer in ANSWERS]


def model_of(**changes):
    torch.manual_seed(0)
    return tiny_model("llama", torch.float64, **changes)


def collate(items):
    width = max(len(prompt) + len(answer) for prompt, answer in items)
    ids, labels = torch.zeros(len(items), width, dtype=torch.long), torch.full((len(items), width), IGNORED)
    mask = torch.zeros_like(ids)
    for number, (prompt, answer) in enumerate(items):
        row = torch.tensor(prompt + answer)
        ids[number, : len(row)], mask[number, : len(row)] = row, 1
        labels[number, len(prompt) : len(row)] = row[len(prompt) :]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def train(tmp_path, line, model=None, rows=ROWS, **settings):
    """Logs and weights of a Trainer; `line` is called with its model."""
    args = TrainingArguments(
        **{
            "output_dir": str(tmp_path),
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 4,
            "num_train_epochs": 2,
            "learning_rate": 0.05,
            "optim": "sgd",
            "max_grad_norm": 0.5,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "remove_unused_columns": False,
            **settings,
        }
    )
    trainer = Trainer(model_of() if model is None else model, args, train_dataset=rows, data_collator=collate)
    sharing = line(trainer.model)
    trainer.train()
    logs = [
        {name: entry[name] for name in ("loss", "grad_norm", "eval_loss") if name in entry}
        for entry in trainer.state.log_history
    ]
    return logs, trainer.model.state_dict(), sharing


def three_steps(folder, **more):
    """Arguments of a short run that logs each step."""
    return TrainingArguments(
        str(folder),
        max_steps=3,
        optim="sgd",
        learning_rate=0.05,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
        **more,
    )


def assert_same(found, expected):
    for entry, other in zip(found[0], expected[0], strict=True):
        assert entry.keys() == other.keys()
        for name, value in other.items():
            assert float(entry[name]) == pytest.approx(float(value), rel=1e-5, abs=1e-6), name
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"max_tokens": 5}], ids=["whole", "budget"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3},
        {"max_grad_norm": 0.0},
        {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 4},
    ],
    ids=["rows one by one", "remainders", "no clipping", "no accumulation"],
)
def test_the_trainer(tmp_path, settings, options):
    expected = train(tmp_path, lambda _: None, **settings)
    found = train(tmp_path, lambda model: tw.share_prefixes(model, **options), **settings)
    assert_same(found, expected)
    assert found[2].counts.share_ratio > 1.3


def test_adapters(tmp_path):
    def adapted():
        return get_peft_model(
            model_of(), LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
        )

    expected = train(tmp_path, lambda _: None, adapted())
    found = train(tmp_path, tw.share_prefixes, adapted())
    assert_same(found, expected)
    assert found[2].counts.share_ratio > 1.3


def test_evaluation_and_generation_in_the_middle(tmp_path):
    """Between steps, and of rows that the window holds."""

    def run(line):
        from transformers import TrainerCallback

        class Look(TrainerCallback):
            def on_substep_end(self, args, state, control, model=None, **_):
                with torch.no_grad():
                    model(**collate(ROWS[:2]))
                    model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, do_sample=False, pad_token_id=0)

        torch.manual_seed(0)
        micro = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3}
        args = three_steps(tmp_path, eval_strategy="steps", eval_steps=1, **micro)
        trainer = Trainer(
            model_of(), args, train_dataset=ROWS, eval_dataset=ROWS[:3], data_collator=collate, callbacks=[Look()]
        )
        sharing = line(trainer.model)
        trainer.train()
        keys = ("loss", "grad_norm", "eval_loss")
        logs = [{key: entry[key] for key in keys if key in entry} for entry in trainer.state.log_history]
        return logs, trainer.model.state_dict(), sharing

    assert_same(run(tw.share_prefixes), run(lambda _: None))


def loop(line, num_steps=3, accumulate=4):
    accelerator = Accelerator(gradient_accumulation_steps=accumulate, cpu=True)
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    sharing = line(model)
    norms = []
    for number in range(num_steps * accumulate):
        with accelerator.accumulate(model):
            loss = model(**collate([ROWS[number % len(ROWS)]])).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append({"grad_norm": float(accelerator.clip_grad_norm_(model.parameters(), 0.5))})
            optimizer.step()
            optimizer.zero_grad()
    return norms, model.state_dict(), sharing


def test_a_loop_of_accelerate():
    found = loop(tw.share_prefixes)
    assert_same(found, loop(lambda _: None))
    assert found[2].counts.share_ratio > 1.5


def test_a_reference_model_that_changes_with_a_step():
    """Through parameter.data, which torch does not count, as TRL's `sync_ref_model` does; no accelerator trains it."""

    def run(line):
        model, reference = model_of(), model_of()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = accelerator.prepare(model)
        sharings = [tw.share_prefixes(each) for each in (model, reference)] if line else []
        found = []
        for row in ROWS[:4]:
            with accelerator.accumulate(model):
                with torch.no_grad():
                    found.append(float(reference(**collate([row])).loss))
                accelerator.backward(model(**collate([row])).loss)
                if accelerator.sync_gradients:
                    for each in reference.parameters():
                        each.data.mul_(0.9)
        for each in sharings:
            assert each.counts.share_ratio > 1
            each.remove()
        return found

    assert run(line=True) == pytest.approx(run(line=False), rel=1e-6)


def test_a_loop_of_ones_own():
    def run(share):
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sharing = tw.share_prefixes(model) if share else None
        for _ in range(2):
            optimizer.zero_grad()
            if share:
                with sharing.window():
                    for row in ROWS:
                        model(**collate([row])).loss.backward()
            else:
                for row in ROWS:
                    model(**collate([row])).loss.backward()
            optimizer.step()
        return [], model.state_dict(), sharing

    found = run(share=True)
    assert_same(found, run(share=False))
    assert found[2].counts.share_ratio > 2


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_are_zeroed_before_the_backward_of_a_call_that_is_left(set_to_none):
    """GPT-2's rows behind left padding are the model's own, and add to gradients that a window has a mark in."""
    first, second = collate(ROWS[:1]), collate(ROWS[1:2])
    left = {name: torch.nn.functional.pad(value, (1, 0), value=0) for name, value in second.items()}
    left["labels"][:, :2] = IGNORED
    model = tiny_model("gpt2", torch.float64)
    model(**left).loss.backward()
    expected = {name: each.grad.clone() for name, each in model.named_parameters()}
    model.zero_grad()
    sharing = tw.share_prefixes(model)
    with sharing.window():
        model(**first).loss.backward()
        loss = model(**left).loss
        model.zero_grad(set_to_none=set_to_none)
        loss.backward()
    assert sharing.counts.num_left == 1
    for name, each in model.named_parameters():
        torch.testing.assert_close(each.grad, expected[name])


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_are_zeroed_before_the_backward_of_a_call_outside(set_to_none):
    model = model_of()
    model(**collate(ROWS[1:2])).loss.backward()
    expected = {name: each.grad.clone() for name, each in model.named_parameters()}
    model.zero_grad()
    sharing = tw.share_prefixes(model)
    with sharing.window():
        model(**collate(ROWS[:1])).loss.backward()
        with sharing.paused():
            loss = model(**collate(ROWS[1:2])).loss
        model.zero_grad(set_to_none=set_to_none)
        loss.backward()
    for name, each in model.named_parameters():
        torch.testing.assert_close(each.grad, expected[name])


def test_a_batch_is_verified_within_a_window():
    """As without one; what the window has stays."""
    model = model_of()
    for row in ROWS[:2]:
        model(**collate([row])).loss.backward()
    expected = {name: each.grad.clone() for name, each in model.named_parameters()}
    model.zero_grad()
    sharing = tw.share_prefixes(model)
    with sharing.window():
        model(**collate(ROWS[:1])).loss.backward()
        sharing.verify(collate(ROWS[:2])).raise_if_failed()
        model(**collate(ROWS[1:2])).loss.backward()
    for name, each in model.named_parameters():
        torch.testing.assert_close(each.grad, expected[name])


def test_windows_without_anything_shared_are_given_up_and_taken_up_again(tmp_path):
    apart = [([number, number + 1, number + 2], [7]) for number in range(8, 48, 5)]
    settings = {"num_train_epochs": 1, "train_sampling_strategy": "sequential"}
    rows = [*apart, *[ROWS[0]] * 8]
    expected = train(tmp_path, lambda _: None, rows=rows, **settings)
    found = train(tmp_path, tw.share_prefixes, rows=rows, **settings)
    assert_same(found, expected)
    counts = found[2].counts
    # A window that shares nothing, two that only look, one that shares.
    assert (counts.num_calls, counts.num_left) == (8, 8)


def test_no_window_if_asked(tmp_path):
    expected = train(tmp_path, lambda _: None)
    found = train(tmp_path, lambda model: tw.share_prefixes(model, window=None))
    assert_same(found, expected)
    assert found[2].counts.num_calls == 0
    assert "window=None" in str(found[2])


def test_accelerates_backward_is_its_own_again(monkeypatch):
    monkeypatch.setattr(accumulation, "_listening", weakref.WeakSet())
    monkeypatch.setattr(accumulation, "_own_backward", [])
    own = Accelerator.backward
    sharings = [tw.share_prefixes(model_of()) for _ in range(2)]
    assert Accelerator.backward is not own
    for each in sharings:
        each.remove()
    assert Accelerator.backward is own
