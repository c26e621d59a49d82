"""Files that all ranks write together: those that transformers writes, byte for byte, from every mesh."""

import errno
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming

from composer_dist import FSDP2Config
from composer_dist.checkpoint import export_pretrained
from composer_dist.checkpoint.export import plan as export_plan
from composer_dist.checkpoint.export import weights as export_model
from composer_dist.distributed import parallelize_model
from composer_dist.distributed.mesh.layout import Coordinate, Layout
from composer_dist.errors import CheckpointRuntimeError, CheckpointValueError, ParallelismValueError
from composer_dist.files.slabs import Slab
from tests.kit.compare import same
from tests.kit.files import tensors
from tests.kit.huggingface import gpt2, mixtral, phi3, qwen3, random, tied_llama
from tests.kit.measure import profiled
from tests.kit.meshes import BY_WORLD
from tests.kit.world import run

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


def export_all(directory: Path, kinds: dict[str, list[str]]) -> dict[str, bool]:
    warnings.simplefilter("ignore")
    wrote: dict[str, bool] = {}
    write = export_model.write_slabs

    def watched(slabs: list[Slab], *rest: Any) -> int:
        total = write(slabs, *rest)
        wrote[key] = wrote.get(key, False) or total > 0
        return total

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_model, "write_slabs", watched)
        patch.setattr(export_model, "_SMALL", 64)  # holders of the same part share the work
        for name, models in kinds.items():
            for kind in models:
                key = f"{name} {kind}"
                model = random(MODELS[kind]())
                parallelize_model(model, BY_WORLD[name]())
                export_pretrained(model, directory / name / kind, max_shard_size="6KB")
    return wrote


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
    wrote = run(export_all, ranks, tmp_path / "found", kinds)
    for name, models in kinds.items():
        for kind in models:
            expect(kind, tmp_path / "expected" / kind, "6KB")
            same_files(tmp_path / "found" / name / kind, tmp_path / "expected" / kind, kind)
            assert all(one[f"{name} {kind}"] for one in wrote), f"a rank wrote nothing of {name} {kind}"


def test_experts_are_written_from_the_shards() -> None:
    model = mixtral()
    plan = planned(model)
    assert plan.groups == ()
    assert plan.direct["model.layers.0.mlp.experts.gate_up_proj"].boxes[0].source.startswith("model.layers.0")


def planned(model: Any, **options: Any) -> export_plan.ExportPlan:
    state = dict(model.state_dict(keep_vars=True))
    sources = {name: (tuple(value.shape), value.dtype) for name, value in state.items()}
    parts = {name: Layout(shape, rows=True).part(Coordinate(0, 2)) for name, (shape, _) in sources.items()}
    return export_plan.plan_export(model, sources, parts, 0, "5GB", **options)


def test_what_would_be_scattered_or_is_asked_for_is_gathered() -> None:
    model = gpt2()
    model.tie_weights()
    assert planned(model).groups == ()
    assert planned(model, everything=True).direct == {}
    together = ["transformer.wte.weight", "transformer.wpe.weight"]
    assert set(together) <= set(planned(model, together=[together], everything=True).groups[0].sources)
    with gathering():
        assert planned(model).direct == {}


@contextmanager
def gathering() -> Iterator[None]:
    """Inside, nothing is written from the shards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_plan, "_FEW", 0)
        patch.setattr(export_plan, "_WORTH", 1 << 30)
        yield


def export_gathered(directory: Path) -> None:
    warnings.simplefilter("ignore")
    for kind, name in (("mixtral", "fsdp"), ("phi3", "tp"), ("tied", "ddp")):
        model = random(MODELS[kind]())
        parallelize_model(model, BY_WORLD[name]())
        with gathering():
            export_pretrained(model, directory / kind)


@pytest.mark.promise(96)
def test_what_is_gathered_is_the_same(tmp_path: Path) -> None:
    run(export_gathered, 2, tmp_path / "found")
    for kind in ("mixtral", "phi3", "tied"):
        expect(kind, tmp_path / "expected" / kind, "5GB")
        same_files(tmp_path / "found" / kind, tmp_path / "expected" / kind, kind)


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


# Memory, and what fails


def big() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "vocab_size": 16384}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes))


def export_peak(directory: Path, name: str) -> int:
    warnings.simplefilter("ignore")
    model = big()
    parallelize_model(model, BY_WORLD[name]())
    return profiled(lambda: export_pretrained(model, directory / name))


@pytest.mark.parametrize("name", ["fsdp", "tp"])
def test_memory_while_exporting_is_bounded(tmp_path: Path, name: str) -> None:
    assert max(run(export_peak, 2, tmp_path, name)) <= 2 << 20  # of 84 MiB


def export_blind(directory: Path) -> list[str]:
    class Elsewhere(type(Path())):  # type: ignore[misc]
        def exists(self, **_: Any) -> bool:
            return False

    model = random(tied_llama())
    parallelize_model(model, FSDP2Config())
    with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        patch.setattr(export_model, "Path", Elsewhere if dist.get_rank() == 1 else Path)
        export_pretrained(model, directory)
    return [str(one.message) for one in caught if "do not see" in str(one.message)]


def test_a_directory_that_a_rank_does_not_see_is_written_by_rank_0(tmp_path: Path) -> None:
    first, second = run(export_blind, 2, tmp_path / "found")
    assert second == []
    assert first[0].startswith(f"Ranks 1 do not see {tmp_path / 'found'}, where rank 0 writes")
    expect("tied", tmp_path / "expected", "5GB")
    same_files(tmp_path / "found", tmp_path / "expected", "tied")


def export_to_a_full_disk(directory: Path, gathered: bool) -> str:
    model = random(tied_llama())
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
        with pytest.raises(CheckpointRuntimeError) as failure:
            export_pretrained(model, directory)
    dist.barrier()
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
    return str(failure.value)


@pytest.mark.parametrize("gathered", [False, True])
def test_a_rank_that_cannot_write_fails_on_all_and_the_earlier_export_stays(
    tmp_path: Path, gathered: bool
) -> None:
    first, second = run(export_to_a_full_disk, 2, tmp_path / "found", gathered)
    assert first == second
    assert first.startswith("Rank 1: Cannot write ")
    assert first.endswith("model.safetensors: No space left on device.")


def export_different(directory: Path) -> None:
    model = tied_llama()
    with pytest.raises(ParallelismValueError, match="a different max_shard_size"):
        export_pretrained(model, directory, max_shard_size=["1KB", "9KB"][dist.get_rank()])
    dist.barrier()  # rank 0 looks after the directory
    assert not list(directory.iterdir())
    with pytest.raises(CheckpointValueError, match="on the meta device: model.embed_tokens.weight"):
        export_pretrained(tied_llama().to("meta"), directory)


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    run(export_different, 2, tmp_path)
