"""The numbers that are printed before the first step."""

from transformers import GPT2Config, MambaConfig, Qwen3Config, Qwen3VLConfig

from treewise.trainer.run_summary import length_warning
from treewise.trainer.survey import DataFacts, survey


def test_derived_numbers_are_printed_before_the_first_step(make_trainer, trees, capsys):
    make_trainer(trees, max_steps=3, max_tokens=32, gradient_accumulation_steps=2).train()
    text = capsys.readouterr().out
    facts = survey(trees)
    for expected in ("trees            7", f"{facts.num_tree_tokens:,}", "3 of 4 trees", "32 tokens", "micro-batches"):
        assert expected in text
    assert text.index("share ratio") < text.index("'loss'")


def test_a_path_beyond_the_positions_of_a_model_is_a_warning():
    facts = DataFacts("", 1, 1, 9, 9, 9, num_longest_tokens=9, longest_source="a.jsonl:7")
    text = {"max_position_embeddings": 8}
    for config in (Qwen3Config(**text), GPT2Config(n_positions=8), Qwen3VLConfig(text_config=text)):
        assert length_warning(config, facts).startswith("a.jsonl:7 has 9 tokens, the model was made for 8 ")
    assert length_warning(Qwen3Config(max_position_embeddings=9), facts) is None
    assert length_warning(MambaConfig(), facts) is None
