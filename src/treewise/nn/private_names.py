"""What treewise relies on that is not public: names of other libraries that may change without notice.

One test per name (`tests/nn/test_private_names.py`) checks it in the installed release. Another allows `# noqa: SLF001`
only on lines that use a name of this list.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrivateName:
    """library: the distribution that it belongs to. used_in: modules under `src/treewise`. why: what has no public
    equivalent."""

    library: str
    name: str
    used_in: tuple[str, ...]
    why: str


PRIVATE_NAMES = (
    PrivateName(
        "torch",
        "_scaled_dot_product_flash_attention_for_cpu",
        ("nn/attention/cascade.py", "engine/step_memory.py"),
        "the only attention on the CPU that returns the log-sum-exp, without which partial results cannot be merged",
    ),
    PrivateName(
        "torch",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        ("nn/attention/cascade.py", "engine/step_memory.py"),
        "its backward, called with the output and log-sum-exp merged from several parts",
    ),
    PrivateName(
        "torch",
        "_grouped_mm",
        ("engine/step_memory.py",),
        "the product of experts, which runs without data in bfloat16 alone",
    ),
    PrivateName(
        "torch",
        "torch.ops.higher_order.flex_attention",
        ("nn/attention/flex.py",),
        "FlexAttention's operator, differentiable on the CPU, where the function around it is not",
    ),
    PrivateName(
        "torch",
        "_dynamo",
        ("nn/attention/flex.py", "nn/compilation.py"),
        "maybe_mark_dynamic and config: one kernel for all lengths; config: the limit of graphs for one function",
    ),
    PrivateName("torch", "_orig_mod", ("nn/model.py",), "the model inside a compiled one"),
    PrivateName("torch", "_compiled_call_impl", ("nn/compilation.py",), "detects layers that are compiled in place"),
    PrivateName(
        "torch",
        "_version",
        ("engine/differentiable.py", "engine/offload.py"),
        "detects tensors changed in place: weights before a backward, what autograd saves twice",
    ),
    PrivateName("torch", "_base", ("engine/offload.py",), "detects views of weights among what autograd saves"),
    PrivateName("torch", "_parameters", ("distributed/ends.py",), "replaces parameters of a module in place"),
    PrivateName("torch", "_buffers", ("distributed/fsdp.py",), "replaces buffers of a module in place"),
    PrivateName(
        "torch",
        "_backward_hooks",
        ("nn/gradients.py", "engine/probe.py", "engine/step_checks.py"),
        "hooks on gradients, which run once a step; hooks of modules",
    ),
    PrivateName(
        "torch",
        "_post_accumulate_grad_hooks",
        ("nn/gradients.py", "nn/tensor_parallel.py"),
        "hooks on accumulated gradients, likewise; those of transformers' tensor parallelism are removed",
    ),
    PrivateName("torch", "_execution_engine", ("nn/gradients.py",), "calls what ends with a backward"),
    PrivateName("torch", "_set_pg_timeout", ("distributed/ranks.py",), "gives groups of a mesh the run's timeout"),
    PrivateName("torch", "_unflatten", ("distributed/mesh.py",), "an axis of a mesh in two, for hybrid sharding"),
    PrivateName("torch", "_get_backend", ("distributed/ranks.py",), "of the group of all ranks, for its options"),
    PrivateName("torch", "_timeout", ("distributed/ranks.py",), "the timeout that a group was made with"),
    PrivateName("torch", "_DropoutNd", ("nn/model_checks.py",), "the base class of all dropout modules"),
    PrivateName(
        "torch",
        "torch.utils._python_dispatch",
        ("nn/attention/mask_audit.py", "nn/vision/tower_flops.py", "engine/step_memory.py"),
        "TorchDispatchMode: mask functions run on the CPU whatever tensors they index; shapes alone; allocations",
    ),
    PrivateName(
        "torch",
        "torch.utils._pytree",
        ("nn/attention/mask_audit.py", "nn/vision/tower_flops.py", "engine/step_memory.py"),
        "tree_map_only and tree_leaves, beside it",
    ),
    PrivateName(
        "transformers",
        "_attn_implementation",
        ("nn/attention/interface.py", "nn/vision/tower_flops.py"),
        "the implementation that a model had before; read through the module's configuration at every call",
    ),
    PrivateName(
        "transformers",
        "_attn_implementation_internal",
        ("nn/attention/interface.py", "bench/flat.py"),
        "sets a name that carries state; `set_attn_implementation` would replace it by a plain string",
    ),
    PrivateName(
        "transformers",
        "_can_set_attn_implementation",
        ("nn/model.py",),
        "whether the layers of a model call the attention interface",
    ),
    PrivateName(
        "transformers",
        "_gradient_checkpointing_func",
        ("nn/recurrent/mixers.py",),
        "what a layer recomputes, so that the recomputation gets the tree, too",
    ),
    PrivateName(
        "transformers",
        "allow_is_causal_skip",
        ("nn/attention/interface.py",),
        "an argument of mask functions: builds the mask also where attention would need none",
    ),
    PrivateName(
        "transformers",
        "_attn",
        ("nn/attention/legacy_layers.py",),
        "the attention of GPT-J, CodeGen and GPT-Neo, which do not call the interface",
    ),
    PrivateName("transformers", "_rnn_scan", ("nn/recurrent/kinds/rglru.py",), "the scan of RecurrentGemma's unit"),
    PrivateName(
        "accelerate",
        "_old_forward",
        ("nn/recurrent/mixers.py",),
        "where accelerate keeps a module's forward while it wraps it in hooks",
    ),
    PrivateName(
        "trl",
        "_flash_attn",
        ("bench/trl_rows.py",),
        "the kernel of TRL's tree rows: benchmarks give all contestants the same one",
    ),
    PrivateName(
        "trl",
        "_generate_and_score_completions",
        ("rl/trl_rollouts.py",),
        "returns the batch of an update, whose advantages are replaced by those of the tree",
    ),
    PrivateName("trl", "_calculate_rewards", ("rl/trl_rollouts.py",), "rewards completions while their tree grows"),
    PrivateName(
        "trl", "_tokenize_prompts", ("rl/trl_rollouts.py",), "the token ids of prompts, as the trainer has them"
    ),
    PrivateName("trl", "_tokenizer", ("rl/trl_rollouts.py",), "the tokenizer below a processor"),
)
