"""Text to token ids, each message once: long histories that share prefixes are cut at special tokens and remembered.

A tokenizer splits its input at special tokens before anything else, so the ids of a text are the ids of its pieces
("<|im_start|>user\\nHi" | "<|im_end|>\\n" | ...) in a row. Prompts of one record then cost one look-up per message
instead of a new tokenisation. Tokens that reach over their borders (`lstrip`, `normalized`, `single_word`) do not cut.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np

from treewise.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Pieces = tuple[np.ndarray, ...]
MAX_REMEMBERED_CHARS = 64_000_000
MAX_CONTEXT = 256  # characters in front of a text, behind which it is encoded


class _AddedToken(Protocol):
    """What is read of a token that was added to a vocabulary."""

    content: str
    special: bool
    normalized: bool
    lstrip: bool
    single_word: bool


class Encoder:
    """A tokenizer with a memory of pieces, for several threads. `encode` never adds special tokens.

    Raises:
        ConfigError: a tokenizer of no vocabulary, as transformers makes of a folder without its files.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.tokenizer = tokenizer
        table: Mapping[int, _AddedToken] = getattr(tokenizer, "added_tokens_decoder", {})
        added = table.values()
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
        newline, alone, after = self._encode_all(["\n", "a", "\na"])
        if not len(alone) and not len(self._encode_all(["the Quick 0"])[0]):
            raise ConfigError(
                f"{getattr(tokenizer, 'name_or_path', '') or 'the tokenizer'}: {type(tokenizer).__name__} makes no "
                "token of a text; are its files (tokenizer.json) complete?"
            )
        self._adds_space = not np.array_equal(alone, after[len(newline) :])

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

    def encode_behind(self, pairs: Sequence[tuple[str, str]]) -> list[np.ndarray]:
        """Ids of texts that follow others, each given behind what it follows, as the tokenizer writes them there.

        A special token may take the white space behind it along, and tokenizers with a prefix space put it in front of
        a text, or of the text behind each special token. So the text is encoded behind the end of what it follows, and
        the ids of that are cut off. Where they are others then (a token reaches over the border, which a model that
        sampled apart cannot have sampled), it is encoded behind a line, or alone.
        """
        contexts = [self._contexts(before) for before, _ in pairs]
        firsts = [(own[0], own[0] + text) for own, (_, text) in zip(contexts, pairs, strict=True)]
        self.encode([text for both in firsts for text in both])  # all at once, so that each is remembered
        return [self._behind(own, text)[1] for own, (_, text) in zip(contexts, pairs, strict=True)]

    def _behind(self, contexts: Sequence[str], text: str) -> tuple[str, np.ndarray]:
        """The first context that stays as it is in front of a text, and the ids of the text behind it."""
        for context in contexts:
            own, whole = map(joined, self.encode([context, context + text]))
            if np.array_equal(whole[: len(own)], own):
                return context, whole[len(own) :]
        raise AssertionError

    def _contexts(self, before: str) -> list[str]:
        """What a text is encoded behind: the end of what it follows from its last special token on, a line, nothing."""
        end = before[-MAX_CONTEXT:]
        last = max((match.start() for match in self._special.finditer(end)), default=-1)
        return [*([end[last:]] if last >= 0 else []), *(["\n"] if self._adds_space else []), ""]

    def trained_tokens(self, before: str, text: str, spans: Sequence[tuple[int, int]]) -> np.ndarray:
        """[tokens] bool, the tokens of a text whose characters all lie in a span; as `encode_behind` writes it.

        White space at a token's border does not count: " tree" belongs to a span that begins with "tree".

        Parameters:
            before: what the text follows.
            spans: half-open ranges of characters.

        Raises:
            DataError: a tokenizer that gives no character offsets of its tokens.
        """
        if not getattr(self.tokenizer, "is_fast", False):
            raise DataError(
                "parts of a turn are marked as trained ({% generation %} blocks, train_detail), which needs a fast "
                "tokenizer: this one gives no character offsets of its tokens."
            )
        context, ids = self._behind(self._contexts(before), text)
        found = self.tokenizer(context + text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        all_ids: list[int] = found["input_ids"]
        offsets: list[tuple[int, int]] = found["offset_mapping"]
        if not np.array_equal(all_ids[len(all_ids) - len(ids) :], ids):
            raise DataError(f"the tokens of {text[:40]!r} cannot be found again in the text.")
        is_trained = np.zeros(len(ids), dtype=bool)
        for index, (start, end) in enumerate(offsets[len(all_ids) - len(ids) :]):
            low, high = max(0, start - len(context)), max(0, end - len(context))
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

    def begin_token(self) -> str:
        """The text of that token; empty where there is none."""
        return str(self.tokenizer.bos_token) if len(self._begin) else ""

    def begins(self, text: str) -> bool:
        """Whether a plain text begins with the token that the tokenizer puts in front of it."""
        return len(self._begin) > 0 and text.startswith(self.tokenizer.bos_token)

    @cached_property
    def _begin(self) -> np.ndarray:
        bos: int | None = getattr(self.tokenizer, "bos_token_id", None)
        ids: list[int] = self.tokenizer("a")["input_ids"]
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
