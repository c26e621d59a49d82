"""YAML that would hang, or end in a traceback, is reported with its line."""

import pytest
import yaml

from composer_dist.config.yaml import parse, parse_value

pytestmark = pytest.mark.promise(107)

HOSTILE = {
    "laughs": "a0: &a0 [x]\n" + "".join(f"a{n + 1}: &a{n + 1} [{f'*a{n}, ' * 9}]\n" for n in range(30)),
    "merges": "a0: &a0 {x: 1}\n"
    + "".join(f"a{n + 1}: &a{n + 1} {{<<: [{f'*a{n}, ' * 9}]}}\n" for n in range(30)),
    "itself": "a: &a\n  b: *a\n",
    "itself in a list": "&a [*a]",
    "itself as a merge": "a: &a {<<: *a}",
    "deep": "a: " + "[" * 20_000,
    "deep and closed": "a: " + "[" * 200 + "]" * 200,
    "a date that is none": "a: 2026-99-99",
    "a number of too many digits": f"a: {'1' * 10_000}",
    "a number of too many hexadecimal digits": f"a: 0x{'f' * 5000}",
    "a number of many minutes": f"a: 1{':1' * 100_000}",
    "a word as a date": "a: !!timestamp tomorrow",
    "a flag that is none": "a: !!bool maybe",
    "no number": "a: !!int ''",
    "a number of base 8": "a: 010",
    "a number of base 60": "a: 1:30",
    "a fraction of base 60": "a: -1:30.5",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_cannot_be_read_is_a_fault(what: str) -> None:
    found = parse(HOSTILE[what])
    assert [text.partition(":")[0] for _, _, text in found.faults] == ["not valid YAML"]
    assert what == "deep" or found.faults[0][1] is not None
    with pytest.raises(yaml.YAMLError):
        parse_value(HOSTILE[what])


def test_a_long_word_of_digits_takes_little_time() -> None:
    word = "1_" * 100_000 + "x"
    assert parse_value(word) == word


def test_aliases_and_merges_of_a_usual_size_are_read() -> None:
    text = "base: &base {lr: 1e-3, betas: &b [0.9, 0.95]}\none: {<<: *base, lr: 2}\ntwo: [*base, *b]"
    found = parse(text)
    assert not found.faults
    base = {"lr": 1e-3, "betas": [0.9, 0.95]}
    assert found.values == {"base": base, "one": base | {"lr": 2}, "two": [base, base["betas"]]}
    assert parse_value(text) == found.values


@pytest.mark.parametrize(
    ("text", "key", "hint"),
    [
        ("true: 1\nTrue: 2", "True", ""),
        ("1: a\n1.0: b", "1.0", ""),
        ("1: a\ntrue: b", "true", ""),
        ("null: a\n~: b", "~", ""),
        ("'1': a\n1: b", "1", ""),
        ("16: a\n0x10: b", "0x10", ""),
        ("<<: {a: 1}\n<<: {a: 2}", "<<", "; write all mappings in one: <<: [*a, *b]"),
    ],
)
def test_keys_that_replace_each_other_are_faults(text: str, key: str, hint: str) -> None:
    said = f"duplicate key {key!r}, first on line 1{hint}"
    assert parse(text).faults == [((key,), 2, said)]
    with pytest.raises(yaml.YAMLError, match="^duplicate key"):
        parse_value(text)


@pytest.mark.parametrize("text", ["3e4tok", "trueish", "False.positive", "1e3x"])
def test_text_that_begins_like_a_number_or_a_boolean_is_text(text: str) -> None:
    assert parse_value(f"[{text}]") == [text]
