"""Laws of the reference sampler."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rows import every
from twin.engine.sampling import SamplingParams, sample, uniform
from twin.errors import ConfigError, EngineError

LOGITS = np.array([1.0, 3.0, 3.0, 2.0, -1.0], np.float32)


def drawn(params: SamplingParams, logits: np.ndarray = LOGITS, steps: int = 400) -> set[int]:
    return {sample(logits, params, step) for step in range(steps)}


def test_greedy_ties_go_to_the_lower_index() -> None:
    assert sample(LOGITS, SamplingParams(), 0) == 1


def test_top_k_cuts_exactly_k_among_equal_logits() -> None:
    assert drawn(SamplingParams(1.0, top_k=1)) == {1}
    assert drawn(SamplingParams(1.0, top_k=2)) == {1, 2}
    assert drawn(SamplingParams(1.0, top_k=99)) == drawn(SamplingParams(1.0))


def test_top_p_includes_the_crossing_token_and_no_more() -> None:
    logits = np.log(np.array([0.1, 0.5, 0.3, 0.1], np.float32))
    assert drawn(SamplingParams(1.0, top_p=0.49), logits) == {1}
    assert drawn(SamplingParams(1.0, top_p=0.6), logits) == {1, 2}
    # equal logits: the lower index first
    assert drawn(SamplingParams(1.0, top_p=0.85), logits) == {0, 1, 2}
    assert drawn(SamplingParams(1.0, top_p=1.0), logits) == {0, 1, 2, 3}


def test_top_p_counts_what_top_k_left() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.3], np.float32))
    assert drawn(SamplingParams(1.0, top_k=2, top_p=0.5), logits) == {0}


def test_min_p_keeps_what_has_that_part_of_the_likeliest_one_s_probability() -> None:
    logits = np.log(np.array([0.1, 0.4, 0.19, 0.21, 0.1], np.float32))
    assert drawn(SamplingParams(1.0, min_p=0.5), logits) == {1, 3}
    assert drawn(SamplingParams(1.0, min_p=0.4), logits) == {1, 2, 3}
    # by the probabilities of that temperature
    assert drawn(SamplingParams(2.0, min_p=0.5), logits) == {0, 1, 2, 3, 4}
    assert drawn(SamplingParams(1.0, min_p=1e-300), logits) == {0, 1, 2, 3, 4}
    assert drawn(SamplingParams(1.0, min_p=5e-324, top_k=1), logits) == {1}


def test_top_p_counts_what_min_p_left() -> None:
    logits = np.log(np.array([0.5, 0.2, 0.15, 0.1, 0.05], np.float32))
    # half of all; of those two that min-p leaves, 0.71
    assert drawn(SamplingParams(1.0, top_p=0.6), logits) == {0, 1}
    assert drawn(SamplingParams(1.0, min_p=0.35, top_p=0.6), logits) == {0}


def test_draw_frequencies_follow_the_probabilities() -> None:
    p = np.array([0.5, 0.2, 0.2, 0.1], np.float32)
    params = SamplingParams(1.0, seed=7)
    counts = np.bincount([sample(np.log(p), params, s) for s in range(8000)], minlength=4)
    assert np.abs(counts / 8000 - p).max() < 0.02


def test_temperature_sharpens() -> None:
    logits = np.array([0.0, 1.0], np.float32)
    cold, hot = (
        np.mean([sample(logits, SamplingParams(t), s) for s in range(2000)]) for t in (0.25, 4.0)
    )
    assert cold > 0.95
    assert hot < 0.65


def test_minus_infinity_is_never_drawn() -> None:
    logits = np.array([-np.inf, 0.0, -np.inf, 0.0, -np.inf], np.float32)
    assert drawn(SamplingParams(2.0)) == {0, 1, 2, 3, 4}
    assert drawn(SamplingParams(2.0), logits) == {1, 3}
    assert drawn(SamplingParams(2.0, top_k=4), logits) == {1, 3}


def test_generator_is_the_published_splitmix64() -> None:
    # First output of splitmix64 seeded with 0 is 0xE220A8397B1DCDAF, as in its public reference
    # code.
    assert uniform(0, 0) == (0xE220A8397B1DCDAF >> 40) / 2**24


@pytest.mark.parametrize("logits", [[np.nan, 1.0], [-np.inf, -np.inf], [np.inf, 0.0]])
def test_logits_without_a_choice_are_refused(logits: list[float]) -> None:
    with pytest.raises(EngineError, match="step 3"):
        sample(np.array(logits, np.float32), SamplingParams(1.0), 3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("seed", -1),
        ("min_p", -0.1),
        ("min_p", 1.5),
    ],
)
def test_a_bad_parameter_names_its_value_and_limit(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{field}={value}.*must"):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


OUT_OF_RANGE = [
    (
        "temperature",
        [
            3.5e38,
            1.7e308,
            10**400,
            1e-38,
            5e-324,
            float("inf"),
            True,
            "1",
            None,
            [1.0],
            "\x1b" * 9_999,
        ],
    ),
    ("top_k", [2**31, 10**400, 1.0, True, "5", None]),
    ("top_p", [1 + 1e-9, 5e-324, 1e-30, -0.0, 10**400, True, float("nan"), "1", None]),
    ("min_p", [1 + 1e-9, -5e-324, 10**400, True, float("nan"), "1", None]),
    ("seed", [2**64, 10**400, 1.0, True, None, "x" * 99_999]),
]


@every(("field", "value"), [(field, value) for field, values in OUT_OF_RANGE for value in values])
def test_a_parameter_that_the_kernel_cannot_hold_is_refused_in_one_short_line(
    field: str, value: object
) -> None:
    with pytest.raises(ConfigError) as error:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    message = str(error.value)
    assert message.startswith(f"{field}=")
    assert message.isprintable()
    assert len(message) < 400


@pytest.mark.parametrize("temperature", [2.0**-126, 1e-30, 1e30, float(np.finfo(np.float32).max)])
def test_a_temperature_within_the_range_keeps_top_k_and_top_p(temperature: float) -> None:
    """What FP32 would make infinite or zero drew from all tokens, or none."""
    assert np.isfinite(np.float32(temperature))
    assert drawn(SamplingParams(temperature, top_k=2)) <= {1, 2}
    assert drawn(SamplingParams(temperature, top_p=1e-6)) == {1}
    assert drawn(SamplingParams(temperature, top_p=2.0**-64)) == {1}
    assert drawn(SamplingParams(temperature, min_p=1)) == {1, 2}


@given(
    st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=40),
    st.floats(0.1, 3),
    st.integers(0, 45),
    st.floats(0.01, 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**31),
)
def test_the_drawn_token_is_always_a_kept_one(
    values: list[float], temperature: float, top_k: int, top_p: float, seed: int, step: int
) -> None:
    logits = np.array(values, np.float32)
    token = sample(logits, SamplingParams(temperature, top_k, top_p, seed), step)
    better = (logits > logits[token]) | (
        (logits == logits[token]) & (np.arange(len(logits)) < token)
    )
    assert top_k == 0 or better.sum() < top_k
    p = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    assert better.sum() == 0 or p[better].sum() / p.sum() < top_p + 1e-5
