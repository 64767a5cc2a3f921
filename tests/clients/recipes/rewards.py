"""A reward that untrained models earn, too, and each answer another."""


def vowels(prompts: list[str], completions: list[str]) -> list[float]:
    """How many of the letters are vowels."""
    return [sum(letter in "aeiou" for letter in text) / max(1, len(text)) for text in completions]
