"""The table of reports/claims.md: what neighbours claim, what was seen here, and why it may differ."""

from typing import Any

Record = dict[str, Any]
TARGETS = {"gradient_norm": "policy", "imitation": "imitation"}


def claims(records: dict[str, Record]) -> str:
    """A row for each claim whose result there is. records: by the benchmark's name."""
    rows = {"claims-values": _values, "claims-training": _training, "claims-angles": _angles, "grow-wide": _growth}
    lines = ["| claim | claimed | seen here | why it may differ |", "|---|---|---|---|"]
    for name, cells_of in rows.items():
        if name in records:
            lines += [f"| {' | '.join(cells)} |" for cells in cells_of(records[name])]
    return "\n".join(lines)


def labels(record: Record) -> str:
    """Errors and biases of labels, by arm."""
    kinds = [(kind, label) for kind in ("start", "open", "all") for label in ("draws", "leaves")]
    lines = [f"| branching | games a tree | {' | '.join(f'{kind}, {label}' for kind, label in kinds)} |"]
    lines.append(f"|---|---:|{'---:|' * len(kinds)}")
    for row in record["rows"]:
        if "arm" in row:
            cells = [f"{row[f'error, {k}, {x}'][0]:.3f}, {row[f'bias, {k}, {x}'][0]:+.3f}" for k, x in kinds]
            lines.append(f"| `{row['arm']}` | {row['games']:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _span(figure: list[float], digits: int = 3, sign: str = "") -> str:
    value, low, high = (f"{each:{sign}.{digits}f}" for each in figure)
    return f"{value} [{low}, {high}]"


def _values(record: Record) -> list[tuple[str, ...]]:
    arms = {row["arm"]: row for row in record["rows"] if "arm" in row}
    rates = {name: row["rates"] for name, row in arms.items() if "rates" in row}
    seen = "; ".join(
        f"`{name}`: {_span(each['posterior, bin means'])} on means, {_span(each['posterior, by position'])} a position "
        f"(prior alone {each['prior, bin means'][0]:.3f} and {each['prior, by position'][0]:.3f})"
        for name, each in rates.items()
    )
    late = ", ".join(f"`{name}` {_span(row['rate, late'])}" for name, row in arms.items())
    bias = ", ".join(
        f"`{name}` {_span(row['bias, start, leaves'], sign='+')} and {_span(row['bias, start, draws'], sign='+')}"
        for name, row in arms.items()
    )
    return [
        (
            "LCR: the posterior estimate of the label change rate",
            "RMSE 0.023 on means, 0.11 to 0.18 a position, against empirical rates of 20,000 positions of Go",
            seen,
            "exact rates in place of empirical ones; a network of 64 units in place of one with a search; our bins",
        ),
        (
            "LCR: variations raise the rate of late positions, random ones do not",
            "a figure of the paper, no number at hand",
            late,
            "a game of some ten moves on 16 cells has few late positions",
        ),
        (
            "LCR: the mean of all results below a position labels its value",
            "no error is given",
            f"bias at the start, means over leaves and over draws: {bias}",
            "the paper has no exact values to compare with",
        ),
    ]


def _training(record: Record) -> list[tuple[str, ...]]:
    table = record["rows"][0]["table"]
    pairs = [name for name in table if " against " in name]
    seen = "; ".join(f"{name}: {_span(table[name]['mean'])}, at the end {_span(table[name]['last'])}" for name in pairs)
    return [
        (
            "LCR: players trained on guided trees win more, at equal moves",
            "guided 62 % (19 x 19) and 69 % (9 x 9) against none, random 35 % against none and 25.5 % against guided",
            f"share of games won, mean over iterations, {table['seeds']} seeds: {seen}",
            "no tree search, a solved game, one look ahead, 1,000 times fewer moves",
        )
    ]


def _angles(record: Record) -> list[tuple[str, ...]]:
    rows = [row for row in record["rows"] if "steps" in row]
    seen = []
    for steps in dict.fromkeys(row["steps"] for row in rows):
        own = [row for row in rows if row["steps"] == steps]
        parts = []
        for target, name in TARGETS.items():
            if target == "gradient_norm" and not all(row["varied"] > 2 for row in own):
                continue  # no rewards that differ, no policy gradient
            values = [row["correlations"][f"angle, {target}"][0] for row in own]
            parts.append(f"{', '.join(f'{value:+.2f}' for value in values)} ({name})")
        success = sum(row["success"] for row in own) / len(own)
        seen.append(f"after {steps} steps (success {success:.2f}): {'; '.join(parts)}")
    num_models = len({row["seed"] for row in rows})
    return [
        (
            "GAIN-RL: the larger the angle signal of a task, the larger its gradient",
            "the signal predicts the norm; 2.5 times the training efficiency follows",
            f"rank correlation of intra + inter with the norm, of {num_models} models. {'. '.join(seen)}",
            "a model of 112,000 parameters and prompts of a few characters, which share one token",
        )
    ]


def angles(record: Record) -> str:
    """Rank correlations of every signal at every stage of each model."""
    signals = ("angle", "intra", "inter", "length")
    heads = [f"{signal}, {name}" for name in TARGETS.values() for signal in signals]
    lines = [f"| model | steps | success | {' | '.join(heads)} |", f"|---|---:|---:|{'---|' * len(heads)}"]
    for row in record["rows"]:
        if "steps" in row:
            found = [row["correlations"][f"{signal}, {target}"] for target in TARGETS for signal in signals]
            cells = " | ".join(_span(figure, 2, "+") if any(figure) else "" for figure in found)
            lines.append(f"| {row['seed']} | {row['steps']} | {row['success']:.2f} | {cells} |")
    return "\n".join(lines)


def _growth(record: Record) -> list[tuple[str, ...]]:
    table = [row for row in record["rows"][0]["table"] if row["arm"] != "scratch"]
    seen = []
    for row in table:
        if "saved" in row:
            span = [100 * each for each in row["saved"]]
            figure = f"{span[0]:.0f}" if row["seeds"] == 1 else _span(span, 0)
            seen.append(f"`{row['arm']}` {figure} % ({100 * row['saved_free'][0]:.0f} % without its operator)")
        else:
            seen.append(f"`{row['arm']}` reached it in {row['reached']} of {row['seeds']} seeds")
    return [
        (
            "Mango: FLOPs saved to the loss of scratch",
            "76 % (DeiT-S to B), 59.9 % (GPT), 39.2 % (BERT), from memory; 12 and 21 points above bert2BERT and LiGO",
            f"{'; '.join(seen)}; seeds: {table[0]['seeds']}",
            "tiny models, a text of 430,000 characters; scratch has not converged; operators cost a larger share",
        )
    ]
