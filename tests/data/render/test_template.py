import numpy as np
import pytest

from treewise.data import RenderOptions, load_trees
from treewise.data.render import piece_tokenizer, template_process
from treewise.data.render import template as templates
from treewise.data.render.piece_tokenizer import Encoder, joined
from treewise.data.render.template import Template, template_text
from treewise.errors import ConfigError, DataError

USER = {"role": "user", "content": "Hi"}
OPENS_THINKING = """\
{%- for m in messages %}{% if m.role == 'assistant' -%}
<|im_start|>assistant\n{{ m.content.split('</think>')[-1].lstrip('\\n') }}<|im_end|>\n
{%- else -%}
<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n
{%- endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"""


def load(write, tokenizer, messages, **options):
    [tree] = load_trees(write({"messages": messages}), tokenizer, options=RenderOptions(**options))
    return [
        tuple(tokenizer.decode(t.token_ids[(t.loss_weights > 0) == part]) for part in (False, True))
        for t in tree.trajectories
    ]


def answer(content="Yes.", **more):
    return {"role": "assistant", "content": content, **more}


def test_an_empty_think_block_that_the_template_writes_is_context(write, tokenizer, qwen3_template):
    path = write({"messages": [USER, answer(), USER, answer("No.")]})
    dataset = load_trees(path, tokenizer, options=RenderOptions(chat_template=qwen3_template))
    first, second = dataset[0].trajectories
    assert [tokenizer.decode(t.token_ids[t.loss_weights > 0]) for t in (first, second)] == [
        "Yes.<|im_end|>",
        "No.<|im_end|>",
    ]
    context = tokenizer.decode(second.token_ids[second.loss_weights == 0])
    assert context.count("<think>") == 1
    assert context.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    [finding] = dataset.report.warnings
    assert "enable_thinking: false" in finding
    prompted = RenderOptions(chat_template=qwen3_template, chat_template_kwargs={"enable_thinking": False})
    for ours, theirs in zip(
        (first, second), load_trees(path, tokenizer, options=prompted)[0].trajectories, strict=True
    ):
        assert np.array_equal(ours.token_ids, theirs.token_ids)
        assert np.array_equal(ours.loss_weights, theirs.loss_weights)


def test_an_empty_think_block_that_the_model_wrote_is_trained(write, tokenizer):
    content = "<think>\n\n</think>\n\nYes."
    assert load(write, tokenizer, [USER, answer(content)], chat_template="chatml")[0][1] == f"{content}<|im_end|>"


def test_qwen3_reasoning_is_trained_from_its_field_and_from_its_content(write, tokenizer, qwen3_template):
    by_field = load(write, tokenizer, [USER, answer(reasoning_content="Hm.")], chat_template=qwen3_template)
    in_text = load(write, tokenizer, [USER, answer("<think>\nHm.\n</think>\n\nYes.")], chat_template=qwen3_template)
    assert by_field == in_text
    assert by_field[0][1] == "<think>\nHm.\n</think>\n\nYes.<|im_end|>"


def test_a_closed_think_block_of_the_prompt_is_context(write, tokenizer, qwen3_template):
    options = {"chat_template": qwen3_template, "chat_template_kwargs": {"enable_thinking": False}}
    [(prompt, sampled)] = load(write, tokenizer, [USER, answer()], **options)
    assert prompt.endswith("<think>\n\n</think>\n\n")
    assert sampled == "Yes.<|im_end|>"


def test_reasoning_after_a_closed_think_block_cannot_be_aligned(write, tokenizer, qwen3_template):
    options = {"chat_template": qwen3_template, "chat_template_kwargs": {"enable_thinking": False}}
    with pytest.raises(DataError, match=r"jsonl:1: turn 1 .*does not begin with its prompt.*character \d+.*Hm"):
        load(write, tokenizer, [USER, answer(reasoning_content="Hm.")], **options)


def test_a_turn_right_after_another_is_found_though_the_history_changes(write, tokenizer, qwen3_template):
    messages = [USER, answer("One."), answer("Two.", reasoning_content="More.")]
    calls = load(write, tokenizer, messages, chat_template=qwen3_template)
    assert calls[1][0].endswith("<think>\n\n</think>\n\nOne.<|im_end|>\n<|im_start|>assistant\n")
    assert calls[1][1] == "<think>\nMore.\n</think>\n\nTwo.<|im_end|>"


def test_an_opened_think_block_continues_with_the_logged_reasoning(write, tokenizer):
    for turn in (answer(reasoning_content="Hm."), answer("<think>\nHm.\n</think>\n\nYes.")):
        [(prompt, sampled)] = load(write, tokenizer, [USER, turn], chat_template=OPENS_THINKING)
        assert prompt.endswith("<|im_start|>assistant\n<think>\n")
        assert sampled == "Hm.\n</think>\n\nYes.<|im_end|>"


def test_an_opened_think_block_without_reasoning_is_refused(write, tokenizer):
    with pytest.raises(DataError, match=r"turn 1 .*opens <think>.*no reasoning_content"):
        load(write, tokenizer, [USER, answer()], chat_template=OPENS_THINKING)


def test_keeping_is_refused_where_the_template_has_no_append_only_form(write, tokenizer):
    shown = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | upper }}{% if m.role == 'user' %}"
    lost = shown + "<|im_end|>{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    assert len(load(write, tokenizer, [USER, answer()], chat_template=lost)) == 1
    with pytest.raises(DataError, match="thinking='keep' is not possible"):
        load(write, tokenizer, [USER, answer(), USER, answer()], chat_template=lost, thinking="keep")


def test_a_missing_end_token_is_added_and_reported(write, tokenizer):
    turns = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    template = turns + "{% if add_generation_prompt %}[assistant] {% endif %}"
    dataset = load_trees(
        write({"messages": [USER, answer()]}), tokenizer, options=RenderOptions(chat_template=template)
    )
    [trajectory] = dataset[0].trajectories
    assert tokenizer.decode(trajectory.token_ids[trajectory.loss_weights > 0]) == "Yes.<|im_end|>"
    assert "end-of-turn" in dataset.report.warnings[0]


def test_tools_that_a_template_never_writes_are_reported(write, tokenizer):
    record = {"messages": [USER, answer()], "tools": [{"type": "function", "function": {"name": "f"}}]}
    dataset = load_trees(write(record), tokenizer)
    assert "never writes tools" in dataset.report.warnings[0]


def test_the_reason_of_a_refusing_template_is_passed_on(write, tokenizer):
    template = "{{ raise_exception('Roles must alternate') }}{# {{ #}"
    with pytest.raises(DataError, match=r"jsonl:1: .*Roles must alternate"):
        load(write, tokenizer, [USER, answer()], chat_template=template)


def test_a_tokenizer_without_a_template_says_what_to_give(write, tokenizer_folder):
    from transformers import AutoTokenizer

    bare = AutoTokenizer.from_pretrained(tokenizer_folder)
    bare.chat_template = None
    with pytest.raises(DataError, match="no chat template; give one as chat_template"):
        load(write, bare, [USER, answer()])


def test_a_template_may_lie_in_a_file(tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text("{{ messages }}")
    assert template_text(str(path)) == "{{ messages }}"
    path.write_bytes(b"{{ '\xe9' }}")
    for name, reason in (("none", "No such file"), ("t.jinja", "not UTF-8"), ("/dev/zero", "a pipe or a device")):
        with pytest.raises(ConfigError, match=f"neither Jinja text.*{reason}"):
            template_text(str(tmp_path / name))
    path.write_text("{{ " + "(" * 20_000)
    with pytest.raises(ConfigError, match=r"t\.jinja: Jinja nested too deeply"):
        template_text(str(path))


def test_a_conversation_is_rendered_once_and_by_all_that_its_text_depends_on(tokenizer, monkeypatch):
    """Records of a tree repeat their first turns."""
    template, applied = Template(Encoder(tokenizer), "chatml", {}), []
    ask = template_process.ask

    def counted(request, num_answers):
        applied.append(num_answers)
        return ask(request, num_answers)

    monkeypatch.setattr(template_process, "ask", counted)
    talk, tools = [USER, answer()], [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    (whole,) = template.render([talk], None, "here")
    (prompt,) = template.render([talk], None, "here", generation=True)
    assert prompt == whole + "<|im_start|>assistant\n"
    (with_tools,) = template.render([talk], tools, "here")
    assert '"name": "f"' in with_tools
    applied.clear()
    copies = [[dict(USER), answer()], [USER, answer("No.")], [USER, answer("No.")]]
    assert template.render(copies, None, "here")[0] == whole
    assert applied == [1]  # the new one
    assert "No." in template.render(copies, None, "here")[2]
    assert template.render([talk], tools, "here") == [with_tools]
    assert applied == [1]

    applied.clear()
    unknown = [{**USER, "images": [object()]}]  # what JSON cannot hold no template reads
    assert template.render([unknown], None, "here") == template.render([[USER]], None, "here")
    applied.clear()
    monkeypatch.setattr(templates, "MAX_KEPT", 0)
    template.render([[{**USER, "content": "Ho"}]], None, "here")
    assert template.render([talk], None, "here") == [whole]
    assert applied == [1, 1]  # nothing from before was kept


def test_pieces_give_the_ids_of_the_whole_text(fixtures, tokenizer):
    [tree] = load_trees(fixtures / "nemo.jsonl.gz", tokenizer, options=RenderOptions(chat_template="chatml"))
    texts = [tokenizer.decode(item.token_ids) for item in tree.trajectories] + ["", "plain", "<|im_end|>"]
    for text, pieces in zip(texts, Encoder(tokenizer).encode(texts), strict=True):
        assert np.array_equal(joined(pieces), tokenizer(text, add_special_tokens=False)["input_ids"])


class Crowded(Encoder):
    """Another thread encodes, and forgets what it does not need, when this one has just remembered its pieces."""

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "_known_chars" and value > 2:
            super().__setattr__(name, piece_tokenizer.MAX_REMEMBERED_CHARS + 1)
            self.encode(["b"])


def test_pieces_that_a_thread_needs_stay_while_another_one_forgets_them(tokenizer):
    pieces = Crowded(tokenizer).encode(["some words", "more words"])
    for found, expected in zip(pieces, Encoder(tokenizer).encode(["some words", "more words"]), strict=True):
        assert np.array_equal(joined(found), joined(expected))


def test_continuations_get_no_space_in_front_from_a_sentencepiece_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<u>", "▁", "a", "▁a", "b", "<0x0A>", "\n", "</s>"])}
    backend = Tokenizer(models.BPE(vocabulary, [("▁", "a")], unk_token="<u>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace()
    encoder = Encoder(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<u>", eos_token="</s>"))
    assert joined(encoder.encode(["a"])[0]).tolist() == [3]
    assert encoder.encode_behind([("b", "a")])[0].tolist() == [2]


def test_a_tokenizer_without_a_vocabulary_is_an_error(tmp_path):
    """transformers makes one of a folder without tokenizer.json; every text was no token at all."""
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    with pytest.raises(ConfigError, match=r"Qwen2Tokenizer makes no token of a text; are its files"):
        load_trees([{"messages": [USER, answer()]}], str(tmp_path), options={"chat_template": "chatml"})
