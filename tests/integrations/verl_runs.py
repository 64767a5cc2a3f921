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


def batch_of(seed, engine, micro_batch_size=ANSWERS, max_tokens=None):
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
    return tu.get_tensordict({name: nested(each) for name, each in tensors.items()}, non_tensor_dict=settings)


def whole(tensor):
    return getattr(tensor, "full_tensor", lambda: tensor)().detach().clone()


def outcome(folder, micro_batch_size=ANSWERS, max_tokens=None, **settings):
    """Log-probs, entropies, losses and gradients of batches, and the weights after two updates, in this process."""
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss

    warnings.simplefilter("ignore")  # of torch about hooks on views, as without the line
    engine = engine_of(folder, **settings)
    rank = torch.distributed.get_rank()
    config = ActorConfig(strategy="fsdp", rollout_n=ANSWERS, ppo_micro_batch_size_per_gpu=micro_batch_size,
                         entropy_coeff=0.01, use_kl_loss=False)  # fmt: skip
    loss = functools.partial(ppo_loss, config)
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
