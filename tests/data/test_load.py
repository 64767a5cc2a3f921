import json
import subprocess
import sys

import numpy as np
import pytest

from tests.damage import damages
from tests.dates import TEMPLATE, set_today
from treewise.data import RenderOptions, load_trees
from treewise.data.io import rows as row_store
from treewise.data.records import RecordReader
from treewise.errors import ConfigError, DataError

GOOD = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]}
BAD = {"messages": [{"role": "user", "content": "Hi"}]}


def same(a, b):
    assert a.fingerprint == b.fingerprint
    for one, other in zip(a, b, strict=True):
        assert (one.name, one.num_records, one.source) == (other.name, other.num_records, other.source)
        for x, y in zip(one.trajectories, other.trajectories, strict=True):
            assert np.array_equal(x.token_ids, y.token_ids)
            assert np.array_equal(x.loss_weights, y.loss_weights)
            assert (x.group, x.reward, x.rollout, x.source) == (y.group, y.reward, y.rollout, y.source)


@pytest.fixture
def no_rendering(monkeypatch):
    def fail(*_):
        raise AssertionError("rendered although cached")

    return lambda: monkeypatch.setattr(RecordReader, "read_samples", fail)


def test_a_second_load_comes_from_the_cache_and_is_equal(fixtures, tokenizer, tmp_path, no_rendering):
    path = fixtures / "whowhen.jsonl.gz"
    first = load_trees(path, tokenizer, cache_dir=tmp_path)
    no_rendering()
    second = load_trees(path, tokenizer, cache_dir=tmp_path)
    same(first, second)
    assert first.report == second.report
    assert [item.suffix for item in tmp_path.iterdir()] == [".parquet"]


@pytest.mark.slow
@pytest.mark.parametrize("change", ["options", "bytes", "template", "tools"])
def test_what_the_result_depends_on_is_part_of_the_key(write, tokenizer_folder, tmp_path, change):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    path, options = write(GOOD), RenderOptions(chat_template=None)
    load_trees(path, tokenizer, options=options, cache_dir=tmp_path / "cache")
    if change == "options":
        options = RenderOptions(train_on="last_assistant")
    elif change == "bytes":
        path = write(GOOD, GOOD)
    elif change == "template":
        tokenizer.chat_template = "{# new #}" + tokenizer.chat_template
    else:
        (path.parent / "tools.json").write_text("{}")
    load_trees(path, tokenizer, options=options, cache_dir=tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_template_that_writes_the_date_is_rendered_anew_each_day(
    write, tokenizer, tmp_path, monkeypatch, no_rendering
):
    def loaded(**options):
        return load_trees(path, tokenizer, options=options, cache_dir=tmp_path / "cache")

    def prompt(trees):
        return tokenizer.decode(trees[0].trajectories[0].token_ids)

    path = write(GOOD)
    set_today(monkeypatch, "2026-11-27")
    first = loaded(chat_template=TEMPLATE)
    assert "Today is 27 November 2026." in prompt(first)
    assert first.report.dates == ["2026-11-27"]
    assert first.report.warnings == ["the chat template writes today's date, which is 2026-11-27 here (template_date)"]
    undated = loaded()
    set_today(monkeypatch, "2026-11-28")
    second = loaded(chat_template=TEMPLATE)
    assert "Today is 28 November 2026." in prompt(second)
    assert second.fingerprint != first.fingerprint
    no_rendering()
    kept = loaded(chat_template=TEMPLATE, template_date="2026-11-27")
    same(kept, first)
    assert kept.report == first.report
    same(loaded(), undated)  # of other templates the day is no part of the key
    assert undated.report.dates == []


def test_workers_write_the_day_on_which_a_load_began(write, tokenizer, monkeypatch):
    path = write(*[GOOD] * 4)
    set_today(monkeypatch, "2024-02-03")
    trees = load_trees(path, tokenizer, options={"chat_template": TEMPLATE}, num_workers=1, read_only=True)
    assert "Today is 03 February 2024." in tokenizer.decode(trees[3].trajectories[0].token_ids)
    assert trees.report.dates == ["2024-02-03"]


@pytest.mark.parametrize("value", ["27.11.2026", "2026-1-2", "20261127", "today", ""])
def test_what_is_no_date_is_refused(tokenizer, value):
    with pytest.raises(ConfigError, match=r"template_date is .*; write a date as 2026-11-28"):
        load_trees([GOOD], tokenizer, options={"template_date": value})


@pytest.mark.representatives(".arrow")
@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_damaged_cache_is_rendered_again_with_a_warning(suffix, write, tokenizer, tmp_path, monkeypatch):
    if suffix == ".arrow":  # as of rows that exceed the memory; Arrow itself ends the process for a flipped length
        monkeypatch.setattr(row_store, "MAX_MEMORY_BYTES", 1)
    path, cache = write(GOOD, {**GOOD, "group": "g", "reward": 1}), tmp_path / "cache"
    first = load_trees(path, tokenizer, cache_dir=cache, num_workers=0)
    [entry] = cache.iterdir()
    assert entry.suffix == suffix
    for how in damages(entry, num_flips=40, num_cuts=5):
        again = load_trees(path, tokenizer, cache_dir=cache, num_workers=0)
        same(first, again)
        line, *rest = again.report.warnings
        assert line.startswith(f"{entry}: "), how
        assert line.endswith("it was rendered again."), how
        assert bool(rest) == entry.is_dir()  # in whose place no file can be put
        if not entry.is_dir():
            assert load_trees(path, tokenizer, cache_dir=cache, num_workers=0).report.warnings == []
        assert list(cache.iterdir()) == [entry]


def test_loads_with_dropped_records_are_not_cached(write, tokenizer, tmp_path):
    path, out = write(GOOD, BAD), tmp_path / "q.jsonl"
    for _ in range(2):
        dataset = load_trees(
            path, tokenizer, on_bad_record="quarantine", quarantine_path=out, cache_dir=tmp_path / "cache"
        )
        assert len(dataset.report.dropped) == 1
    assert not (tmp_path / "cache").exists()


def test_quarantined_records_are_written_with_place_and_reason(write, tokenizer, tmp_path):
    path, out = write(GOOD, BAD, '{"broken', GOOD), tmp_path / "q.jsonl"
    dataset = load_trees(path, tokenizer, on_bad_record="quarantine", quarantine_path=out)
    assert (len(dataset), dataset.report.num_records) == (2, 4)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["location"] for line in lines] == [f"{path}:2", f"{path}:3"]
    assert json.loads(lines[0]["record"]) == BAD
    assert [(line["location"], line["reason"]) for line in lines] == dataset.report.dropped


@pytest.mark.parametrize("data", ["rows.jsonl", "."])
def test_data_are_not_written_over_by_bad_records(data, write, tmp_path, monkeypatch):
    """As where someone mended the file of an earlier load, or names the folder in which it stands."""
    rows = write(GOOD, BAD, name="rows.jsonl")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.jsonl").symlink_to("rows.jsonl")
    before = rows.read_bytes()
    with pytest.raises(ConfigError, match=r"link.jsonl is among the data, .*give it another name"):
        load_trees(data, on_bad_record="quarantine", quarantine_path="link.jsonl")
    assert rows.read_bytes() == before


def test_bad_trees_given_by_line_are_quarantined_whole(write, tmp_path):
    nodes = [{"tree": 1, "parent": None, "token_ids": [1, 2]}, {"tree": 2, "parent": "x", "token_ids": [3]}]
    out = tmp_path / "q.jsonl"
    dataset = load_trees(write(*nodes), on_bad_record="quarantine", quarantine_path=out)
    assert len(dataset) == 1
    assert "does not exist" in out.read_text()


def test_nothing_left_after_quarantine_is_an_error(write, tokenizer, tmp_path):
    with pytest.raises(DataError, match=r"no record to train on .*1 record left out"):
        load_trees(write(BAD), tokenizer, on_bad_record="quarantine", quarantine_path=tmp_path / "q.jsonl")


def test_records_group_in_order_of_first_appearance(write):
    rows = [
        {"token_ids": [1, i + 2], **key} for i, key in enumerate([{"group": "b"}, {}, {"task_id": "a"}, {"group": "b"}])
    ]
    dataset = load_trees(path := write(*rows))
    assert [tree.name for tree in dataset] == ["b", f"{path}:2", "a"]
    assert [tree.num_records for tree in dataset] == [2, 1, 1]
    assert dataset[-1].name == "a"
    with pytest.raises(IndexError):
        dataset[3]


def test_group_by_names_the_field(write):
    rows = [{"token_ids": [1, 2], "group": i, "user": "u"} for i in range(3)]
    assert len(load_trees(write(*rows), options=RenderOptions(group_by="user"))) == 1
    with pytest.raises(DataError, match="no field 'team' to group by"):
        load_trees(write(*rows), options=RenderOptions(group_by="team"))


def test_groups_reach_over_files(write):
    paths = [write({"token_ids": [1, i], "group": "g"}, name=f"{i}.jsonl") for i in range(2)]
    assert len(load_trees(paths)) == 1


@pytest.mark.slow
def test_a_script_without_a_main_guard_may_use_processes(write):
    path = write(*({"token_ids": [1, i + 2]} for i in range(3)))
    script = f"from treewise.data import load_trees\nprint(len(load_trees({str(path)!r}, num_workers=1)))"
    result = subprocess.run([sys.executable, "-"], input=script, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "3"


@pytest.mark.slow
def test_processes_give_what_one_process_gives(fixtures, tokenizer, tmp_path):
    files = [fixtures / name for name in ("gsm8k.jsonl.gz", "tau_airline.jsonl.gz", "whowhen.jsonl.gz")]
    options = RenderOptions(chat_template="chatml")
    one = load_trees(files, tokenizer, options=options, num_workers=0, cache_dir=tmp_path / "a")
    two = load_trees(files, tokenizer, options=options, num_workers=2, cache_dir=tmp_path / "b")
    same(one, two)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_shown_on_a_terminal_and_nowhere_else(write, capsys, monkeypatch, is_terminal):
    if is_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")  # which rich takes for a terminal
    load_trees(write({"token_ids": [1, 2]}), progress=True)
    assert ("reading" in capsys.readouterr().err) == is_terminal


def test_a_tokenizer_may_be_given_by_its_folder(write, tokenizer, tokenizer_folder):
    assert load_trees(write(GOOD), tokenizer_folder).fingerprint == load_trees(write(GOOD), tokenizer).fingerprint
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_trees(write(GOOD), tokenizer_folder / "none")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"thinking": "keeps"}, "Did you mean 'keep'"),
        ({"train_on": "last"}, "choose one of all_assistant, last_assistant"),
        ({"max_length": 1}, "at least 2"),
        ({"chat_template_kwargs": {"a": {1}}}, "plain JSON"),
        ({"max_lenght": 5}, "Did you mean 'max_length'"),
    ],
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        RenderOptions.from_dict(options)


def test_bad_settings_of_a_load_are_refused(write):
    path = write({"token_ids": [1, 2]})
    with pytest.raises(ConfigError, match="on_bad_record"):
        load_trees(path, on_bad_record="ignore")
    with pytest.raises(ConfigError, match="num_workers is -1"):
        load_trees(path, num_workers=-1)
    with pytest.raises(ConfigError, match="quarantine_path"):
        load_trees(path, on_bad_record="quarantine", quarantine_path=path.parent / "no" / "q.jsonl")


@pytest.mark.slow
def test_data_imports_no_torch_and_no_transformers():
    code = "import sys, treewise.data; print({'torch', 'transformers'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


def test_options_may_be_a_mapping(write):
    path = write({"token_ids": [1, 2], "team": "a"}, {"token_ids": [3, 4], "team": "a"})
    assert len(load_trees(path, options={"group_by": "team"})) == 1
    with pytest.raises(ConfigError, match="Did you mean 'group_by'"):
        load_trees(path, options={"groupby": "team"})


def test_unknown_arguments_are_named(write):
    path = write({"token_ids": [1, 2]})
    with pytest.raises(ConfigError, match=r"no argument 'thinking'. It is an option: options=\{'thinking': ...\}"):
        load_trees(path, thinking="keep")
    with pytest.raises(ConfigError, match=r"no argument 'num_worker'. Did you mean 'num_workers'\?"):
        load_trees(path, num_worker=0)
    with pytest.raises(ConfigError, match=r"no argument 'max_lenght'. Did you mean 'max_length'\?"):
        load_trees(path, max_lenght=3)


def test_control_characters_of_a_group_are_escaped_in_its_name_alone(write):
    [tree] = load_trees(write({"token_ids": [1, 2], "group": "a\x1b]0;b\x07"}))
    assert tree.name == "a\\x1b]0;b\\x07"
    assert tree.trajectories[0].group == "a\x1b]0;b\x07"
