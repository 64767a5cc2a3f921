"""What treewise relies on that is not public: names of other libraries that may change without notice.

Each is there in the installed release, or a failure says which release broke it; what they do is held by the tests of
what uses them. `# noqa: SLF001` is allowed only on lines that use a name of the list.
"""

import re
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.needs import FUSED_HEAD, MESHES

PACKAGE = Path(__file__).parents[2] / "src" / "treewise"
SOURCES = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}

MODULE, TENSOR = "torch.nn.modules.module:Module", "torch:Tensor"
CONFIG = "transformers.configuration_utils:PreTrainedConfig"
DISTRIBUTED = "torch.distributed.distributed_c10d"
# Where a name stands: a module whose source holds it, or after `:` what has it as an attribute; and what has no public
# equivalent.
PRIVATE_NAMES = {
    # The only attention on the CPU that returns the log-sum-exp, without which partial results cannot be merged.
    "_scaled_dot_product_flash_attention_for_cpu": "torch:ops.aten",
    # Its backward, called with the output and log-sum-exp merged from several parts.
    "_scaled_dot_product_flash_attention_for_cpu_backward": "torch:ops.aten",
    "_grouped_mm": "torch:ops.aten",  # the product of experts, which runs without data in bfloat16 alone
    # FlexAttention's operator, differentiable on the CPU, where the function around it is not.
    "torch.ops.higher_order.flex_attention": "torch:ops.higher_order.flex_attention",
    "_dynamo": "torch:_dynamo.maybe_mark_dynamic",  # one kernel for all lengths; the limit of graphs for one function
    "_make_subclass": "torch:Tensor",  # tensors without data that autocast takes for the CPU's
    "_DisableTorchDispatch": "torch:_C",  # their shape changed in place
    # Whether autograd itself adds two gradients, and whether anything else holds the first: it then adds in place.
    "_current_autograd_node": "torch:_C",
    "_storage_Use_Count": "torch:_C",
    "_cdata": "torch:UntypedStorage",
    "_from_config": "transformers.modeling_utils",  # a model of a configuration, as `from_pretrained` makes it
    "_orig_mod": "torch._dynamo.eval_frame",  # the model inside a compiled one
    "_compiled_call_impl": MODULE,  # detects layers that are compiled in place
    "_cache_enabled": "torch.nn.utils.parametrize:",  # whether computed weights are kept between forwards
    "_version": TENSOR,  # detects tensors changed in place: weights before a backward, what autograd saves twice
    "_base": TENSOR,  # detects views of weights among what autograd saves
    "_modules": "torch.nn.modules.module",  # the modules inside of one
    "_parameters": "torch.nn.modules.module",  # replaces parameters of a module in place
    "_non_persistent_buffers_set": "torch.nn.modules.module",  # buffers that no checkpoint and no server gets
    "_buffers": "torch.nn.modules.module",  # replaces buffers of a module in place
    "_backward_hooks": TENSOR,  # hooks on gradients, which run once a step; hooks of modules
    "_post_accumulate_grad_hooks": TENSOR,  # hooks on accumulated gradients; those of tensor parallelism are removed
    "_execution_engine": "torch.autograd:Variable",  # calls what ends with a backward
    "_get_active_ddp_module": "torch.nn.parallel:DistributedDataParallel",  # which DDP a forward is inside of
    "_join_config": "torch.distributed.algorithms.join",  # whether processes may have different numbers of batches
    "_set_pg_timeout": DISTRIBUTED + ":",  # gives groups of a mesh the run's timeout
    "_resolve_process_group": DISTRIBUTED + ":",  # which ranks an operation that is recorded is between
    "_internal": "torch.testing:",  # groups that send nothing, for many ranks in one process
    # The mesh of a model that transformers divided: before 5.23 it is refused.
    "_device_mesh": "transformers.distributed.mixin",
    "_unflatten": "torch.distributed.device_mesh:DeviceMesh",  # an axis of a mesh in two, for hybrid sharding
    "_get_backend": DISTRIBUTED + ":ProcessGroup",  # of the group of all ranks, for its options
    "_timeout": "torch._C._distributed_c10d:Backend.Options",  # that a group was made with
    "_DropoutNd": "torch.nn.modules.dropout:",  # the base class of all dropout modules
    # TorchDispatchMode: mask functions run on the CPU whatever tensors they index; shapes alone; allocations.
    "torch.utils._python_dispatch": "torch.utils._python_dispatch:TorchDispatchMode.__torch_dispatch__",
    "torch.utils._pytree": "torch.utils._pytree:tree_map_only",
    "_attn_implementation": CONFIG,  # the implementation that a model had before, read at every call
    # Sets a name that carries state; `set_attn_implementation` would replace it by a plain string.
    "_attn_implementation_internal": "transformers.configuration_utils",
    # Whether the layers of a model call the attention interface.
    "_can_set_attn_implementation": "transformers.modeling_utils:PreTrainedModel",
    # What a layer recomputes, so that the recomputation gets the tree, too.
    "_gradient_checkpointing_func": "transformers.modeling_layers",
    # Which modules of a model are its routers.
    "_can_record_outputs": "transformers.modeling_utils:PreTrainedModel",
    # An argument of mask functions: builds the mask also where attention would need none.
    "allow_is_causal_skip": "transformers.masking_utils",
    # Of layers without the attention interface: GPT-Neo, before transformers 5.24 GPT-J and CodeGen, too.
    "_attn": "transformers.models.gpt_neo.modeling_gpt_neo:GPTNeoSelfAttention",
    # The scan of RecurrentGemma's unit.
    "_rnn_scan": "transformers.models.recurrent_gemma.modeling_recurrent_gemma:RecurrentGemmaRglru",
    # Of units of FSDP2, whose hooks walks within a backward of others tell apart, and whose end they tell it.
    "_get_fsdp_state": "torch.distributed.fsdp:FSDPModule",
    **dict.fromkeys(
        ("_state_ctx", "_comm_ctx", "_mp_policy", "_device", "_root_post_backward_final_callback"),
        "torch.distributed.fsdp._fully_shard._fsdp_state",
    ),
    "_models": "accelerate.accelerator",  # which models an accelerator has prepared
    "_shared_state": "accelerate.state:GradientState",  # whether a loop of accelerate runs
    "_disable_adapters": "peft.tuners.tuners_utils",  # whether a layer's adapters are off, for the present call
    "_old_forward": "accelerate.hooks",  # where accelerate keeps a forward that it wraps in hooks
    "_flash_attn": "trl.experimental.async_grpo.packing:",  # of TRL's tree rows: all contestants get the same kernel
    "_calculate_rewards": "trl:GRPOTrainer",  # rewards completions while their tree grows
    "_tokenizer": "trl.trainer.grpo_trainer",  # below a processor
}

# Of features that need a later release than the lowest.
LATER = {"_device_mesh": MESHES, "_flash_attn": FUSED_HEAD, "_tokenizer": FUSED_HEAD}


@pytest.mark.parametrize("name", [pytest.param(each, marks=LATER.get(each, ())) for each in PRIVATE_NAMES])
@pytest.mark.filterwarnings("default")
def test_the_installed_release_has_it(name: str) -> None:
    place = PRIVATE_NAMES[name]
    library = re.split("[:.]", place)[0]
    pytest.importorskip(library)
    try:
        if ":" in place:
            module, _, path = place.partition(":")
            found = import_module(module)
            for part in [*filter(None, path.split(".")), *([] if name.rpartition(".")[2] in place else [name])]:
                found = getattr(found, part)
        else:
            source = Path(str(import_module(place).__file__)).read_text(encoding="utf-8")
            assert re.search(rf"\b{name}\b", source), f"not in {place}"
    except (AttributeError, ImportError, AssertionError) as error:
        used_in = ", ".join(modules_with(name))
        pytest.fail(f"{library} {version(library)} broke {name}, which {used_in} needs: {error!r}")


@cache
def modules_with(name: str) -> list[str]:
    """The modules of the package that hold a name."""
    return [str(path.relative_to(PACKAGE)) for path, text in SOURCES.items() if name in text]


def test_each_name_is_used() -> None:
    assert not [name for name in PRIVATE_NAMES if not modules_with(name)]


def test_private_members_of_others_are_in_the_list() -> None:
    for path, text in SOURCES.items():
        for line in text.splitlines():
            if "noqa: SLF001" in line:
                missing = set(re.findall(r"\.(_[A-Za-z]\w*)", line.partition("#")[0])) - PRIVATE_NAMES.keys()
                assert not missing, f"{path.name}: add {missing} to PRIVATE_NAMES"
