"""Calls between two optimizer steps share what they have in common."""

from treewise.engine.window.known_rows import StepCalls
from treewise.engine.window.window import Window, WindowWalk, new_window

__all__ = ["StepCalls", "Window", "WindowWalk", "new_window"]
