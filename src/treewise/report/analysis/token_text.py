"""The text of tokens: the bytes of each token, so that any run of tokens can be joined and shown.

Single tokens may be parts of a character, so text is joined as bytes and decoded last. A page that stores the
bytes of each token once can show the text of every segment.
"""

import re
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np

PROBE = "Hello, wörld 漢字\n\tif x == 1:  # 🙂\n"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenText:
    """Tokens to text. Without a tokenizer a token reads as its number, `[17]`.

    Parameters:
        tokenizer: a transformers tokenizer, the processor around one, or None.
    """

    def __init__(self, tokenizer: Any = None) -> None:
        tokenizer = self.tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        self._known: dict[int, bytes] = {}
        self._added: dict[int, str] = {}
        self.special_ids: frozenset[int] = frozenset()
        self.turn_ids: frozenset[int] = frozenset()  # those that begin or end a text, or fill it up
        if tokenizer is not None:
            added = getattr(tokenizer, "added_tokens_decoder", {})
            self._added = {int(number): str(token.content) for number, token in added.items()}
            special = {number for number, token in added.items() if token.special}
            ends = (getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad"))
            self.turn_ids = frozenset(number for number in ends if isinstance(number, int))
            self.special_ids = frozenset(map(int, special | set(tokenizer.all_special_ids)))

    @property
    def has_text(self) -> bool:
        return self.tokenizer is not None

    @property
    def special_texts(self) -> list[str]:
        """Contents of the special tokens, longest first."""
        texts = {self._added.get(number) or self.read([number]) for number in self.special_ids}
        return sorted((text for text in texts if text), key=len, reverse=True)

    def token_bytes(self, ids: Iterable[int] | np.ndarray) -> list[bytes]:
        """UTF-8 bytes of each token; a token that is a part of a character gives a part of its bytes."""
        numbers = ids.tolist() if isinstance(ids, np.ndarray) else list(map(int, ids))
        for number in dict.fromkeys(numbers):
            if number not in self._known:
                self._known[number] = self._bytes(number)
        return [self._known[number] for number in numbers]

    def read(self, ids: Iterable[int] | np.ndarray) -> str:
        """The text of a run of tokens; bytes that are no character read as U+FFFD."""
        return b"".join(self.token_bytes(ids)).decode("utf-8", "replace")

    def _bytes(self, number: int) -> bytes:
        if self.tokenizer is None:
            return f"[{number}]".encode()
        if number in self._added:
            return self._added[number].encode()
        token = self.tokenizer.convert_ids_to_tokens(number)
        if token is None:  # an id that the tokenizer does not have
            return f"[{number}]".encode()
        token = token if isinstance(token, str) else bytes(token).decode("utf-8", "replace")
        kind = self._kind
        if kind == "byte_level":
            return _of_byte_level(token, self._byte_of_char)
        if kind == "sentencepiece":
            return _of_sentencepiece(token)
        return str(self.tokenizer.decode([number])).encode()

    @cached_property
    def _byte_of_char(self) -> dict[str, int]:
        return {char: byte for byte, char in _printable_bytes().items()}

    @cached_property
    def _kind(self) -> str:
        """How the vocabulary writes bytes, found by writing a known text and reading it back."""
        ids = self.tokenizer(PROBE, add_special_tokens=False)["input_ids"]
        tokens = [str(token) for token in self.tokenizer.convert_ids_to_tokens(ids)]
        expected = PROBE.encode()
        if b"".join(_of_byte_level(token, self._byte_of_char) for token in tokens) == expected:
            return "byte_level"
        if b"".join(map(_of_sentencepiece, tokens)).lstrip(b" ") == expected:
            return "sentencepiece"
        return "unknown"  # as WordPiece: each token is decoded alone


def _of_byte_level(token: str, byte_of_char: dict[str, int]) -> bytes:
    if all(char in byte_of_char for char in token):
        return bytes(byte_of_char[char] for char in token)
    return token.encode()


def _of_sentencepiece(token: str) -> bytes:
    byte = _BYTE.fullmatch(token)
    return bytes([int(byte.group(1), 16)]) if byte else token.replace("\u2581", " ").encode()


def _printable_bytes() -> dict[int, str]:
    """Byte-level vocabularies write printable bytes as themselves and the others as characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in printable}
    for rank, byte in enumerate(byte for byte in range(256) if byte not in table):
        table[byte] = chr(0x100 + rank)
    return table
