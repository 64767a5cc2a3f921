"""Who would take longer than is left is left out by name, by its first rows or by what others took; by our clock."""

import pytest
import torch

from treewise.bench import Settings, make, measure_workload, pace, random_model, run
from treewise.bench.contestants import builders, prepare, twin
from treewise.bench.measure import measure
from treewise.bench.pace import REFERENCE, Pace, TooSlow
from treewise.tree.forest import Forest

CPU = torch.device("cpu")


class Clock:
    now = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(pace, "perf_counter", lambda: made.now)
    for module in ("pace", "measure"):
        monkeypatch.setattr(f"treewise.bench.{module}.synchronized_clock", lambda _: made.now)
    return made


def made_of_rows(of: Pace, clock: Clock, *seconds: float):
    """A step of rows of as many tokens each."""

    def step() -> float:
        for number, each in enumerate(seconds, 1):
            clock.now += each
            of.part(number, len(seconds), number / len(seconds))
        return 1.0

    return step


@pytest.mark.parametrize(
    ("rows", "after"),
    [
        ([10.0] * 14, 2),  # 140 s, and 60 are left
        ([40.0, 40.0], 1),  # more than half of what is left
        ([20.0, *[1.0] * 18], None),  # the first one began with what is done once
        ([4.0] * 7, None),  # two steps of 28 s fit
        ([5.0] * 7, 2),  # two of 35 do not
    ],
)
def test_a_step_is_predicted_from_its_first_rows(clock: Clock, rows: list[float], after: int | None) -> None:
    of = Pace(60.0)
    step = made_of_rows(of, clock, *rows)
    with of.first_step("flat", CPU):
        if after is None:
            step()
            return
        with pytest.raises(TooSlow) as found:
            step()
    took = sum(rows[:after])
    assert clock.now == took
    assert f"({after} of its {len(rows)} rows took {took:.3g} s), and 60 s of its 60 s are left (--max_seconds)" in str(
        found.value
    )
    step()  # once it was measured, a step is not watched


def test_the_reference_may_take_a_quarter(clock: Clock) -> None:
    of = Pace(60.0)
    with of.first_step(REFERENCE, CPU):
        made_of_rows(of, clock, 7.0, 7.0)()
    with of.first_step(REFERENCE, CPU), pytest.raises(TooSlow, match="a step would take some 21 s"):
        made_of_rows(of, clock, 7.0, 7.0, 7.0)()


def test_who_has_no_rows_is_refused_by_what_others_took(clock: Clock) -> None:
    of = Pace(60.0, {"flat": 1000, "merged": 1200, "tree": 500, "flat-ckpt": 1000, "trl": 4000})
    assert of.refusal("flat") is None  # nothing is known yet
    of.end("flat", 10.0, "first step", [])
    assert of.refusal("tree") is None
    assert of.refusal("merged") is None
    assert of.refusal("trl") == (
        "left out: a step would take some 40 s by what flat took, and 50 s of its 60 s are left (--max_seconds)"
    )
    clock.now += 25
    assert str(of.refusal("flat-ckpt")).startswith(
        "left out: a step would take some 13.3 s by what flat took, and 25 s"
    )
    assert Pace().refusal("trl") is None


def test_measuring_leaves_out_tells_and_stops_in_time(clock: Clock) -> None:
    model = torch.nn.Linear(1, 1)
    lines: list[str] = []
    of = Pace(60.0, {"flat": 1000, "slow": 2000, "tree": 500, "huge": 6000}, lines.append)
    steps = {
        "flat": made_of_rows(of, clock, 5.0, 5.0),
        "slow": made_of_rows(of, clock, *[9.0] * 9),
        "tree": made_of_rows(of, clock, 2.0),
        "huge": made_of_rows(of, clock, 1e9),
    }
    seen = []
    found = measure(model, steps, 5, pace=of, on_step=lambda measured: seen.append(sum(map(bool, measured.values()))))
    assert {name: len(each.seconds) for name, each in found.items()} == {"flat": 2, "slow": 0, "tree": 2, "huge": 0}
    assert clock.now == 10 + 18 + 2 + 2 * 12  # a third round would have ended at 66 s
    assert lines[0] == "flat: first step 10 s; some 50 s left, and 3 more to begin"
    assert lines[1] == "slow: left out"  # the reason stands below the table
    assert found["slow"].skipped.startswith(
        "left out: a step would take some 81 s (2 of its 9 rows took 18 s), and 40 s of"
    )
    assert lines[2] == "tree: first step 2 s; some 30 s left, and 1 more to begin"
    assert lines[3] == "huge: left out"
    assert found["huge"].skipped.startswith(
        "left out: a step would take some 24 s by what tree took, and 18 s of its 60"
    )
    assert lines[4:6] == ["flat: step 1 10 s; some 20 s left", "tree: step 1 2 s; some 18 s left"]
    assert len(seen) == 3 + 4


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return random_model("qwen3-tiny", torch.float32, CPU)


def test_rows_tell_how_far_they_are(model: torch.nn.Module) -> None:
    pytest.importorskip("trl")
    items = make("tau2", "tiny", 64).trajectories
    longest = max(map(len, items))
    made = builders(twin(model), items, Settings(["flat", "trl"], row_tokens=longest), [longest])
    for name in ("flat", f"trl@{longest}"):
        told: list[tuple[int, int, float]] = []
        contestant = prepare(made[name])
        contestant.step(lambda *part, told=told: told.append(part))
        assert [number for number, _, _ in told] == list(range(1, told[0][1] + 1))
        assert [done for *_, done in told] == sorted(done for *_, done in told)
        assert told[-1][2] == 1.0


def test_what_trls_rows_copy_is_said(model: torch.nn.Module) -> None:
    """The path down to the end of each of TRL's segments, which fork one token before trajectories differ."""
    pytest.importorskip("trl")
    items = make("grpo", "tiny", 64).trajectories
    forest = Forest.from_trajectories(items)
    made = builders(twin(model), items, Settings(["trl"], with_checkpointing=True), [])
    plain, checkpointed = prepare(made["trl"]), prepare(made["trl-ckpt"])
    prompt = int(forest.depth[forest.segments.start[1:]].max()) - 1
    rows = prompt + sum(map(len, items))
    config = model.config
    kibibytes = rows * config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * 4 / 1024
    assert plain.note == (
        f"copies the path of each of {1 + len(items)} segments in every layer, {rows:,} rows of keys and values: "
        f"{kibibytes:.2f} KiB in a forward, kept for the backward, where they are added up again"
    )
    assert "in a forward, where they are added" in checkpointed.note


def test_what_was_measured_until_then_is_handed_over(model: torch.nn.Module) -> None:
    """Who is cut short has the steps that ended; speeds are compared of those that have one."""
    partial, lines = [], []
    settings = Settings(["flat"], max_tokens=[30], repetitions=1)
    found = measure_workload(twin(model), make("grpo", "tiny", 64), settings, lines.append, partial.append)
    first, *_, last = partial
    assert first["contestants"]["flat"]["is_first_step_alone"]
    assert first["contestants"]["tree"]["skipped"] == "not measured: the run was cut short"
    assert first["speed_up"] == {}
    assert last == found
    announced = "8 trajectories, 241 flat tokens, 73 of the tree; flat, tree, tree@30 in turns, a step to warm up"
    assert lines[0] == f"{announced} and 1 step each where time allows"
    assert [line.split(":")[0] for line in lines[1:]] == ["flat", "tree", "tree@30"] * 2
    told: list[str] = []
    run(
        lambda: model,
        "tiny",
        lambda _: [make("grpo", "tiny", 64)],
        lambda _: None,
        settings,
        told.append,
        partial.append,
    )
    assert told[0].startswith(f"tiny, grpo: {announced} and 1 step each where time allows: some ")
    assert told[1].startswith("tiny, grpo: flat: first step ")
    assert (partial[-1]["model"], partial[-1]["workload"]) == ("tiny", "grpo")


def test_a_reference_that_takes_too_long_is_replaced_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_slow(self: Pace, number: int, total: int, done: float) -> None:
        if self._first_step is not None and self._first_step[0] == REFERENCE:
            raise TooSlow("left out: a step would take some 70 s")

    monkeypatch.setattr(Pace, "part", too_slow)
    model = random_model("qwen3-tiny", torch.bfloat16, CPU)
    row = measure_workload(model, make("grpo", "tiny", 64), Settings(["flat"], max_tokens=[30], repetitions=1))
    assert row["reference"] == "the first contestant (a float32 copy was left out: a step would take some 70 s)"
    assert row["contestants"]["flat"]["gradient_error"] == 0
