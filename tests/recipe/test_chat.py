"""A chat model from a YAML file: trained on several processes, exported, and asked in its template."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from composer_dist import HuggingFaceModel
from composer_dist.errors import ParallelismError, ParallelismValueError
from composer_dist.precision import Precision
from composer_dist.recipe.data import datasets, loader
from composer_dist.recipe.read import read_configuration
from composer_dist.recipe.schema import ChatData, RowData
from composer_dist.recipe.session import run
from composer_dist.recipe.sources.rows import conversations, read
from composer_dist.recipe.tokenizer import byte_tokenizer
from composer_dist.recipe.trial import check_packing
from composer_dist.trainer import State
from tests.kit.compare import fails
from tests.kit.grids import slow
from tests.kit.scripts.recipes import exported, trained
from tests.kit.world import World

pytestmark = pytest.mark.promise(124)
hf = pytest.importorskip("datasets", reason="an extra")
EXAMPLE = Path(__file__).parents[2] / "examples" / "chat"
ROWS = EXAMPLE / "capitals.jsonl"


def answer(folder: Path, question: str) -> str:
    """What an exported model says, by transformers alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    messages = [{"role": "user", "content": question}]
    asked = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    told = model.generate(**asked, max_new_tokens=30, do_sample=False)
    found: str = tokenizer.decode(told[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)
    return found


@pytest.mark.slow
def test_a_chat_model_of_two_processes_answers_in_its_template(world2: World, tmp_path: Path) -> None:
    file = EXAMPLE / "chat.yaml"
    assert sum(not line.lstrip().startswith("#") for line in file.read_text().splitlines()) <= 20
    world2(exported, file, f"out={tmp_path}", f"data.source={ROWS}", "trainer.max_duration=120ba")
    for question, expected in (
        ("The capital of Peru?", "It is Lima."),
        ("The capital of Kenya?", "It is Nairobi."),
    ):
        assert answer(tmp_path / "model", question) == expected


@pytest.mark.parametrize("packing", ["true", slow("false")])
def test_two_processes_train_as_one(packing: str, world1: World, world2: World, tmp_path: Path) -> None:
    short = [f"data.source={ROWS}", f"data.packing={packing}", "trainer.max_duration=4ba"]
    (alone,) = world1(trained, EXAMPLE / "chat.yaml", f"out={tmp_path}/1", *short)
    one, other = world2(trained, EXAMPLE / "chat.yaml", f"out={tmp_path}/2", *short)
    assert one["losses"] == other["losses"] == pytest.approx(alone["losses"], rel=1e-4)


@pytest.mark.slow
def test_a_stream_resumes_where_it_was(world2: World, tmp_path: Path) -> None:
    lines = ROWS.read_text().splitlines()
    for number in range(2):
        (tmp_path / f"{number}.jsonl").write_text("\n".join(lines[number::2] * 6))
    options = [f"data.source={tmp_path}/*.jsonl", "data.streaming=true", "scheduler=null", "data.context=128"]
    options += ["checkpoints.interval=3ba"]
    run = EXAMPLE / "chat.yaml"
    whole, _ = world2(trained, run, f"out={tmp_path}/a", "trainer.max_duration=6ba", *options)
    first, _ = world2(trained, run, f"out={tmp_path}/b", "trainer.max_duration=3ba", *options)
    second, _ = world2(trained, run, f"out={tmp_path}/b", "trainer.max_duration=6ba", *options)
    assert second["began"] == 3
    assert first["losses"] + second["losses"] == whole["losses"]


def test_rows_are_read_from_every_kind_of_file(tmp_path: Path) -> None:
    expected = [json.loads(line) for line in ROWS.read_text().splitlines()]
    rows = hf.Dataset.from_list(expected)
    rows.to_parquet(tmp_path / "rows.parquet")
    rows.to_json(tmp_path / "rows.json")
    rows.save_to_disk(tmp_path / "saved")
    sources: list[Any] = [str(ROWS), [f"{tmp_path}/*.parquet"], f"{tmp_path}/rows.json", f"{tmp_path}/saved"]
    sources.append({"dataset": "json", "data_files": str(ROWS)})
    for source in sources:
        assert list(read(source)) == expected
        assert list(read(source, streaming=True)) == expected
    hf.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "splits")
    with pytest.raises(ParallelismValueError, match=r"has the splits train, test: give .*splits/train"):
        read(f"{tmp_path}/splits")
    with pytest.raises(
        ParallelismValueError, match=r"is not a folder that save_to_disk wrote.* \S+/\*\.jsonl"
    ):
        read(str(tmp_path))
    (tmp_path / "bad.jsonl").write_text(f'{ROWS.read_text()}{{"messages": [}}\n')
    with pytest.raises(
        ParallelismValueError, match=rf"bad\.jsonl:{len(expected) + 1}: not JSON: Expecting value"
    ):
        read(f"{tmp_path}/bad.jsonl")
    (tmp_path / "blank.jsonl").write_text('{"text": "a"}\n\n{"text": 3}\n')
    with pytest.raises(ParallelismValueError, match=r"^data.source: .*blank\.jsonl: The data set"):
        read(f"{tmp_path}/blank.jsonl")
    (tmp_path / "bad.csv").write_text("text,label\na,1\nb,2,3\n")
    with pytest.raises(
        ParallelismValueError, match=r"^data.source: .*bad\.csv: .*Expected 2 fields in line 3"
    ):
        read(f"{tmp_path}/bad.csv")
    (tmp_path / "more.jsonl").write_text('{"messages": [], "more": 1}\n')
    with pytest.raises(
        ParallelismValueError, match=r"other columns than the first one: .*1 new columns .*more"
    ):
        read([str(ROWS), f"{tmp_path}/more.jsonl"])
    (tmp_path / "na.CSV").write_text("text,label\nNA,None\n,b\n")
    assert list(read(f"{tmp_path}/na.CSV")) == [{"text": "NA", "label": "None"}, {"text": None, "label": "b"}]
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ParallelismValueError, match=r"data.evaluate: the files of .*empty.jsonl are empty"):
        read(f"{tmp_path}/empty.jsonl", key="data.evaluate")
    assert list(read([f"{tmp_path}/empty.jsonl", str(ROWS)])) == expected
    (tmp_path / "rows.txt").write_text("a")
    with pytest.raises(ParallelismValueError, match=r"names unknown kinds of files, '\.txt'. Rows are"):
        read([f"{tmp_path}/rows.parquet", f"{tmp_path}/rows.txt"])
    with pytest.raises(ParallelismValueError, match="No file matches"):
        read(f"{tmp_path}/*.none")


def test_rows_in_another_encoding_are_told(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes('{"text": "café"}\n'.encode("latin1"))
    data = ChatData(kind="chat", source=str(tmp_path / "rows.jsonl"))
    with fails(ParallelismValueError, "data.source: the rows are not text in UTF-8 (", "iconv -f latin1"):
        conversations(data, byte_tokenizer(), tmp_path)


MIXING = {
    "opt": "hidden_size: 32, word_embed_proj_dim: 32, num_hidden_layers: 2, num_attention_heads: 2",
    "bloom": "hidden_size: 32, n_layer: 2, n_head: 2",
    "mamba": "hidden_size: 32, num_hidden_layers: 2",
}
"""OPT's attention ignores `position_ids`, BLOOM takes none, and Mamba's layers have a state."""


def refused(folder: Path, kind: str) -> None:
    config = f"model.config={{model_type: {kind}, vocab_size: 512, {MIXING[kind]}}}"
    options = [config, f"data.source={ROWS}", f"out={folder}", "trainer.max_duration=1ba"]
    with fails(ParallelismValueError, f"model of type {kind} does not separate", "data.packing: false"):
        run(read_configuration(EXAMPLE / "chat.yaml", options))


@pytest.mark.parametrize("kind", MIXING)
def test_packing_is_refused_where_rows_would_see_each_other(kind: str, world2: World, tmp_path: Path) -> None:
    world2(refused, tmp_path, kind)


@pytest.mark.parametrize("kind", ["llama", "granitemoe"])
def test_rounding_is_not_taken_for_rows_that_see_each_other(kind: str) -> None:
    """Which tokens an expert gets together depends on the other row, and so does the order of additions."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = CONFIG_MAPPING[kind](vocab_size=512, use_cache=False, **sizes)
    model = HuggingFaceModel(AutoModelForCausalLM.from_config(config), byte_tokenizer())
    data = ChatData(kind="chat", source=str(ROWS), context=24)
    for precision in (None, Precision.AMP_BF16):
        check_packing(model, State(model=model, precision=precision), data)


def test_rows_are_held_out_and_padded(tmp_path: Path) -> None:
    options = [f"data.source={ROWS}", "data.held_out=2", "data.packing=false", f"out={tmp_path}"]
    read = read_configuration(EXAMPLE / "chat.yaml", options)
    tokenizer = byte_tokenizer()
    train, held = datasets(read.run, tokenizer, EXAMPLE)
    assert (len(train), len(held)) == (6, 2)
    batch = next(iter(loader(held, read, tokenizer, training=False)))
    assert batch["input_ids"].shape == batch["labels"].shape == batch["attention_mask"].shape
    assert torch.equal(batch["labels"] != -100, (batch["labels"] == batch["input_ids"]))
    assert bytes(batch["labels"][0][batch["labels"][0] != -100][:-1].tolist()) == b"It is Paris."
    read = read_configuration(EXAMPLE / "chat.yaml", [*options, "parallelism={mesh: {cp: 5}}"])
    longer = next(iter(loader(held, read, tokenizer, training=False)))
    length = batch["input_ids"].shape[1]
    assert longer["input_ids"].shape == (2, -(-length // 10) * 10), "each of 5 ranks gets two pieces"
    assert torch.equal(longer["labels"][:, :length], batch["labels"])
    assert (longer["labels"][:, length:] == -100).all()


@pytest.mark.parametrize(("file", "override", "told"), [
    ("chat/chat.yaml", "seed=1", "packed rows cannot be divided; set data.packing: false"),
    ("dpo.yaml", "seed=1", "data of kind preferences cannot be divided; set it to 1"),
    ("demo/english.yaml", "data.context=6", "so data.context must be a multiple of 4"),
])  # fmt: skip
def test_what_context_parallelism_cannot_divide_is_refused_before_the_model_is_built(
    file: str, override: str, told: str
) -> None:
    read = read_configuration(EXAMPLE.parent / file, [override, "parallelism={mesh: {cp: 2}}"])
    with pytest.raises(ParallelismValueError, match=f"parallelism.mesh.cp=2 divides each.*{told}"):
        loader([], read, byte_tokenizer(), training=True)  # type: ignore[arg-type]


def test_the_last_batch_of_an_epoch_is_left_out_unless_asked_for(tmp_path: Path) -> None:
    options = [f"data.source={ROWS}", "data.packing=false", "data.batch_size=3", f"out={tmp_path}"]
    for drop_last, expected in ((True, [3, 3]), (False, [3, 3, 2])):
        read = read_configuration(EXAMPLE / "chat.yaml", [*options, f"data.drop_last={drop_last}"])
        train, _ = datasets(read.run, tokenizer := byte_tokenizer(), EXAMPLE)
        batches = loader(train, read, tokenizer, training=True).placed(1, 0)
        assert [len(batch["input_ids"]) for batch in batches] == expected
    read = read_configuration(EXAMPLE / "chat.yaml", [*options, "data.batch_size=9"])
    with pytest.raises(
        ParallelismValueError, match="has 8 samples .* Reduce data.batch_size, or set drop_last"
    ):
        loader(train, read, tokenizer, training=True)


def test_what_contradicts_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="held_out takes rows of a source that is not streamed"):
        RowData(source="a", held_out=1, streaming=True)


def test_a_source_without_a_name_says_what_it_needs() -> None:
    with pytest.raises(ParallelismError, match="needs 'dataset'"):
        read({"split": "train"})
