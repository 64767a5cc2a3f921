"""What the calls of a run share between two of its optimizer steps, however it sends them.

For a client that sends one datum at a time and waits for each answer, each prefix is computed once: see
`engine.window`. When a window is used follows from the run's own requests, so a run that goes on after a kill ends with
the same weights.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from treewise.base import features
from treewise.engine.engine import TreeEngine
from treewise.errors import TreewiseError, UnsupportedModelError
from treewise.tree.forest import Forest

if TYPE_CHECKING:
    from treewise.engine.window import Window

# Tokens of calls for each of their common tree, from which a window is worth what it keeps; and from which also where
# its graphs are not held, so that each token is computed forward once more (4 in place of 3).
WORTH_IT, WORTH_IT_TWICE = 1.05, 1.4


class GradientsLostError(TreewiseError, RuntimeError):
    """Gradients of a step that could not be computed; the optimizer steps by none of them."""


class CallInWindow:
    """A call that was given to a window."""

    def __init__(self, window: "Window", forest: Forest) -> None:
        self._window, self._forest, window.is_new = window, forest, None
        self._before = window.num_flat_tokens, window.num_tokens

    @property
    def is_new(self) -> np.ndarray | None:
        """[T] bool, the tokens that no earlier call had computed, once it ran; None: the window did not take it."""
        return self._window.is_new

    @property
    def share_ratio(self) -> float:
        """Of all calls so far."""
        assert self.is_new is not None
        flat, tree = self._before
        return float((flat + self._forest.num_flat_tokens) / (tree + self.is_new.sum()))


class StepWindow:
    """The window of one run, and whether it is worth it.

    setting: `auto`, `none`, or the most tokens that it keeps. is_worth_it: whether the calls of the last step had
    enough in common; None: none was seen, and a window is used as long as it costs nothing. num_apart: calls with
    gradients since the last step that were computed by themselves though a window was there.
    """

    def __init__(self, setting: str) -> None:
        self._most = int(setting) if setting.isdecimal() else None
        self._is_off = setting == "none"
        self.is_worth_it: bool | None = None
        self._calls, self.num_apart = features.window.StepCalls(), 0
        self._window: Window | None = None
        self._lost = ""

    @property
    def has_gradients(self) -> bool:
        """Whether gradients came that no parameter has yet, or were lost."""
        return bool(self._lost) or (self._window is not None and self._window.has_gradients)

    @property
    def num_tokens(self) -> int:
        """Tokens whose keys and values it keeps."""
        return 0 if self._window is None else self._window.num_tokens

    @property
    def num_held(self) -> int:
        """Tokens whose graphs it holds."""
        return 0 if self._window is None else self._window.num_held

    def let_go(self) -> None:
        """Frees its graphs, for which others have use; the end computes them again."""
        if self._window is not None:
            self._window.let_go()

    # -- calls, within `Slots.using` of the run's weights -------------------------------------------------------------

    @contextmanager
    def around(self, engine: TreeEngine, forest: Forest, *, gradients: bool) -> Iterator["CallInWindow | None"]:
        """Inside, the engine computes a call within the window; None: by itself. An error leaves all as it was."""
        window = self._of_call(engine, forest) if gradients else self._to_read(forest)
        if window is None:
            yield None
        else:
            call, engine.in_window = CallInWindow(window, forest), window
            try:
                with window.all_or_nothing() if gradients else window.only_reading():
                    yield call
            finally:
                engine.in_window = None
            self.num_apart += gradients and call.is_new is None
        if gradients and not forest.has_images and not forest.has_routes:
            self._calls.add(forest)

    def _of_call(self, engine: TreeEngine, forest: Forest) -> "Window | None":
        self._refuse_a_part()
        if self._is_off or self.is_worth_it is False:
            return None
        if forest.has_images or forest.has_routes:  # which no window takes
            self.num_apart += 1
            return None
        if self._window is None:
            engine.plan(forest)  # measures the budget, if it is still to be
            try:
                self._window = features.window.new_window(engine, None, self._most)
            except UnsupportedModelError:  # recurrent layers: there is nothing to decide
                self._is_off = True
                return None
        window = self._window
        if not _has_room(window, forest, window.max_tokens):  # a new one begins
            self._give()
            self._refuse_a_part()
        most = window.hold_tokens
        if self.is_worth_it is None and most is not None and not _has_room(window, forest, most):
            self.num_apart += 1
            return None
        return window

    def _to_read(self, forest: Forest) -> "Window | None":
        """A call without gradients reads what is there, if that spares it anything."""
        window = self._window
        if forest.has_images or forest.has_routes:
            return None
        return window if window is not None and window.num_new(forest) < forest.num_tokens else None

    # -- its end ------------------------------------------------------------------------------------------------------

    def end(self) -> int:
        """The run's parameters get all gradients; returns how many tokens were computed again for it. Within
        `Slots.using`.

        Raises:
            GradientsLostError: they could not be computed, now or before. The caller drops what parameters have.
        """
        calls, self._calls, self.num_apart = self._calls, features.window.StepCalls(), 0
        again = self._give()
        lost, self._lost = self._lost, ""
        if lost:
            raise GradientsLostError(lost)
        if calls.num_call_tokens:
            hold = None if self._window is None else self._window.hold_tokens
            fits = hold is None or calls.num_tree_tokens <= hold
            least = WORTH_IT if fits else WORTH_IT_TWICE
            self.is_worth_it = calls.num_call_tokens >= least * calls.num_tree_tokens
        return again

    def forget(self) -> None:
        """Drops everything, as when other weights are loaded."""
        self._calls, self.num_apart, self._lost = features.window.StepCalls(), 0, ""
        if self._window is not None:
            self._window.drop()

    def _give(self) -> int:
        if self._window is None:
            return 0
        try:
            self._window.end()
        except (TreewiseError, RuntimeError, MemoryError) as error:
            self._lost = (
                f"the gradients of the calls since the last step could not be computed ({error}); all of them were "
                "dropped, and the weights are as before. Send the calls again."
            )
        return int(self._window.num_again)

    def _refuse_a_part(self) -> None:
        if self._lost:
            raise GradientsLostError(self._lost)


def _has_room(window: "Window", forest: Forest, most: int) -> bool:
    """Whether a window has at most so many tokens with those of a tree. What is new of it is looked up only where all
    of it might be too much."""
    room = most - window.num_tokens
    return forest.num_tokens <= room or window.num_new(forest) <= room
