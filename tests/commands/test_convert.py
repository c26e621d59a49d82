"""`composer-dist convert`: every form into every other, with the same values and in little memory."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typer.testing import CliRunner

from composer_dist import FSDP2Config
from composer_dist.checkpoint import load_checkpoint, save_checkpoint
from composer_dist.cli import app
from composer_dist.distributed import parallelize_model
from composer_dist.models import HuggingFaceModel
from tests.checkpoint.test_export import mixtral, same_tensors, tensors
from tests.checkpoint.test_huggingface import logits
from tests.distributed.test_weight_names import random
from tests.models.pretrained import llama, tokenizer
from tests.world import run


def convert(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["convert", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["convert", *map(str, arguments)])
    assert "Traceback" not in result.output
    return result.exit_code, " ".join(result.stderr.replace("│", " ").split())


def trained() -> tuple[Any, torch.optim.Optimizer]:
    model = HuggingFaceModel(llama(tied=True), tokenizer())
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.1)
    optimizer.step()
    return model, optimizer


def save(directory: Path) -> None:
    model, optimizer = trained()
    parallelize_model(model, FSDP2Config(), optimizer)
    state = {"model": model, "optimizer": optimizer, "steps": 7, "note": "a run"}
    save_checkpoint(directory / "sharded", state)
    save_checkpoint(directory / "whole.pt", state, sharded=False)


def same_run(path: Path) -> None:
    """A checkpoint loads as the run that was saved."""
    expected, its_optimizer = trained()
    model = HuggingFaceModel(llama(tied=True).apply(zero), tokenizer())
    optimizer = torch.optim.AdamW(model.parameters())
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "steps": 0}
    assert load_checkpoint(path, state) == {"note": "a run"}
    assert state["steps"] == 7
    same_tensors(model.state_dict(), expected.state_dict())
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        llama(tied=True).save_pretrained(like)
        tokenizer().save_pretrained(like)
    convert(tmp_path / "sharded", tmp_path / "made.pt")
    assert set(torch.load(tmp_path / "made.pt", weights_only=True)) == {"model", "optimizer", "steps", "note"}
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(tmp_path / "model", max_shard_size="5KB")
    convert(tmp_path / "model", tmp_path / "model.pt")
    held: dict[str, Tensor] = torch.load(tmp_path / "model.pt", weights_only=True)["model"]
    same_tensors(held, model.state_dict())
    convert(tmp_path / "model", tmp_path / "sharded", "--to", "sharded", "--prefix", "model.")
    other = HuggingFaceModel(mixtral())
    load_checkpoint(tmp_path / "sharded", {"model": other})
    same_tensors(other.model.state_dict(), model.state_dict())
    for source in ("model.pt", "sharded"):
        target = tmp_path / f"back from {source}"
        convert(tmp_path / source, target, "--to", "huggingface", "--like", tmp_path / "model")
        same_tensors(tensors(target), tensors(tmp_path / "model"))


def test_what_cannot_be_converted_is_said_in_a_statement(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        llama().save_pretrained(tmp_path / "model")
    (tmp_path / "there.pt").write_bytes(b"torn")
    assert refused(tmp_path / "model", tmp_path / "target")[0] == 2  # into what?
    status, text = refused(tmp_path / "nowhere", tmp_path / "target.pt")
    assert (status, "there is no" in text) == (2, True), text
    status, text = refused(tmp_path / "model", tmp_path / "there.pt")
    assert (status, "--overwrite" in text) == (2, True), text
    status, text = refused(tmp_path / "there.pt", tmp_path / "target", "--to", "sharded")
    assert (status, text.startswith("composer-dist convert: ")) == (1, True), text
    assert not (tmp_path / "target").exists()
    convert(tmp_path / "model", tmp_path / "there.pt", "--overwrite")
    status, text = refused(tmp_path / "there.pt", tmp_path / "target", "--to", "huggingface")
    assert (status, "pass --like" in text) == (1, True), text
    status, text = refused(
        tmp_path / "there.pt",
        tmp_path / "target",
        "--to",
        "huggingface",
        "--like",
        tmp_path / "model",
        "--key",
        "x",
    )
    assert (status, "has no 'x'; pass --key with one of model" in text) == (1, True), text
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mixtral().save_pretrained(tmp_path / "other")
    status, text = refused(
        tmp_path / "there.pt", tmp_path / "target", "--to", "huggingface", "--like", tmp_path / "other"
    )
    assert (status, "does not fit the model" in text) == (1, True), text
    assert not (tmp_path / "target").exists()
