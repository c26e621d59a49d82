"""Texts and their pieces: the same samples and masks on any number of ranks and after any resume."""

from pathlib import Path

import pytest
import torch

from composer_dist.errors import ParallelismValueError
from composer_dist.recipe.data import datasets
from composer_dist.recipe.schema import Run
from composer_dist.recipe.sources import text
from composer_dist.recipe.tokenizer import byte_tokenizer, tokenizer_named


def test_the_byte_tokenizer_gives_bytes_and_is_loaded_by_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = "héllo wörld\n\n\ttab \x00 €"
    made = byte_tokenizer()
    assert made(written)["input_ids"] == list(written.encode())
    assert (len(made), made.pad_token_id, made.mask_token_id) == (261, 259, 260)
    made.save_pretrained(tmp_path)
    loaded = tokenizer_named(str(tmp_path))
    assert loaded(written)["input_ids"] == list(written.encode())
    assert loaded.decode(loaded(written)["input_ids"]) == written
    short = text.pieces(written * 9, loaded, 7)
    del loaded.init_kwargs["is_bytes"]  # the way of every other tokenizer must come to the same
    for at_once in (1, 4, 1000):
        monkeypatch.setattr(text, "_AT_ONCE", at_once)
        assert torch.equal(text.pieces(written * 9, loaded, 7), short)


def test_files_by_glob_and_what_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "a.txt").write_text("one")
    assert text.read(f"{tmp_path}/*.txt") == "one\n\ntwo"
    assert text.read([f"{tmp_path}/b.txt", f"{tmp_path}/*.txt"]) == "two\n\none"
    assert text.read([f"{tmp_path}/a.txt", f"{tmp_path}/../{tmp_path.name}/a.txt"]) == "one"
    with pytest.raises(ParallelismValueError, match=r"No file matches '.*/\*\.md'.*'english' or 'python'"):
        text.read([f"{tmp_path}/*.md", f"{tmp_path}/a.txt"])
    (tmp_path / "a.bin").write_bytes("wide".encode("utf-16"))
    with pytest.raises(ParallelismValueError, match=r"Not text in UTF-8, .*zero bytes .*: \S+/a\.bin\.$"):
        text.read([f"{tmp_path}/a.*", f"{tmp_path}/b.txt"])
    (tmp_path / "c.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    assert text.read(f"{tmp_path}/c.txt") == "one\ntwo"
    (tmp_path / "c.txt").write_bytes("one\ncafé".encode("latin1"))
    with pytest.raises(ParallelismValueError, match=r"c\.txt:2: not text in UTF-8.*xe9.*iconv"):
        text.read(f"{tmp_path}/c.txt")
    with pytest.raises(ParallelismValueError, match="has 3 tokens, fewer than one sample of 4"):
        text.pieces("one", byte_tokenizer(), 4)


@pytest.mark.promise(124)
def test_a_column_of_texts_has_texts_alone(tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="an extra")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": null}\n')
    source = {"dataset": "json", "data_files": f"{tmp_path}/a.jsonl"}
    with pytest.raises(ParallelismValueError, match=r"Row 1 of json has None in column 'text', not a text"):
        text.read(source)


@pytest.mark.promise(118)
def test_rows_in_place_of_a_text_are_told(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}')
    with pytest.warns(UserWarning, match=r"a\.jsonl has rows.*give \{dataset: json"):
        assert text.read(f"{tmp_path}/*.jsonl") == '{"text": "one"}'


def test_held_out_samples_are_spread_and_no_longer_trained_on() -> None:
    train, held = text.hold_out(range(10), 3)
    assert held == [0, 3, 6]
    assert train == [1, 2, 4, 5, 7, 8, 9]
    assert text.hold_out(range(3), 0) == ([0, 1, 2], [])
    with pytest.raises(ParallelismValueError, match="3 cannot be held out"):
        text.hold_out(range(3), 3)


def test_a_text_is_held_once_in_four_bytes_a_token() -> None:
    run = Run.model_validate(
        {
            "out": "x",
            "model": {"kind": "causal_lm", "config": {}},
            "data": {"kind": "text", "source": "english", "context": 16, "held_out": 4},
            "trainer": {},
        }
    )
    train, held = datasets(run, byte_tokenizer(), Path())
    assert train._tokens is held._tokens
    assert train._tokens.dtype == torch.int32
    assert len(train) + len(held) == len(train._tokens)
    assert [{*sample} for sample in (train[0], held[0])] == [{"input_ids", "labels"}] * 2
    assert torch.equal(held[0]["input_ids"], train._tokens[0].long())
    assert torch.equal(train[0]["labels"], train._tokens[1].long())


@pytest.mark.promise(100)
def test_masks_depend_on_seed_epoch_and_sample_alone() -> None:
    tokens = torch.arange(5 * 400).view(5, 400) % 256
    samples = text.MaskedSamples(tokens.int(), range(5), mask=260, vocabulary=261, share=0.15, seed=1)
    first, again = samples[3], samples[3]
    assert all(torch.equal(first[key], again[key]) for key in first)
    chosen = first["labels"] != text.IGNORED
    assert 30 < chosen.sum() < 90
    assert torch.equal(first["labels"][chosen], tokens[3][chosen])
    assert torch.equal(first["input_ids"][~chosen], tokens[3][~chosen])
    assert 0.6 < (first["input_ids"][chosen] == 260).double().mean() < 0.95
    # The same in every process: Python's own hash() differs from one to the next.
    assert chosen.nonzero().flatten()[:4].tolist() == [2, 7, 8, 13]
    samples.set_epoch(1)
    assert not torch.equal(samples[3]["labels"], first["labels"])


def test_classes_are_balanced_also_in_what_is_held_out() -> None:
    run = Run.model_validate(
        {
            "out": "x",
            "model": {"kind": "sequence_classification", "config": {}},
            "data": {"kind": "labeled_text", "classes": {"e": "english", "p": "python"}, "held_out": 10},
            "trainer": {},
        }
    )
    train, held = datasets(run, byte_tokenizer(), Path())
    assert held is not None
    assert [int(sample["labels"]) for sample in held] == [0, 1] * 5
    assert sum(int(train[index]["labels"]) for index in range(1000)) == 500
