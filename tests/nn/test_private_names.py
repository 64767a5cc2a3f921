"""Each private name of another library that treewise relies on is there; a failure says which release broke it."""

import inspect
import re
from collections import OrderedDict
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from treewise.nn.private_names import PRIVATE_NAMES, PrivateName
from treewise.testing.families import tiny_model

PACKAGE = Path(__file__).parents[2] / "src" / "treewise"


def check_flash_attention() -> None:
    query = torch.ones(1, 2, 3, 8)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, query, query, is_causal=True)
    assert out.shape == query.shape
    assert lse.shape == (1, 2, 3)


def check_flash_attention_backward() -> None:
    query = torch.ones(1, 2, 3, 8)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, query, query)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    grads = backward(out, query, query, query, out, lse, dropout_p=0.0, is_causal=False, attn_mask=None, scale=0.5)
    assert [grad.shape for grad in grads] == [query.shape] * 3


def check_dynamo() -> None:
    torch._dynamo.maybe_mark_dynamic(torch.ones(3), 0)
    with torch._dynamo.config.patch(recompile_limit=8, specialize_float=True, automatic_dynamic_shapes=False):
        pass


def check_compiled_model() -> None:
    model = nn.Linear(1, 1)
    assert torch.compile(model).get_submodule("_orig_mod") is model


def check_layer_compiled_in_place() -> None:
    model = nn.Linear(2, 2)
    assert model._compiled_call_impl is None
    model.compile()
    assert model._compiled_call_impl is not None


def check_version_counter() -> None:
    weight = torch.ones(1)
    before = weight._version
    weight += 1
    assert weight._version > before


def check_base() -> None:
    weight = nn.Parameter(torch.ones(2, 3))
    assert weight.t()._base is weight
    assert weight._base is None


def check_members(name: str) -> None:
    module = nn.BatchNorm1d(1)
    assert isinstance(getattr(module, name), dict)
    assert getattr(module, name)


def check_backward_hooks() -> None:
    weight = nn.Parameter(torch.ones(1))
    assert not weight._backward_hooks
    weight.register_hook(lambda grad: grad * 2)
    hooks, weight._backward_hooks = weight._backward_hooks, OrderedDict()
    weight.sum().backward()
    weight._backward_hooks = hooks
    weight.sum().backward()
    assert float(weight.grad) == 1 + 2


def check_post_accumulate_grad_hooks() -> None:
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
    weight, calls = nn.Parameter(torch.ones(1)), []
    weight.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(lambda: calls.append(1)))
    weight.sum().backward()
    assert calls == [1]


def check_group_timeouts() -> None:
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
    assert list(inspect.signature(DeviceMesh._unflatten).parameters)[1:4] == ["dim", "mesh_sizes", "mesh_dim_names"]


def check_dropout() -> None:
    assert all(issubclass(each, nn.modules.dropout._DropoutNd) for each in (nn.Dropout, nn.AlphaDropout))


def check_dispatch_mode() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    assert "__torch_dispatch__" in vars(TorchDispatchMode)


def check_pytree() -> None:
    from torch.utils._pytree import tree_map_only

    assert tree_map_only(int, lambda value: value + 1, (1, {"a": "b"})) == (2, {"a": "b"})


def check_attention_name() -> None:
    config = tiny_model("llama", num_hidden_layers=1).config
    name = type("Name", (str,), {"previous": "sdpa"})("sdpa")
    config._attn_implementation_internal = name
    assert config._attn_implementation is name  # a string with state survives


def check_can_set_attention() -> None:
    assert tiny_model("llama", num_hidden_layers=1)._can_set_attn_implementation()
    assert not tiny_model("gptj", num_hidden_layers=1)._can_set_attn_implementation()


def check_gradient_checkpointing() -> None:
    model = tiny_model("lfm2")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert all("_gradient_checkpointing_func" in vars(layer) for layer in model.model.layers)


def check_causal_skip() -> None:
    from transformers.masking_utils import sdpa_mask

    assert "allow_is_causal_skip" in inspect.signature(sdpa_mask).parameters


def check_legacy_attention() -> None:
    from transformers.models.codegen.modeling_codegen import CodeGenAttention
    from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention
    from transformers.models.gptj.modeling_gptj import GPTJAttention

    for layer in (CodeGenAttention, GPTNeoSelfAttention, GPTJAttention):
        names = list(inspect.signature(layer._attn).parameters)
        assert names[:5] == ["self", "query", "key", "value", "attention_mask"]


def check_recurrent_gemma() -> None:
    from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

    assert {"hidden_states", "recurrent_gate", "reset"} <= {
        *inspect.signature(RecurrentGemmaRglru._rnn_scan).parameters
    }


def check_accelerate_hooks() -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    module = nn.Linear(1, 1)
    forward = module.forward
    add_hook_to_module(module, ModelHook())
    assert module._old_forward == forward


def check_trl_kernel() -> None:
    from treewise.bench.trl_rows import packing_module

    assert hasattr(packing_module(), "_flash_attn")


def check_grpo(name: str, arguments: list[str]) -> None:
    from trl import GRPOTrainer

    assert list(inspect.signature(getattr(GRPOTrainer, name)).parameters) == ["self", *arguments]


def check_grpo_tokenizer() -> None:
    from trl import GRPOTrainer

    assert "self._tokenizer" in inspect.getsource(GRPOTrainer.__init__)


def check_grouped_product() -> None:
    left, right = torch.empty(6, 16, device="meta"), torch.empty(2, 16, 8, device="meta")
    offsets = torch.empty(2, dtype=torch.int32, device="meta")
    product = torch.ops.aten._grouped_mm.default
    assert product(left.bfloat16(), right.bfloat16(), offsets).shape == (6, 8)


CHECKS = {
    "_grouped_mm": check_grouped_product,
    "_scaled_dot_product_flash_attention_for_cpu": check_flash_attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": check_flash_attention_backward,
    "torch.ops.higher_order.flex_attention": lambda: torch.ops.higher_order.flex_attention,
    "_dynamo": check_dynamo,
    "_orig_mod": check_compiled_model,
    "_compiled_call_impl": check_layer_compiled_in_place,
    "_version": check_version_counter,
    "_base": check_base,
    "_parameters": lambda: check_members("_parameters"),
    "_buffers": lambda: check_members("_buffers"),
    "_backward_hooks": check_backward_hooks,
    "_post_accumulate_grad_hooks": check_post_accumulate_grad_hooks,
    "_execution_engine": check_end_of_a_backward,
    "_set_pg_timeout": check_group_timeouts,
    "_unflatten": check_unflatten,
    "_get_backend": check_group_timeouts,
    "_timeout": check_group_timeouts,
    "_DropoutNd": check_dropout,
    "torch.utils._python_dispatch": check_dispatch_mode,
    "torch.utils._pytree": check_pytree,
    "_attn_implementation": check_attention_name,
    "_attn_implementation_internal": check_attention_name,
    "_can_set_attn_implementation": check_can_set_attention,
    "_gradient_checkpointing_func": check_gradient_checkpointing,
    "allow_is_causal_skip": check_causal_skip,
    "_attn": check_legacy_attention,
    "_rnn_scan": check_recurrent_gemma,
    "_old_forward": check_accelerate_hooks,
    "_flash_attn": check_trl_kernel,
    "_generate_and_score_completions": lambda: check_grpo("_generate_and_score_completions", ["inputs"]),
    "_calculate_rewards": lambda: check_grpo(
        "_calculate_rewards", ["inputs", "prompts", "completions", "completion_ids_list"]
    ),
    "_tokenize_prompts": lambda: check_grpo("_tokenize_prompts", ["prompts"]),
    "_tokenizer": check_grpo_tokenizer,
}


@pytest.mark.parametrize("each", PRIVATE_NAMES, ids=lambda each: f"{each.library}-{each.name}")
@pytest.mark.filterwarnings("default")
def test_the_installed_release_has_it(each: PrivateName) -> None:
    if each.library == "trl":
        pytest.importorskip("trl")
    try:
        CHECKS[each.name]()
    except (AttributeError, ImportError, AssertionError, TypeError, RuntimeError) as error:
        release = f"{each.library} {version(each.library)}"
        pytest.fail(f"{release} broke {each.name}, which {', '.join(each.used_in)} needs ({each.why}): {error!r}")


def test_each_name_is_used_where_the_list_says() -> None:
    for each in PRIVATE_NAMES:
        for path in each.used_in:
            assert each.name in (PACKAGE / path).read_text(encoding="utf-8"), f"{each.name} is not used in {path}"


def test_private_members_are_used_only_where_the_list_says() -> None:
    listed = {(path, each.name) for each in PRIVATE_NAMES for path in each.used_in}
    for path in PACKAGE.rglob("*.py"):
        for line in path.read_text(encoding="utf-8").splitlines():
            if "noqa: SLF001" in line:
                names = set(re.findall(r"\.(_[A-Za-z]\w*)", line.partition("#")[0]))
                missing = {name for name in names if (str(path.relative_to(PACKAGE)), name) not in listed}
                assert not missing, f"{path.name}: add {missing} to nn/private_names.py"
