"""`distributed.context_parallelism.batch`: what a rank's part of a batch is, and which cannot be split."""

from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor, nn

from composer_dist.distributed.context_parallelism.attention import SequenceSplit
from composer_dist.distributed.context_parallelism.batch import Splitter
from composer_dist.errors import ParallelismValueError


def language_model(kind: str = "Llama") -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    name = "LlamaForCausalLM" if kind == "Llama" else "BertForMaskedLM"
    with torch.device("meta"):
        return getattr(transformers, name)(getattr(transformers, f"{kind}Config")(vocab_size=32, **sizes))


class Positioned(nn.Module):
    def forward(self, ids: Tensor, position_ids: Tensor) -> Tensor:
        return ids + position_ids


IDS = torch.arange(16).view(2, 8)


def split(model: nn.Module, batch: Any, rank: int = 0, **options: Any) -> Any:
    splitter = Splitter(model, **options)
    return splitter.split(batch, splitter.layout(batch, 2, rank))


def test_a_language_model_gets_what_its_part_does_not_say() -> None:
    labels = IDS.clone()
    labels[0, :5] = -100
    batch = transformers.BatchEncoding({"input_ids": IDS, "labels": labels})
    part = split(language_model(), batch, rank=1)
    assert isinstance(part, transformers.BatchEncoding)
    places = [2, 3, 4, 5]
    assert part["input_ids"].tolist() == IDS[:, places].tolist()
    assert part["position_ids"].tolist() == [places, places]
    assert part["labels"].tolist() == labels[:, places].tolist()
    assert part["shift_labels"].tolist() == labels[:, [3, 4, 5, 6]].tolist()
    assert split(language_model(), batch)["shift_labels"][:, -1].tolist() == [-100, -100]
    assert part["attention_mask"].tolist() == [[1] * 4] * 2
    assert part["num_items_in_batch"] == (3 + 7) / 2
    assert set(batch) == {"input_ids", "labels"}
    counted = split(language_model(), {**batch, "num_items_in_batch": torch.tensor(30)})
    assert counted["num_items_in_batch"] == 15
    alone = split(language_model(), {"input_ids": IDS})
    assert alone.keys() == {"input_ids", "position_ids", "attention_mask"}


def test_other_models_get_the_positions_if_they_ask_for_them() -> None:
    part = split(Positioned(), {"ids": IDS, "other": IDS[:, 0], "name": "x"}, rank=1)
    assert part["position_ids"].tolist() == [[4, 5, 6, 7]] * 2
    assert part["other"].tolist() == [0, 8]
    assert part["name"] == "x"
    assert part.keys() == {"ids", "other", "name", "position_ids"}
    assert split(nn.Identity(), {"ids": IDS}).keys() == {"ids"}


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def test_batches_keep_their_type_and_dimensions_can_be_said() -> None:
    pair = split(nn.Identity(), Pair(IDS, torch.ones(2, 3)), rank=1, sequence_dims={"1": None})
    assert isinstance(pair, Pair)
    assert pair.first.tolist() == IDS[:, 4:].tolist()
    assert pair.second.shape == (2, 3)
    assert split(nn.Identity(), IDS.t(), sequence_dims={"": 0}).tolist() == IDS[:, :4].t().tolist()
    nested = split(nn.Identity(), {"a": [IDS, {"b": IDS.t()}]}, sequence_dims={"a.1.b": 0})
    assert nested["a"][1]["b"].shape == (4, 2)


def test_the_balanced_layout_is_for_causal_attention() -> None:
    assert Splitter(language_model()).balanced
    assert not Splitter(language_model("Bert")).balanced
    assert not Splitter(nn.Identity()).balanced
    assert Splitter(nn.Identity(), balanced=True).balanced


def given(ids: Tensor = IDS, **rest: Any) -> dict[str, Any]:
    return {"input_ids": ids, **rest}


def masked(mask: list[list[int]], **rest: Any) -> dict[str, Any]:
    return given(attention_mask=torch.tensor(mask), **rest)


RIGHT, LEFT = [[1] * 8, [1] * 6 + [0] * 2], [[1] * 8, [0] * 2 + [1] * 6]


@pytest.mark.parametrize(
    ("kind", "batch", "message"),
    [
        (
            "Llama",
            given(IDS[:, :6]),
            r"6 positions .* 2 x cp = 4, .*pad_to_multiple_of=4\) to 8 .*balanced=F",
        ),
        ("Llama", given(IDS[:, :7]), r"7 positions cannot .* on the right .* to 8 \(labels -100\)\.$"),
        ("Bert", given(IDS[:, :7]), "7 positions cannot be divided by cp = 2; pad it on the right .* to 8"),
        ("Llama", masked(LEFT), "padding on the left .*tokenizer.padding_side='right'"),
        ("Llama", masked([[1] * 8, [1, 0] * 4]), "padding on the left or in between"),
        ("Llama", masked(RIGHT, labels=IDS), "labels at padded positions; set them to -100"),
        ("Bert", masked(RIGHT), "padding, which bidirectional attention would"),
        ("Llama", given(attention_mask=torch.ones(2, 1, 8, 8)), r"attention_mask \(2, 1, 8, 8\)"),
        ("Llama", given(position_ids=IDS % 4), "several sequences packed in one row"),
        ("Llama", given(pixels=torch.ones(2, 3)), r"pixels \(2, 3\) does not have 8 positions .*'pixels': "),
        ("Llama", {"x": torch.ones(3)}, "A batch of type dict has no tensor"),
    ],
)
def test_batches_that_cannot_be_split_are_refused(kind: str, batch: Any, message: str) -> None:
    with pytest.raises(ParallelismValueError, match=message):
        split(language_model(kind), batch)


def test_padding_on_the_right_is_left_to_causal_attention() -> None:
    labels = IDS.clone()
    labels[1, 6:] = -100
    assert split(language_model(), masked(RIGHT, labels=labels))["attention_mask"].all()


def test_unequal_labels_need_a_denominator_or_a_caller_that_weighs() -> None:
    labels = IDS.clone()
    labels[0, :3] = -100
    batch = {"ids": IDS, "labels": labels}
    with pytest.raises(ParallelismValueError, match="parts have 5, 8 labels.*forward does not accept num"):
        split(nn.Identity(), batch)
    assert split(nn.Identity(), batch, weighted=True)["labels"].tolist() == labels[:, :4].tolist()
    assert split(nn.Identity(), {"ids": IDS, "labels": IDS}).keys() == {"ids", "labels"}


def test_the_proof_s_batch_is_one_short_row() -> None:
    splitter = Splitter(nn.Identity(), sequence_dims={"turned": 0})
    batch = {"ids": IDS, "turned": IDS.t(), "rows": torch.tensor([1, 2]), "n": torch.tensor(3)}
    short = splitter.shorten(batch, 8, 4)
    assert [tuple(short[name].shape) for name in batch] == [(1, 4), (4, 2), (1,), ()]


def test_tables_of_positions_are_cut_and_put_back() -> None:
    model = nn.Sequential(nn.Identity())
    model[0].register_buffer("table", torch.arange(20.0))
    whole = model[0].table
    splitter = Splitter(model, buffers={"0.table": 0})
    with splitter.tables(SequenceSplit(8, 2, 1, True)):
        assert model[0].table.tolist() == [2, 3, 4, 5]
    assert model[0].table is whole
