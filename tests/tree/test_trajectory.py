"""Trajectories: what is accepted and converted, and the message for everything that is not."""

from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from treewise.errors import DataError, TreewiseError
from treewise.tree.checks import MAX_TOKEN_ID
from treewise.tree.trajectory import Trajectory

NAN, INF = float("nan"), float("inf")


def test_defaults_train_every_token_but_the_first():
    trajectory = Trajectory([5, 6, 7])
    assert trajectory.loss_weights.tolist() == [0, 1, 1]
    assert trajectory.num_trained_tokens == 2
    assert len(trajectory) == 3
    assert trajectory.advantages is None
    assert trajectory.old_logprobs is None
    assert trajectory.reward is None


@pytest.mark.parametrize(
    "token_ids",
    [
        [1, 2, 3],
        (1, 2, 3),
        range(1, 4),
        np.array([1, 2, 3], dtype=np.uint8),
        np.array([1, 2, 3], dtype=np.uint64),
        np.array([1, 2, 3], dtype=">i8"),
        np.array([1, 0, 2, 0, 3])[::2],
        [np.int64(1), 2, np.int16(3)],
    ],
)
def test_token_ids_of_any_integer_type_become_int32(token_ids):
    made = Trajectory(token_ids).token_ids
    assert made.dtype == np.int32
    assert made.flags.c_contiguous
    assert made.tolist() == [1, 2, 3]


def test_the_largest_token_id_is_accepted():
    assert Trajectory([0, MAX_TOKEN_ID]).token_ids.tolist() == [0, 2**31 - 1]


@pytest.mark.parametrize("values", [[0, 1, 1], [False, True, True], np.array([0, 1, 1], dtype=np.float64), (0, 1.0, 1)])
@pytest.mark.parametrize("name", ["loss_weights", "advantages", "old_logprobs", "ref_logprobs"])
def test_streams_become_float32(name, values):
    made = getattr(Trajectory([1, 2, 3], **{name: values}), name)
    assert made.dtype == np.float32
    assert made.tolist() == [0, 1, 1]


@pytest.mark.parametrize("advantage", [-2, 0.25, np.float16(0.25), np.array(3)])
def test_one_advantage_holds_for_all_tokens(advantage):
    made = Trajectory([1, 2, 3], advantages=advantage).advantages
    assert made.tolist() == [float(advantage)] * 3


def test_a_reward_becomes_a_float():
    assert type(Trajectory([1, 2], reward=np.float32(0.5)).reward) is float


def test_a_trajectory_is_frozen():
    with pytest.raises(FrozenInstanceError):
        Trajectory([1, 2]).reward = 1.0


BAD_TOKEN_IDS = [
    ([], "token_ids is empty"),
    (np.zeros(0, dtype=np.int64), "token_ids is empty"),
    ([7], "one token only"),
    ([1, 2.0], "integers, found float at position 1"),
    (np.array([1.0, 2.0]), "integers, found float64"),
    ([1, NAN], "integers, found float at position 1"),
    ([True, False], "integers, found bool at position 0"),
    ([1, True, 2], "integers, found bool at position 1"),
    (np.array([True, False]), "integers, found bool"),
    ([1, None, 2], "integers, found NoneType at position 1"),
    (["1", "2"], "integers, found str at position 0"),
    ([3, "2"], "integers, found str at position 1"),
    ("12", "0 dimensions"),
    (None, "0 dimensions"),
    ({1: 2}, "0 dimensions"),
    (5, "0 dimensions"),
    ([[1, 2], [3, 4]], "2 dimensions"),
    (np.ones((1, 3), dtype=np.int32), "2 dimensions"),
    ([1, [2, 3]], "token_ids is not a flat sequence of numbers, found list at position 1"),
    ([1, 2, -1], "token id -1 at position 2 is outside"),
    ([1, 2**31], "token id 2147483648 at position 1 is outside"),
    (np.array([1, 2**64 - 1], dtype=np.uint64), "token id 18446744073709551615 at position 1 is outside"),
    ([1, 2**70], f"token id {2**70} at position 1 is outside"),
    ([1, 10**5000], "token id of 16,610 bits at position 1 is outside"),
    ([1, 2j], "integers, found complex at position 1"),
]


@pytest.mark.parametrize(("token_ids", "message"), BAD_TOKEN_IDS)
def test_bad_token_ids_are_refused_by_place(token_ids, message):
    with pytest.raises(DataError, match=message) as error:
        Trajectory(token_ids, source="rows.jsonl:17")
    assert str(error.value).startswith("rows.jsonl:17: ")


BAD_STREAMS = [
    ("loss_weights", [0, 1], "2 loss_weights for 3 tokens"),
    ("loss_weights", [], "0 loss_weights for 3 tokens"),
    ("loss_weights", 1.0, "shape .* loss_weights for 3 tokens"),
    ("loss_weights", [[0, 1, 1]], r"shape \(1, 3\) loss_weights for 3 tokens"),
    ("loss_weights", [0, [1], 1], "loss_weights is not a flat sequence"),
    ("loss_weights", [0.0, NAN, 1.0], r"loss_weights\[1\] is nan"),
    ("loss_weights", [0.0, 1.0, INF], r"loss_weights\[2\] is inf"),
    ("loss_weights", [0.5, 1, 1], r"loss_weights\[0\] is 0.5, but nothing predicts a first token"),
    ("loss_weights", [0, 1, -0.5], "loss weight -0.5 at position 2 is negative"),
    ("loss_weights", [0, 0, 0], "no trained token .all 3 loss weights are 0"),
    ("loss_weights", [0.0, None, 1.0], "loss_weights must be numbers, found NoneType at position 1"),
    ("loss_weights", [0.0, 1.0, "1"], "loss_weights must be numbers, found str at position 2"),
    ("loss_weights", "abc", "loss_weights for 3 tokens"),
    ("advantages", [1.0, 2.0], "2 advantages for 3 tokens"),
    ("advantages", NAN, r"advantages\[0\] is nan"),
    ("advantages", "high", "advantages must be numbers, found <U4"),
    ("advantages", [0, 1, 1e39], r"advantages\[2\] is 1e\+39"),
    ("old_logprobs", [0.0, -1.0], "2 old_logprobs for 3 tokens; they must align with token_ids"),
    ("old_logprobs", -1.0, "old_logprobs for 3 tokens"),
    ("old_logprobs", [0.0, -INF, -1.0], r"old_logprobs\[1\] is -inf"),
    ("ref_logprobs", [0, 1, 2, 3], "4 ref_logprobs for 3 tokens"),
    ("ref_logprobs", np.array([0, 1j, 0]), "ref_logprobs must be numbers, found complex128"),
    ("sampler_logprobs", [0.0, NAN, -1.0], r"sampler_logprobs\[1\] is nan"),
    ("rollout_weight", 0, "rollout_weight is 0; it must be positive"),
    ("rollout_weight", INF, "rollout_weight is inf"),
    ("reward", NAN, "reward is nan"),
    ("reward", -INF, "reward is -inf"),
    ("reward", 10**400, "reward is inf"),
    ("reward", -1e308, r"reward is -1e\+308; it must be finite as float32"),
    ("reward", "80%", "reward must be a number, found '80%'; leave out quotes and units"),
    ("reward", True, "reward must be a number, found bool"),
    ("reward", [1.0], "reward must be a number, found list"),
]


@pytest.mark.parametrize(("name", "values", "message"), BAD_STREAMS)
def test_bad_streams_are_refused_by_place(name, values, message):
    with pytest.raises(DataError, match=message) as error:
        Trajectory([1, 2, 3], **{name: values}, source="rows.jsonl:17")
    assert str(error.value).startswith("rows.jsonl:17: ")


BAD_TEACHERS = [
    ([[1]] * 3, None, "teacher_logprobs is missing; teacher_ids and teacher_logprobs go together"),
    (None, [[-1.0]] * 3, "teacher_ids is missing"),
    ([1, 2, 3], [[-1.0]] * 3, r"teacher_ids has shape \(3,\); give \[3, k\]"),
    ([[1]] * 2, [[-1.0]] * 3, r"teacher_ids has shape \(2, 1\)"),
    ([[]] * 3, [[]] * 3, r"teacher_ids has shape \(3, 0\)"),
    ([[1]] * 3, [[-1.0, -2.0]] * 3, "differ in shape"),
    ([[1.0]] * 3, [[-1.0]] * 3, "teacher_ids must be integers, not float64"),
    ([[-1]] * 3, [[-1.0]] * 3, "a token id in teacher_ids is outside"),
    ([[1]] * 3, [[NAN]] * 3, "not a log-prob"),
    ([[1]] * 3, [[0.5]] * 3, "at most 0"),
    ([[1, 2]] * 3, [[-9.0, -9.0], [-1.0, -2.0], [-0.1, -0.1]], "probabilities at position 2 add up to 1.81"),
]


@pytest.mark.parametrize(("ids", "logprobs", "message"), BAD_TEACHERS)
def test_bad_teachers_are_refused_by_place(ids, logprobs, message):
    with pytest.raises(DataError, match=message) as error:
        Trajectory([1, 2, 3], teacher_ids=ids, teacher_logprobs=logprobs, source="rows.jsonl:17")
    assert str(error.value).startswith("rows.jsonl:17: ")


def test_a_teacher_may_leave_places_empty():
    item = Trajectory([1, 2], teacher_ids=[[1, 2], [3, 4]], teacher_logprobs=[[-INF, -INF], [-0.5, -INF]])
    assert (item.teacher_ids.dtype, item.teacher_logprobs.dtype) == (np.int32, np.float32)
    assert item.teacher_logprobs[1].tolist() == [-0.5, -INF]


def test_without_a_source_the_message_still_says_what_it_is_about():
    with pytest.raises(DataError, match=r"^trajectory: token_ids is empty"):
        Trajectory([])


def test_a_data_error_is_a_value_error():
    assert issubclass(DataError, TreewiseError)
    assert issubclass(DataError, ValueError)
