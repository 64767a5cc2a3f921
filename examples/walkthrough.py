# %% [markdown]
# # A walk through treewise
#
# Real trees, a tiny random model, no download, a minute on two cores. Run it as a script, or cell by cell in an editor
# that knows `# %%` (VS Code, PyCharm, Spyder), or as the notebook `walkthrough.ipynb`. It writes to `runs/walkthrough`.

# %%
import gzip
import json
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import treewise as tw
from treewise.data import load_trees
from treewise.report.html.build import build_data_report
from treewise.report.html.page import write_page

FOLDERS = [Path(__file__).parent] if "__file__" in globals() else [Path(), Path("examples")]
HERE = next(folder for folder in FOLDERS if (folder / "data").is_dir())
OUTPUT = Path("runs/walkthrough")
OUTPUT.mkdir(parents=True, exist_ok=True)

# %% [markdown]
# ## Data
#
# A search over a crossword by GPT-4 (Tree of Thoughts): each record is the conversation that leads to one state, so
# records begin alike. To need no tokenizer, a byte is a token here. Only what the assistant wrote is trained.


# %%
def to_row(record: dict) -> dict:
    token_ids, loss_weights = [], []
    for message in record["messages"]:
        text = f"{message['role']}: {message['content']}\n".encode()
        token_ids += text
        loss_weights += [float(message["role"] == "assistant")] * len(text)
    return {"token_ids": token_ids, "loss_weights": loss_weights, "reward": record["reward"], "group": record["group"]}


lines = gzip.decompress((HERE / "data" / "searches.jsonl.gz").read_bytes()).splitlines()
records = [json.loads(line) for line in lines]
rows = [to_row(record) for record in records if record["group"] == "crosswords-8-first-20"]
items = [tw.Trajectory(**row) for row in rows]
print(f"{len(items)} trajectories of {min(map(len, items))} to {max(map(len, items))} tokens")

# %% [markdown]
# ## The tree
#
# Shared prefixes are merged token by token. The share ratio is the most that token-wise layers can gain over a trainer
# that computes every record alone, the leaf ratio over one that leaves out records contained in others.

# %%
forest = tw.Forest.from_trajectories(items)
print(f"{forest.num_flat_tokens:,} flat tokens, {forest.num_tokens:,} tree tokens")
print(f"share ratio {forest.share_ratio:.2f}, leaf ratio {forest.leaf_ratio:.2f}, pair ratio {forest.pair_ratio:.2f}")
print("trajectories through each of the first tokens:", forest.multiplicity[:5])

# %% [markdown]
# ## A budget
#
# `max_tokens` limits how many tokens hold activations at a time. Open tokens, with more than a budget below them, run
# twice.

# %%
for max_tokens in (None, 1024, 512, 256):
    plan = tw.plan(forest, max_tokens=max_tokens)
    print(
        f"budget {max_tokens or 'none':>5}: {plan.num_micro_batches} micro-batches, "
        f"{plan.num_open_tokens} open tokens, {plan.num_computed_tokens:,} computed"
    )

# %% [markdown]
# ## Is it the same training?
#
# `verify` trains the trajectories one by one, with plain code, and compares. Here at a budget far below the tree.

# %%
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    bos_token_id=None,
    eos_token_id=None,
)
model = LlamaForCausalLM(config)
report = tw.verify(model, items[:6], max_tokens=256)
print(report.describe())
report.raise_if_failed()

# %% [markdown]
# ## A step
#
# Forward and backward of the whole forest; gradients are added into `.grad`, and any optimizer follows.

# %%
engine = tw.TreeEngine(model, max_tokens=512)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses = []
for _ in range(5):
    out = engine.step(forest, tw.SFT())
    optimizer.step()
    optimizer.zero_grad()
    losses.append(out.loss)
print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
print(f"{out.num_computed_tokens:,} tokens computed, {out.num_flat_tokens:,} flat")

# %% [markdown]
# ## Reinforcement learning
#
# Rewards become advantages, here by comparing siblings at each fork; `scored` fills the log-probs before the update in
# one pass without gradients; then several clipped updates.

# %%
scored, credit = tw.advantages.sibling_relative(items)
print(credit)
scored = engine.scored(scored, stream="old_logprobs")
forest_rl = tw.Forest.from_trajectories(scored)
for update in range(2):
    out = engine.step(forest_rl, tw.GRPO(clip_low=0.2, clip_high=0.28))
    optimizer.step()
    optimizer.zero_grad()
    print(f"update {update}: loss {out.loss:+.4f}", {name: round(value, 4) for name, value in out.metrics.items()})

# %% [markdown]
# ## A loss of your own
#
# Any function of the log-probs; `trained_only` leaves prompts out. `logprobs[i]` are those of trajectory `i`. Here the
# best record should become likelier than the worst one, by the logistic loss of their mean log-probs.

# %%
best, worst = (int(pick([item.reward for item in items])) for pick in (np.argmax, np.argmin))


def preference(logprobs: list[torch.Tensor]) -> torch.Tensor:
    return -torch.nn.functional.logsigmoid(logprobs[best].mean() - logprobs[worst].mean())


print(f"preference loss {engine.step(forest, preference, trained_only=True).loss:.4f}")
optimizer.zero_grad()

# %% [markdown]
# ## A run
#
# `TreeTrainer` is a `transformers.Trainer`: schedule, checkpoints, logging, resumption. From here on the rows are a
# file, as they would be for `treewise train`, `treewise rl` and `treewise inspect`.

# %%
(OUTPUT / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
trees = load_trees(str(OUTPUT / "rollouts.jsonl"))
arguments = tw.TreeTrainingArguments(
    output_dir=str(OUTPUT / "run"), max_tokens=512, num_train_epochs=3, learning_rate=1e-3, report_to="none"
)
trainer = tw.TreeTrainer(model, arguments, train_dataset=trees)
trainer.train()
print([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])

# %% [markdown]
# ## A report
#
# One page without any other file: ratios, where sharing is lost, what a budget costs, and a picture of the tree.

# %%
page, twin = write_page(OUTPUT / "report.html", build_data_report(trees, trees.report, max_tokens=512), None, "")
print(f"open {page}; the same numbers are in {twin}")
