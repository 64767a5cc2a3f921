"""Another day, as `treewise` sees it, and a template that writes it."""

from datetime import date

import pytest

from treewise.data.io import options

TEMPLATE = (
    "{%- set d = strftime_now('%d %B %Y') %}<|im_start|>system\nToday is {{ d }}.<|im_end|>\n"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def set_today(monkeypatch: pytest.MonkeyPatch, day: str) -> None:
    """Makes a day, as 2026-11-28, that of every run from now on."""

    class Day(date):
        @classmethod
        def today(cls) -> date:
            return date.fromisoformat(day)

    monkeypatch.setattr(options, "date", Day)
