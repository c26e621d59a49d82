"""Files that all ranks write together: those that transformers writes, byte for byte, from every mesh."""

import errno
import os
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming

from composer_dist import FSDP2Config
from composer_dist.checkpoint import export_pretrained
from composer_dist.checkpoint.export import plan as export_plan
from composer_dist.checkpoint.export import weights as export_model
from composer_dist.distributed import init_context, parallelize_model
from composer_dist.distributed.mesh.layout import Coordinate, Layout
from composer_dist.errors import CheckpointRuntimeError, CheckpointValueError, ParallelismValueError
from composer_dist.files.slabs import Slab
from tests.kit.compare import fails_alike, same
from tests.kit.files import tensors
from tests.kit.huggingface import gpt2, logits, lora_llama, mixtral, phi3, qwen3, random, tied_llama
from tests.kit.measure import profiled
from tests.kit.meshes import BY_WORLD
from tests.kit.world import on_ranks, run

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
MODELS = {"phi3": phi3, "gpt2": gpt2, "qwen3": qwen3, "tied": tied_llama, "mixtral": mixtral}


def same_files(found: Path, expected: Path, kind: str) -> None:
    if kind == "mixtral":  # transformers keeps what shares memory in one file, however large
        same(tensors(found), tensors(expected))
        return
    names = {path.name for path in expected.iterdir()}
    assert {path.name for path in found.iterdir()} == names
    for name in names:
        assert (found / name).read_bytes() == (expected / name).read_bytes(), name


def expect(kind: str, path: Path, size: str) -> None:
    warnings.simplefilter("ignore")
    random(MODELS[kind]()).save_pretrained(path, max_shard_size=size)


def exported(directory: Path, name: str, kind: str, **options: Any) -> None:
    warnings.simplefilter("ignore")
    model = random(MODELS[kind]())
    parallelize_model(model, BY_WORLD[name]())
    export_pretrained(model, directory / name / kind, **options)


def export_all(directory: Path, kinds: dict[str, list[str]]) -> None:
    write, written = export_model.write_slabs, []

    def watched(slabs: list[Slab], *rest: Any) -> int:
        written.append(write(slabs, *rest))
        return written[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_model, "write_slabs", watched)
        patch.setattr(export_model, "_SMALL", 64)  # holders of the same part share the work
        for name, models in kinds.items():
            for kind in models:
                written.clear()
                exported(directory, name, kind, max_shard_size="6KB")
                assert sum(written) > 0, f"this rank wrote nothing of {name} {kind}"


@pytest.mark.promise(96)
@pytest.mark.parametrize(
    ("ranks", "kinds"),
    [
        (
            2,
            {"fsdp": ["gpt2", "mixtral"], "ddp": ["tied"], "hsdp": ["qwen3"], "tp": ["phi3", "gpt2", "tied"]},
        ),
        (4, {"hsdp": ["mixtral"], "tp": ["phi3", "qwen3"], "replicas of tp": ["gpt2"]}),
    ],
)
def test_every_mesh_writes_what_transformers_writes(
    tmp_path: Path, ranks: int, kinds: dict[str, list[str]]
) -> None:
    run(export_all, ranks, tmp_path / "found", kinds)
    for name, models in kinds.items():
        for kind in models:
            expect(kind, tmp_path / "expected" / kind, "6KB")
            same_files(tmp_path / "found" / name / kind, tmp_path / "expected" / kind, kind)


def export_what_one_rank_has_loaded(directory: Path) -> None:
    warnings.simplefilter("ignore")
    if dist.get_rank() == 0:
        model = AutoModelForCausalLM.from_pretrained(directory / "given")
    else:
        with init_context():
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory / "given"))
    parallelize_model(model, "fsdp")
    export_pretrained(model, directory / "found", max_shard_size="6KB")


@pytest.mark.promise(96)
def test_a_model_that_one_rank_has_loaded_is_exported_as_it_came(tmp_path: Path) -> None:
    """transformers sorts the names of a model that it has loaded, and those of other ranks not."""
    expect("qwen3", tmp_path / "given", "6KB")
    run(export_what_one_rank_has_loaded, 2, tmp_path)
    same_files(tmp_path / "found", tmp_path / "given", "qwen3")


def planned(model: Any, **options: Any) -> export_plan.ExportPlan:
    state = dict(model.state_dict(keep_vars=True))
    sources = {name: (tuple(value.shape), value.dtype) for name, value in state.items()}
    parts = {name: Layout(shape, rows=True).part(Coordinate(0, 2)) for name, (shape, _) in sources.items()}
    return export_plan.plan_export(model, sources, parts, 0, "5GB", **options)


def test_what_is_written_from_the_shards_and_what_is_gathered() -> None:
    plan = planned(mixtral())
    assert plan.groups == ()
    assert plan.direct["model.layers.0.mlp.experts.gate_up_proj"].boxes[0].source.startswith("model.layers.0")
    model = gpt2()
    model.tie_weights()
    assert planned(model).groups == ()
    assert planned(model, everything=True).direct == {}
    together = ["transformer.wte.weight", "transformer.wpe.weight"]
    assert set(together) <= set(planned(model, together=[together], everything=True).groups[0].sources)
    with gathering():
        assert planned(model).direct == {}


@pytest.mark.promise(96)
def test_ties_that_the_configuration_does_not_have_are_stored_twice(tmp_path: Path) -> None:
    model = random(qwen3())
    model.lm_head.weight = model.model.embed_tokens.weight
    model.model.layers[1].mlp = model.model.layers[0].mlp
    export_pretrained(model, tmp_path)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert torch.equal(logits(loaded), logits(model))


def gathering() -> Any:
    """Inside, nothing is written from the shards."""
    return mock.patch.multiple(export_plan, _FEW=0, _WORTH=1 << 30)


def export_gathered(directory: Path) -> None:
    with gathering():
        for name, kind in (("fsdp", "mixtral"), ("tp", "phi3"), ("ddp", "tied")):
            exported(directory, name, kind)


@pytest.mark.promise(96)
def test_what_is_gathered_is_the_same(tmp_path: Path) -> None:
    run(export_gathered, 2, tmp_path / "found")
    for name, kind in (("fsdp", "mixtral"), ("tp", "phi3"), ("ddp", "tied")):
        expect(kind, tmp_path / "expected" / kind, "5GB")
        same_files(tmp_path / "found" / name / kind, tmp_path / "expected" / kind, kind)


class Scaled(ConversionOps):
    """A conversion that computes."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **_: Any
    ) -> dict[str, Any]:
        (value,) = input_dict.values()
        return {target_patterns[0]: (value[0] if isinstance(value, list) else value) * self.factor}

    @property
    def reverse_op(self) -> ConversionOps:
        return Scaled(1 / self.factor)


def scaled() -> Any:
    model = random(tied_llama())
    model._weight_conversions = [
        WeightConverter("mlp.half.weight", "mlp.down_proj.weight", operations=[Scaled(2.0)]),
        WeightRenaming("norm.scale", "norm.weight"),
    ]
    return model


def export_scaled(directory: Path) -> None:
    model = scaled()
    parallelize_model(model, FSDP2Config())
    export_pretrained(model, directory)


@pytest.mark.promise(96)
def test_what_transformers_computes_is_gathered_alone(tmp_path: Path) -> None:
    names = {name for group in planned(scaled()).groups for name in group.sources}
    assert names == {f"model.layers.{number}.mlp.down_proj.weight" for number in range(len(names))}
    run(export_scaled, 2, tmp_path / "found")
    scaled().save_pretrained(tmp_path / "expected")
    same_files(tmp_path / "found", tmp_path / "expected", "tied")
    assert any(name.endswith("half.weight") for name in tensors(tmp_path / "found"))


def big() -> Any:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "vocab_size": 16384}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes))


@pytest.mark.parametrize("name", ["fsdp", "tp"])
@on_ranks(2)
def test_memory_while_exporting_is_bounded(tmp_path: Path, name: str) -> None:
    warnings.simplefilter("ignore")
    model = big()
    parallelize_model(model, BY_WORLD[name]())
    assert profiled(lambda: export_pretrained(model, tmp_path / name)) <= 2 << 20  # of 84 MiB


@on_ranks(2)
def test_a_directory_that_a_rank_does_not_see_is_written_by_rank_0(tmp_path: Path) -> None:
    class Elsewhere(type(Path())):  # type: ignore[misc]
        def exists(self, **_: Any) -> bool:
            return False

    rank, model, found = dist.get_rank(), random(tied_llama()), tmp_path / "found"
    parallelize_model(model, FSDP2Config())
    with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        patch.setattr(export_model, "Path", Elsewhere if rank == 1 else Path)
        export_pretrained(model, found)
    told = [one for one in caught if "do not see" in str(one.message)]
    assert [one.filename for one in told] == [__file__] * (1 - rank)
    assert rank or str(told[0].message).startswith(f"Ranks 1 do not see {found}, where rank 0 writes")
    if rank == 0:
        expect("tied", tmp_path / "expected", "5GB")
        same_files(found, tmp_path / "expected", "tied")


@pytest.mark.parametrize("gathered", [False, True])
@on_ranks(2)
def test_a_rank_that_cannot_write_fails_on_all_and_the_earlier_export_stays(
    tmp_path: Path, gathered: bool
) -> None:
    model, directory = random(tied_llama()), tmp_path / "found"
    parallelize_model(model, FSDP2Config())
    export_pretrained(model, directory)
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    dist.barrier()
    pwrite = os.pwrite

    def fail(*arguments: Any) -> int:
        if dist.get_rank() == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(*arguments)

    with pytest.MonkeyPatch.context() as patch, gathering() if gathered else nullcontext():
        patch.setattr(os, "pwrite", fail)
        with fails_alike(CheckpointRuntimeError, "Rank 1: Cannot write ", "model.safetensors: No space left"):
            export_pretrained(model, directory)
    dist.barrier()  # rank 0 looks after the directory
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")
@on_ranks(2)
def test_what_peft_cannot_merge_fails_on_all_ranks_and_leaves_no_collective(tmp_path: Path) -> None:
    model = lora_llama(lora_bias=True)
    parallelize_model(model, FSDP2Config())
    text = "Rank 0: peft cannot merge the adapter of model.layers.0.self_attn.q_proj: Impossible to merge"
    with fails_alike(CheckpointValueError, text):
        export_pretrained(model, tmp_path / "out", merge_adapters=True)
    assert not list(tmp_path.rglob("*.safetensors"))
    tokens = torch.ones(1, 3, dtype=torch.int64)
    model(input_ids=tokens, labels=tokens).loss.backward()
    dist.barrier()


@on_ranks(2)
def test_what_cannot_be_exported(tmp_path: Path) -> None:
    with pytest.raises(ParallelismValueError, match="a different max_shard_size"):
        export_pretrained(tied_llama(), tmp_path, max_shard_size=["1KB", "9KB"][dist.get_rank()])
    dist.barrier()  # rank 0 looks after the directory
    assert not list(tmp_path.iterdir())
    with pytest.raises(CheckpointValueError, match="on the meta device: model.embed_tokens.weight"):
        export_pretrained(tied_llama().to("meta"), tmp_path)
