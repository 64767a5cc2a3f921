"""Ids of turns and of what stands between them, for every kind of tokenizer and of added tokens, against the whole
conversation as `apply_chat_template` tokenises it: in files, environments and agents' calls."""

import itertools
from functools import cache

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from treewise.data.render import chat
from treewise.data.render.messages import clean_conversation
from treewise.data.render.piece_tokenizer import Encoder
from treewise.data.render.template import Template
from treewise.rl.recorder.chat_tokens import ChatTokens, Turn

TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "user assistant Yes No . , ! ?",
    "I am\n\nhere two  spaces 42",
    "Yes\n\n",
]
SPECIAL = ["<s>", "<|u|>", "<|a|>", "<|e|>"]
TEMPLATES = {
    "lines": "{% for m in messages %}{{ '<|u|>' if m.role == 'user' else '<|a|>' }}\n{{ m.content }}<|e|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|a|>\n{% endif %}",
    "tight": "{% for m in messages %}{{ '<|u|>' if m.role == 'user' else '<|a|>' }}{{ m.content }}<|e|>{% endfor %}"
    "{% if add_generation_prompt %}<|a|>{% endif %}",
    "Llama 2": "{% for m in messages %}{% if m.role == 'user' %}{{ '<s>[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' <|e|>' }}{% endif %}{% endfor %}",
    "words": "{% for m in messages %}{{ m.role }}: {{ m.content }}<|e|>\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}",
}
CONTENTS = ["Yes", "the quick fox", "No.\nnew line", " two", "42 ", "A"]


def trained(raw, trainer):
    raw.train_from_iterator(TEXTS * 10, trainer(special_tokens=["<u>"], show_progress=False))
    return raw


def byte_level(has_prefix):
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=has_prefix)
    raw.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    return trained(raw, lambda **given: trainers.BpeTrainer(vocab_size=350, initial_alphabet=letters, **given))


def metaspace(scheme, splits, model):
    raw = Tokenizer(models.Unigram() if model == "Unigram" else models.BPE(unk_token="<u>"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=splits)
    raw.decoder = decoders.Metaspace(prepend_scheme=scheme, split=splits)
    if model == "Unigram":
        return trained(raw, lambda **given: trainers.UnigramTrainer(vocab_size=90, unk_token="<u>", **given))
    return trained(raw, lambda **given: trainers.BpeTrainer(vocab_size=200, **given))


def prepended():
    """As Llama's older tokenizers: a normalizer puts the space in front of each text between special tokens."""
    raw = Tokenizer(models.BPE(unk_token="<u>", fuse_unk=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return trained(raw, lambda **given: trainers.BpeTrainer(vocab_size=200, **given))


def word_piece():
    raw = Tokenizer(models.WordPiece(unk_token="<u>"))
    raw.normalizer, raw.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    raw.decoder = decoders.WordPiece()
    return trained(raw, lambda **given: trainers.WordPieceTrainer(vocab_size=200, **given))


KINDS = {
    "bytes": lambda: byte_level(has_prefix=False),
    "bytes, prefix": lambda: byte_level(has_prefix=True),
    "prepended": prepended,
    "WordPiece": word_piece,
    **{
        f"{model}, {scheme}{', split' if splits else ''}": lambda s=scheme, p=splits, m=model: metaspace(s, p, m)
        for model in ("BPE", "Unigram")
        for scheme in ("always", "first", "never")
        for splits in (False, True)
    },
}


@cache
def saved(kind):
    return KINDS[kind]().to_str()


def tokenizer_of(kind, template, **flags):
    """flags: of the special tokens."""
    raw = Tokenizer.from_str(saved(kind))
    raw.add_special_tokens([AddedToken(token, special=True, **flags) for token in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|e|>", bos_token="<s>")
    tokenizer.chat_template = template
    return tokenizer


def cases(kind):
    """Tokenizers and conversations in which each end is a token, and each prompt what the whole begins with."""
    names = ("lstrip", "rstrip", "normalized", "single_word")
    for number, flags in enumerate(itertools.product((False, True), repeat=4)):
        for template in TEMPLATES.values():
            tokenizer = tokenizer_of(kind, template, **dict(zip(names, flags, strict=True)))
            contents = [CONTENTS[(number + turn) % len(CONTENTS)] for turn in range(4)]
            talk = [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(contents)]
            end, wholes, prompts = tokenizer.eos_token_id, [], []
            for size in range(1, 5):
                ids = tokenizer.apply_chat_template(talk[:size], return_dict=False)
                wholes.append(ids[: len(ids) - ids[::-1].index(end)] if end in ids else ids)
                prompts.append(
                    tokenizer.apply_chat_template(talk[:size], return_dict=False, add_generation_prompt=True)
                )
            num_ends = 2 if template == TEMPLATES["Llama 2"] else 4
            begins = all(wholes[turn][: len(prompts[turn - 1])] == prompts[turn - 1] for turn in (1, 3))
            if begins and wholes[3].count(end) == num_ends and prompts[2][: len(wholes[1])] == wholes[1]:
                yield tokenizer, talk, wholes, prompts


@pytest.mark.representatives("bytes", "bytes, prefix", "prepended", "WordPiece", "BPE, first", "Unigram, always, split")
@pytest.mark.parametrize("kind", KINDS)
def test_turns_and_what_stands_between_are_as_in_the_whole(kind):
    found = list(cases(kind))
    assert len(found) >= 12
    assert any(token.rstrip for tokenizer, *_ in found for token in tokenizer.added_tokens_decoder.values())
    for tokenizer, talk, wholes, prompts in found:
        calls = chat.conversation_calls(clean_conversation(talk, "a"), "all_assistant", "a")
        rows = chat.render_calls(Template(Encoder(tokenizer), None, {}), calls, None, "a", [])
        ids = np.concatenate([rows[0].token_ids[: rows[1].shared], rows[1].token_ids])
        assert [rows[0].token_ids.tolist(), ids.tolist()] == [wholes[1], wholes[3]], tokenizer.chat_template

        tokens, sampled = ChatTokens(tokenizer), wholes[1][len(prompts[0]) :]
        assert list(tokens.prompt_ids(talk[:1])) == prompts[0]
        tail = tokens.answer_ids(talk[:1], talk[1], tokenizer.eos_token_id, talk[2:3], None, "a")
        assert wholes[1] + tail.tolist() == prompts[2], tokenizer.chat_template

        writer = ChatTokens(tokenizer)
        written = writer.written(talk[:3])
        turn = Turn(np.array(sampled), talk[1]["content"], is_ended=True, is_cut=False)
        rest = writer.tail(written, 2, turn)
        assert rest.num_kept == len(sampled)
        assert wholes[1] + writer.following_ids("<|e|>", rest.text).tolist() == prompts[2], tokenizer.chat_template


def test_what_an_end_takes_along_is_not_written_again():
    """Phi-3's ends take the line behind them."""
    tokenizer = tokenizer_of("bytes", TEMPLATES["lines"], rstrip=True)
    encoder = Encoder(tokenizer)
    assert encoder.encode_behind([("Yes<|e|>", "\n<|u|>\nA")])[0].tolist() == tokenizer("<|u|>A")["input_ids"]
    assert encoder.encode_behind([("Yes", "\nA")])[0].tolist() == tokenizer("\nA")["input_ids"]


def test_a_token_that_reaches_over_the_border_is_written_apart():
    """The header ends in a line that belongs to the prompt, whatever the content begins with."""
    raw = byte_level(has_prefix=False)
    raw.add_special_tokens(SPECIAL)
    encoder = Encoder(PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|e|>"))
    alone, two = (raw.encode(text).ids for text in ("\n", "\n\n"))
    assert len(two) == len(alone) == 1
    assert encoder.encode_behind([("<|a|>\n", "\n")])[0].tolist() == alone
