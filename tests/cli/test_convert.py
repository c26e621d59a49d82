"""`composer-dist convert`: every form into every other, with the same values and in little memory."""

import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from composer_dist import FSDP2Config
from composer_dist.checkpoint import load_checkpoint, save_checkpoint
from composer_dist.checkpoint.convert import convert_checkpoint
from composer_dist.cli.commands import app
from composer_dist.distributed import parallelize_model
from composer_dist.models import HuggingFaceModel
from composer_dist.progress import Progress
from tests.kit.compare import same
from tests.kit.files import tensors
from tests.kit.huggingface import llama, logits, lora_llama, mixtral, pretrained_llama, random, tokenizer
from tests.kit.measure import profiled
from tests.kit.world import run


def called(*arguments: object) -> tuple[int, str]:
    """The exit status of a conversion, and what it prints."""
    result = CliRunner().invoke(app, ["convert", *map(str, arguments)])
    assert "Traceback" not in result.output
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


def convert(*arguments: object) -> None:
    status, told = called(*arguments)
    assert status == 0, told


def write(model: Any, path: Path, **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(path, **options)


SCALE = {"mean": torch.zeros(3), "std": torch.ones(3)}


def trained() -> tuple[Any, torch.optim.Optimizer]:
    model = HuggingFaceModel(pretrained_llama(tied=True), tokenizer())
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.1)
    optimizer.step()
    return model, optimizer


def save(directory: Path) -> None:
    model, optimizer = trained()
    parallelize_model(model, FSDP2Config(), optimizer)
    state = {"model": model, "optimizer": optimizer, "steps": 7, "note": "a run", "scale": SCALE}
    save_checkpoint(directory / "sharded", state)
    save_checkpoint(directory / "whole.pt", state, sharded=False)


def same_run(path: Path) -> None:
    """A checkpoint loads as the run that was saved."""
    expected, its_optimizer = trained()
    model = HuggingFaceModel(pretrained_llama(tied=True).apply(zero), tokenizer())
    optimizer = torch.optim.AdamW(model.parameters())
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "steps": 0}
    rest = load_checkpoint(path, state)
    same(rest.pop("scale"), SCALE)
    assert rest == {"note": "a run"}
    assert state["steps"] == 7
    same(model.state_dict(), expected.state_dict())
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        found, wanted = optimizer.state[parameter], its_optimizer.state[other]
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def zero(module: torch.nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        torch.nn.init.zeros_(parameter)


def test_runs_between_directories_files_and_models(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run(save, 2, tmp_path)
    like = tmp_path / "like"
    write(pretrained_llama(tied=True), like)
    tokenizer().save_pretrained(like)
    convert(tmp_path / "sharded", tmp_path / "made.pt")
    keys = {"model", "optimizer", "steps", "note", "scale"}
    assert set(torch.load(tmp_path / "made.pt", weights_only=True)) == keys
    convert(tmp_path / "whole.pt", tmp_path / "made", "--to", "sharded")
    for made in ("made.pt", "made"):
        same_run(tmp_path / made)
    for source in ("sharded", "whole.pt"):
        target = tmp_path / f"from {source}"
        convert(tmp_path / source, target, "--to", "huggingface", "--like", like, "--max-shard-size", "4KB")
        loaded, report = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
        assert not any(report.values()), report
        assert torch.equal(logits(loaded), logits(trained()[0].model))
        assert AutoTokenizer.from_pretrained(target)("a b").input_ids == [4, 5]
        assert (target / "model.safetensors.index.json").exists()


def test_models_into_checkpoints_and_back(tmp_path: Path) -> None:
    model = random(mixtral())
    write(model, tmp_path / "model", max_shard_size="5KB")
    convert(tmp_path / "model", tmp_path / "model.pt")
    held: dict[str, Tensor] = torch.load(tmp_path / "model.pt", weights_only=True)["model"]
    same(held, model.state_dict())
    convert(tmp_path / "model", tmp_path / "sharded", "--to", "sharded", "--prefix", "model.")
    other = HuggingFaceModel(mixtral())
    load_checkpoint(tmp_path / "sharded", {"model": other})
    same(other.model.state_dict(), model.state_dict())
    convert(tmp_path / "model" / "model.safetensors.index.json", tmp_path / "from the index.pt")
    same(torch.load(tmp_path / "from the index.pt", weights_only=True)["model"], model.state_dict())
    for source in ("model.pt", "sharded"):
        target = tmp_path / f"back from {source}"
        convert(tmp_path / source, target, "--to", "huggingface", "--like", tmp_path / "model")
        same(tensors(target), tensors(tmp_path / "model"))


def test_a_bare_state_and_a_directory_from_before_safetensors(tmp_path: Path) -> None:
    model, old, bare = random(llama()), tmp_path / "old", tmp_path / "bare.pt"
    write(model, tmp_path / "like")
    model.config.save_pretrained(old)
    torch.save(model.state_dict(), bare)
    torch.save(model.state_dict(), old / "pytorch_model.bin")
    for source in (bare, old):
        convert(source, tmp_path / f"{source.stem} made", "--to", "huggingface", "--like", tmp_path / "like")
        same(tensors(tmp_path / f"{source.stem} made"), tensors(tmp_path / "like"))
        convert(source, tmp_path / f"{source.stem} start", "--to", "sharded")
        other = random(llama(), seed=2)
        load_checkpoint(tmp_path / f"{source.stem} start", {"model": other})
        same(other.state_dict(), model.state_dict())


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's own
def test_what_cannot_be_converted_is_said_in_a_statement(tmp_path: Path) -> None:
    write(pretrained_llama(), tmp_path / "model")
    (tmp_path / "there.pt").write_bytes(b"torn")
    model, there, target, other = (tmp_path / name for name in ("model", "there.pt", "target", "other"))
    into = ["--to", "huggingface"]

    def refused(*arguments: object, status: int = 2) -> str:
        found, told = called(*arguments)
        assert found == status, told
        return told

    refused(model, target)  # into what?
    for size in ("-5KB", "0KB", "5"):
        assert f"max_shard_size must be a number of bytes or a size such as '5GB', not '{size}'." in refused(
            model, target, *into, f"--max-shard-size={size}"
        )
    assert "does not exist" in refused(tmp_path / "nowhere", target)
    assert "does not exist" in refused(tmp_path / "nowhere", tmp_path / "target.pt")
    assert "--overwrite" in refused(model, there)
    assert refused(there, target, "--to", "sharded").startswith("composer-dist convert: ")
    assert not target.exists()
    convert(model, there, "--overwrite")
    write(mixtral(), other)
    assert "pass --like" in refused(there, target, *into)
    told = refused(there, target, *into, "--like", model, "--key", "x")
    assert "has no 'x'; pass --key with one of model" in told
    assert "does not match the model" in refused(there, target, *into, "--like", other)
    save_checkpoint(tmp_path / "lora", {"model": HuggingFaceModel(lora_llama())})
    told = refused(tmp_path / "lora", target, *into, "--like", model)
    assert "lora, of a model with LoRA, does not match the model" in told
    assert not target.exists()


# Memory


def large(folder: Path, width: int) -> tuple[int, int]:
    """Write a Hugging Face model, and its pieces by two ranks; its bytes, and those of its largest tensor."""
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "vocab_size": 4096}
    model = llama(num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=8, **sizes)
    model.save_pretrained(folder / "model", max_shard_size="80MB")
    run(save_pieces, 2, folder)
    nbytes = [parameter.nbytes for parameter in model.parameters()]
    return sum(nbytes), max(nbytes)


def save_pieces(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    warnings.simplefilter("ignore")
    loaded = AutoModelForCausalLM.from_pretrained(folder / "model")
    parallelize_model(loaded, FSDP2Config())
    save_checkpoint(folder / "pieces", {"model": loaded})


WAYS = [
    ("model", "from model", "sharded"),
    ("model", "from model.pt", "file"),
    ("model", "again", "huggingface"),
    ("pieces", "from pieces.pt", "file"),
    ("pieces", "from pieces", "sharded"),
    ("pieces", "as model", "huggingface"),
    ("from model.pt", "from file", "sharded"),
    ("from model.pt", "file as model", "huggingface"),
]
"""From, to and form; what is in pieces was saved by two ranks."""
CONVERSION = """
import sys, threading
from pathlib import Path
import torch, transformers
from composer_dist.checkpoint.convert import convert_checkpoint, model_like

def memory(kind):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(kind)) * 1024

source, target, form, like = sys.argv[1:]
model_like(Path(like))
start, peak, over = memory("RssAnon"), 0, threading.Event()

def watch():
    global peak
    while not over.wait(0.001):
        peak = max(peak, memory("RssAnon"))

watcher = threading.Thread(target=watch)
watcher.start()
convert_checkpoint(Path(source), Path(target), form, like=Path(like))
over.set()
watcher.join()
print(peak - start)
"""


def test_torch_allocates_next_to_nothing(tmp_path: Path) -> None:
    assert large(tmp_path, 256)[0] > 18e6
    for source, target, form in WAYS:
        paths, like = (tmp_path / source, tmp_path / target), tmp_path / "model"
        convert_one = partial(convert_checkpoint, *paths, form, like=like, progress=Progress(shown=False))
        assert profiled(convert_one) < 1 << 20, (source, target)


@pytest.mark.slow
def test_memory_is_bounded_by_the_largest_tensor(tmp_path: Path) -> None:
    """Memory of its own: pages of mapped files are the system's, which takes them back when it likes."""
    whole, largest = large(tmp_path, 1024)
    assert whole > 180e6
    for source, target, form in WAYS:
        command = [sys.executable, "-c", CONVERSION, source, target, form, "model"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
        used = int(done.stdout.split()[-1])
        print(f"{source} -> {target}: {used / 1e6:.0f} MB of {whole / 1e6:.0f}")
        assert used <= 2 * largest + (32 << 20), (source, target)


@pytest.mark.promise(107)
@pytest.mark.parametrize("architecture", ["AutoConfig", "logging", "is_torch_available", "LlamaConfig"])
def test_only_models_of_transformers_are_called(tmp_path: Path, architecture: str) -> None:
    write(llama(), tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", architecture))
    status, told = called(tmp_path / "model", tmp_path / "out", "--to", "sharded")
    assert status != 0
    assert f"transformers.{architecture} is not a model" in told
    assert not (tmp_path / "out").exists()


@pytest.mark.promise(130)
def test_the_configuration_has_the_dtype_of_the_weights(tmp_path: Path) -> None:
    """With another one transformers, whose default is the configuration's, would round the weights."""
    from transformers import AutoModelForCausalLM

    model = random(llama())
    write(model, tmp_path / "trained")
    write(llama().bfloat16(), tmp_path / "base")
    convert(tmp_path / "trained", tmp_path / "c", "--to", "sharded")
    convert(tmp_path / "c", tmp_path / "made", "--to", "huggingface", "--like", tmp_path / "base")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype="auto")
    same(loaded.state_dict(), model.state_dict())


def test_a_directory_with_others_in_it_is_split_again_in_place(tmp_path: Path) -> None:
    model = random(llama())
    write(model, tmp_path / "model")
    before = tensors(tmp_path / "model")
    (tmp_path / "model" / "original").mkdir()
    (tmp_path / "model" / "original" / "params.json").write_text("{}")
    options = ["--to", "huggingface", "--max-shard-size", "5KB"]
    convert(tmp_path / "model", tmp_path / "other", *options)
    convert(tmp_path / "model", tmp_path / "model", *options, "--overwrite")
    for made in ("other", "model"):
        assert len(list((tmp_path / made).glob("*.safetensors"))) > 1
        same(tensors(tmp_path / made), before)
    assert (tmp_path / "model" / "original" / "params.json").exists()
    assert not (tmp_path / "other" / "original").exists()


@pytest.mark.promise(107)
def test_links_out_of_the_directory_are_not_copied(tmp_path: Path) -> None:
    write(llama(), tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "c", "--to", "sharded")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "model" / "notes.txt").symlink_to(tmp_path / "secret")
    status, told = called(
        tmp_path / "c", tmp_path / "out", "--to", "huggingface", "--like", tmp_path / "model"
    )
    assert status != 0
    assert "notes.txt is a link that leads out of its directory" in told
    assert not (tmp_path / "out" / "notes.txt").exists()


def test_files_of_the_user_stay_in_a_replaced_directory(tmp_path: Path) -> None:
    write(llama(), tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "c", "--to", "sharded")
    (tmp_path / "out").mkdir()
    for name in ("model_of_mine.safetensors", "model-00001-of-00002.safetensors"):
        (tmp_path / "out" / name).write_text("x")
    to = ["--to", "huggingface", "--like", tmp_path / "model", "--overwrite"]
    convert(tmp_path / "c", tmp_path / "out", *to)
    assert sorted(file.name for file in (tmp_path / "out").glob("*.safetensors")) == [
        "model.safetensors",
        "model_of_mine.safetensors",
    ]
