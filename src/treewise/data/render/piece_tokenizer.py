"""Text to token ids, each message once: long histories that share prefixes are cut at special tokens and remembered.

A tokenizer splits its input at special tokens before anything else, so the ids of a text are the ids of its pieces
("<|im_start|>user\\nHi" | "<|im_end|>\\n" | ...) in a row. Prompts of one record then cost one look-up per message
instead of a new tokenisation. Tokens that reach over their borders (`lstrip`, `normalized`, `single_word`) do not cut.
"""

import re
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from treewise.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Pieces = tuple[np.ndarray, ...]
MAX_REMEMBERED_CHARS = 64_000_000


class Encoder:
    """A tokenizer with a memory of pieces, for several threads. `encode` never adds special tokens.

    Raises:
        ConfigError: a tokenizer of no vocabulary, as transformers makes of a folder without its files.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        safe = {t.content for t in added if t.special and not (t.normalized or t.lstrip or t.single_word)}
        names = sorted((t.content for t in added), key=len, reverse=True)
        self._cut = re.compile("|".join(map(re.escape, names)) or "(?!)")
        self._safe = safe if getattr(tokenizer, "is_fast", False) else set()
        special = sorted({t.content for t in added if t.special} | set(tokenizer.all_special_tokens), key=len)
        any_special = "(?:" + ("|".join(map(re.escape, special[::-1])) or "(?!)") + ")"
        self._special = re.compile(any_special)
        self._ending = re.compile(any_special + r"(?=\s*\Z)")
        self._endings = re.compile(rf"(?:{any_special}\s*)+\Z")
        self._known: dict[str, np.ndarray] = {}
        self._known_chars = 0
        self._newline = self._encode_all(["\n"])[0]
        alone, after = self._encode_all(["a", "\na"])
        if not len(alone) and not len(self._encode_all(["the Quick 0"])[0]):
            raise ConfigError(
                f"{getattr(tokenizer, 'name_or_path', '') or 'the tokenizer'}: {type(tokenizer).__name__} makes no "
                "token of a text; are its files (tokenizer.json) complete?"
            )
        self._adds_space = not np.array_equal(alone, after[len(self._newline) :])

    def encode(self, texts: Sequence[str]) -> list[Pieces]:
        """Ids of texts, as pieces to be put in a row. Equal pieces are the same array."""
        cut = [self._pieces(text) for text in texts]
        needed = dict.fromkeys(piece for pieces in cut for piece in pieces)
        known = self._known  # in whose place another thread may put a smaller one
        if self._known_chars > MAX_REMEMBERED_CHARS:
            known = {piece: known[piece] for piece in needed if piece in known}
            self._known_chars, self._known = sum(map(len, known)), known
        new = [piece for piece in needed if piece not in known]
        known |= dict(zip(new, self._encode_all(new), strict=True))
        self._known_chars += sum(map(len, new))
        return [tuple(known[piece] for piece in pieces) for pieces in cut]

    def encode_continuations(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of texts that continue another text, so no space is put in front of the first word."""
        if not self._adds_space:
            return [joined(pieces) for pieces in self.encode(texts)]
        ids = self._encode_all(["\n" + text for text in texts])
        plain = self._encode_all(texts)
        cut = len(self._newline)
        return [
            with_line[cut:] if np.array_equal(with_line[:cut], self._newline) else without
            for with_line, without in zip(ids, plain, strict=True)
        ]

    def trained_tokens(self, text: str, spans: Sequence[tuple[int, int]], ids: np.ndarray) -> np.ndarray:
        """[len(ids)] bool, the tokens of a continuation whose characters all lie in a span.

        White space at a token's border does not count: " tree" belongs to a span that begins with "tree".

        Parameters:
            text: one that `encode_continuations` turned into `ids`.
            spans: half-open ranges of characters.

        Raises:
            DataError: a tokenizer that gives no character offsets of its tokens.
        """
        if not getattr(self.tokenizer, "is_fast", False):
            raise DataError(
                "parts of a turn are marked as trained ({% generation %} blocks, train_detail), which needs a fast "
                "tokenizer: this one gives no character offsets of its tokens."
            )
        for before in ("\n", "") if self._adds_space else ("",):
            found = self.tokenizer(before + text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            skipped = len(self._newline) if before else 0
            if np.array_equal(found["input_ids"][skipped:], ids):
                break
        else:
            raise DataError(f"the tokens of {text[:40]!r} cannot be found again in the text.")
        is_trained = np.zeros(len(ids), dtype=bool)
        for index, (start, end) in enumerate(found["offset_mapping"][skipped:]):
            low, high = max(0, start - len(before)), max(0, end - len(before))
            word = text[low:high].strip()
            if word:
                low = text.index(word, low)
                high = low + len(word)
            is_trained[index] = any(first <= low and high <= last and low < last for first, last in spans)
        return is_trained

    def end_of_turn(self, text: str) -> tuple[int, int] | None:
        """Where the special token that closes the text lies (white space may follow it); None where there is none."""
        match = self._ending.search(text, max(0, len(text.rstrip()) - 256))
        return match.span() if match else None

    def endings(self, text: str) -> list[tuple[int, int]]:
        """Where the special tokens lie that close the text one after another; white space may stand between them."""
        match = self._endings.search(text, max(0, len(text.rstrip()) - 256))
        return [special.span() for special in self._special.finditer(text, match.start())] if match else []

    def special_at(self, text: str) -> str | None:
        """The special token that a text begins with."""
        match = self._special.match(text)
        return match.group() if match else None

    def special_tokens(self, text: str) -> list[str]:
        """The special tokens that a text holds as text, each once."""
        return list(dict.fromkeys(self._special.findall(text)))

    def begin_ids(self) -> np.ndarray:
        """The ids that the tokenizer puts in front of a plain text (a begin-of-sequence token), if any."""
        return self._begin

    def begins(self, text: str) -> bool:
        """Whether a plain text begins with the token that the tokenizer puts in front of it."""
        return len(self._begin) > 0 and text.startswith(self.tokenizer.bos_token)

    @cached_property
    def _begin(self) -> np.ndarray:
        bos = getattr(self.tokenizer, "bos_token_id", None)
        ids = self.tokenizer("a")["input_ids"]
        return np.array([bos] if bos is not None and ids and ids[0] == bos else [], dtype=np.int32)

    def _pieces(self, text: str) -> list[str]:
        starts = [m.start() for m in self._cut.finditer(text) if m.group() in self._safe and m.start()]
        bounds = [0, *starts, len(text)]
        return [text[low:high] for low, high in pairwise(bounds) if high > low]

    def _encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        if not texts:
            return []
        ids = self.tokenizer(  # not verbose: a history longer than the model's context is no mistake of one text
            list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False
        )["input_ids"]
        return [np.asarray(item, dtype=np.int32) for item in ids]


def joined(pieces: Sequence[np.ndarray]) -> np.ndarray:
    """Pieces in one array."""
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int32)
