"""Classification and sequence-to-sequence models from tables, their metrics, and schedules of one's own."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from composer_dist.errors import ParallelismValueError
from composer_dist.recipe.data import datasets, loader
from composer_dist.recipe.models import build_model
from composer_dist.recipe.problems import ConfigurationError
from composer_dist.recipe.read import read_configuration
from composer_dist.recipe.schema import HubModel, TableData
from composer_dist.recipe.sources.rows import classes_of
from composer_dist.recipe.tokenizer import byte_tokenizer
from tests.kit.scripts.recipes import logs_of
from tests.kit.world import World

pytestmark = pytest.mark.promise(125)
hf = pytest.importorskip("datasets", reason="an extra")
BERT = {"model_type": "bert", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
BERT |= {"num_attention_heads": 2, "max_position_embeddings": 64, "hidden_dropout_prob": 0}
BERT |= {"attention_probs_dropout_prob": 0}
T5 = {"model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 2}
T5 |= {"dropout_rate": 0}
FUNCTIONS = """
import datasets

def halving(state, by=2.0):
    return by ** -state.timestamp.batch

def rows(streamed=False):
    made = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [4]] * 4, "labels": [[1, 2, 3], [4]] * 4})
    return made.to_iterable_dataset() if streamed else made
"""


def configuration(folder: Path, model: Any, data: Any, **others: Any) -> Path:
    (folder / "mine.py").write_text(FUNCTIONS)
    run = {"out": str(folder / "out"), "model": model | {"tokenizer": "bytes"}, "data": data}
    run |= {"trainer": {"max_duration": "3ba", "eval_interval": "3ba"}, "checkpoints": None, "export": False}
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(run | others))
    return file


def table(folder: Path) -> Path:
    rows = [{"text": f"The {n} is {w}", "label": w} for n in range(8) for w in ("good", "bad")]
    file = folder / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def test_a_table_with_names_of_classes(world1: World, world2: World, tmp_path: Path) -> None:
    model = {"kind": "sequence_classification", "config": BERT, "metrics": {"accuracy": {}}}
    data = {"kind": "table", "source": str(table(tmp_path)), "held_out": 4, "context": 32, "batch_size": 4}
    file = configuration(tmp_path, model, data)
    run = read_configuration(file).run
    tokenizer = byte_tokenizer()
    made: Any = build_model(run, tokenizer, tmp_path).model
    assert made.config.id2label == {0: "bad", 1: "good"}
    (alone,) = world1(logs_of, file)
    one, _ = world2(logs_of, file)
    assert one["loss/train/total"] == pytest.approx(alone["loss/train/total"], rel=1e-4)
    assert one["metrics/eval/MulticlassAccuracy"] == alone["metrics/eval/MulticlassAccuracy"]


def test_a_table_with_texts_to_write(world1: World, world2: World, tmp_path: Path) -> None:
    metrics: Any = {"perplexity": None, "token_accuracy": None}
    model = {"kind": "seq2seq_lm", "config": T5, "metrics": metrics}
    data = {"kind": "table", "source": str(table(tmp_path)), "held_out": 4, "context": 32, "batch_size": 4}
    scheduler = {"name": "mine.py:halving", "by": 4.0}
    file = configuration(tmp_path, model, data, scheduler=scheduler, callbacks={"lr_monitor": {}})
    (alone,) = world1(logs_of, file)
    one, _ = world2(logs_of, file)
    assert one["loss/train/total"] == pytest.approx(alone["loss/train/total"], rel=1e-4)
    assert one["metrics/eval/LanguagePerplexity"] == pytest.approx(alone["metrics/eval/LanguagePerplexity"])
    assert 0 <= one["metrics/eval/TokenAccuracy"][0] <= 1
    (rates,) = (values for name, values in alone.items() if name.startswith("lr"))
    assert rates == pytest.approx([1e-3, 1e-3 / 4, 1e-3 / 16])


def test_classes_of_a_column(tmp_path: Path) -> None:
    classifier = HubModel(kind="sequence_classification", config=BERT)
    source = str(table(tmp_path))
    data = TableData(kind="table", source=source)
    assert classes_of(data, classifier) == ["bad", "good"]
    assert classes_of(data.model_copy(update={"classes": ["good", "bad"]}), classifier) == ["good", "bad"]
    with pytest.raises(ParallelismValueError, match="has no column 'labl'. Did you mean 'label'"):
        classes_of(data.model_copy(update={"label": "labl"}), classifier)
    with pytest.raises(ParallelismValueError, match=r"give data\.classes"):
        classes_of(data.model_copy(update={"streaming": True}), classifier)
    with pytest.raises(
        ParallelismValueError, match=r"num_labels is 3, but data\.label has 2 classes: bad, good"
    ):
        classes_of(data, classifier.model_copy(update={"num_labels": 3}))
    features = hf.Features({"text": hf.Value("string"), "label": hf.ClassLabel(names=["no", "yes"])})
    hf.Dataset.from_dict({"text": ["a"], "label": [0]}, features=features).save_to_disk(tmp_path / "named")
    assert classes_of(TableData(kind="table", source=f"{tmp_path}/named"), classifier) == ["no", "yes"]


@pytest.mark.parametrize(("labels", "count", "expected"), [
    ([0, 2, 2], None, ["0", "1", "2"]),
    ([1, 2, 3], None, ["1", "2", "3"]),
    ([-1.0, None, 1.0], None, ["-1", "1"]),
    ([0, 2], 5, ["0", "1", "2", "3", "4"]),
    ([0.5, 1.5], 1, None),
    ([True, False], None, ["false", "true"]),
])  # fmt: skip
def test_classes_of_numbers(labels: Any, count: Any, expected: Any, tmp_path: Path) -> None:
    model = HubModel(kind="sequence_classification", config=BERT, num_labels=count)
    hf.Dataset.from_dict({"text": ["a"] * len(labels), "label": labels}).save_to_disk(tmp_path / "numbers")
    assert classes_of(TableData(kind="table", source=f"{tmp_path}/numbers"), model) == expected


@pytest.mark.parametrize(
    "wrong", [{"classes": ["a", "b", "a"]}, {"classes": [1, "1"]}, {"classes": []}, {"text": []}]
)
def test_classes_have_different_names_and_texts_a_column(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"at least two different names|at least 1 item"):
        TableData(kind="table", source="a", **wrong)


def test_numbers_that_are_no_classes_are_named(tmp_path: Path) -> None:
    model = HubModel(kind="sequence_classification", config=BERT)
    hf.Dataset.from_dict({"text": ["a"], "label": ["x"]}).save_to_disk(tmp_path / "one")
    with pytest.raises(ParallelismValueError, match=r"data\.label: there is only one class, 'x'"):
        classes_of(TableData(kind="table", source=f"{tmp_path}/one"), model)
    with pytest.raises(ParallelismValueError, match=r"regression on numbers, but column 'label' has texts"):
        classes_of(
            TableData(kind="table", source=f"{tmp_path}/one"), model.model_copy(update={"num_labels": 1})
        )
    assert TableData(kind="table", source="a", classes=[1, True, "b"]).classes == ["1", "true", "b"]  # type: ignore[list-item]
    hf.Dataset.from_dict({"text": ["a"], "label": [0.5]}).save_to_disk(tmp_path / "numbers")
    with pytest.raises(
        ParallelismValueError, match=r"classes are texts or whole numbers, .* has 0\.5\. model"
    ):
        classes_of(TableData(kind="table", source=f"{tmp_path}/numbers"), model)


def test_a_regression_on_numbers(world1: World, tmp_path: Path) -> None:
    rows = [{"text": f"The {n}", "label": n / 2} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    model = {"kind": "sequence_classification", "config": BERT, "num_labels": 1}
    data = {"kind": "table", "source": f"{tmp_path}/rows.jsonl", "context": 32, "batch_size": 4}
    (logs,) = world1(logs_of, configuration(tmp_path, model, data))
    assert logs["loss/train/total"][-1] < logs["loss/train/total"][0]


@pytest.mark.parametrize("streamed", [False, True])
def test_rows_of_a_function_are_padded(streamed: bool, tmp_path: Path) -> None:
    data = {"kind": "function", "name": "mine.py:rows", "arguments": {"streamed": streamed}, "batch_size": 2}
    model = {"kind": "causal_lm", "config": {"model_type": "llama"}}
    file = configuration(tmp_path, model, data | {"shuffle": False})
    read = read_configuration(file)
    tokenizer = byte_tokenizer()
    train, _ = datasets(read.run, tokenizer, tmp_path)
    batch = next(iter(loader(train, read, tokenizer, training=True).placed(1, 0)))
    pad = tokenizer.pad_token_id
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, pad, pad]]
    assert batch["labels"].tolist() == [[1, 2, 3], [4, -100, -100]]


def test_unknown_metrics_and_data_for_another_model_are_named(tmp_path: Path) -> None:
    model: Any = {"kind": "causal_lm", "config": {"model_type": "llama"}, "metrics": {"perplexty": {}}}
    file = configuration(tmp_path, model, {"kind": "table", "source": "a"})
    with pytest.raises(ConfigurationError) as error:
        read_configuration(file)
    assert "There is no metric 'perplexty'. Did you mean 'perplexity'?" in str(error.value)
    model["metrics"] = {"accuracy": {}}
    with pytest.raises(
        ConfigurationError, match=r"run.yaml:\d+: model.metrics.accuracy: a model of kind causal_lm"
    ):
        read_configuration(configuration(tmp_path, model, {"kind": "text", "source": "english"}))
    assert "a model of kind causal_lm needs data of kind text or chat or" in str(error.value)
