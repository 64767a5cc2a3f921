"""Ranks whose model is sharded by another program (FSDP2): what they agree on before each call.

Every pass gathers layers, which all ranks do together. So a call is computed as trees on all ranks or on none, in one
pass each or in lockstep, and an error on one is raised on all.
"""

from dataclasses import dataclass, replace

from treewise.distributed import ranks
from treewise.distributed.others_shards import OthersShards
from treewise.engine.engine import TreeEngine
from treewise.integrations.batches.batch_forest import RowRules
from treewise.nn.gradient_hooks import refuse_hooks
from treewise.tree.forest import Forest


class Together:
    """The ranks of one engine, whose every call of the model reaches `agree`, then `begin` where trees are computed.

    num_cut: calls that some rank computed in several passes.
    """

    def __init__(self, engine: TreeEngine, shards: OthersShards) -> None:
        self._engine, self.shards = engine, shards
        self.num_cut = 0
        self._has_asked = False
        self._is_cut = self._is_checked = False
        engine.walk_inside(shards)

    def ask_once(self, rules: RowRules) -> None:
        """What forwards of a few tokens show of a model is asked on all ranks at once, before any call needs it."""
        if not self._has_asked:
            with self.shards.ends_whole():
                rules.is_relative()
                rules.cuts_rows()
            self._has_asked = True

    def completed(self, offer: "Offer", forest: Forest) -> "Offer":
        """The same with whether this rank's trees take several passes, and the model has been checked as it is.

        Raises:
            ConfigError: several passes, each of which would run a hook on an accumulated gradient.
            DataError: a token id beyond the vocabulary.
        """
        most = self._engine.max_tokens
        is_cut = most is not None and forest.num_tokens > most
        if is_cut:
            why = "and each pass over a batch above max_tokens would run it. Take it off, or leave max_tokens out."
            refuse_hooks(self._engine.model, why)
        return replace(offer, is_cut=is_cut, is_checked=self._engine.is_checked(forest))

    def agree(self, offers: "list[Offer]") -> None:
        """offers: of all ranks, which compute this call as trees."""
        self._is_cut = any(each.is_cut for each in offers)
        self._is_checked = all(each.is_checked for each in offers)

    def begin(self, forest: Forest) -> bool:
        """Whether the walks of this call run in lockstep. Compares a few tokens with the model's own forward, where it
        has changed since: the same ones on every rank, so that all find the same."""
        if not self._is_checked:
            trajectories = ranks.on_first_rank(lambda: list(forest.trajectories))
            self._engine.check_again(Forest.from_trajectories(trajectories))
        self.num_cut += self._is_cut
        return self._is_cut


@dataclass(frozen=True, slots=True)
class Offer:
    """What one rank can do with its rows of a call.

    left: why they have to be computed by the model's own forward; empty: they need not. is_own_call: it is meant for
    that, as in generation. level: of a log that says so. num_padded: tokens, padding included. num_tree: tokens of the
    tree. fits: within the budget, as they are. is_cut, is_checked: see `Together.completed`.
    """

    left: str = ""
    is_own_call: bool = False
    level: int = 0
    num_padded: int = 0
    num_tree: int = 0
    fits: bool = True
    is_cut: bool = False
    is_checked: bool = True
