# %% [markdown]
# # Qwen3-0.6B on a free T4
#
# Fine-tunes Qwen3-0.6B on recorded trees, measures what the trees save beside training every record alone, and ends
# with an assertion that both give the same gradients. A T4 has 15 GiB, no bfloat16 and too little shared memory for
# FlexAttention's kernels, so the weights stay in float32 with adapters on them, and attention is the plain one. In
# Colab choose *Runtime, Change runtime type, T4*, then run all cells: some minutes. It sends nothing anywhere; it
# downloads this repository and the model.

# %%
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

REPOSITORY = os.environ.get("TREEWISE_REPOSITORY", "")  # an address or a folder to clone, where treewise is not here
if find_spec("treewise") is None:
    assert REPOSITORY or Path("treewise").is_dir(), "clone treewise beside this notebook, or name its address above"
    if not Path("treewise").is_dir():
        subprocess.run(["git", "clone", "--depth", "1", REPOSITORY, "treewise"], check=True)
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", ".[lora]"], check=True, cwd="treewise")

# %% [markdown]
# ## The machine
#
# `treewise doctor` says in one line where a driver, a wheel and a card do not fit one another.

# %%
import gc
import time

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import treewise as tw
from treewise.data import RenderOptions, load_trees
from treewise.report.analysis.misfits import installed, misfit

MODEL = os.environ.get("TREEWISE_MODEL", "Qwen/Qwen3-0.6B")
GROUP = os.environ.get("TREEWISE_GROUP", "game24-937-first-20")  # of the data: a search by GPT-4, 20 conversations
STEPS = int(os.environ.get("TREEWISE_STEPS", "8"))
LIMIT = 15 * 2**30  # bytes of a T4

why = misfit(installed())
assert why is None, why
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if device.type == "cuda":
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, LIMIT / total))
    print(torch.cuda.get_device_name(device), f"{total / 2**30:.1f} GiB")
has_kernels = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
attention = "auto" if has_kernels or device.type == "cpu" else "reference"

# %% [markdown]
# ## The trees
#
# Each record is a whole conversation of one search, so records begin alike. Merged, each shared token is there once.

# %%
places = [Path(__file__).parent] if "__file__" in globals() else [Path(), Path("examples"), Path("treewise/examples")]
data = next(each for each in places if (each / "data").is_dir()) / "data" / "searches.jsonl.gz"
tokenizer = AutoTokenizer.from_pretrained(MODEL)
trees = load_trees(data, tokenizer, options=RenderOptions(thinking="keep"), num_workers=0)
tree = next(each for each in trees if each.name == GROUP)
rows = list(tree.trajectories)
forest = tw.Forest.from_trajectories(rows)
print(f"{len(rows)} conversations, {forest.num_flat_tokens:,} tokens alone, {forest.num_tokens:,} as a tree")

# %% [markdown]
# ## The model
#
# In float32: a T4 computes no bfloat16, and float16 would need its losses scaled. Adapters keep the optimizer small.

# %%
torch.manual_seed(0)
base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).to(device)
model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")).train()
trained = [each for each in model.parameters() if each.requires_grad]
assert all(each.dtype == torch.float32 for each in model.parameters())
print(f"{sum(each.numel() for each in trained):,} of {sum(each.numel() for each in model.parameters()):,} are trained")

# %% [markdown]
# ## Beside training every record alone
#
# One backward each: of a tree, and of its records one by one.


# %%
def measured(items: list) -> tuple[float, float, list[torch.Tensor]]:
    """Seconds of a step, its peak of memory in GiB (0 on a CPU), and its gradients."""
    engine = tw.TreeEngine(model, attention=attention, check=False)
    total = sum(float(each.loss_weights.sum()) for item in items for each in item)
    seconds = 0.0
    for _ in range(2):  # the first warms up
        model.zero_grad(set_to_none=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for item in items:
            part = sum(float(each.loss_weights.sum()) for each in item) / total
            before = [None if each.grad is None else each.grad.clone() for each in trained]
            model.zero_grad(set_to_none=True)
            engine.step(tw.Forest.from_trajectories(item))
            for parameter, sofar in zip(trained, before, strict=True):  # the mean over all tokens, not of each row
                parameter.grad = part * parameter.grad if sofar is None else sofar + part * parameter.grad
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    return seconds, peak, [each.grad.clone() for each in trained]


flat_seconds, flat_peak, flat_gradients = measured([[each] for each in rows])
tree_seconds, tree_peak, tree_gradients = measured([rows])
model.zero_grad(set_to_none=True)

# %% [markdown]
# ## Training

# %%
optimizer = torch.optim.AdamW(trained, lr=5e-4, weight_decay=0.0)
engine, losses = tw.TreeEngine(model, attention=attention), []
for step in range(STEPS):
    losses.append(float(engine.step(forest).loss))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(f"step {step + 1}: loss {losses[-1]:.4f}")
model.save_pretrained("runs/t4")

# %% [markdown]
# ## What it saved, and that it is the same

# %%
difference = torch.stack([(a - b).double().norm() for a, b in zip(flat_gradients, tree_gradients, strict=True)]).norm()
size = torch.stack([each.double().norm() for each in flat_gradients]).norm()
error = float(difference / size)
print(
    f"tokens: {forest.num_flat_tokens:,} alone, {forest.num_tokens:,} as a tree: {forest.share_ratio:.2f} times fewer"
)
print(f"seconds of a step: {flat_seconds:.2f} alone, {tree_seconds:.2f} as a tree: {flat_seconds / tree_seconds:.2f} x")
if tree_peak:
    print(f"peak of memory: {flat_peak:.2f} GiB alone, {tree_peak:.2f} GiB as a tree, of 15")
print(f"gradients differ by {error:.1e} of their norm")
assert error < 1e-4, "the tree's gradients are not those of its records"
assert losses[-1] < losses[0], "the loss did not fall"
