"""Tokens as text: bytes join to what was written, whatever the kind of vocabulary."""

from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treewise.report.analysis.token_text import PROBE, TokenText

TEXTS = (
    "plain words",
    PROBE,
    "é漢🙂",
    "tabs\tand\n\nlines",
    "<|im_start|>user\nhi<|im_end|>\n",
    " leading and trailing ",
)


class SentencePiece:
    """Stands for a vocabulary of pieces with U+2581 for spaces and `<0x..>` for bytes, as Llama 2 has it."""

    all_special_ids = ()
    added_tokens_decoder: ClassVar[dict[int, object]] = {}

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:
        self.pieces: list[str] = ["\u2581"]
        for char in text:
            known = char.isascii() and char.isprintable()
            self.pieces += [char.replace(" ", "\u2581")] if known else [f"<0x{byte:02X}>" for byte in char.encode()]
        return {"input_ids": list(range(len(self.pieces)))}

    def convert_ids_to_tokens(self, ids: int | list[int]) -> str | list[str]:
        return self.pieces[ids] if isinstance(ids, int) else [self.pieces[i] for i in ids]


@pytest.mark.parametrize("text", TEXTS)
def test_a_byte_level_vocabulary_reads_as_it_was_written(tokenizer, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert TokenText(tokenizer).read(np.array(ids)) == text


@given(text=st.text(max_size=30))
def test_any_text_reads_as_the_tokenizer_decodes_it(tokenizer, text: str) -> None:
    """Not always as it was written: this vocabulary lacks a few bytes of characters that nobody uses."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert TokenText(tokenizer).read(ids) == tokenizer.decode(ids)


def test_a_part_of_a_character_is_a_part_of_its_bytes(tokenizer) -> None:
    ids = tokenizer("漢", add_special_tokens=False)["input_ids"]
    assert len(ids) > 1
    assert b"".join(TokenText(tokenizer).token_bytes(ids)) == "漢".encode()


@pytest.mark.parametrize("text", TEXTS)
def test_sentencepiece_reads_as_it_was_written(text: str) -> None:
    tokenizer = SentencePiece()
    reader = TokenText(tokenizer)
    assert reader._kind == "sentencepiece"
    ids = tokenizer(text)["input_ids"]
    assert reader.read(ids).removeprefix(" ") == text


def test_without_a_tokenizer_tokens_read_as_numbers() -> None:
    reader = TokenText()
    assert not reader.has_text
    assert reader.read([7, 12]) == "[7][12]"


def test_an_id_beyond_the_vocabulary_reads_as_its_number(tokenizer) -> None:
    assert TokenText(tokenizer).read([10_000_000]) == "[10000000]"


def test_special_tokens_are_known(tokenizer) -> None:
    reader = TokenText(tokenizer)
    assert "<|im_end|>" in reader.special_texts
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in reader.special_ids
