"""Runs of verl's own FSDP engine on a CPU, by gloo: forwards, gradients and updates of the same batches."""

import functools
import os
import warnings

import numpy as np
import torch
from torch.distributed.fsdp import _init_utils as fsdp_init

from treewise.testing import tiny_model

VOCABULARY, PROMPT, ANSWERS = 61, 12, 4


def prepare():
    """Makes verl run on a CPU, by its own registry of platforms; once in each process, before verl is imported."""
    os.environ["VERL_PLATFORM"] = "cpu"
    from verl.models.transformers import monkey_patch
    from verl.plugin.platform.platform_cuda import PlatformCUDA
    from verl.plugin.platform.platform_manager import PlatformRegistry

    class Cpu(PlatformCUDA):
        device_name = vendor_name = "cpu"
        device_module = torch.cpu
        is_available = staticmethod(lambda: True)
        current_device = staticmethod(lambda: torch.device("cpu"))
        communication_backend_name = staticmethod(lambda: "gloo")
        set_device = synchronize = staticmethod(lambda *_: None)

    PlatformRegistry.register(platform="cpu")(Cpu)
    torch.cpu.empty_cache = lambda: None  # verl calls it on every platform
    monkey_patch.is_trl_available = lambda: False  # verl wants value heads of TRL 0.27
    fsdp_init._check_module_states_for_sync_module_states = lambda _: None  # gloo broadcasts tensors of a CPU


def save_model(folder, family="llama", *, tie_word_embeddings=True):
    torch.manual_seed(0)
    model = tiny_model(family, torch.float32, vocab_size=VOCABULARY, tie_word_embeddings=tie_word_embeddings)
    model.save_pretrained(folder)
    return model


def engine_of(folder, *, strategy="fsdp2", precision="fp32", engine=(), **options):
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    settings = {
        "use_fused_kernels": True,
        "fused_kernel_options": {"impl_backend": "torch"},
        "enable_gradient_checkpointing": False,
    }
    model_config = HFModelConfig(
        path=str(folder), load_tokenizer=False, override_config={"attn_implementation": "sdpa"}, **settings | options
    )
    dtypes = {"param_dtype": precision, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    config = FSDPEngineConfig(strategy=strategy, mixed_precision=dtypes, use_torch_compile=False, **dict(engine))
    built = FSDPEngineWithLMHead(model_config, config, FSDPOptimizerConfig(lr=1e-3, total_training_steps=9),
                                 CheckpointConfig())  # fmt: skip
    built.initialize()
    return built


def rows_of(seed):
    """Four answers to one prompt; the first two and the last two share a first turn."""
    rng = np.random.default_rng(seed)
    draw = functools.partial(rng.integers, 3, VOCABULARY)
    prompt, turns = draw(size=PROMPT), [draw(size=5) for _ in range(2)]
    return [np.concatenate([prompt, turns[row // 2], draw(size=3 + row)]) for row in range(ANSWERS)]


def experts_of(seed, rows, config):
    """Recorded experts of each row; rows with the same tokens so far have the same. verl fills the last with zeros."""
    rng, drawn = np.random.default_rng(seed), {}

    def draw():
        return [
            rng.permutation(config.num_experts)[: config.num_experts_per_tok] for _ in range(config.num_hidden_layers)
        ]

    tables = [
        np.array([drawn.setdefault(tuple(row[: at + 1]), draw()) for at in range(len(row))], dtype=np.int16)
        for row in rows
    ]
    for table in tables:
        table[-1] = 0
    return tables


def batch_of(seed, engine, micro_batch_size=ANSWERS, max_tokens=None, *, replay=False):
    from verl.utils import tensordict_utils as tu

    rows, torch_rng = rows_of(seed), torch.Generator().manual_seed(seed)
    nested = functools.partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    answers = [len(row) - PROMPT for row in rows]
    tensors = {
        "input_ids": [torch.tensor(row) for row in rows],
        "position_ids": [torch.arange(len(row)) for row in rows],
        "prompts": [torch.tensor(row[:PROMPT]) for row in rows],
        "responses": [torch.tensor(row[PROMPT:]) for row in rows],
        "loss_mask": [torch.ones(length) for length in answers],
        "response_mask": [torch.ones(length) for length in answers],
        "old_log_probs": [-4 + 0.1 * torch.randn(length, generator=torch_rng) for length in answers],
        "advantages": [torch.randn(1, generator=torch_rng).repeat(length) for length in answers],
    }
    if replay:
        tables = experts_of(seed, rows, engine.model_config.hf_config)
        tensors["routed_experts"] = [torch.from_numpy(table) for table in tables]
        tensors["rollout_log_probs"] = [-3 + torch.randn(length, generator=torch_rng) for length in answers]
        for mask in tensors["response_mask"]:
            mask[1] = 0  # of a tool
    settings = {
        "use_dynamic_bsz": max_tokens is not None,
        **({} if max_tokens is None else {"max_token_len_per_gpu": max_tokens}),
        "micro_batch_size_per_gpu": micro_batch_size,
        "temperature": 0.7,
        "use_remove_padding": engine.model_config.use_remove_padding,
        "use_fused_kernels": engine.model_config.use_fused_kernels,
        "calculate_entropy": True,
        "global_batch_size": ANSWERS * torch.distributed.get_world_size(),
    }
    fields = {name: nested(each) for name, each in tensors.items()} | {"multi_modal_inputs": [{} for _ in rows]}
    return tu.get_tensordict(fields, non_tensor_dict=settings)


def dealt_batch(seed, engine, max_tokens, *, by_trees):
    """This rank's rows of a step of four prompts, and their indices: dealt by lengths, as verl does, or by trees."""
    from verl.utils import tensordict_utils as tu
    from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

    from treewise.integrations.verl_batches import rows_by_rank, verl_workload

    groups, ranks = range(seed, seed + 4), torch.distributed.get_world_size()
    step = tu.concat_tensordict([batch_of(each, engine, max_tokens=max_tokens) for each in groups])
    rows = [row.numpy() for row in step["input_ids"].unbind()]
    if by_trees:
        dealt = rows_by_rank(rows, np.repeat(groups, ANSWERS), ranks, verl_workload)
        assert dealt.num_cut == 0
        parts = dealt.rows
    else:
        workload = calculate_workload(torch.tensor([len(row) for row in rows]))
        parts = get_seqlen_balanced_partitions(workload, ranks, equal_size=True)
    own = parts[torch.distributed.get_rank()]
    batch = tu.index_select_tensor_dict(step, own)
    tu.assign_non_tensor(batch, global_batch_size=len(rows))
    return batch, own


def dealt_outcome(folder, max_tokens, *, by_trees, **settings):
    """Of all ranks' rows, in their order: log-probs; losses, gradients, and weights after two updates."""
    engine = engine_of(folder, **settings)
    loss = ppo_loss_of(ANSWERS)

    def of_all(value):
        values = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(values, value)
        return values

    batch, own = dealt_batch(0, engine, max_tokens, by_trees=by_trees)
    with engine.eval_mode():
        logprobs = engine.infer_batch(batch)["model_output"]["log_probs"]
    pairs = [pair for each in of_all(list(zip(own, logprobs.unbind(), strict=True))) for pair in each]
    # Without the last of each row, whose label is what stands behind the row.
    found = {"log_probs": [value[:-1].float() for _, value in sorted(pairs, key=lambda pair: pair[0])], "losses": []}
    with engine.train_mode():
        for step in range(2):
            batch, _ = dealt_batch(10 * step, engine, max_tokens, by_trees=by_trees)
            trained = engine.train_batch(batch, loss)
            found["losses"].append(sum(of_all(sum(trained["loss"]))))
            found[f"norm {step}"] = torch.tensor(trained["metrics"]["grad_norm"])
    found["losses"] = torch.tensor(found["losses"])
    found["weights"] = {name: whole(each) for name, each in engine.module.named_parameters()}
    sharing = getattr(engine, "treewise", None)
    return found, None if sharing is None else sharing.counts


def ppo_loss_of(micro_batch_size):
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss

    config = ActorConfig(strategy="fsdp", rollout_n=ANSWERS, ppo_micro_batch_size_per_gpu=micro_batch_size,
                         entropy_coeff=0.01, use_kl_loss=False)  # fmt: skip
    return functools.partial(ppo_loss, config)


def whole(tensor):
    return getattr(tensor, "full_tensor", lambda: tensor)().detach().clone()


def replayed_outcome(folder, **settings):
    """Log-probs of a batch with recorded experts and without, the records, the gradient of a router, counts, and the
    metrics of an update in two micro-batches."""
    warnings.simplefilter("ignore")
    engine = engine_of(folder, **settings)
    with engine.eval_mode():
        found, live = (
            [each.float() for each in engine.infer_batch(batch)["model_output"]["log_probs"].unbind()]
            for batch in (batch_of(3, engine, replay=True), batch_of(3, engine))
        )
    half = ANSWERS // 2
    with engine.train_mode():
        engine.optimizer_zero_grad()
        batch, before = batch_of(3, engine, half, replay=True), engine.treewise.counts.num_calls
        trained = engine.forward_backward_batch(batch, ppo_loss_of(half))
        router = whole(engine.module.model.layers[1].mlp.gate.weight.grad)
    rollout = [
        (values, mask.bool())
        for values, mask in zip(batch["rollout_log_probs"].unbind(), batch["response_mask"].unbind(), strict=True)
    ]
    experts = experts_of(3, rows_of(3), engine.model_config.hf_config)
    counts = engine.treewise.counts
    return {"found": found, "live": live, "experts": experts, "router": router, "counts": counts,
            "num_trained": counts.num_calls - before, "metrics": trained["metrics"], "rollout": rollout}  # fmt: skip


def outcome(folder, micro_batch_size=ANSWERS, max_tokens=None, **settings):
    """Log-probs, entropies, losses and gradients of batches, and the weights after two updates, in this process."""
    warnings.simplefilter("ignore")  # of torch about hooks on views, as without the line
    engine = engine_of(folder, **settings)
    rank, loss = torch.distributed.get_rank(), ppo_loss_of(micro_batch_size)
    with engine.eval_mode():
        outputs = engine.infer_batch(batch_of(rank, engine, micro_batch_size, max_tokens))["model_output"]
    found = {name: [each.float() for each in value.unbind()] for name, value in outputs.items()}
    with engine.train_mode():
        engine.optimizer_zero_grad()
        first = engine.forward_backward_batch(batch_of(10 + rank, engine, micro_batch_size, max_tokens), loss)
        found["loss"] = torch.tensor(first["loss"]).sum()  # of its micro-batches
        if settings.get("strategy") != "fsdp":
            found["gradients"] = {name: whole(each.grad) for name, each in engine.module.named_parameters()
                                  if each.grad is not None}  # fmt: skip
        updates = [engine.train_batch(batch_of(20 + 2 * step + rank, engine, micro_batch_size, max_tokens), loss)
                   for step in range(2)]  # fmt: skip
    found["losses"] = torch.tensor([sum(each["loss"]) for each in updates])
    found["norms"] = torch.tensor([each["metrics"]["grad_norm"] for each in updates])
    found["weights"] = {name: whole(each) for name, each in engine.module.named_parameters()}
    sharing = getattr(engine, "treewise", None)
    return found, None if sharing is None else sharing.counts
