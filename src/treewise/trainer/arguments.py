"""Settings of a run: those of transformers, some of treewise, and errors for those that cannot hold on trees."""

import json
import logging
import math
import os
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, cast

import torch
from accelerate.utils import DynamoBackend
from annotated_types import Ge, Gt, Lt
from transformers import TrainingArguments

from treewise.base import features
from treewise.base.paths import path_of
from treewise.engine.prepared import AUTO, Budget
from treewise.errors import ConfigError, check_fields, did_you_mean, pip_install
from treewise.nn.attention import choose
from treewise.nn.platform.releases import clips_by_accelerator
from treewise.objectives.protocol import may_merge_trees
from treewise.objectives.sft import SFT

logger = logging.getLogger("treewise")

# Settings of transformers that are impossible on trees, or would do something else than their user expects.
_UNSUPPORTED = {
    "fp16": "treewise does not scale losses; use bf16.",
    "label_smoothing_factor": "losses are made of log-probs alone; set it to 0.",
    "neftune_noise_alpha": "a shared token is computed once, so branches cannot have different noise.",
    "auto_find_batch_size": "a smaller batch would change the steps; lower max_tokens instead, which does not.",
    "dataloader_drop_last": "no tree is dropped; the last step of an epoch has the remaining ones.",
    "ignore_data_skip": "a resumed run would train on other trees than an uninterrupted one.",
    "average_tokens_across_devices": "the loss is always the mean over the whole step, on all ranks; leave it on.",
    "deepspeed": "use sharded=True (PyTorch's FSDP2).",
    "enable_jit_checkpoint": "a run is always saved when a signal ends it; leave it off.",
    "parallelism_config": "give tp_size, ep_size or context_size.",
}
# Settings of transformers that nothing reads: trees are not padded, collated or pinned, an evaluation gathers one sum,
# and no forward runs in another dtype than the one that was asked for.
_WITHOUT_EFFECT = (
    "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_in_order", "remove_unused_columns",
    "label_names", "length_column_name", "eval_do_concat_batches", "eval_use_gather_object",
    "eval_accumulation_steps", "include_for_metrics", "batch_eval_metrics", "bf16_full_eval", "fp16_full_eval",
    "liger_kernel_config", "torch_empty_cache_steps", "logging_nan_inf_filter", "ddp_find_unused_parameters",
    "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph", "hub_always_push",
)  # fmt: skip
_SIZES = ("tp_size", "ep_size", "context_size")
_SAMPLING = ("random", "sequential")


@dataclass
class TreeTrainingArguments(TrainingArguments):
    """`transformers.TrainingArguments` with the settings of tree training.

    `per_device_train_batch_size` and `per_device_eval_batch_size` count trees. Memory follows `max_tokens`, not the
    number of trees: trees of one batch share their prefixes and fill one another's micro-batches. So do all batches of
    a step (`gradient_accumulation_steps`) in one process with `max_tokens`; elsewhere prefer a large batch.

    `torch_compile` (`torch_compile_backend`, `torch_compile_mode`) compiles the decoder's layers, one by one, in place,
    as `compile_layers: always` does. `use_liger_kernel` takes norms, rotary positions and MLPs of the installed
    liger-kernel, and none of its losses. `activation_checkpointing: auto` (`gradient_checkpointing` before transformers
    5.23) computes layers again in the backward where the first step is predicted not to fit into the free memory; with
    `max_tokens: auto` where that is predicted to be faster than a smaller budget.

    Parameters:
        max_tokens: the budget: how many tokens may hold activations at a time. `auto`: as many as fit in the free
            memory, measured at the first step. None: a batch is one micro-batch.
        steps_per_epoch: cut the trees of an epoch into so many optimizer steps, as equal as possible;
            `per_device_train_batch_size` is then ignored. None: as many steps as batches of that size give.
        compile_layers: compile the decoder's layers, each by itself, in place: `always`, `never`, or on a GPU where
            they can be (`auto`).
        attention: `auto`, `reference`, `cascade`, `flex`, `flash` or `cudnn`.
        temperature: divides the logits, as the sampler of the data did.
        offload: gateways and the activations of held micro-batches are moved to host memory.
        router_z_coefficient: the factor of a z-loss on the router logits of a mixture of experts; 0: none.
        router_loss_choices: what the load-balancing loss counts where recorded experts are replayed: `live`, what the
            routers would choose now, or `replayed`.
        float32_gradients: add the gradients of micro-batches, batches and processes up in float32 where weights are
            narrower, which takes 2 bytes more for each trained parameter of 2 bytes. Not with sharded parameters.
        weighting: how often a shared trained token counts: `per_trajectory` (once for each trajectory, as in flat
            training), `per_rollout` (once for each rollout) or `once`.
        normalization: `token_mean`, `trajectory_mean`, `rollout_mean`, `rollout_sum` or `constant`, over all trees of
            an optimizer step (`treewise.objectives.sft`).
        constant: the divisor of `rollout_sum` and `constant`.
        merge_across_trees: compute prefixes that trees of one batch have in common (system prompts) once. Changes no
            loss; has no effect on an objective with `weighting="once"`, where a token counts once per tree.
        sharded: shard parameters, gradients and the optimizer's state over the processes, by FSDP2. `fsdp` and
            `accelerate launch --use_fsdp` set it, too.
        shard_config: `reshard_after_forward`, `cpu_offload`, `state_dict_type`, `transformer_layer_cls_to_wrap`, as in
            transformers' `fsdp_config`; `dp_replicate_size`, the copies of hybrid sharding.
        tp_size: processes that share each layer and compute one batch together (tensor parallelism). The model has to
            be loaded for it (`treewise.distributed.mesh.load_on_mesh`; the command line does).
        ep_size: processes that share the experts of each mixture (expert parallelism): a multiple of `tp_size`.
        context_size: processes that compute one batch together, a part of the tokens of every micro-batch each (context
            parallelism). `max_tokens` counts the tokens of all of them.
        balance_ranks: with several processes, place the trajectories of a step by predicted time;
            False: ranks take trees in turn. Changes no loss.
        nonfinite: `stop` at a loss or gradient that is not finite, or `skip` the update. Its trees are named and
            written to `nonfinite.jsonl` in the run's folder.
        max_skipped_steps: consecutive skipped updates after which the run stops.
        spike_factor: log a warning with the trees when the gradient norm exceeds this many medians of the last 50
            steps; 0: off.
        on_save_failure: `stop`, or `continue` without the checkpoint, when it cannot be written.
        verify_saves: read the first checkpoint and the final model or adapters back by transformers, and compare
            log-probs of rows of the data with the model in memory; a difference beyond rounding is an error. It takes
            the model once more in host memory, and is left out, with a line, where that is not free.
        prepare_ahead: load, merge, place and plan the trees of the next step in a thread while this one computes.
            False: when the step begins, for data whose items cannot be read in another thread. Changes no loss.

    Raises:
        ConfigError: an unknown value, or a setting of transformers that cannot hold on trees.
    """

    max_tokens: int | str | None = "auto"
    steps_per_epoch: Annotated[int, Ge(1), "leave it out for no limit"] | None = None
    attention: str = "auto"
    compile_layers: Literal["auto", "always", "never"] = "auto"
    temperature: Annotated[float, Gt(0), Lt(math.inf)] = 1.0
    offload: bool = False
    router_z_coefficient: Annotated[float, Ge(0), Lt(math.inf)] = 0.0
    router_loss_choices: Literal["live", "replayed"] = "live"
    float32_gradients: bool = False
    weighting: str = "per_trajectory"
    normalization: str = "token_mean"
    constant: float | None = None
    nonfinite: Literal["stop", "skip"] = "stop"
    max_skipped_steps: int = 5
    spike_factor: Annotated[float, Ge(0), Lt(math.inf)] = 10.0
    on_save_failure: Literal["stop", "continue"] = "stop"
    verify_saves: bool = True
    prepare_ahead: bool = True
    sharded: bool = False
    shard_config: dict[str, Any] | None = None
    tp_size: int = 1
    ep_size: int = 1
    context_size: int = 1
    balance_ranks: bool = True
    merge_across_trees: bool = True

    # transformers' own, under the name of 5.23 and the one before: also `auto`.
    if "activation_checkpointing" in TrainingArguments.__dataclass_fields__:
        activation_checkpointing: bool | Literal["auto"] | None = TrainingArguments.activation_checkpointing
    if "gradient_checkpointing" in TrainingArguments.__dataclass_fields__:
        gradient_checkpointing: bool | Literal["auto"] | None = TrainingArguments.gradient_checkpointing

    # transformers' own: other defaults, and limits.
    logging_steps: Annotated[float, Gt(0), "logging_strategy=no for never"] = 1  # steps of trees are few and long
    logging_nan_inf_filter: bool = False  # a loss that is not finite stops the run
    remove_unused_columns: bool = False  # items are trees
    per_device_train_batch_size: Annotated[int, Ge(1)] = 8
    per_device_eval_batch_size: Annotated[int, Ge(1)] = 8
    gradient_accumulation_steps: Annotated[int, Ge(1)] = 1
    save_total_limit: Annotated[int, Ge(1), "leave it out for no limit"] | None = None
    save_steps: Annotated[float, Gt(0), "save_strategy=no for never"] = 500
    eval_steps: Annotated[float, Gt(0), "eval_strategy=no for never"] | None = None
    # Its own defaults; it takes values that fail later or train nothing.
    seed: Annotated[int, Ge(0), Lt(2**32)] = TrainingArguments.seed
    data_seed: Annotated[int, Ge(0), Lt(2**32)] | None = TrainingArguments.data_seed
    learning_rate: Annotated[float, Ge(0), Lt(math.inf)] = TrainingArguments.learning_rate
    weight_decay: Annotated[float, Ge(0), Lt(math.inf)] = TrainingArguments.weight_decay
    max_grad_norm: Annotated[float, Ge(0), Lt(math.inf)] = TrainingArguments.max_grad_norm
    adam_epsilon: Annotated[float, Ge(0), Lt(math.inf)] = TrainingArguments.adam_epsilon
    adam_beta1: Annotated[float, Ge(0), Lt(1)] = TrainingArguments.adam_beta1
    adam_beta2: Annotated[float, Ge(0), Lt(1)] = TrainingArguments.adam_beta2

    # Of an instance, and no settings, so without annotations.
    _is_settling = False  # while transformers takes the settings
    _own_device = cast("torch.device | None", None)

    def __new__(cls, *_given: Any, **settings: Any) -> "TreeTrainingArguments":
        """Raises `ConfigError` for a name that is no setting."""
        known = [item.name for item in fields(cls) if item.init]
        for name in settings:
            if name not in known:
                from treewise.data import RenderOptions

                hint = did_you_mean(name, known)
                if name in RenderOptions.__dataclass_fields__:
                    hint = f" It is of records: TreeTrainer(..., render={{{name!r}: ...}})."
                raise ConfigError(f"TreeTrainingArguments has no setting {name!r}.{hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in ("fsdp_config", "accelerator_config"):
            setattr(self, name, _mapping(name, getattr(self, name)))
        for name in filter(self._is_set, _UNSUPPORTED):
            raise ConfigError(f"{name}={getattr(self, name)!r} cannot be used: {_UNSUPPORTED[name]}")
        if unread := [name for name in _WITHOUT_EFFECT if self._is_set(name)]:
            logger.warning("without effect on trees: %s; leave them out", ", ".join(unread))
        if self.include_num_input_tokens_seen not in ("no", False) and clips_by_accelerator():
            raise ConfigError(f"include_num_input_tokens_seen needs {pip_install('transformers>=5.3')}.")
        if getattr(self, "train_sampling_strategy", "random") not in _SAMPLING:
            raise ConfigError(
                f"train_sampling_strategy={self.train_sampling_strategy!r}: choose {' or '.join(_SAMPLING)}."
            )
        if "checkpoint" in str(getattr(self.hub_strategy, "value", self.hub_strategy)):
            raise ConfigError("hub_strategy: the model is uploaded at the end; hf upload uploads a checkpoint.")
        if str(self.max_tokens).lower() in ("none", "null"):  # as a flag gives it
            self.max_tokens = None
        Budget(self.max_tokens)
        choose(self.attention, "cpu")  # an unknown name is an error now
        check_fields(self)
        self.sft_objective()
        self._take_over_fsdp()
        if self.shard_config and not self.sharded:
            raise ConfigError("shard_config says how parameters are sharded; give sharded: true, too, or leave it out.")
        self.shard_settings()
        is_divided = self.sharded or self.tp_size * self.ep_size > 1
        if is_divided and any(part in self.optimizer_name for part in ("8bit", "4bit")):
            raise ConfigError(
                f"optim={self.optimizer_name}: its codes cannot be saved where parameters are divided over processes "
                "(sharded, tp_size, ep_size) yet; take adamw_torch, or processes with whole models."
            )
        self._take_over_compilation()
        if self.recomputation == AUTO and (names := ", ".join(self._spread_over_ranks())):
            raise ConfigError(
                f"activation_checkpointing=auto (gradient_checkpointing) predicts the memory of a process that has the "
                f"whole model, not with {names}; give true or false."
            )
        is_for_several = "ACCELERATE_USE_CPU" in os.environ and "MASTER_PORT" in os.environ
        if is_for_several and "WORLD_SIZE" not in os.environ:
            raise ConfigError(  # steps would have fewer trees than requested
                "accelerate launch was asked for several processes and started one, as it does with --cpu. Start them "
                "with torchrun --nproc_per_node N, or accelerate launch --multi_gpu --num_processes N (on a CPU, too, "
                "with use_cpu: true); for one process give --num_processes 1 and unset MASTER_PORT."
            )
        launched = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
        if self.tp_size * self.ep_size != 1:
            features.mesh.check_mesh_sizes(self.tp_size, self.ep_size, launched)
        if self.context_size != 1:
            features.context.check_context_size(self.context_size, launched, self.tp_size, self.ep_size)

    # -- processes and the device: asked for when a run begins, not by the settings -----------------------------------

    @property
    def device(self) -> torch.device:
        """The device of this process. When it is first asked for, the processes of a run join one another.

        Raises:
            LostRankError: not all processes came within `ddp_timeout`.
        """
        if self._is_settling:
            return torch.device("cpu")  # transformers asks while it takes the settings, to have it chosen
        if self._own_device is None:
            is_launched = "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1
            if is_launched:
                features.watchdog.join(self)
            backend = getattr(self, "ddp_backend", None)
            if "RANK" not in os.environ:  # one process, in which accelerate would look for the group of that backend
                self.ddp_backend = None
            self._own_device = super().device
            self.ddp_backend = backend
            if is_launched:
                features.watchdog.begin(self.ddp_timeout)
        return self._own_device

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return 1 if self._is_settling else int(super().world_size if self.device else 1)

    @property
    def process_index(self) -> int:
        """The rank of this process, from 0."""
        return 0 if self._is_settling else int(super().process_index if self.device else 0)

    @property
    def local_process_index(self) -> int:
        """Its rank on this machine."""
        return 0 if self._is_settling else int(super().local_process_index if self.device else 0)

    @property
    def optimizer_name(self) -> str:
        """As it is given (`optim`)."""
        return str(getattr(self.optim, "value", self.optim))

    # -- what other settings mean here --------------------------------------------------------------------------------

    def _is_set(self, name: str) -> bool:
        """Whether a setting, which this version of transformers may lack, has another value than its default."""
        known = self.__dataclass_fields__.get(name)
        value = None if known is None else getattr(self, name)
        return known is not None and value != known.default and value not in ("", [], None)

    def _take_over_fsdp(self) -> None:
        """Takes FSDP settings over from transformers and accelerate, which leaves parameters whole on a CPU."""
        if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
            known = {"reshard_after_forward", "offload_params", "state_dict_type", "version"}
            variables = {name: os.environ.get(f"FSDP_{name.upper()}") for name in known}
            from_environment = {name: value for name, value in variables.items() if value is not None}
            self.shard_config = {**from_environment, **(self.shard_config or {})}
            self.sharded = True
        fsdp: Any = getattr(self, "fsdp", None)
        if fsdp:
            config: Any = getattr(self, "fsdp_config", None)
            settings = features.fsdp.shard_settings(fsdp, config)
            if settings is not None:
                self.sharded, self.shard_config = True, settings.as_config()
            self.fsdp, self.fsdp_config = None, None

    def _take_over_compilation(self) -> None:
        """transformers' own `__post_init__`, which would set TF32 for `torch_compile`, without this setting.

        It is also set by `torch_compile_backend`, `torch_compile_mode` and `accelerate launch --dynamo_backend`.
        """
        own: Any = self
        backend, mode = own.torch_compile_backend, own.torch_compile_mode
        launched = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
        if launched != "no" and backend is None:
            given = os.environ.get("ACCELERATE_DYNAMO_MODE", "default")
            backend, mode = launched, mode or (None if given == "default" else given)
        is_compiled = own.torch_compile or backend is not None or mode is not None
        if is_compiled and own.compile_layers == "never":
            raise ConfigError(
                "compile_layers=never and torch_compile (_backend, _mode) contradict; leave one of them out."
            )
        is_compiled = is_compiled or own.compile_layers == "always"
        own.torch_compile, own.torch_compile_backend, own.torch_compile_mode = False, None, None
        pins_memory = own.dataloader_pin_memory  # put out on a CPU, and a run's own settings would be warned of
        self._is_settling = True
        try:
            super().__post_init__()
        finally:
            self._is_settling = False
        own.dataloader_pin_memory = pins_memory
        if own.use_liger_kernel:
            self._take_over_liger(is_compiled=is_compiled)
        if not is_compiled:
            return
        own.torch_compile, own.torch_compile_mode = True, mode
        compilation = features.compilation
        own.torch_compile_backend = backend or compilation.DEFAULT_BACKEND
        known = {each.value.lower() for each in DynamoBackend}
        compilation.check_compilation(own.torch_compile_backend, mode, known=known)

    @property
    def recomputation(self) -> bool | str:
        """Whether layers are computed again in the backward: yes, no or `auto`."""
        given = [getattr(self, name, None) for name in ("activation_checkpointing", "gradient_checkpointing")]
        return AUTO if AUTO in given else any(given)

    def _spread_over_ranks(self) -> list[str]:
        """Settings that spread a model or a batch over ranks."""
        spread = {"sharded": self.sharded, **{name: getattr(self, name) > 1 for name in _SIZES}}
        return [name for name, is_set in spread.items() if is_set]

    def _take_over_liger(self, *, is_compiled: bool) -> None:
        """Of what transformers would apply, without losses."""
        liger = features.liger
        liger.require_liger()
        if is_compiled:
            raise ConfigError("use_liger_kernel and compiled layers fuse the same; leave one of them out.")
        if getattr(self, "liger_kernel_config", None):
            raise ConfigError("liger_kernel_config: all but the losses is applied; leave it out.")
        self.liger_kernel_config = dict(liger.PARTS)

    @property
    def compiles_by_itself(self) -> bool:
        """Whether layers are compiled that nobody asked to compile."""
        is_decided = self.torch_compile or self.compile_layers == "never" or self.use_liger_kernel
        return not is_decided and self.device.type == "cuda"

    def shard_settings(self) -> Any:
        """How parameters are sharded (`distributed.fsdp.ShardSettings`); None where they are not."""
        return features.fsdp.shard_settings(self.sharded, self.shard_config) if self.sharded else None

    @property
    def place_model_on_device(self) -> bool | None:
        """False for a model that will be sharded: its shards are moved to the device, not the model."""
        return False if self.sharded else super().place_model_on_device

    @property
    def n_gpu(self) -> int:
        """One per process: `nn.DataParallel` splits tensors, not trees. Use torchrun for several GPUs."""
        return min(1, super().n_gpu)

    def sft_objective(self) -> SFT:
        """The loss that these settings name."""
        return SFT(self.weighting, self.normalization, self.constant)

    @property
    def data_size(self) -> int:
        """Batches that are computed at a time: processes, or groups of `ranks_per_batch`."""
        return int(self.world_size) // self.ranks_per_batch

    @property
    def data_index(self) -> int:
        """Which of them this process computes."""
        return int(self.process_index) // self.ranks_per_batch

    @property
    def is_parted(self) -> bool:
        """Whether no process has the whole model: it is sharded, or on a mesh."""
        return int(self.world_size) > 1 and (self.sharded or self.tp_size * self.ep_size > 1)

    @property
    def ranks_per_batch(self) -> int:
        """Processes that compute one batch together."""
        return self.tp_size * self.context_size

    def merges_trees(self, objective: object) -> bool:
        """Whether trees of one batch are merged under an objective."""
        return self.merge_across_trees and may_merge_trees(objective)

    @property
    def joins_batches(self) -> bool:
        """Whether the batches of a step are computed as one: by a lone process, and under a budget, not the batch size,
        for its memory."""
        return self.world_size == 1 and not self.sharded and self.max_tokens is not None

    @property
    def places_trees(self) -> bool:
        """Whether every rank loads all trees of a batch and takes its part by predicted time."""
        return self.balance_ranks and self.data_size > 1

    @property
    def trees_per_step(self) -> int:
        """Trees of one optimizer step, on all ranks."""
        return int(self.per_device_train_batch_size * self.gradient_accumulation_steps * self.data_size)

    def order_facts(self) -> dict[str, Any]:
        """The settings that determine, with the data, which trees a step trains."""
        seed = self.seed if self.data_seed is None else self.data_seed
        size = {"trees_per_step": self.trees_per_step}
        if self.steps_per_epoch is not None:
            size = {"steps_per_epoch": self.steps_per_epoch}
        return {"seed": seed, **size, "shuffle": self.train_sampling_strategy == "random"}


def _mapping(name: str, value: Any) -> Any:
    """A setting that is given as JSON text, or by the path of a JSON file, as the mapping that it holds."""
    if not isinstance(value, str):
        return value
    from treewise.data.io.field_checks import shown
    from treewise.data.io.files import read_text

    try:
        found = json.loads(value if value.lstrip().startswith("{") else read_text(path_of(value)))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not valid JSON: {error}"
        raise ConfigError(f"{name}: {shown(value)} cannot be read ({reason}); give a mapping, or a file.") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{name}: {shown(value)} holds no JSON object; give a mapping, or a file of one.")
    return found
