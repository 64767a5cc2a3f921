"""Probe of a model before its first step: a few rows flat, whole and at a budget, with every trained gradient.

Four rows of the user's own tokens with three forks, longer than the windows and chunks of the configuration that are
short, and with the smallest of the forest's images where it has some, are trained three times: each row alone by the
model's own forward (`flat`), all as one micro-batch, and at a budget that cuts their trunk twice, keeps one part and
computes the other again. Hidden rows, log-probs and the gradient of every trained parameter must agree. So what no flag
of a model shows is found by what it does: a leak between branches, an index of a row used as a position, a factor on
the logits, a lost gradient. Masks are compared far beyond these rows (`mask_audit`), and the head where logits are
large. What a few rows cannot show is listed in benchmarks/reports/precision.md.

Trained parameters are replaced for the moment by others on the same storage: no `.grad` changes, and no hook runs that
waits for it. Those of adapters have noise added, because a fresh adapter is the identity. One set of gradients is held:
those of the trees are subtracted from the flat ones, half and half, and the norms in between tell them apart.

Layers that are computed again in the backward run once here, but for reentrant checkpoints, whose gradients are
compared with those without: what a layer reads beside its arguments gets none through these.

A model with weights in float32 is probed in float32, also under autocast, unless its own forward enters autocast. In
lower precision rows are compared with the model's own spread between two correct orders of computation.

Letters: L tokens of a row, T tokens of the tree, M model width.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from treewise.base import features
from treewise.base.shapes import Float
from treewise.engine.flat import FlatLoss
from treewise.engine.probed_rows import ProbedRows, probed_rows, text_ids
from treewise.engine.step import StepLoss, Walk
from treewise.errors import TreewiseError, UnsupportedModelError, num
from treewise.nn.attention import check_masks, observe_masks
from treewise.nn.decoder import DecoderAndHead
from treewise.nn.gradients import gradients_restored, hooks_run_once
from treewise.nn.guest import Guest, MicroBatchOutput
from treewise.nn.platform.tensors import is_out_of_memory, to_device
from treewise.nn.recomputation import is_reentrant
from treewise.nn.wrapped import (
    SUPPORTED_MODELS,
    adapter_parameters,
    experts_in_loops,
    named_modules,
    stirred,
    uncompiled,
    untried_experts,
)
from treewise.objectives.sft import SFT
from treewise.planning.planner import plan as make_plan
from treewise.planning.plans import Plan
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

if TYPE_CHECKING:
    from treewise.nn.router_loss import RouterLossRule

# In float32 or wider, largest differences of a hidden row relative to it, and of a parameter's gradient relative to its
# own norm and to that of the whole gradient: these, or so many spreads of the model (2e-6 in SmolLM2-135M, where the
# tree differs by 0.9, 7 and 0.9 spreads). Of a log-prob.
_ROW, _OWN, _WHOLE = (2e-5, 20), (1e-4, 100), (1e-5, 10)
_LOGPROB = 1e-3
# At least the spread of scans, which round in float32 in every order; short convolutions alone have none.
_SCANS, _WITHOUT_SCAN = 1e-5, "short convolution"
# In low precision the median over the rows of a branch may differ by this many spreads of the model, or roundings of
# one number; the median log-prob by one nat, because single tokens may be routed elsewhere.
_SPREADS, _ROUNDINGS, _LOW_LOGPROB = 8, 4, 1.0
_LOW, _LOW_EXPERTS, _UNREACHED = 0.2, 0.5, 1e-6  # of the whole gradient
_EXPERTS = ("expert", "moe", "router", "gate")  # in paths of what tokens that are routed elsewhere reach
_PROBED_LOGIT = 40.0  # the head is compared where its largest logit is about this, which shows a cap of 30
_TREE_SCALE = -0.5  # of two walks, whose gradients flat ones are added to
_REENTRANT = (
    "Layers read more than what they are given by position, and reentrant gradient checkpoints pass no gradient to it; "
    "set use_reentrant=False (gradient_checkpointing_kwargs)."
)


def probe(
    lm: DecoderAndHead,
    impl: str,
    forest: Forest,
    *,
    processor: object = None,
    hold: str = "auto",
    offload: bool = False,
) -> None:
    """Raises if the model computes anything else on a tree than flat; gradients are compared where they are enabled.

    forest: whose tokens are used; on tokens that a model never saw in training, low precision alone moves log-probs by
    several nats. impl, hold, offload: as the engine's walks have them. processor: the model's, for rows with an image
    of the forest; None: text alone.

    Raises:
        UnsupportedModelError: with the measured difference.
    """
    rows = probed_rows(lm, forest, with_image=processor is not None)
    loss, tree = FlatLoss(rows.items, SFT(), processor), Forest.from_trajectories(rows.items)
    with _stand_ins(lm.model) as trained:
        with _without_checkpointing(lm.model):
            with hooks_run_once(lm.model):
                flat = _flat(lm, loss)
            gradients = _Gradients(lm, trained)
            autocast = partial(torch.autocast, lm.device.type, flat.autocast, enabled=flat.autocast is not None)
            with autocast():
                spread = _spread(lm, impl, rows, is_exact=flat.is_exact)
                for budget in (None, rows.budget):
                    plan = make_plan(tree, budget, hold=hold)
                    with hooks_run_once(lm.model, scale=_TREE_SCALE):
                        found = _on_tree(lm, plan, impl, processor, offload=offload, trains=gradients.are_compared)
                    if difference := _difference(lm, plan, flat, *found, rows, spread):
                        _refuse(lm, loss, flat, difference)
                    gradients.note(_where(plan))
            _check_head(lm, rows.text)
        gradients.check(spread, is_exact=flat.is_exact)
        if gradients.are_compared and any(map(is_reentrant, lm.model.modules())):
            run = partial(_on_tree, lm, make_plan(tree, None, hold=hold), impl, processor, offload=offload, trains=True)
            with autocast(), gradients_restored(lm.model):
                with _without_checkpointing(lm.model):
                    run(scale=1.0)
                gradients = _Gradients(lm, trained, _REENTRANT)
                for _ in range(2):
                    run()
                    gradients.note(" under reentrant gradient checkpoints")
            gradients.check(spread, is_exact=flat.is_exact)


def check_router_losses(lm: DecoderAndHead, rule: "RouterLossRule | None", forest: Forest) -> None:
    """Compares the load-balancing loss that steps add with that of the model's own forward. rule: None: none is added.

    Raises:
        UnsupportedModelError: it is another one.
    """
    if rule is not None and rule.aux_coefficient:
        token_ids = to_device(text_ids(forest)[:12], lm.device, torch.long)
        features.router_loss.check_router_loss(lm.model, rule, token_ids)


# -- parameters for the moment ----------------------------------------------------------------------------------------


@contextmanager
def _stand_ins(model: nn.Module) -> Iterator[dict[str, nn.Parameter]]:
    """Inside, trained parameters are others on the same storage, with noise on those of adapters; here by name."""
    adapters = adapter_parameters(model)
    made: dict[int, nn.Parameter] = {}
    names: dict[str, nn.Parameter] = {}
    slots = [
        (module, f"{path}.{name}".lstrip("."), name, parameter)
        for path, module in named_modules(model)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.requires_grad
    ]
    with torch.inference_mode(mode=False), torch.no_grad():  # a parameter cannot be a tensor of inference mode
        for _, path, _, parameter in slots:
            if id(parameter) not in made:
                data = parameter.detach()
                if id(parameter) in adapters:
                    data = stirred(data, len(made), adapters[id(parameter)])
                made[id(parameter)] = names[path] = nn.Parameter(data)
                for hook in (parameter._backward_hooks or {}).values():  # they are part of its gradient
                    names[path].register_hook(hook)
    try:
        for module, _, name, parameter in slots:
            setattr(module, name, made[id(parameter)])
        yield names
    finally:
        for module, _, name, parameter in slots:
            setattr(module, name, parameter)


@contextmanager
def _without_checkpointing(model: nn.Module) -> Iterator[None]:
    """A few rows need none, and a layer that attends twice cannot have it at a budget."""
    checkpointed: list[Any] = [each for each in model.modules() if getattr(each, "gradient_checkpointing", False)]
    for module in checkpointed:
        module.gradient_checkpointing = False
    try:
        yield
    finally:
        for module in checkpointed:
            module.gradient_checkpointing = True


# -- flat and on a tree -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Flat:
    """What the model's own forward gives: log-probs ([L - 1] float64 of each row), and the decoder's hidden rows
    ([L, M] of each; none where it is not called as a module). autocast: that its forward ran in; None: none."""

    logprobs: list[Tensor]
    hidden: list[Tensor]
    autocast: torch.dtype | None
    is_exact: bool


def _flat(lm: DecoderAndHead, loss: FlatLoss) -> _Flat:
    """Adds the flat gradients into `.grad`. Without autocast, if all weights are in float32 or wider; with experts one
    after the other, where no test has tried their implementation."""
    device = lm.device.type
    floats = [each for each in [*lm.model.parameters(), *lm.model.buffers()] if each.is_floating_point()]
    is_wide = all(torch.finfo(each.dtype).bits >= 32 for each in floats)
    is_given = torch.is_autocast_enabled(device) and not is_wide
    hidden: list[Tensor] = []
    entered: list[torch.dtype | None] = [torch.get_autocast_dtype(device) if is_given else None]

    def observe(_: nn.Module, __: tuple[Any, ...], output: object) -> None:
        entered.append(torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None)
        rows = getattr(output, "last_hidden_state", None)
        if isinstance(rows, Tensor) and rows.dim() == 3:
            hidden.append(rows[0].detach())

    what = "images" if any(item.images for item in loss.items) else "text alone"
    hook = lm.decoder.register_forward_hook(observe)
    try:
        with (
            _failing_as(lm, f"{type(lm.model).__name__} does not run on {what}"),
            torch.autocast(device, entered[0], enabled=is_given),
            uncompiled(lm.model),
            experts_in_loops(lm.model),
        ):
            run = loss.run(lm.model, lm.device)
    finally:
        hook.remove()
    if [len(each) for each in hidden] != [len(item) for item in loss.items]:
        hidden = []
    for what, values in (("hidden rows", hidden), ("logits", run.logprobs)):
        if not all(value.isfinite().all() for value in values):
            wrong = [name for name, each in lm.model.named_parameters() if not each.isfinite().all()]
            why = "its weights diverged, or its precision is too low."
            if wrong:
                count = num(len(wrong), "parameter")
                why = f"weights of {', '.join(wrong[:3])} are not finite ({count} in all); it diverged."
            error = UnsupportedModelError(f"{type(lm.model).__name__} gives {what} that are not finite: {why}")
            error.is_finite = False
            raise error
    has_fewer_bits = device == "cuda" and torch.backends.cuda.matmul.fp32_precision in ("tf32", "bf16")
    return _Flat(run.logprobs, hidden, entered[-1], is_wide and entered[-1] is None and not has_fewer_bits)


@contextmanager
def _failing_as(lm: DecoderAndHead, what: str) -> Iterator[None]:
    """Inside, errors of a model's own code are `UnsupportedModelError`; so are those of compilers, as what they are."""
    try:
        yield
    except Exception as error:
        if isinstance(error, TreewiseError) or is_out_of_memory(error):
            raise
        name, dtype = type(lm.decoder).__name__, str(lm.decoder.dtype).removeprefix("torch.")
        size = getattr(lm.decoder.config, "head_dim", None)
        heads = "" if size is None else f", heads of {size}"
        failure = features.compiler_errors.compiler_failure(error, f"kernels of {name} in {dtype}{heads}", lm.device)
        if failure is not None:
            raise failure from error
        if not isinstance(error, AttributeError | ImportError | KeyError | RuntimeError | TypeError | ValueError):
            raise
        reason = f"{type(error).__name__}: {error}".rstrip(".")
        raise UnsupportedModelError(f"{what}: {reason}. {_way_out(lm)}") from error


def _way_out(lm: DecoderAndHead) -> str:
    """The end of a message: an implementation of experts that may be the cause, and the models that follow a tree."""
    names = sorted({name for _, name in untried_experts(lm.model).values()})
    experts = f"Its experts run by experts_implementation={names[0]!r}; grouped_mm is tested. " if names else ""
    return f"{experts}{SUPPORTED_MODELS}"


def _on_tree(
    lm: DecoderAndHead,
    plan: Plan,
    impl: str,
    processor: object,
    *,
    offload: bool,
    trains: bool,
    scale: float = _TREE_SCALE,
) -> tuple[Float[Tensor, "T M"], Float[Tensor, " T"]]:
    """[T, M] hidden rows and [T] log-probs (float64; 0 for first tokens) of a tree, by one walk, as steps run it.

    trains: gradients are added to `.grad`, times scale: half of them is subtracted.
    """
    tree, guests = plan.forest, list[Guest]([features.host_memory.HostMemory()] if offload else [])
    loss = StepLoss(tree, SFT(), None)
    loss.denominator /= scale
    hidden: list[tuple[np.ndarray, Tensor]] = []
    logprobs = torch.zeros(tree.num_tokens, dtype=torch.float64)

    def scaled(output: MicroBatchOutput) -> Tensor | None:
        hidden.append((output.positions, output.hidden.detach()))
        scored = loss.scored(output)
        if scored is None:
            return None
        part, (entries, values) = scored
        logprobs[torch.from_numpy(loss.terms.positions[entries])] = values["log_probs"].double().cpu()
        return part

    with _failing_as(lm, f"{type(lm.decoder).__name__} fails on a tree{_where(plan)}"):
        if len(tree.images):
            images = features.images
            pixels = images.processed_by(processor, "TreeEngine(model, processor=...)")
            guests.append(images.ForestVision(lm, tree, pixels, is_in_graph=plan.is_whole))
        walk = Walk(lm, plan, impl, guests)
        (walk.train if trains else walk.visit)(scaled)
    order = np.argsort(np.concatenate([positions for positions, _ in hidden]))
    rows = torch.cat([each for _, each in hidden])[torch.as_tensor(order, device=lm.device)]
    return rows, logprobs


def _where(plan: Plan) -> str:
    return "" if plan.is_whole else f" under a budget of {plan.max_tokens} tokens"


@torch.no_grad()
def _spread(lm: DecoderAndHead, impl: str, rows: ProbedRows, *, is_exact: bool) -> float:
    """How far rows move by rounding, relative to the norm of a row.

    In float32 or wider: the largest of all rows that are compared, when each number of the embeddings moves by its
    rounding; some move a hundred times as far as others. In low precision: the largest of the medians over rows of one
    text, between correct orders of computation: alone, in a batch, as a tree. None of them has anything else in its
    row, so a leak does not widen it.
    """
    generator = torch.Generator().manual_seed(0)

    def moved(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
        noise = torch.randn(output.shape, generator=generator, dtype=output.dtype).to(output.device)
        return output * (1 + torch.finfo(torch.float32).eps * noise)

    def hidden(ids: np.ndarray, copies: int = 1) -> Tensor:
        tokens = torch.as_tensor(ids, dtype=torch.long, device=lm.device).expand(copies, -1)
        return lm.decoder(input_ids=tokens, use_cache=False).last_hidden_state[0]

    kinds = features.recurrent.kinds_of(lm.decoder) if lm.is_recurrent else {}
    has_scans = bool({*kinds.values()} - {_WITHOUT_SCAN})
    with uncompiled(lm.model), _failing_as(lm, f"{type(lm.decoder).__name__} gives no hidden rows by itself"):
        alone = [hidden(ids) for ids in (rows.texts if is_exact else [rows.text])]
        if is_exact:
            hook = lm.decoder.get_input_embeddings().register_forward_hook(moved)
            try:
                gaps = [_gaps(each, hidden(ids)).max().item() for each, ids in zip(alone, rows.texts, strict=True)]
                return max(*gaps, _SCANS if has_scans else 0.0)
            finally:
                hook.remove()
        batched = hidden(rows.text, 3)
    chain = Walk(lm, make_plan(Forest.from_trajectories([Trajectory(rows.text)])), impl).forward(0).hidden
    return max(_gaps(alone[0], each).median().item() for each in (batched, chain))


def _gaps(expected: Float[Tensor, "n M"], found: Float[Tensor, "n M"]) -> Float[Tensor, " n"]:
    """[n] differences of rows, relative to their norms. A row may be zero, as of padding tokens alone."""
    wide = torch.promote_types(expected.dtype, torch.float32)
    expected, found = expected.to(wide), found.to(wide)
    return (expected - found).norm(dim=1) / expected.norm(dim=1).clamp(min=torch.finfo(wide).tiny)


# -- comparing --------------------------------------------------------------------------------------------------------


def _difference(
    lm: DecoderAndHead, plan: Plan, flat: _Flat, hidden: Tensor, logprobs: Tensor, probed: ProbedRows, spread: float
) -> str | None:
    """The first difference that is beyond its limit, in words: of hidden rows relative to them, or of log-probs."""
    decoder, images = type(lm.decoder).__name__, " with images" if len(plan.forest.images) else ""

    def restored(values: Tensor) -> list[Tensor]:
        return [values[torch.as_tensor(path, device=values.device)] for path in plan.forest.paths]

    if flat.hidden:
        gaps = [_gaps(*pair) for pair in zip(flat.hidden, restored(hidden), strict=True)]
        size, limit = torch.cat(gaps).max().item(), max(_ROW[0], _ROW[1] * spread)
        if not flat.is_exact:
            # FSDP2 may widen what layers return.
            dtypes = (flat.autocast,) if flat.autocast is not None else (hidden.dtype, lm.decoder.dtype)
            limit = max(_SPREADS * spread, _ROUNDINGS * max(torch.finfo(each).eps for each in dtypes))
            branches = [each[-own:] for each, own in zip(gaps, probed.own, strict=True)]
            size = max(each.median().item() for each in (gaps[0][: -probed.own[0]], *branches))
        by = f"{size:.3g} (limit {limit:.3g}) of a row"
        if not size <= limit and plan.is_whole:
            return (
                f"{decoder} leaks between branches, or computes something{images} from more than a token and what is "
                f"before it in its trajectory: hidden rows on a tree differ from its own forward's by {by}."
            )
        if not size <= limit:
            return (
                f"{decoder} computes other rows under a budget than without, by {by}: its layers pass on more than "
                "keys and values."
            )
    ours = torch.cat([each[1:] for each in restored(logprobs)])
    is_scored = torch.from_numpy(np.concatenate([item.loss_weights[1:] != 0 for item in probed.items]))
    gaps_L = (torch.cat(flat.logprobs) - ours)[is_scored].abs()
    size, limit = (gaps_L.max().item(), _LOGPROB) if flat.is_exact else (gaps_L.median().item(), _LOW_LOGPROB)
    if size <= limit:
        return None
    return (
        f"{type(lm.model).__name__}: log-probs on the tree differ from the model's own by {size:.3g} (limit "
        f"{limit:.3g}). It computes something{images} between decoder and logits that treewise does not support."
    )


def _refuse(lm: DecoderAndHead, loss: FlatLoss, flat: _Flat, difference: str) -> NoReturn:
    """A model that is random differs from itself, too."""
    with torch.no_grad(), uncompiled(lm.model), experts_in_loops(lm.model):
        again = torch.cat(loss.run(lm.model, lm.device).logprobs)
    if flat.is_exact and not torch.allclose(again, torch.cat(flat.logprobs), atol=1e-6):
        raise UnsupportedModelError(
            f"{type(lm.model).__name__} is random while training: the same tokens gave other log-probs. Call "
            "model.eval(), or disable what is random."
        )
    raise UnsupportedModelError(f"{difference} {_way_out(lm)}")


class _Gradients:
    """The flat gradients in `.grad` of P parameters, from which those of a tree are subtracted, half and half.

    way_out: ends a message; None: as for a model that does not follow a tree.
    """

    def __init__(self, lm: DecoderAndHead, trained: dict[str, nn.Parameter], way_out: str | None = None) -> None:
        self._trained, self._way_out = trained, way_out or _way_out(lm)
        self._has_experts = any(word in path for path, _ in named_modules(lm.decoder) for word in ("expert", "moe"))
        self._norms: list[tuple[str, np.ndarray]] = []
        self.note("")
        self.are_compared = torch.is_grad_enabled() and any(each.grad is not None for each in trained.values())

    def note(self, where: str) -> None:
        """Keeps the norms as they are now. where: under which budget a walk came before, in words."""
        grads = [each.grad for each in self._trained.values()]
        self._norms.append((where, np.array([0.0 if grad is None else grad.float().norm().item() for grad in grads])))

    def check(self, spread: float, *, is_exact: bool) -> None:
        """Raises `UnsupportedModelError` with the first parameter whose gradient is lost or another one."""
        flat = self._norms[0][1]
        whole = float(np.sqrt(np.square(flat).sum()))
        if not self.are_compared or not np.isfinite(flat).all():
            return  # flat training fails alike; the step reports it with its trees
        names = list(self._trained)

        def refuse(index: int, what: str) -> NoReturn:
            raise UnsupportedModelError(
                f"the gradient of {names[index]} {what}, where flat training's has norm {flat[index]:.3g} (whole "
                f"gradient {whole:.3g}). {self._way_out}"
            )

        is_routed = np.array([self._has_experts and any(word in name for word in _EXPERTS) for name in names])
        # In low precision a single expert may have tokens on one side only; a parameter of all in a layer has some.
        may_rest = is_routed & np.array([each.dim() < 3 for each in self._trained.values()])
        has_to_move = (flat > _UNREACHED * whole) & (is_exact | ~may_rest)
        for (_, before), (where, after) in pairwise(self._norms):
            for index in np.flatnonzero(has_to_move & (before == after))[:1]:
                refuse(index, f"has no gradient on the tree{where}")
        gaps = 2 * self._norms[-1][1]
        if is_exact:
            own, of_whole = (max(least, spreads * spread) for least, spreads in (_OWN, _WHOLE))
            limits = own * flat + of_whole * whole
            for index in np.flatnonzero(~(gaps <= limits))[:1]:
                refuse(index, f"differs on the tree by {gaps[index]:.3g}")
            return
        gaps[is_routed] = 0
        gap, limit = float(np.sqrt(np.square(gaps).sum())), (_LOW_EXPERTS if is_routed.any() else _LOW) * whole
        if not gap <= limit:
            index = int(np.argmax(gaps))
            refuse(index, f"differs on the tree by {gaps[index]:.3g} (all by {gap:.3g}, limit {limit:.3g})")


# -- beyond the rows --------------------------------------------------------------------------------------------------


@torch.no_grad()
def _check_head(lm: DecoderAndHead, token_ids: np.ndarray) -> None:
    """Compares masks far beyond the rows, and the head with the model's own way to its logits where these are large.

    Small logits hide a cap on them. Models that do not call their decoder as a module are left to the log-probs.
    """
    device = lm.device.type
    large: list[Tensor] = []
    dtype = torch.float32

    def enlarge(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        nonlocal dtype
        rows = getattr(output, "last_hidden_state", None)
        if isinstance(rows, Tensor) and rows.dim() == 3:
            largest = lm.head().logits(rows[0]).abs().max().item()
            output.last_hidden_state = rows * (_PROBED_LOGIT / max(largest, 1e-6))
            large.append(lm.head().logits(output.last_hidden_state[0]))
            dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else rows.dtype

    tokens = torch.as_tensor(token_ids, dtype=torch.long, device=lm.device)[None]
    hook = lm.decoder.register_forward_hook(enlarge)
    try:
        with observe_masks() as observations, uncompiled(lm.model):
            own: Tensor = lm.model(input_ids=tokens, use_cache=False).logits[0]
    finally:
        hook.remove()
    modules = set(lm.decoder.modules())
    check_masks([observation for observation in observations if observation.module in modules])
    if len(large) != 1 or large[0].shape != own.shape:
        return
    gap, largest = (large[0].float() - own.float()).abs().max().item(), own.abs().max().item()
    limit = max(1e-4, 8 * torch.finfo(dtype).eps) * max(largest, 1.0)
    if not gap <= limit:
        raise UnsupportedModelError(
            f"{type(lm.model).__name__}: logits from the same rows differ from the model's own by {gap:.3g} (limit "
            f"{limit:.3g}, largest logit {largest:.3g}). It scales or caps them in a way that treewise does not "
            f"support. {SUPPORTED_MODELS}"
        )
