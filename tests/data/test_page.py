"""The records that docs/forms.md shows are read as it says."""

import re
from pathlib import Path

import pytest

from treewise.data import RenderOptions, load_trees

PAGE = (Path(__file__).parents[2] / "docs" / "forms.md").read_text(encoding="utf-8")
CHATML = RenderOptions(chat_template="chatml")
# Heading of the section: trajectories of each of its blocks.
SHOWN = {
    "Chat": [2],
    "Prompt and completion": [1],
    "Token rows": [1, 2],
    "Logged calls": [2],
    "Preference pairs": [2, 1],
    "Forms of other libraries": [1, 1, 1, 1],
    "Declared trees": [2, 1],
}


def blocks_of(heading: str) -> list[str]:
    section = PAGE.split(f"\n### {heading}\n")[1].split("\n##")[0]
    return re.findall(r"^```json\n(.*?)^```", section, re.DOTALL | re.MULTILINE)


def test_every_section_is_read_below() -> None:
    forms = PAGE
    assert re.findall(r"^### (.*)$", forms, re.MULTILINE) == list(SHOWN)


@pytest.mark.parametrize(("heading", "counts"), SHOWN.items())
def test_records_are_read(heading: str, counts: list[int], write, tokenizer) -> None:
    blocks = blocks_of(heading)
    assert len(blocks) == len(counts)
    for block, count in zip(blocks, counts, strict=True):
        line = " ".join(block.split())
        if '"tree"' in line:  # a file of nodes needs one that is trained
            line += '\n{"tree": "search-7", "id": "a", "parent": "prompt", "token_ids": [9, 2]}'
        (tree,) = load_trees(write(*line.splitlines()), tokenizer, options=CHATML)
        assert tree.forest().num_trajectories == count


def test_what_the_page_says_of_them(write, tokenizer) -> None:
    def read(heading: str, number: int = 0):
        (tree,) = load_trees(write(" ".join(blocks_of(heading)[number].split())), tokenizer, options=CHATML)
        return tree.forest()

    assert read("Chat").leaf_ratio == 1.0  # the second begins with the first
    assert read("Declared trees").num_tokens == 6
    assert read("Token rows", 1).flat_stream("sampler_logprobs").tolist() == pytest.approx(
        [0, 0, -0.1, -0.2, 0, 0, -1.1, -0.3]
    )
    calls = read("Logged calls")
    assert "Read the file" not in tokenizer.decode(calls.trajectories[1].token_ids)
    first = read("Prompt and completion").trajectories[0]
    assert tokenizer.decode(first.token_ids) == "2+2=4" + tokenizer.eos_token
