"""What treewise relies on that is not public: names of other libraries that may change without notice.

Each is there in the installed release, or a failure says which release broke it; `# noqa: SLF001` is allowed only on
lines that use a name of the list.
"""

import inspect
import re
from collections import OrderedDict
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from treewise.testing.families import tiny_model

PACKAGE = Path(__file__).parents[2] / "src" / "treewise"
SOURCES = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}


def check_flash_attention() -> None:
    """The only attention on the CPU that returns the log-sum-exp, without which partial results cannot be merged."""
    query = torch.ones(1, 2, 3, 8)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, query, query, is_causal=True)
    assert out.shape == query.shape
    assert lse.shape == (1, 2, 3)


def check_flash_attention_backward() -> None:
    """Its backward, called with the output and log-sum-exp merged from several parts."""
    query = torch.ones(1, 2, 3, 8)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, query, query)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    grads = backward(out, query, query, query, out, lse, dropout_p=0.0, is_causal=False, attn_mask=None, scale=0.5)
    assert [grad.shape for grad in grads] == [query.shape] * 3


def check_dynamo() -> None:
    """Maybe_mark_dynamic and config: one kernel for all lengths; config: the limit of graphs for one function."""
    torch._dynamo.maybe_mark_dynamic(torch.ones(3), 0)
    with torch._dynamo.config.patch(recompile_limit=8, specialize_float=True, automatic_dynamic_shapes=False):
        pass


def check_compiled_model() -> None:
    """The model inside a compiled one."""
    model = nn.Linear(1, 1)
    assert torch.compile(model).get_submodule("_orig_mod") is model


def check_layer_compiled_in_place() -> None:
    """Detects layers that are compiled in place."""
    model = nn.Linear(2, 2)
    assert model._compiled_call_impl is None
    model.compile()
    assert model._compiled_call_impl is not None


def check_version_counter() -> None:
    """Detects tensors changed in place: weights before a backward, what autograd saves twice."""
    weight = torch.ones(1)
    before = weight._version
    weight += 1
    assert weight._version > before


def check_base() -> None:
    """Detects views of weights among what autograd saves."""
    weight = nn.Parameter(torch.ones(2, 3))
    assert weight.t()._base is weight
    assert weight._base is None


def check_members(name: str) -> None:
    module = nn.BatchNorm1d(1)
    assert isinstance(getattr(module, name), dict)
    assert getattr(module, name)


def check_backward_hooks() -> None:
    """Hooks on gradients, which run once a step; hooks of modules."""
    weight = nn.Parameter(torch.ones(1))
    assert not weight._backward_hooks
    weight.register_hook(lambda grad: grad * 2)
    hooks, weight._backward_hooks = weight._backward_hooks, OrderedDict()
    weight.sum().backward()
    weight._backward_hooks = hooks
    weight.sum().backward()
    assert float(weight.grad) == 1 + 2


def check_post_accumulate_grad_hooks() -> None:
    """Hooks on accumulated gradients, likewise; those of transformers' tensor parallelism are removed."""
    weight = nn.Parameter(torch.ones(1))
    assert not weight._post_accumulate_grad_hooks
    calls = []
    weight.register_post_accumulate_grad_hook(calls.append)
    hooks, weight._post_accumulate_grad_hooks = weight._post_accumulate_grad_hooks, OrderedDict()
    weight.sum().backward()
    assert not calls
    weight._post_accumulate_grad_hooks = hooks
    weight.sum().backward()
    assert len(calls) == 1


def check_end_of_a_backward() -> None:
    """Calls what ends with a backward."""
    weight, calls = nn.Parameter(torch.ones(1)), []
    weight.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(lambda: calls.append(1)))
    weight.sum().backward()
    assert calls == [1]


def check_group_timeouts() -> None:
    """Gives groups of a mesh the run's timeout; of the group of all ranks, for its options; the timeout that a group
    was made with.
    """
    is_own = not torch.distributed.is_initialized()
    if is_own:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        options = torch.distributed.group.WORLD._get_backend(torch.device("cpu")).options
        before = options._timeout
        torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=9), torch.distributed.group.WORLD)
        assert options._timeout == timedelta(seconds=9)
        torch.distributed.distributed_c10d._set_pg_timeout(before, torch.distributed.group.WORLD)
    finally:
        if is_own:
            torch.distributed.destroy_process_group()


def check_unflatten() -> None:
    """An axis of a mesh in two, for hybrid sharding."""
    assert list(inspect.signature(DeviceMesh._unflatten).parameters)[1:4] == ["dim", "mesh_sizes", "mesh_dim_names"]


def check_dropout() -> None:
    """The base class of all dropout modules."""
    assert all(issubclass(each, nn.modules.dropout._DropoutNd) for each in (nn.Dropout, nn.AlphaDropout))


def check_dispatch_mode() -> None:
    """TorchDispatchMode: mask functions run on the CPU whatever tensors they index; shapes alone; allocations."""
    from torch.utils._python_dispatch import TorchDispatchMode

    assert "__torch_dispatch__" in vars(TorchDispatchMode)


def check_pytree() -> None:
    """Tree_map_only and tree_leaves, beside it."""
    from torch.utils._pytree import tree_map_only

    assert tree_map_only(int, lambda value: value + 1, (1, {"a": "b"})) == (2, {"a": "b"})


def check_attention_name() -> None:
    """The implementation that a model had before; read through the module's configuration at every call; sets a name
    that carries state; `set_attn_implementation` would replace it by a plain string.
    """
    config = tiny_model("llama", num_hidden_layers=1).config
    name = type("Name", (str,), {"previous": "sdpa"})("sdpa")
    config._attn_implementation_internal = name
    assert config._attn_implementation is name  # a string with state survives


def check_can_set_attention() -> None:
    """Whether the layers of a model call the attention interface."""
    assert tiny_model("llama", num_hidden_layers=1)._can_set_attn_implementation()
    assert not tiny_model("gptj", num_hidden_layers=1)._can_set_attn_implementation()


def check_gradient_checkpointing() -> None:
    """What a layer recomputes, so that the recomputation gets the tree, too."""
    model = tiny_model("lfm2")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert all("_gradient_checkpointing_func" in vars(layer) for layer in model.model.layers)


def check_causal_skip() -> None:
    """An argument of mask functions: builds the mask also where attention would need none."""
    from transformers.masking_utils import sdpa_mask

    assert "allow_is_causal_skip" in inspect.signature(sdpa_mask).parameters


def check_legacy_attention() -> None:
    """The attention of GPT-J, CodeGen and GPT-Neo, which do not call the interface."""
    from transformers.models.codegen.modeling_codegen import CodeGenAttention
    from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention
    from transformers.models.gptj.modeling_gptj import GPTJAttention

    for layer in (CodeGenAttention, GPTNeoSelfAttention, GPTJAttention):
        names = list(inspect.signature(layer._attn).parameters)
        assert names[:5] == ["self", "query", "key", "value", "attention_mask"]


def check_recurrent_gemma() -> None:
    """The scan of RecurrentGemma's unit."""
    from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

    assert {"hidden_states", "recurrent_gate", "reset"} <= {
        *inspect.signature(RecurrentGemmaRglru._rnn_scan).parameters
    }


def check_accelerate_hooks() -> None:
    """Where accelerate keeps a module's forward while it wraps it in hooks."""
    from accelerate.hooks import ModelHook, add_hook_to_module

    module = nn.Linear(1, 1)
    forward = module.forward
    add_hook_to_module(module, ModelHook())
    assert module._old_forward == forward


def check_trl_kernel() -> None:
    """The kernel of TRL's tree rows: benchmarks give all contestants the same one."""
    from treewise.bench.trl_rows import packing_module

    assert hasattr(packing_module(), "_flash_attn")


def check_grpo() -> None:
    """Returns the batch of an update, whose advantages are replaced by those of the tree; rewards completions while
    their tree grows; the token ids of prompts, as the trainer has them.
    """
    from trl import GRPOTrainer

    arguments = {
        "_generate_and_score_completions": ["inputs"],
        "_calculate_rewards": ["inputs", "prompts", "completions", "completion_ids_list"],
        "_tokenize_prompts": ["prompts"],
    }
    for name, expected in arguments.items():
        assert list(inspect.signature(getattr(GRPOTrainer, name)).parameters) == ["self", *expected], name


def check_grpo_tokenizer() -> None:
    """The tokenizer below a processor."""
    from trl import GRPOTrainer

    assert "self._tokenizer" in inspect.getsource(GRPOTrainer.__init__)


def check_grouped_product() -> None:
    """The product of experts, which runs without data in bfloat16 alone."""
    left, right = torch.empty(6, 16, device="meta"), torch.empty(2, 16, 8, device="meta")
    offsets = torch.empty(2, dtype=torch.int32, device="meta")
    product = torch.ops.aten._grouped_mm.default
    assert product(left.bfloat16(), right.bfloat16(), offsets).shape == (6, 8)


# Library, name, what fails where the name is gone or means something else, and what has no public equivalent.
PRIVATE_NAMES: tuple[tuple[str, str, Callable[[], object]], ...] = (
    ("torch", "_scaled_dot_product_flash_attention_for_cpu", check_flash_attention),
    ("torch", "_scaled_dot_product_flash_attention_for_cpu_backward", check_flash_attention_backward),
    ("torch", "_grouped_mm", check_grouped_product),
    # FlexAttention's operator, differentiable on the CPU, where the function around it is not.
    ("torch", "torch.ops.higher_order.flex_attention", lambda: torch.ops.higher_order.flex_attention),
    ("torch", "_dynamo", check_dynamo),
    ("torch", "_orig_mod", check_compiled_model),
    ("torch", "_compiled_call_impl", check_layer_compiled_in_place),
    ("torch", "_version", check_version_counter),
    ("torch", "_base", check_base),
    ("torch", "_parameters", lambda: check_members("_parameters")),  # replaces parameters of a module in place
    ("torch", "_buffers", lambda: check_members("_buffers")),  # replaces buffers of a module in place
    ("torch", "_backward_hooks", check_backward_hooks),
    ("torch", "_post_accumulate_grad_hooks", check_post_accumulate_grad_hooks),
    ("torch", "_execution_engine", check_end_of_a_backward),
    ("torch", "_set_pg_timeout", check_group_timeouts),
    ("torch", "_unflatten", check_unflatten),
    ("torch", "_get_backend", check_group_timeouts),
    ("torch", "_timeout", check_group_timeouts),
    ("torch", "_DropoutNd", check_dropout),
    ("torch", "torch.utils._python_dispatch", check_dispatch_mode),
    ("torch", "torch.utils._pytree", check_pytree),
    ("transformers", "_attn_implementation", check_attention_name),
    ("transformers", "_attn_implementation_internal", check_attention_name),
    ("transformers", "_can_set_attn_implementation", check_can_set_attention),
    ("transformers", "_gradient_checkpointing_func", check_gradient_checkpointing),
    ("transformers", "allow_is_causal_skip", check_causal_skip),
    ("transformers", "_attn", check_legacy_attention),
    ("transformers", "_rnn_scan", check_recurrent_gemma),
    ("accelerate", "_old_forward", check_accelerate_hooks),
    ("trl", "_flash_attn", check_trl_kernel),
    ("trl", "_generate_and_score_completions", check_grpo),
    ("trl", "_calculate_rewards", check_grpo),
    ("trl", "_tokenize_prompts", check_grpo),
    ("trl", "_tokenizer", check_grpo_tokenizer),
)


@pytest.mark.parametrize(("library", "name", "check"), PRIVATE_NAMES)
@pytest.mark.filterwarnings("default")
def test_the_installed_release_has_it(library: str, name: str, check: Callable[[], object]) -> None:
    if library == "trl":
        pytest.importorskip("trl")
    try:
        check()
    except (AttributeError, ImportError, AssertionError, TypeError, RuntimeError) as error:
        used_in = ", ".join(modules_with(name))
        pytest.fail(f"{library} {version(library)} broke {name}, which {used_in} needs ({check.__doc__}): {error!r}")


@cache
def modules_with(name: str) -> list[str]:
    """The modules of the package that hold a name."""
    return [str(path.relative_to(PACKAGE)) for path, text in SOURCES.items() if name in text]


def test_each_name_is_used() -> None:
    assert not [name for _, name, _ in PRIVATE_NAMES if not modules_with(name)]


def test_private_members_of_others_are_in_the_list() -> None:
    listed = {name for _, name, _ in PRIVATE_NAMES}
    for path, text in SOURCES.items():
        for line in text.splitlines():
            if "noqa: SLF001" in line:
                missing = set(re.findall(r"\.(_[A-Za-z]\w*)", line.partition("#")[0])) - listed
                assert not missing, f"{path.name}: add {missing} to PRIVATE_NAMES"
