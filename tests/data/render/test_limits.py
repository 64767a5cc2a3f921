"""Templates that would never end, or fill the memory, are stopped; others render as transformers renders them."""

import itertools
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from treewise.data import load_trees
from treewise.data.render import limits
from treewise.errors import ConfigError

TALK = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
TWO_LOOPS = "{% for i in range(100000) %}{% for j in range(30000) %}a{% endfor %}{% endfor %}"
LONG = "{% set a = 'ab\n' * 1000000 %}"
SECONDS, CHARACTERS = "takes more than 10 seconds", "makes more than 100,000,000 characters"
WIDE = "pads"
TEMPLATES = {
    "output": (TWO_LOOPS, SECONDS),
    "no output": (TWO_LOOPS.replace("a{% endfor", "{% endfor", 1), SECONDS),
    "a block": ("{% set x %}" + TWO_LOOPS + "{% endset %}", SECONDS),
    "a macro": ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}", SECONDS),
    "a recursive loop": (
        "{% for m in messages recursive %}{{ loop(messages) if loop.depth < 100 }}{% endfor %}",
        SECONDS,
    ),
    "a filter": ("{% for i in range(100000) %}{% set x = range(100000)|map('string')|list %}{% endfor %}", SECONDS),
    "a constant": ("{{ 'a' * 3000000000 }}", CHARACTERS),
    "a constant of constants": ("{{ 'a' * 100000 * 100000 }}", CHARACTERS),
    "a constant that is not reached": ("{% if false %}{{ 'a' * 3000000000 }}{% endif %}", CHARACTERS),
    "a filter of a constant": ("{{ 'a'|center(3000000000) }}", WIDE),
    "repetition": ("{{ 'a' * (messages|length * 1000000000) }}", CHARACTERS),
    "repetition from the left": ("{{ (messages|length * 1000000000) * 'a' }}", CHARACTERS),
    "a list": ("{% set x = messages * 100000000 %}", "makes more than 10,000,000 items"),
    "doubling": (
        "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        CHARACTERS,
    ),
    "doubling by +": (
        "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        CHARACTERS,
    ),
    "output of much": (LONG + "{% for i in range(50) %}{{ a }}{% endfor %}", CHARACTERS),
    "ljust": ("{{ 'a'.ljust(3000000000) }}", WIDE),
    "format": ("{{ '{:>3000000000}'.format(1) }}", WIDE),
    "format of a width": ("{{ '{:>{w}}'.format(1, w=3000000000) }}", WIDE),
    "percent": ("{{ '%3000000000d' % messages|length }}", WIDE),
    "percent of a width": ("{{ '%*d' % (3000000000, messages|length) }}", WIDE),
    "a filter of format": ("{{ '%3000000000d'|format(messages|length) }}", WIDE),
    "replace": (LONG + "{{ a.replace('a', a) }}", CHARACTERS),
    "a filter of replace": (LONG + "{{ a|replace('a', a) }}", CHARACTERS),
    "join": (LONG + "{{ a.join(a) }}", CHARACTERS),
    "a filter of join": (LONG + "{{ range(100000)|join(a) }}", CHARACTERS),
    "indent": (LONG + "{{ a|indent(1000) }}", CHARACTERS),
    "expandtabs": ("{{ ('\\t' * 1000000).expandtabs(1000) }}", CHARACTERS),
    "translate": (LONG + "{{ a.translate({97: a}) }}", CHARACTERS),
    "tojson": ("{{ messages|tojson(indent=1000000) }}", WIDE),
    "lipsum": ("{{ lipsum(n=100000000) }}", WIDE),
    "a power": ("{{ (10 ** (messages|length * 1000000000)) > 1 }}", "computes a number of more than 100,000 bits"),
    "a power of constants": ("{{ 10 ** 1000000000 }}", "computes a number of more than 100,000 bits"),
    "squares": (
        "{% set n = namespace(x=10) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "computes a number of more than 100,000 bits",
    ),
}


MUCH = (
    "{% macro f(x) %}[{{ x ~ 3 * 2 ~ ([1] + [2]) }}]{% endmacro %}"
    "{% for m in messages %}{% for c in 'ab' if c != 'a' %}{{ f(m.role)|replace('u', 'U')|indent(2) }}"
    "{{ '%s|%5d' % (c, loop.index) }}{{ '{:>4}'.format(c) }}{% endfor %}{% else %}{% endfor %}"
    "{{ messages|map(attribute='role')|join(', ') }}{{ ', '.join(['a', 'b']) }}{{ tools|tojson(indent=2) }}"
    "{{ '12345678 {} {:d}'.format('1234567', 12345678) }}{{ '1234567 %s' % 12345678 }}"
    "{% generation %}{{ 2 ** 3 }}{% endgeneration %}{{ 'a\tb'.expandtabs(2) }}{{ 'x'|center(5) }}"
)


@pytest.fixture
def fast_clock(monkeypatch):
    """A clock that goes on whenever it is looked at: 10 seconds are 200 turns of a loop, on every machine."""
    looks = itertools.count()
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=lambda: next(looks) / 20))


@pytest.mark.usefixtures("fast_clock")
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_is_stopped_at_its_limits(name, tokenizer):
    template, words = TEMPLATES[name]
    with pytest.raises(ConfigError, match=rf"^the chat template {words}.* for one conversation .*another chat_"):
        load_trees([{"messages": TALK}], tokenizer, options={"chat_template": template + PLAIN})


@pytest.mark.usefixtures("fast_clock")
def test_a_template_that_only_some_conversations_keep_busy(tokenizer, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slow.jinja").write_text("{% if messages|length > 3 %}" + TWO_LOOPS + "{% endif %}" + PLAIN)
    records = [{"messages": TALK}, {"messages": [*TALK, *TALK]}]
    options = {"chat_template": "slow.jinja"}
    load_trees(records[:1], tokenizer, options=options)
    with pytest.raises(ConfigError, match=r"^chat_template 'slow.jinja' takes more than 10 .* \(records:1"):
        load_trees(records, tokenizer, options=options)


@pytest.mark.usefixtures("fast_clock")
def test_blocks_of_generation_are_limited_too(tokenizer):
    inner = "{% generation %}{{ m.content }}{% endgeneration %}" + TWO_LOOPS
    with pytest.raises(ConfigError, match="takes more than 10 seconds"):
        load_trees([{"messages": TALK}], tokenizer, options={"chat_template": PLAIN.replace("{{ m.content }}", inner)})


def test_what_a_template_writes_stays_the_same(tokenizer, qwen3_template, tokenizer_folder):
    """transformers' own text, of the same template with another first character, which nothing limits."""
    fresh = AutoTokenizer.from_pretrained(tokenizer_folder)
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": [1, None, "x"]}}}
    talk = [*TALK, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "5"}]
    tools = [{"type": "function", "function": {"name": "f", "description": "d ~ e", "parameters": {}}}]
    for template in (qwen3_template, tokenizer.chat_template, MUCH):
        with limits.limited(template):
            ours = tokenizer.apply_chat_template(talk, tools=tools, chat_template=template, tokenize=False)
        assert ours == fresh.apply_chat_template(talk, tools=tools, chat_template="{#-#}" + template, tokenize=False)


def test_nothing_is_limited_outside(tokenizer, monkeypatch):
    template = "{% for i in range(1000) %}{% endfor %}" + PLAIN
    with limits.limited(template):
        inside = tokenizer.apply_chat_template(TALK, chat_template=template, tokenize=False)
    monkeypatch.setattr(limits, "MAX_SECONDS", -1)
    with limits.limited(template), pytest.raises(limits.TemplateLimitError):
        tokenizer.apply_chat_template(TALK, chat_template=template, tokenize=False)
    assert tokenizer.apply_chat_template(TALK, chat_template=template, tokenize=False) == inside
