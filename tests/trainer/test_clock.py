"""Time strings, their arithmetic, and the timestamp."""

import pytest

from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.trainer.clock import Time, Timestamp, TimeUnit


@pytest.mark.promise(98)
@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("1ep", 1, "ep"),
        ("100ba", 100, "ba"),
        ("5_000sp", 5000, "sp"),
        ("3e4tok", 30000, "tok"),
        ("1.5e3tok", 1500, "tok"),
        ("0.5dur", 0.5, "dur"),
        (".25dur", 0.25, "dur"),
        ("90sec", 90.0, "sec"),
        ("1h30m", 5400.0, "sec"),
        ("1d2h3m4s", 93784.0, "sec"),
        ("1.5h", 5400.0, "sec"),
        (" 3 EP ", 3, "ep"),
    ],
)
def test_time_strings(text: str, value: float, unit: str) -> None:
    time = Time.parse(text)
    assert (time.value, time.unit) == (value, TimeUnit(unit))
    assert Time.parse(str(time)) == time


def test_what_is_not_a_time_is_refused_with_examples() -> None:
    for text in ("", "ep", "5", "-1ba", "1x", "1__0ba", "1m1h", "1.ep", "h"):
        with pytest.raises(ParallelismValueError, match="not a valid duration. Use .* and a unit: '3ep'"):
            Time.parse(text)
    with pytest.raises(ParallelismValueError, match=r"'1\.5ep' is not a whole number"):
        Time.parse("1.5ep")  # only shares and seconds may be fractions


def test_of_takes_a_time_a_string_or_an_integer() -> None:
    time = Time(3, TimeUnit.BATCH)
    assert Time.of(time) is time
    assert Time.of("3ba") == time
    assert Time.of(3) == "3ep"
    with pytest.raises(ParallelismTypeError, match="2.5 is not a valid"):
        Time.of(2.5)  # type: ignore[arg-type]
    with pytest.raises(ParallelismTypeError, match="3 is not a valid"):
        Time.of(3, unit=None)


def test_arithmetic_and_comparisons_in_one_unit() -> None:
    three = Time.of("3ba")
    assert three + "2ba" == "5ba"
    assert "2ba" + three == "5ba"
    assert three - "1ba" == "2ba"
    assert "4ba" - three == "1ba"
    assert three * 2 == 2 * three == "6ba"
    assert three * 0.5 == "1ba"
    assert Time.of("100ba") * 0.29 == "29ba"  # 28.999999999999996 by floats
    assert Time.of("1h") * 0.5 == "30m"
    assert three / "2ba" == 1.5
    assert not Time.of("0ba")
    assert three < "4ba"
    assert three <= "3ba"
    assert three > Time.of("2ba")
    assert three >= three
    assert three != "3ep"
    assert three != 3
    assert three != "three"
    assert len({three, Time.of("3ba"), Time.of("3ep")}) == 2
    assert {three: 1}["3ba"] == 1
    with pytest.raises(ParallelismValueError, match="'3ba' and '3ep' are in different units"):
        Time.of("3ba") < "3ep"  # noqa: B015
    with pytest.raises(ParallelismValueError, match="different units"):
        Time.of("3ba") + "3ep"


def test_a_timestamp_counts_all_units() -> None:
    start = Timestamp()
    then = start.next_batch(samples=4, tokens=20, seconds=1.5).next_batch(samples=3, tokens=10)
    assert start == Timestamp()
    found = " ".join(str(then.get(unit)) for unit in ("ep", "ba", "sp", "tok", "sec"))
    assert found == "0ep 2ba 7sp 30tok 1.5sec"
    assert (then.batch_in_epoch, then.sample_in_epoch, then.token_in_epoch) == (2, 7, 30)
    after = then.next_epoch()
    assert (after.epoch, after.batch, after.sample, after.token) == (1, 2, 7, 30)
    assert (after.batch_in_epoch, after.sample_in_epoch, after.token_in_epoch) == (0, 0, 0)


def test_a_timestamp_has_reached_what_has_passed() -> None:
    timestamp = Timestamp(batch=3, token=100)
    assert [timestamp.reached(time) for time in ("3ba", "4ba", Time.of("1e2tok"))] == [True, False, True]
    with pytest.raises(ParallelismValueError, match="has no 'dur'"):
        timestamp.reached("0.5dur")


def test_a_timestamp_survives_saving() -> None:
    timestamp = Timestamp(epoch=1, batch=5, sample_in_epoch=2, seconds=3.5)
    assert Timestamp.from_state_dict(timestamp.state_dict()) == timestamp
    state = timestamp.state_dict()
    del state["token"]
    with pytest.raises(ParallelismValueError, match="missing or unknown keys: iter, token"):
        Timestamp.from_state_dict(state | {"iter": 1})
