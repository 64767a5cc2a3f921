"""What a plain step on text does without: features in files of their own, loaded when something asks for them.

A model asks (recurrent layers, a sharded head), a setting (`offload`, `tp_size`, `sharded`, an objective), or a record
(an image, a dump of another library). Nothing else imports these modules, so a reader may leave them out, and taking
one away takes its feature away and nothing else (`tests/base/test_features.py`).
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from treewise.errors import ConfigError

if TYPE_CHECKING:  # their types, for mypy; a test holds these lines against the table
    from treewise.data import images as image_records
    from treewise.data import importers as importers
    from treewise.data import mixtures as mixtures
    from treewise.data import progress_bar as progress_bar
    from treewise.data import tables as tables
    from treewise.data import workers as workers
    from treewise.data.io import encoded_arrays as encoded_arrays
    from treewise.data.io import endings as endings
    from treewise.data.readers import declared_trees as declared_trees
    from treewise.data.readers import logged_calls as logged_calls
    from treewise.data.readers import other_libraries as other_libraries
    from treewise.data.readers import packed_rows as packed_rows
    from treewise.data.readers import preference_records as preference_records
    from treewise.data.readers import texts as texts
    from treewise.data.readers import token_rows as token_rows
    from treewise.data.render import kept_reasoning as kept_reasoning
    from treewise.data.render import marked_parts as marked_parts
    from treewise.data.render import tools as tools
    from treewise.distributed import context as context
    from treewise.distributed import fsdp as fsdp
    from treewise.distributed import launcher as launcher
    from treewise.distributed import mesh as mesh
    from treewise.distributed import online_placement as online_placement
    from treewise.distributed import placement as placement
    from treewise.distributed import same_plan as same_plan
    from treewise.distributed import watchdog as watchdog
    from treewise.distributed.lockstep import guest as lockstep
    from treewise.engine import budget as budget
    from treewise.engine import flat_terms as flat_terms
    from treewise.engine import values as values
    from treewise.engine import window as window
    from treewise.experimental.gain import angles as angles
    from treewise.models import load_model as load_model
    from treewise.nn import adapted_head as adapted_head
    from treewise.nn import adapters as adapters
    from treewise.nn import compilation as compilation
    from treewise.nn import edge_values as edge_values
    from treewise.nn import gradient_hooks as gradient_hooks
    from treewise.nn import host_memory as host_memory
    from treewise.nn import launching as launching
    from treewise.nn import liger as liger
    from treewise.nn import module_head as module_head
    from treewise.nn import recurrent as recurrent
    from treewise.nn import router_loss as router_loss
    from treewise.nn import routing as routing
    from treewise.nn import tensor_parallel as tensor_parallel
    from treewise.nn import vision as images
    from treewise.nn.attention import depth_scaling as depth_scaling
    from treewise.nn.attention import inside as attention_inside
    from treewise.nn.attention import legacy_layers as legacy_layers
    from treewise.nn.attention import needs as attention_needs
    from treewise.nn.attention import side_copies as side_copies
    from treewise.nn.attention import softcap as softcap
    from treewise.nn.platform import compiler_errors as compiler_errors
    from treewise.objectives import preference as preference
    from treewise.objectives import registry as objectives
    from treewise.planning import fastest as fastest
    from treewise.rl.agents import grammars as grammars
    from treewise.rl.online import ahead as ahead
    from treewise.rl.online import many_turns as many_turns
    from treewise.rl.samplers import copied_weights as copied_weights
    from treewise.rl.samplers import heard_decoders as heard_decoders
    from treewise.rl.samplers import seen_prompt as seen_prompts
    from treewise.rl.samplers import servers as servers
    from treewise.trainer import fused_layers as fused_layers
    from treewise.trainer import hub as hub
    from treewise.trainer import many_ranks as many_ranks
    from treewise.trainer import nonfinite as nonfinite
    from treewise.trainer import recomputation as recomputation
    from treewise.trainer import references as references
    from treewise.trainer import saved_model as verified_saves
    from treewise.trainer import whole_rollouts as whole_rollouts
    from treewise.trainer.checkpoint import resume as resume
    from treewise.trainer.checkpoint import weights as saved_weights
    from treewise.tree import declared as nodes
    from treewise.tree import routes as routes
    from treewise.tree import teachers as teachers

# name -> its module, and who asks for it, as the subject of a sentence in the plural.
FEATURES = {
    "adapted_head": ("treewise.nn.adapted_head", "heads with adapters"),
    "adapters": ("treewise.nn.adapters", "new adapters (peft_config, lora)"),
    "ahead": ("treewise.rl.online.ahead", "iterations that are sampled while others train (max_staleness)"),
    "angles": ("treewise.experimental.gain.angles", "curricula by angles (gain)"),
    "attention_inside": ("treewise.nn.attention.inside", "compiled layers whose graphs hold their attention"),
    "attention_needs": ("treewise.nn.attention.needs", "kernels of attention beyond Triton's (flash, cudnn)"),
    "budget": ("treewise.engine.budget", "measured budgets (max_tokens='auto')"),
    "compilation": ("treewise.nn.compilation", "compiled layers (compile_layers, torch_compile)"),
    "compiler_errors": ("treewise.nn.platform.compiler_errors", "errors of compilers"),
    "context": ("treewise.distributed.context", "batches divided among ranks (context_size)"),
    "copied_weights": (
        "treewise.rl.samplers.copied_weights",
        "samplers with a copy of the weights (max_staleness, sharded, tp_size)",
    ),
    "declared_trees": ("treewise.data.readers.declared_trees", "records of declared trees (nodes)"),
    "depth_scaling": (
        "treewise.nn.attention.depth_scaling",
        "layers that scale queries by their position (attn_temperature_tuning)",
    ),
    "edge_values": ("treewise.nn.edge_values", "log-probs, and losses of all tokens at once"),
    "encoded_arrays": ("treewise.data.io.encoded_arrays", "records with experts of tokens (routed_experts)"),
    "endings": ("treewise.data.io.endings", "replies that say why they ended"),
    "fastest": ("treewise.planning.fastest", "plans of the least time (max_tokens='auto', or a GPU)"),
    "flat_terms": ("treewise.engine.flat_terms", "comparisons of objectives with flat training (verify)"),
    "fsdp": ("treewise.distributed.fsdp", "sharded parameters (sharded)"),
    "grammars": ("treewise.rl.agents.grammars", "replies of agents that keep to a schema (response_format)"),
    "gradient_hooks": ("treewise.nn.gradient_hooks", "hooks on gradients, and what refuses them"),
    "heard_decoders": ("treewise.rl.samplers.heard_decoders", "samplers that record experts (routing_replay)"),
    "host_memory": ("treewise.nn.host_memory", "gateways in host memory (offload)"),
    "fused_layers": (
        "treewise.trainer.fused_layers",
        "fused layers (compile_layers, torch_compile, use_liger_kernel)",
    ),
    "hub": ("treewise.trainer.hub", "uploads of models (push_to_hub)"),
    "image_records": ("treewise.data.images", "records with images"),
    "images": ("treewise.nn.vision", "trajectories with images"),
    "importers": ("treewise.data.importers", "dumps of other libraries"),
    "kept_reasoning": ("treewise.data.render.kept_reasoning", "conversations whose reasoning is kept (thinking)"),
    "launcher": ("treewise.distributed.launcher", "runs that torchrun or accelerate started"),
    "launching": ("treewise.nn.launching", "plans by the time of a GPU"),
    "legacy_layers": ("treewise.nn.attention.legacy_layers", "models from before the attention interface (GPT-Neo)"),
    "liger": ("treewise.nn.liger", "kernels of liger-kernel (use_liger_kernel)"),
    "load_model": ("treewise.models.load_model", "models, tokenizers and processors by name"),
    "lockstep": ("treewise.distributed.lockstep.guest", "ranks that run the same passes (sharded, ep_size)"),
    "logged_calls": ("treewise.data.readers.logged_calls", "records of logged calls"),
    "many_ranks": ("treewise.trainer.many_ranks", "runs of several processes"),
    "many_turns": ("treewise.rl.online.many_turns", "tasks of several turns (environments)"),
    "marked_parts": ("treewise.data.render.marked_parts", "turns of which parts are trained"),
    "mesh": ("treewise.distributed.mesh", "meshes of processes (tp_size, ep_size)"),
    "mixtures": ("treewise.data.mixtures", "mixtures of data sets, and eval_split"),
    "module_head": ("treewise.nn.module_head", "heads that are more than one weight (adapters, quantised layers)"),
    "nodes": ("treewise.tree.declared", "declared trees (Forest.from_nodes, records with nodes)"),
    "nonfinite": ("treewise.trainer.nonfinite", "steps whose loss or gradient is not finite"),
    "objectives": ("treewise.objectives.registry", "objectives by name"),
    "online_placement": ("treewise.distributed.online_placement", "trees that are placed on several processes"),
    "other_libraries": ("treewise.data.readers.other_libraries", "records of ShareGPT and alpaca"),
    "packed_rows": ("treewise.data.readers.packed_rows", "rows of several samples"),
    "placement": ("treewise.distributed.placement", "trees that are placed on several processes"),
    "preference": ("treewise.objectives.preference", "preference objectives (dpo, ipo, kto)"),
    "preference_records": ("treewise.data.readers.preference_records", "preference pairs and labelled completions"),
    "progress_bar": ("treewise.data.progress_bar", "bars of what is read (progress=True)"),
    "recomputation": ("treewise.trainer.recomputation", "layers that are computed again (activation_checkpointing)"),
    "recurrent": ("treewise.nn.recurrent", "models with recurrent layers or short convolutions"),
    "references": ("treewise.trainer.references", "preference objectives (dpo, ipo, kto)"),
    "resume": ("treewise.trainer.checkpoint.resume", "runs that go on (resume_from_checkpoint)"),
    "router_loss": ("treewise.nn.router_loss", "losses on routers of mixtures of experts"),
    "routes": ("treewise.tree.routes", "trajectories with experts of tokens (routed_experts)"),
    "routing": ("treewise.nn.routing", "recorded experts (routed_experts)"),
    "same_plan": ("treewise.distributed.same_plan", "batches that processes compute together (tp_size, context_size)"),
    "saved_weights": (
        "treewise.trainer.checkpoint.weights",
        "weights of checkpoints, whole, sharded or of adapters",
    ),
    "seen_prompts": ("treewise.rl.samplers.seen_prompt", "prompts with images, which are sampled from"),
    "servers": ("treewise.rl.samplers.servers", "samplers on servers (vllm, openai)"),
    "side_copies": ("treewise.nn.attention.side_copies", "gateways of a GPU in host memory (offload)"),
    "softcap": ("treewise.nn.attention.softcap", "layers that cap their scores on a CPU (attn_logit_softcapping)"),
    "tables": ("treewise.data.tables", "data sets, data frames, Arrow tables and Parquet files"),
    "teachers": ("treewise.tree.teachers", "trajectories with a teacher's candidates (teacher_ids)"),
    "tensor_parallel": ("treewise.nn.tensor_parallel", "layers that are spread over processes"),
    "texts": ("treewise.data.readers.texts", "plain texts, and prompts with their completions"),
    "token_rows": ("treewise.data.readers.token_rows", "rows of token ids"),
    "tools": ("treewise.data.render.tools", "records with tools or tool calls"),
    "values": ("treewise.engine.values", "log-probs, hidden states, and losses of all tokens at once"),
    "verified_saves": ("treewise.trainer.saved_model", "saved models that are read back (verify_saves)"),
    "watchdog": ("treewise.distributed.watchdog", "runs of several processes"),
    "whole_rollouts": ("treewise.trainer.whole_rollouts", "objectives that count rollouts (grpo, gspo, dpo, kto)"),
    "window": ("treewise.engine.window", "windows (calls between two optimizer steps that share)"),
    "workers": ("treewise.data.workers", "processes that read data (num_workers)"),
}


def __getattr__(name: str) -> Any:
    """The module of a feature, as `features.window`.

    Raises:
        ConfigError: it was taken out of this installation.
    """
    if name not in FEATURES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, who = FEATURES[name]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name) or is_there(name):
            raise
        raise ConfigError(f"{who} need {module}, which this installation of treewise was made without.") from None


def is_there(name: str) -> bool:
    """Whether the module of a feature is installed."""
    try:
        return find_spec(FEATURES[name][0]) is not None
    except ModuleNotFoundError:
        return False
