"""Weights from files into the shards of any mesh: values, bytes read, memory, and what is refused.

Longer than other files: all cases read files that the same helpers write.
"""

import json
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM

from composer_dist import DDPConfig
from composer_dist.checkpoint import load_pretrained
from composer_dist.distributed import init_context, parallelize_composer_model, parallelize_model
from composer_dist.distributed.mesh.layout import Layout
from composer_dist.distributed.mesh.mesh import Mesh
from composer_dist.distributed.moving import shares
from composer_dist.distributed.moving.gather import gather
from composer_dist.distributed.prepared import named_parameters_canonical
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.distributed.weights.disk import Pretrained, UnfilledPart, check_weights
from composer_dist.errors import (
    CheckpointKeyError,
    CheckpointRuntimeError,
    CheckpointValueError,
    ParallelismRuntimeError,
    ParallelismTypeError,
    ParallelismValueError,
)
from composer_dist.files.match import Match
from composer_dist.files.read import Files
from composer_dist.files.safetensors import read_index
from composer_dist.models import HuggingFaceModel
from composer_dist.structure.structure import read_structure
from composer_dist.tensors.blueprint import Blueprint
from tests.kit.compare import close, fails_alike, same, values
from tests.kit.files import saved
from tests.kit.grids import crossed, in_the_default_run, slow
from tests.kit.huggingface import gpt2, llama, phi3, qwen3, tied_llama
from tests.kit.measure import profiled
from tests.kit.meshes import config, mesh
from tests.kit.toy import Toy, built, tokens, train
from tests.kit.world import on_ranks, run

pytestmark = pytest.mark.promise(105)

MIB = 1 << 20


def shared_file(directory: Path, make: Callable[[], nn.Module] = Toy, **changes: Any) -> Path:
    """What rank 0 saves of a model; None leaves a name out."""
    if dist.get_rank() == 0:
        saved(built(make, seed=3), directory, **changes)
    dist.barrier()
    return directory / "toy.safetensors"


def same_start_and_training(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    expected = built(seed=3)
    same(values(model), values(expected))
    train(model, optimizer)
    train(expected, torch.optim.SGD(expected.parameters(), lr=0.1), whole=True)
    close(values(model), values(expected))


@pytest.mark.parametrize(
    ("ranks", "replicas", "start"),
    in_the_default_run(
        *((1, 1, "cpu"), (2, 1, "meta"), (2, 1, "cpu"), (4, 2, "meta")),
        among=[(*each, start) for each in ((1, 1), (2, 1), (4, 1), (4, 2)) for start in ("meta", "cpu")],
    ),
)
@on_ranks("ranks")
@mock.patch.object(shares, "SMALL", 64)  # so that replicas share
def test_every_rank_reads_its_parts_and_nothing_else(
    tmp_path: Path, ranks: int, replicas: int, start: str
) -> None:
    path = shared_file(tmp_path)
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    model = built(seed=7 + dist.get_rank(), device=start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    done = parallelize_model(model, config(replicas=replicas), optimizer, weights=path)
    sharded = [p.to_local().nbytes for n, p in model.named_parameters() if n != "scale"]
    buffers = sum(b.nbytes for n, b in model.named_buffers() if "table" not in n)
    whole = model.scale.nbytes + buffers
    own = sum(size / replicas if size >= 64 else size for size in sharded)
    read = done.bytes_read - (header if dist.get_rank() == 0 else 0)
    assert own <= read + 64 <= own + whole + 64 + 3 * replicas * len(sharded) * 4
    assert replicas == 1 or done.bytes_moved > 0
    assert "bytes read by this rank" in str(done)
    same_start_and_training(model, optimizer)


@pytest.mark.parametrize("ranks", [1, 2, slow(4)])
@on_ranks("ranks")
@mock.patch.object(shares, "SMALL", 64)  # so that replicas share
def test_replicas_read_a_share_each(tmp_path: Path, ranks: int) -> None:
    model = built(device="meta" if dist.get_rank() else "cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    done = parallelize_model(model, DDPConfig(), optimizer, weights=shared_file(tmp_path))
    same_start_and_training(model, optimizer)
    whole = sum(tensor.nbytes for tensor in model.state_dict().values()) - 2 * model.head.weight.nbytes
    assert dist.get_rank() == 0 or done.bytes_read <= 1.5 * whole / ranks + 500


def linears() -> nn.Module:
    return nn.Sequential(*(nn.Linear(256, 300) for _ in range(4)))


@pytest.mark.promise(142)
@on_ranks(4)
def test_bytes_read_are_the_shards_and_the_headers(tmp_path: Path) -> None:
    path, model = shared_file(tmp_path, linears), built(linears, device="meta")
    shard = 4 * (257 * 75 * 4)
    assert shard <= parallelize_model(model, config(), weights=path).bytes_read <= shard * 1.02


# transformers


def llama_base() -> Any:
    return llama().model


def wrapped() -> Any:
    return HuggingFaceModel(gpt2())


@crossed(
    {
        "shard_size": ["5GB", "4KB"],
        "make, original, dtype": [
            (gpt2, gpt2, torch.float32),
            (llama, llama, torch.float32),
            (wrapped, gpt2, torch.float32),
            (llama_base, llama, torch.float32),
            (llama, llama, torch.bfloat16),
        ],
    }
)
@on_ranks(2)
def test_transformers_directories_give_what_from_pretrained_gives(
    tmp_path: Path, make: Any, original: Any, dtype: torch.dtype, shard_size: str
) -> None:
    if dist.get_rank() == 0:
        original().to(dtype).save_pretrained(tmp_path, max_shard_size=shard_size)
    dist.barrier()
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "4KB")
    expected = values(type(original()).from_pretrained(tmp_path, dtype=torch.float32))
    model, strict = built(make, device="meta"), make is not llama_base
    prepare = parallelize_composer_model if make is wrapped else parallelize_model
    if not strict:
        with pytest.raises(CheckpointKeyError, match="unexpected: lm_head.weight. strict=False loads"):
            prepare(model, config=config(), weights=tmp_path)
        expected = {n.removeprefix("model."): v for n, v in expected.items() if n.startswith("model.")}
    with nullcontext() if strict else pytest.warns(UserWarning, match="lm_head.weight"):
        prepare(model, config=config(strict=strict), weights=tmp_path)
    prefix = "model." if make is wrapped else ""
    same(values(model), {f"{prefix}{name}": value for name, value in expected.items()})
    if original is gpt2:
        names = [held.info.names for held in read_structure(model).tensors.values()]
        assert any(len(each) == 2 for each in names)  # still tied


@on_ranks(2)
def test_a_base_checkpoint_and_new_adapters(tmp_path: Path) -> None:
    if dist.get_rank() == 0:
        llama().save_pretrained(tmp_path)
    dist.barrier()
    warnings.simplefilter("ignore")
    with torch.device("meta"):
        model = get_peft_model(llama(), LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=3))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    parallelize_model(model, config(), optimizer, weights=tmp_path)
    found = values(model)
    reference = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    plain = {name.replace(".base_layer", ""): value for name, value in found.items() if "lora_" not in name}
    same({name.removeprefix("base_model.model."): value for name, value in plain.items()}, values(reference))
    for name, value in found.items():
        assert "lora_" not in name or bool(value.any()) == ("lora_A" in name)
    ids = torch.arange(8).view(1, 8)
    torch.testing.assert_close(model(input_ids=ids).logits, reference(input_ids=ids).logits)


@pytest.mark.parametrize(
    ("ranks", "replicas", "make"),
    in_the_default_run(
        *((2, 1, phi3), (2, 1, gpt2), (4, 1, qwen3), (4, 2, tied_llama)),
        among=[
            (*each, make) for each in ((2, 1), (4, 1), (4, 2)) for make in (phi3, qwen3, gpt2, tied_llama)
        ],
    ),
)
@on_ranks("ranks")
@mock.patch.object(shares, "SMALL", 64)  # so that replicas share
def test_tensor_parallel_models_read_their_windows(
    tmp_path: Path, ranks: int, replicas: int, make: Callable[[], Any]
) -> None:
    if dist.get_rank() == 0:
        built(make, seed=3).save_pretrained(tmp_path)
    dist.barrier()
    expected = {name: parameter.detach() for name, parameter in built(make, seed=3).named_parameters()}
    for start in ("meta", "cpu"):
        model = built(make, seed=4, device=start)
        done = parallelize_model(model, mesh(dp_replicate=replicas, tp=2), weights=tmp_path)
        same({name: gather(p) for name, p in named_parameters_canonical(model)}, expected)
        assert done.bytes_read < sum(parameter.nbytes for parameter in expected.values())
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter.to_local() if isinstance(parameter, DTensor) else parameter)
    assert load_pretrained(model, tmp_path) == ([], [])
    same({name: gather(p) for name, p in named_parameters_canonical(model)}, expected)


# What the files lack, and what they have too much


def refused(kind: type[Exception], *texts: str, weights: Any, **options: Any) -> None:
    """On all ranks, before anything changes."""
    model = built(device="meta")
    before = [id(parameter) for parameter in model.parameters()]
    with fails_alike(kind, *texts):
        parallelize_model(model, config(**options), weights=weights)
    assert [id(parameter) for parameter in model.parameters()] == before
    assert all(parameter.is_meta for parameter in model.parameters())


WRONG = torch.zeros(3, 8)


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"head.bias": torch.zeros(16)}, CheckpointKeyError, "unexpected: head.bias"),
        ({"layers.0.up.weight": None, "row": None}, CheckpointKeyError, "missing: row, layers.0.up.weight"),
        ({"row": WRONG}, CheckpointValueError, r"row is (3, 8) in the checkpoint, (1, 8) in the model"),
        ({"row": WRONG[:1].long()}, CheckpointValueError, "row is int64 in the checkpoint, float32"),
        ({"head.weight": WRONG}, CheckpointValueError, "but the model ties them as embed"),
    ],
)
@on_ranks(2)
def test_what_does_not_fit_is_named(
    tmp_path: Path, changes: dict[str, Any], kind: type[Exception], text: str
) -> None:
    refused(kind, text, weights=shared_file(tmp_path, **changes))


@on_ranks(2)
def test_ranks_that_are_given_something_else_are_told(tmp_path: Path) -> None:
    path, rank = shared_file(tmp_path), dist.get_rank()
    refused(ParallelismValueError, "weights= ", "sync='rank0'", weights=path, sync="rank0")
    refused(CheckpointValueError, "There is no file or directory /nowhere here", weights="/nowhere")
    refused(ParallelismValueError, "weights='s3://a/b' is a URL; download the files", weights="s3://a/b")
    own = tmp_path / f"rank{rank}"
    own.mkdir()
    save_file({"row": torch.zeros(1 + rank, 8)}, own / "model.safetensors")
    other = "has 136 bytes, but 104 are expected"
    refused(CheckpointValueError, "rank1", other, weights=own, strict=False)
    elsewhere = "Rank 1 is at 'the plan' while rank 0"
    refused(ParallelismRuntimeError, elsewhere, weights=None if rank else path)


@on_ranks(2)
def test_ranks_that_see_other_contents_of_the_same_size_are_told(tmp_path: Path) -> None:
    rank = dist.get_rank()
    own = tmp_path / f"rank{rank}"
    own.mkdir()
    path = saved(built(seed=3), own)
    model = built(device="meta")
    parallelize_model(model, config(), weights=path)  # equal copies
    same(values(model), values(built(seed=3)))
    if rank == 1:
        contents = bytearray(path.read_bytes())
        contents[-1] ^= 1  # of a tensor that other ranks may hold
        path.write_bytes(contents)
    text = "Ranks 0 and 1 see different contents in toy.safetensors"
    refused(CheckpointValueError, text, weights=path)
    with fails_alike(CheckpointValueError, text):
        load_pretrained(model, path)
    if rank == 1:
        path = path.rename(own / "other.safetensors")
    refused(CheckpointValueError, "given different weights: other.safetensors, toy.safet", weights=path)
    if rank == 1:
        path.unlink()
    refused(CheckpointValueError, "Rank 1: There is no", "rank1/other.safetensors on this rank", weights=path)


@on_ranks(2)
def test_lenient_what_the_files_lack_comes_from_where_it_would(tmp_path: Path) -> None:
    extra = {"row": None, "layers.1.up.weight": None, "other": torch.zeros(2)}
    path = shared_file(tmp_path, **extra)
    expected, initial = values(built(seed=3)), values(built(seed=5))
    lacking = {"row", "layers.1.up.weight"}
    rank = dist.get_rank()
    for device in ("cpu", "meta" if rank else "cpu"):  # equal everywhere; only rank 0 has values
        model = built(seed=5, device=device)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            parallelize_model(model, config(strict=False), weights=path)
        texts = [str(each.message) for each in caught]
        assert any("row, layers.1.up.weight" in text for text in texts)
        assert any("The model lacks these" in text and "other" in text for text in texts)
        same(values(model), {n: initial[n] if n in lacking else expected[n] for n in expected})
    model = built(device="meta")
    torch.manual_seed(11)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parallelize_model(model, config(strict=False), weights=path)
    found = values(model)
    same({n: found[n] for n in found.keys() - lacking}, {n: expected[n] for n in found.keys() - lacking})
    assert all(found[name].std() > 0 for name in lacking)


@on_ranks(2)
def test_new_tensors_of_other_seeds_have_a_remedy_that_works(tmp_path: Path) -> None:
    path, model = shared_file(tmp_path, row=None), built(seed=dist.get_rank())
    texts = "values of row, which the files lack", "or build it inside of init_context"
    with fails_alike(ParallelismValueError, *texts) as error:
        parallelize_model(model, config(strict=False), weights=path)
    assert "sync=" not in str(error.value)
    with init_context():
        model = Toy()
    with pytest.warns(UserWarning, match="lacks these, .*: row"):
        parallelize_model(model, config(strict=False), weights=path)
    assert model.row.shape == (1, 8)


class Scaled(nn.Module):
    """An initializer that looks at another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4))
        self.register_buffer("total", torch.empty(4), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight.numel() and not self.weight.is_meta:
            self.total.copy_(self.weight.detach().sum(0))
        else:
            self.total.copy_(self.weight.sum(0))


@on_ranks(2)
def test_initializers_see_what_the_files_have(tmp_path: Path) -> None:
    path = shared_file(tmp_path, Scaled)
    model, expected = built(Scaled, device="meta"), built(Scaled, seed=3)
    parallelize_model(model, config(), weights=path)
    same(values(model), values(expected))


# Any layout


def opened(path: Path) -> Pretrained:
    index = read_index(path)
    made = {name: Blueprint.stored(name, e.shape, e.dtype) for name, e in index.entries.items()}
    return Pretrained(index, path.parent, Match(made, keys={name: [name] for name in made}), Agreement())


ONE, TWO = ["dp_shard", "tp", "dp_replicate"], ["dp_replicate dp_shard", "dp_shard tp", "dp_replicate tp"]


@pytest.mark.parametrize("names", in_the_default_run(*TWO[1:], among=[*ONE, *TWO]))
@on_ranks(4)
@mock.patch.object(shares, "SMALL", 16)  # so that replicas share
def test_any_layout_on_any_mesh_shared_in_windows(tmp_path: Path, names: str) -> None:
    path = tmp_path / "all.safetensors"
    if dist.get_rank() == 0:
        state = {str(s): torch.randn(s) for s in [(12, 8), (7, 6), (3, 12), (5,), (4, 6, 4), (2, 0), ()]}
        save_file(state | {"half": torch.randn(40, 30).bfloat16()}, path)
    dist.barrier()
    mesh = init_device_mesh("cpu", (4,) if names in ONE else (2, 2), mesh_dim_names=tuple(names.split()))
    everything, at = load_file(path), Mesh(mesh).here
    targets = [
        UnfilledPart(name, layout, torch.full(layout.local_shape(at), -1.0), Mesh(mesh))
        for name, value in everything.items()
        for layout in layouts(value)
    ]
    opened(path).fill(targets, 64)
    for target in targets:
        expected = target.layout.part(at).of(everything[target.name].float())
        assert torch.equal(target.local.view(-1), expected), (target.name, target.layout)


def layouts(value: torch.Tensor) -> list[Layout]:
    shape = tuple(value.shape)
    found = [Layout(shape)]
    if value.ndim and value.numel():
        found.append(Layout(shape, rows=True))
        found += [Layout(shape, rows, dim) for rows in (True, False) for dim in range(value.ndim)]
        found += [Layout(shape, True, 0, 2)] if shape[0] % 4 == 0 else []
    return found


# Memory


def giant_and_small() -> dict[str, torch.Tensor]:
    """In float32, 64 MiB in one tensor and as many in others."""
    giant = torch.arange(1 << 24).remainder_(251).to(torch.uint8).reshape(4096, 4096)
    return {"giant": giant, **{f"small.{i}": part.clone() for i, part in enumerate(giant.split(64))}}


@pytest.mark.parametrize("stored", [torch.float32, slow(torch.bfloat16)])
def test_memory_is_bounded_by_the_buckets(tmp_path: Path, stored: torch.dtype) -> None:
    path = tmp_path / "big.safetensors"
    save_file({name: value.to(stored) for name, value in giant_and_small().items()}, path)
    for kind in ("cut", "whole", "columns"):
        extra = max(run(fill_peak, 2, path, kind))
        assert extra <= 2 * 8 * MIB + 16 * MIB
        assert extra > MIB or (kind == "cut" and stored == torch.float32)  # straight into the shards


def fill_peak(path: Path, kind: str) -> int:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp" if kind == "columns" else "dp_shard",))
    disk, at = opened(path), Mesh(mesh).here
    disk.match.tensors = {
        name: value.t() if kind == "columns" else value for name, value in disk.match.tensors.items()
    }
    targets = []
    for name, value in disk.match.tensors.items():
        layout = Layout(tuple(value.shape), rows=kind == "cut", tp_dim=1 if kind == "columns" else None)
        targets.append(UnfilledPart(name, layout, torch.full(layout.local_shape(at), 1.0), Mesh(mesh)))
    gathered = [0]
    gather = dist.all_gather

    def watched(parts: list[torch.Tensor], *arguments: Any, **options: Any) -> Any:
        gathered.append(sum(part.nbytes for part in parts))
        return gather(parts, *arguments, **options)

    with mock.patch.object(dist, "all_gather", watched):
        extra = profiled(lambda: disk.fill(targets, 8 * MIB))
    assert len(gathered) > 1 or kind != "whole"
    everything = giant_and_small()
    for target in targets[:3]:
        value = everything[target.name].float()
        value = value.t() if kind == "columns" else value
        assert torch.equal(target.local.view(-1), target.layout.part(at).of(value))
    return extra + max(gathered)  # gloo gathers into a buffer of that size


# Failures while reading


@on_ranks(2)
def test_a_file_cut_short_meanwhile_is_an_error_everywhere_and_marks_the_model(tmp_path: Path) -> None:
    path, model, read = shared_file(tmp_path), built(device="meta"), Files.read

    def short(self: Files, number: int, offset: int, memory: Any, fresh: bool = False) -> None:
        read(self, number, offset + dist.get_rank() * path.stat().st_size, memory)

    with (
        fails_alike(CheckpointRuntimeError, "Rank 1: ", "toy.safetensors was truncated"),
        mock.patch.object(Files, "read", short),
    ):
        parallelize_model(model, config(), weights=path)
    with pytest.raises(ParallelismRuntimeError, match="unusable.*was truncated"):
        model(tokens())


@on_ranks(2)
def test_corrupt_files_are_refused_alike_on_all_ranks(tmp_path: Path) -> None:
    path = shared_file(tmp_path)
    if dist.get_rank() == 0:
        header = json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])
        header["row"]["data_offsets"] = header["embed.weight"]["data_offsets"]
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4000))
    dist.barrier()
    refused(CheckpointValueError, "toy.safetensors is corrupt: 'row'", weights=path)


def test_an_empty_path_is_refused() -> None:
    with pytest.raises(ParallelismTypeError, match="file or directory, or None, not ''"):
        check_weights("", "auto")
    with pytest.raises(
        ParallelismTypeError, match="None, not dict. A state dict is loaded by load_full_model"
    ):
        check_weights({"weight": torch.ones(2)}, "auto")
