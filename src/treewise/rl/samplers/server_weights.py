"""Hands the weights of the model in training to servers.

* `reload`: written to a folder as `save_pretrained` does, adapters merged, from which servers load them. vLLM needs
  `VLLM_SERVER_DEV_MODE=1`.
* `adapter`: a LoRA adapter alone, under a new name after each update; at first the model below it, too, where the
  server could hold another run's. vLLM needs `--enable-lora` and
  `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`.
* `fixed`: servers keep their weights on purpose.
"""

import shutil
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from treewise.errors import ConfigError, SamplerError, check_choice
from treewise.nn.adapters import parted_table, tables_of
from treewise.nn.wrapped import base_model, innermost, is_peft, named_modules
from treewise.rl.samplers.server import Server

if TYPE_CHECKING:
    from treewise.nn.wrapped import AdaptedModel

WEIGHTS = ("reload", "adapter", "fixed")
BUSY_SECONDS = 10.0  # that a server may take until its cache can be emptied


@dataclass(frozen=True, slots=True)
class Held:
    """What servers hold.

    version: 0 before the first update. folder: from which they loaded it. adapter: by which name they are asked for
    it. starts: of each server by its address (`Server.start`), when it had taken it; empty where nothing is restored.
    """

    version: int = 0
    folder: str | None = None
    adapter: str | None = None
    starts: Mapping[str, str | None] = field(default_factory=dict)


class Handover:
    """Hands weights over in one way. Parameters as of `ServerSampler`."""

    def __init__(
        self,
        mode: str | Callable[[nn.Module], None] | None,
        servers: "Sequence[Server]",
        folder: str | None,
    ) -> None:
        if isinstance(mode, str):
            check_choice("weights", mode, WEIGHTS)
        self.mode, self.servers = mode, servers
        self._given_folder = folder
        self._folder: Path | None = None
        self._token = uuid.uuid4().hex[:8]  # no server knows an adapter of this process
        self._held = Held()

    def hand_over(self, model: nn.Module) -> Callable[[], Held]:
        """Takes the model's weights, which may change then; what is returned gives them to all servers, and says what
        they hold.

        Raises:
            ConfigError: no way was chosen, or the one that was cannot take this model.
            SamplerError: a server does not take them.
        """
        if self.mode is None:
            raise ConfigError(
                f"the server at {self.servers[0].url} would sample from old weights; give sampler_settings.weights: "
                "reload or adapter, or fixed if that is meant."
            )
        version = self._held.version + 1
        if callable(self.mode):
            self.mode(model)
        elif self.mode != "fixed":
            return self._by_folder(model, version)
        self._held = Held(version)
        return lambda: self._held

    def restore(self, server: Server, held: Held) -> Held:
        """Gives a server that was started anew what the others hold.

        Raises:
            SamplerError: it cannot be had without the model.
        """
        if held.folder is None:
            if held.version and self.mode != "fixed":
                raise SamplerError(
                    f"{server.url} went away, and weights that were handed over by {self.mode} went with it; end the "
                    "run once the server is back, and go on with --resume, which hands them over again."
                )
            return held
        self._load(server, held, server.patience_seconds)  # other processes of the run may sample, and wait in the end
        return replace(held, starts={**held.starts, server.url: server.start()})

    @contextmanager
    def reading(self, server: Server, folder: Path, saved: nn.Module) -> Iterator[str | None]:
        """Inside, a server has a saved model, afterwards what it was given before; yields the adapter by whose name it
        is asked. saved: what was read from the folder here; servers that take whole weights get its adapters merged.

        Raises:
            SamplerError: weights are not handed over through folders; or the server does not take them.
        """
        if not isinstance(self.mode, str) or self.mode == "fixed":
            raise SamplerError("it keeps its weights.")
        before, has_adapters = self._held, is_peft(saved)
        if self.mode == "adapter":
            if not before.version:
                self._load_base(saved, self._own_folder() / "base")
            held = Held(0, str(self._seen_by_servers(folder)), f"treewise-{self._token}-saved")
        elif has_adapters:
            held = Held(0, str(self._own_folder() / "saved"))
            save_whole(saved, self._own_folder() / "saved")
        else:
            held = Held(0, str(self._seen_by_servers(folder)))
        try:
            self._load(server, held)
            yield held.adapter
        finally:
            if held.adapter is not None:
                self._unload(server, held.adapter)
            elif before.folder is not None:
                self._load(server, before)
            shutil.rmtree(self._own_folder() / "saved", ignore_errors=True)

    def _seen_by_servers(self, folder: Path) -> Path:
        """A folder beside which weights are handed over, or else a copy where they are: servers may see no other."""
        folder, own = folder.absolute(), self._own_folder()
        if own.parent in (folder, *folder.parents):
            return folder
        shutil.rmtree(own / "saved", ignore_errors=True)
        (own / "saved").mkdir()
        for each in folder.iterdir():
            if each.is_file():
                shutil.copy2(each, own / "saved")
        return own / "saved"

    def close(self) -> None:
        """Removes what was written."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _by_folder(self, model: nn.Module, version: int) -> Callable[[], Held]:
        before = self._held
        folder = self._own_folder() / f"{version:05d}"
        adapter = None
        if self.mode == "adapter":
            if not is_peft(model):
                raise ConfigError(
                    "weights=adapter hands over a LoRA adapter, and the model has none; give lora, or reload."
                )
            if not before.version:
                self._load_base(model, folder.with_name("base"))
            adapter = f"treewise-{self._token}-{version}"
            save_adapter(model, folder)
        else:
            save_whole(model, folder)
        held = Held(version, str(folder), adapter)

        def load() -> Held:
            for server in self.servers:
                self._load(server, held)
            if before.adapter is not None:
                for server in self.servers:
                    self._unload(server, before.adapter)
            if before.folder is not None:
                shutil.rmtree(before.folder, ignore_errors=True)
            self._held = replace(held, starts={server.url: server.start() for server in self.servers})
            return self._held

        return load

    def _load_base(self, model: nn.Module, folder: Path) -> None:
        """Gives servers that take whole weights too those below the adapter, once: they may hold another run's."""
        changeable = [server for server in self.servers if server.has("/collective_rpc")]
        if changeable:
            save_whole(model, folder, merged=False)
            for server in changeable:
                self._load(server, Held(0, str(folder)))
            shutil.rmtree(folder)

    def _own_folder(self) -> Path:
        """Empty at first: what a run that was killed left there is removed."""
        if self._folder is None:
            given = self._given_folder
            self._folder = Path(tempfile.mkdtemp(prefix="treewise-") if given is None else given).absolute()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(parents=True)
        return self._folder

    def _load(self, server: Server, held: Held, busy_seconds: float | None = None) -> None:
        if held.adapter is not None:
            needed = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora --max-lora-rank"
            asked = {"lora_name": held.adapter, "lora_path": held.folder}
            _told(server, "/v1/load_lora_adapter", asked, needed)
        else:
            reload = {"method": "reload_weights", "kwargs": {"weights_path": held.folder}}
            _told(server, "/collective_rpc", reload, "VLLM_SERVER_DEV_MODE=1")
            _told(server, "/reset_prefix_cache", {}, "VLLM_SERVER_DEV_MODE=1", busy_seconds)

    def _unload(self, server: Server, adapter: str) -> None:
        try:
            server.call("/v1/unload_lora_adapter", {"lora_name": adapter}, retried=())
        except SamplerError:  # a server that was started anew since does not know it
            return


def _told(server: Server, path: str, payload: Any, needed: str, busy_seconds: float | None = None) -> None:
    """Posts a change. Raises `SamplerError` where the server does not take it, also after it was busy so long."""
    end = time.monotonic() + (BUSY_SECONDS if busy_seconds is None else busy_seconds)
    while True:
        try:
            answer = server.call(path, payload, retried=())
        except SamplerError as error:
            if error.status == 404:
                raise SamplerError(f"{server.url} has no {path}; start the server with {needed}.") from error
            raise SamplerError(f"the server did not take the weights: {error}") from error
        if not (isinstance(answer, dict) and answer.get("success") is False):
            return
        if time.monotonic() > end:
            raise SamplerError(f"{server.url}{path}: the server answers success: false. {answer.get('message', '')}")
        time.sleep(0.2)  # as while requests of another run hold the cache


def save_adapter(model: "AdaptedModel", folder: Path) -> None:
    """The active adapter of a model, as PEFT writes one alone, without the embedding that it may add."""
    from peft import get_peft_model_state_dict

    name = model.active_adapter
    model.peft_config[name].save_pretrained(str(folder))
    own: dict[str, torch.Tensor]
    own = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    state = {key: tensor.detach().cpu().contiguous() for key, tensor in own.items()}
    save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def save_whole(model: nn.Module, folder: Path, *, merged: bool = True) -> None:
    """The model as `save_pretrained` writes it, adapters merged into it, or left out."""
    base = base_model(model)
    if not hasattr(model, "peft_config"):
        base.save_pretrained(folder)
        return
    state = {name: tensor.to("cpu", copy=True) for name, tensor in whole_weights(model, merged=merged)}
    base.save_pretrained(folder, state_dict=state)


def whole_weights(model: nn.Module, *, merged: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors as a server's model has them, tied ones once; adapters merged, or left out. A layer is merged
    while its tensors are out, and gets its own bits back: W + BA - BA is not W. Raises `ConfigError` for an adapter on
    one of two layers that share their weights.
    """
    has_adapters = hasattr(model, "peft_config")
    if has_adapters and merged:
        _refuse_tied(base_model(model))
    known: set[int] = set()
    inner = base_model(model) if has_adapters else model
    for name, tensor in _below("", inner, merged if has_adapters else None):
        if id(tensor) not in known:
            known.add(id(tensor))
            yield name, tensor.detach()


def _refuse_tied(base: PreTrainedModel) -> None:
    from peft.tuners.tuners_utils import BaseTunerLayer

    owners = Counter(id(parameter) for _, parameter in base.named_parameters(remove_duplicate=False))
    parted, tables = parted_table(base), [innermost(table) for table in tables_of(base).values()]
    for path, module in named_modules(base):
        is_parted = path == parted
        if isinstance(module, BaseTunerLayer) and not (module.merged or module.disable_adapters):
            parts = [getattr(module, part) for part in module.adapter_layer_names]
            is_adapted = any(name in part for part in parts for name in module.active_adapters)
            layer = module.get_base_layer()
            is_shared = any(owners[id(parameter)] > 1 for parameter in layer.parameters())
            is_parted |= is_adapted and is_shared and not any(layer is table for table in tables)
        if is_parted:
            raise ConfigError(
                f"{path} has an adapter and shares its weights with another layer, so the adapter cannot be merged "
                "into them; give weights=adapter, or train no adapter there."
            )


def _below(prefix: str, module: nn.Module, merged: bool | None) -> Iterator[tuple[str, torch.Tensor]]:
    """merged: None where there are no adapters to look for."""
    if merged is not None:
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper

        module = getattr(module, "token_adapter", module)  # trainable_token_indices
        if isinstance(module, AuxiliaryTrainingWrapper):
            module = module.modules_to_save[module.active_adapters[0]] if merged else module.original_module
        elif isinstance(module, BaseTunerLayer):
            with _merged(module) if merged else nullcontext(module.get_base_layer()) as layer:
                yield from _below(prefix, layer, None)
            return
    passing = module._non_persistent_buffers_set  # noqa: SLF001 - torch has no public name for it
    kept = [(name, buffer) for name, buffer in module.named_buffers(recurse=False) if name not in passing]
    yield from ((f"{prefix}{name}", tensor) for name, tensor in [*module.named_parameters(recurse=False), *kept])
    for name, child in module.named_children():
        yield from _below(f"{prefix}{name}.", child, merged)


@contextmanager
def _merged(layer: Any) -> Iterator[nn.Module]:
    """The layer below an adapter, with the adapter in its weights meanwhile."""
    base = layer.get_base_layer()
    if layer.merged or layer.disable_adapters:
        yield base
        return
    kept = {name: parameter.detach().clone() for name, parameter in base.named_parameters()}
    layer.merge()
    try:
        yield base
    finally:
        layer.unmerge()
        with torch.no_grad():
            for name, parameter in base.named_parameters():
                parameter.copy_(kept[name])
