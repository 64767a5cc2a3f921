"""Templates that would never end, or fill the memory, are stopped; others render as transformers renders them."""

import json
import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest
from transformers import AutoTokenizer

from treewise.data import load_trees
from treewise.data.render import template_process
from treewise.data.render.piece_tokenizer import Encoder
from treewise.data.render.template import Template
from treewise.errors import ConfigError

TALK = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
TWO_LOOPS = "{% for i in range(100000) %}{% for j in range(30000) %}a{% endfor %}{% endfor %}"
LONG = "{% set a = 'ab\n' * (messages|length * 15000000) %}"  # 90 million characters
# 60 lists in one another, each twice: 2**60 numbers for what looks at all of them.
NESTED = (
    "{% set n = namespace(x=[1], y=[1]) %}"
    "{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}"
)
TUPLES = NESTED.replace("[n.x, n.x]", "(n.x, n.x)").replace("[1]", "(1,)")
BEGUN = "{% set n = namespace(x='a', y={}, z=[]) %}"
TEMPLATES = {
    "output": TWO_LOOPS,
    "no output": TWO_LOOPS.replace("a{% endfor", "{% endfor", 1),
    "a block": "{% set x %}" + TWO_LOOPS + "{% endset %}",
    "a generation block": "{% generation %}" + TWO_LOOPS + "{% endgeneration %}",
    "a macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "a recursive loop": "{% for m in messages * 9 recursive %}{{ loop(messages * 9) if loop.depth < 30 }}{% endfor %}",
    "a lazy filter": "{% for i in range(100000) %}{% set x = range(100000)|map('string')|list %}{% endfor %}",
    "a constant": "{{ 'a' * 3000000000 }}",
    "a constant of constants": "{{ ('a' * 100000 * 100000)|length }}",
    "repetition": "{{ 'a' * (messages|length * 1000000000) }}",
    "a list": "{% set x = messages * 1000000000 %}",
    "a tuple": "{{ ((1, 2) * (messages|length * 1000000000))|length }}",
    "doubling by ~": BEGUN + "{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling by +": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling by format": BEGUN + "{% for i in range(60) %}{% set n.x = '%s%s' % (n.x, n.x) %}{% endfor %}",
    "output of much": LONG + "{% for i in range(50) %}{{ a }}{% endfor %}",
    "ljust": "{{ 'a'.ljust(3000000000) }}",
    "format": "{{ '{:>3000000000}'.format(1) }}",
    "format of a width": "{{ '{:>{w}}'.format(1, w=3000000000) }}",
    "percent of a width": "{{ '%*d' % (3000000000, messages|length) }}",
    "replace": LONG + "{{ a.replace('a', a) }}",
    "join": LONG + "{{ a.join(a) }}",
    "a filter of join": LONG + "{{ range(100000)|join(a) }}",
    "indent": LONG + "{{ a|indent(1000) }}",
    "expandtabs": "{{ ('\\t' * 10000000).expandtabs(1000) }}",
    "translate": LONG + "{{ a.translate({97: a}) }}",
    "tojson with an indent": "{{ messages|tojson(indent=1000000000) }}",
    "batch": "{{ 'a'|batch(1000000000, 'b')|list|length }}",
    "slice": "{{ 'a'|slice(1000000000)|list|length }}",
    "lipsum": "{{ lipsum(n=100000000) }}",
    "a power": "{{ (10 ** (messages|length * 1000000000)) > 1 }}",
    "a power of constants": "{{ (10 ** 1000000000) > 1 }}",
    "squares": "{% set n = namespace(x=10) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "a large division": "{% set n = namespace(x=7 ** 3000000) %}{{ (n.x ** 5 // (n.x - 1)) > 1 }}",
    "nested, string": NESTED + "{{ n.x|string|length }}",
    "nested, tojson": NESTED + "{{ n.x|tojson|length }}",
    "nested, ~": NESTED + "{{ (n.x ~ 'a')|length }}",
    "nested, ==": NESTED + "{{ n.x == n.y }}",
    "nested, <": NESTED + "{{ n.x < n.y }}",
    "nested, in": NESTED + "{{ n.x in [n.y] }}",
    "nested, written": NESTED + "{{ n.x }}",
    "nested, join": NESTED + "{{ [n.x, n.y]|join }}",
    "nested, percent": NESTED + "{{ ('%s' % [n.x])|length }}",
    "nested, format": NESTED + "{{ '{}'.format(n.x)|length }}",
    "nested, pprint": NESTED + "{{ n.x|pprint|length }}",
    "nested, sort": NESTED + "{{ [n.x, n.y, n.x]|sort|length }}",
    "nested, max": NESTED + "{{ [n.x, n.y]|max|length }}",
    "nested, groupby": NESTED + "{{ [{'k': n.x}, {'k': n.y}]|groupby('k')|length }}",
    "nested, index": NESTED + "{{ [n.x].index(n.y) }}",
    "nested, count": NESTED + "{{ [n.x, n.x].count(n.y) }}",
    "nested, escape": NESTED + "{{ n.x|escape|length }}",
    "nested, urlencode": NESTED + "{{ n.x|string|urlencode|length }}",
    "nested, a dictionary": NESTED + "{{ {'a': n.x} == {'a': n.y} }}",
    "nested tuples as keys": TUPLES + "{{ {n.x: 1}|length }}",
    "nested tuples, unique": TUPLES + "{{ [n.x]|unique|list|length }}",
    "nested dictionaries": BEGUN + "{% for i in range(60) %}{% set n.y = {'a': n.y, 'b': n.y} %}{% endfor %}{{ n.y }}",
    "keys of one hash": BEGUN + "{% for i in range(90000) %}{% set n.z = n.z + [i * (2 ** 61 - 1)] %}{% endfor %}"
    "{{ n.z|unique|list|length }}",
    "wordcount": LONG + "{% for i in range(100) %}{{ a|wordcount }}{% endfor %}",
    "title": LONG + "{% for i in range(100) %}{{ a|title|length }}{% endfor %}",
    "capitalize": LONG + "{% for i in range(9999) %}{{ a|capitalize|length }}{% endfor %}",
    "upper": LONG + "{% for i in range(9999) %}{{ a|upper|length }}{% endfor %}",
    "striptags": LONG + "{% for i in range(999) %}{{ ('<' ~ a)|striptags|length }}{% endfor %}",
    "urlize": LONG + "{{ a|urlize|length }}",
    "wordwrap": LONG + "{{ a|wordwrap(1)|length }}",
    "list of a text": LONG + "{{ a|list|length }}",
    "split": LONG + "{{ a.split('b')|length }}",
    "reverse": LONG + "{% for i in range(9999) %}{{ a|reverse|length }}{% endfor %}",
    "count": LONG + "{% for i in range(9999) %}{{ a.count('ba') }}{% endfor %}",
    "sums": "{% for i in range(99999) %}{{ range(100000)|sum }}{% endfor %}",
    "sorting": "{% for i in range(99999) %}{{ range(100000)|map('string')|sort|length }}{% endfor %}",
}
FIRST = (
    *("output", "a macro", "a lazy filter", "a constant", "doubling by ~", "output of much", "format of a width"),
    *("a filter of join", "a power", "nested, string", "nested, tojson", "nested, ==", "nested, sort", "wordcount"),
    *("nested tuples as keys", "a generation block"),
)
LIMITS = r"takes more than 0\.2 seconds|takes more than 0\.25 GiB of memory|makes more than 100,000,000 characters"


@pytest.fixture
def low_limits(monkeypatch):
    """Of time and memory, so that the tests take less of both. What is stopped would not end in any time."""
    monkeypatch.setattr(template_process, "MAX_SECONDS", 0.2)
    monkeypatch.setattr(template_process, "MAX_BYTES", 2**28)
    template_process.end()
    yield
    template_process.end()


@pytest.mark.usefixtures("low_limits")
@pytest.mark.representatives(*FIRST)
@pytest.mark.parametrize("name", TEMPLATES, ids=str)
def test_a_template_is_stopped_at_its_limits(name, tokenizer):
    with pytest.raises(
        ConfigError, match=rf"^(the chat template|chat_template) ({LIMITS}) .*not applied; give another"
    ):
        Template(Encoder(tokenizer), TEMPLATES[name] + PLAIN, {}).render([TALK], None, "here")


def test_memory_is_watched_where_the_system_does_not_limit_it(tokenizer, monkeypatch):
    """As on macOS."""
    command = template_process._command()
    monkeypatch.setattr(template_process, "_command", lambda: [*command[:5], str(2**31), *command[6:]])
    monkeypatch.setattr(template_process, "MAX_BYTES", 2**27)
    template_process.end()
    growing = BEGUN + "{% for i in range(100000) %}{% set n.z = n.z + [messages * 10000] %}{% endfor %}"
    with pytest.raises(ConfigError, match=r"^the chat template takes more than 0\.125 GiB of memory"):
        Template(Encoder(tokenizer), growing, {}).render([TALK], None, "here")
    monkeypatch.undo()
    template_process.end()


MUCH = (
    "{% macro f(x) %}[{{ x ~ 3 * 2 ~ ([1] + [2]) }}]{% endmacro %}"
    "{% for m in messages %}{% for c in 'ab' if c != 'a' %}{{ f(m.role)|replace('u', 'U')|indent(2) }}"
    "{{ '%s|%5d' % (c, loop.index) }}{{ '{:>4}'.format(c) }}{% endfor %}{% else %}{% endfor %}"
    "{{ messages|map(attribute='role')|join(', ') }}{{ ', '.join(['a', 'b']) }}{{ tools|tojson(indent=2) }}"
    "{{ '12345678 {} {:d}'.format('1234567', 12345678) }}{{ '1234567 %s' % 12345678 }}"
    "{% generation %}{{ 2 ** 3 }}{% endgeneration %}{{ 'a\tb'.expandtabs(2) }}{{ 'x'|center(5) }}"
    "{% set d = dict(a=1) %}{% set n = namespace(b=2) %}{% for i in [1, 2] %}{% if i == 2 %}{% break %}{% endif %}"
    "{{ d.a + n.b }}{% endfor %}{{ '<é>' | tojson }}"
    "{{ documents }}{{ bos_token }}{{ nothing }}\n  {% if true %}\nx\n{% endif %}"
)


def test_what_a_template_writes_is_what_transformers_writes(tokenizer, qwen3_template, tokenizer_folder):
    fresh = AutoTokenizer.from_pretrained(tokenizer_folder)
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": [1, None, "x"]}}}
    talk = [*TALK, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "5\ud800é"}]
    tools = [{"type": "function", "function": {"name": "f", "description": "d ~ e", "parameters": {}}}]
    for text in (qwen3_template, tokenizer.chat_template, MUCH):
        [ours] = Template(Encoder(tokenizer), text, {}).rendered([talk], tools, "here")
        assert ours.text == fresh.apply_chat_template(talk, tools=tools, chat_template=text, tokenize=False)


def test_blocks_of_generation_are_where_transformers_finds_them(tokenizer):
    text = "é {% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}-{% endfor %}"
    [ours] = Template(Encoder(tokenizer), text, {}).rendered([TALK], None, "here")
    assert ours.text == "é 2+2?-4-"
    assert ours.spans == [(2, 6), (7, 8)]


@pytest.mark.usefixtures("low_limits")
def test_a_template_that_only_some_conversations_keep_busy(tokenizer, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slow.jinja").write_text("{% if messages|length > 3 %}" + TWO_LOOPS + "{% endif %}" + PLAIN)
    template = Template(Encoder(tokenizer), "slow.jinja", {})
    assert template.render([TALK], None, "here") == ["user: 2+2?<|im_end|>assistant: 4<|im_end|>"]
    with pytest.raises(ConfigError, match=r"^chat_template 'slow.jinja' takes more than 0.2 seconds .* \(there\)"):
        template.render([TALK, [*TALK, *TALK]], None, "there")
    assert template.render([TALK[:1]], None, "here") == ["user: 2+2?<|im_end|>"]


def test_a_constant_that_is_not_reached_takes_nothing(tokenizer):
    template = Template(Encoder(tokenizer), "{% if false %}{{ 'a' * 3000000000 }}{% endif %}" + PLAIN, {})
    assert template.render([TALK[:1]], None, "here") == ["user: 2+2?<|im_end|>"]


def test_a_template_of_a_model_is_limited_in_a_load_too(tokenizer_folder, low_limits):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.chat_template = TWO_LOOPS + PLAIN
    with pytest.raises(ConfigError, match=r"^the chat template takes more than 0\.2 seconds"):
        load_trees([{"messages": TALK}], tokenizer)


# -- the process ------------------------------------------------------------------------------------------------------


def asked(text):
    request = {"template": text, "messages": [{}], "talks": [[0]], "tools": None, "variables": {}, "date": "2024-02-03"}
    [answer] = template_process.ask(json.dumps(request), 1)
    return answer["text"]


def pid():
    return template_process._process.pid


def test_a_process_that_was_killed_is_started_again():
    assert asked("a{{ 1 + 1 }}") == "a2"
    first = pid()
    os.kill(first, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(first)] if psutil.pid_exists(first) else [], timeout=60)
    assert asked("b") == "b"
    assert pid() != first


def test_signals_to_a_run_do_not_end_it():
    assert asked("a") == "a"
    first = pid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(first, number)
    assert asked("b") == "b"
    assert pid() == first


def test_threads_get_their_own_answers():
    found = {}

    def work(number):
        for turn in range(20):
            found[number, turn] = asked(f"{{{{ {number} * 100 + {turn} }}}}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {(n, t): str(n * 100 + t) for n in range(4) for t in range(20)}


def test_a_forked_process_asks_a_process_of_its_own():
    assert asked("a") == "a"
    first = pid()
    child = os.fork()
    if not child:
        is_right = asked("b") == "b" and pid() != first
        template_process.end()
        os._exit(0 if is_right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert asked("c") == "c"
    assert pid() == first


def test_it_ends_with_the_process_that_started_it():
    code = (
        "import os\nfrom treewise.data.render import template_process\n"
        """template_process.ask('{"template": "a"}', 1)\n"""
        "print(template_process._process.pid, flush=True)\nos._exit(1)"
    )
    number = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stdout)
    left = [psutil.Process(number)] if psutil.pid_exists(number) else []
    assert not psutil.wait_procs(left, timeout=60)[1]


def test_python_that_cannot_start_it_is_named(monkeypatch):
    monkeypatch.setattr(template_process, "_command", lambda: [sys.executable, "-c", "raise SystemExit('no jinja')"])
    template_process.end()
    with pytest.raises(template_process.RenderingError, match=rf"cannot be rendered by {sys.executable}: no jinja"):
        asked("a")
    monkeypatch.setattr(template_process, "_command", lambda: ["/nowhere/python"])
    with pytest.raises(template_process.RenderingError, match=r"cannot be rendered by .*\(No such file or directory\)"):
        asked("a")
    monkeypatch.undo()
    assert asked("a") == "a"
