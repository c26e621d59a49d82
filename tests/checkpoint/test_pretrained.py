"""`load_pretrained`: files into models that are there already, prepared or not, real or not."""

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peft import (
    BOFTConfig,
    EvaConfig,
    LoraConfig,
    OFTConfig,
    ShiraConfig,
    get_peft_model,
    get_peft_model_state_dict,
)
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from composer_dist import DDPConfig, FSDP2Config
from composer_dist._torch import checkpoint_wrapper
from composer_dist.checkpoint import (
    LoadResult,
    export_pretrained,
    full_model_state,
    load_checkpoint,
    load_full_model_state,
    load_pretrained,
    save_checkpoint,
)
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.distributed import parallelize_model, prepare_fully_shard
from composer_dist.distributed.moving import shares
from composer_dist.errors import (
    CheckpointKeyError,
    CheckpointRuntimeError,
    CheckpointValueError,
    ParallelismRuntimeError,
    ParallelismValueError,
)
from composer_dist.files.read import Files
from tests.kit.compare import close, fails, fails_alike, same, values
from tests.kit.files import saved
from tests.kit.huggingface import llama, lora, random
from tests.kit.meshes import config
from tests.kit.toy import built, tokens, train
from tests.kit.world import on_ranks


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return saved(built(seed=3), tmp_path)


@pytest.mark.parametrize(("ranks", "replicas"), [(1, 1), (2, 1), (4, 2)])
@on_ranks("ranks")
@mock.patch.object(shares, "SMALL", 64)
def test_a_prepared_model_takes_the_files_values_in_place(path: Path, ranks: int, replicas: int) -> None:
    model, reference = built(seed=1), built(seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallelize_model(model, config(replicas=replicas), optimizer)
    train(model, optimizer, 1)
    before = dict(model.named_parameters())
    places = [parameter.data_ptr() for parameter in before.values() if not isinstance(parameter, DTensor)]
    assert load_pretrained(model, path) == LoadResult([], [])
    assert all(dict(model.named_parameters())[name] is parameter for name, parameter in before.items())
    assert places == [p.data_ptr() for p in model.parameters() if not isinstance(p, DTensor)]
    same(values(model), values(reference))
    train(model, optimizer)
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.1), whole=True)
    close(values(model), values(reference))


class Turned(nn.Module):
    """A parameter and a buffer whose elements do not lie in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6).t())
        self.register_buffer("table", torch.randn(4, 6)[:, ::2])


@pytest.fixture
def turned(tmp_path: Path) -> Path:
    (tmp_path / "turned").mkdir()
    return saved(built(Turned, seed=3), tmp_path / "turned")


def test_a_plain_model_without_a_process_group(path: Path) -> None:
    model = built(seed=1)
    load_pretrained(model, path)
    same(values(model), values(built(seed=3)))


@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks("ranks")
@mock.patch.object(shares, "SMALL", 64)
def test_models_that_are_not_sharded(path: Path, turned: Path, ranks: int) -> None:
    for device in ("cpu", "meta"):
        model = built(seed=1, device=device)
        load_pretrained(model, path)
        same(values(model), values(built(seed=3)))
    model = built(Turned, seed=1)
    places = [tensor.data_ptr() for tensor in (model.weight, model.table)]
    load_pretrained(model, turned)
    assert places == [tensor.data_ptr() for tensor in (model.weight, model.table)]
    same(values(model), values(built(Turned, seed=3)))
    if ranks > 1:
        model = built(seed=1)
        parallelize_model(model, DDPConfig())
        load_pretrained(model, path)
        same(values(model), values(built(seed=3)))
        with pytest.raises(ParallelismValueError, match="different structure"):
            load_pretrained(nn.Linear(2, 2 + dist.get_rank()), path)


@pytest.fixture
def lacking(tmp_path: Path) -> Path:
    without: dict[str, Any] = {"layers.1.up.weight": None, "shift": None}
    return saved(built(seed=3), tmp_path, **without, other=torch.ones(2))


@on_ranks(2)
def test_sharded_on_meta_and_what_the_files_lack_is_initialized(lacking: Path) -> None:
    model = built(device="meta")
    prepare_fully_shard(model, FSDP2Config())
    with pytest.raises(CheckpointKeyError, match="missing: shift, layers.1.up.weight. unexpected: other"):
        load_pretrained(model, lacking)
    assert all(parameter.is_meta for parameter in model.parameters())
    torch.manual_seed(4)
    result = load_pretrained(model, lacking, strict=False)
    assert result == LoadResult(["shift", "layers.1.up.weight"], ["other"])
    found, expected = values(model), values(built(seed=3))
    for name in ("layers.1.up.weight", "shift"):
        assert found[name].std() > 0
        expected[name] = found[name]
    same(found, expected)
    load_pretrained(model, lacking, strict=False)  # now they keep their values
    same(values(model), found)


@on_ranks(2)
def test_what_we_export_comes_back(tmp_path: Path) -> None:
    warnings.simplefilter("ignore")
    for name, make in {"llama": llama, "lora": lambda: lora(llama(), modules_to_save=["lm_head"])}.items():
        model, other = random(make()), random(make(), 2)
        for one in (model, other):
            parallelize_model(one, config())
        export_pretrained(model, tmp_path / name, max_shard_size="5KB")
        before = full_model_state(other, ranks="all")
        assert load_pretrained(other, tmp_path / name) == LoadResult([], [])
        found, expected = (full_model_state(one, ranks="all") for one in (other, model))
        if name == "lora":
            expected |= {n: v for n, v in before.items() if "lora_" not in n and ".default." not in n}
        same(found, expected)


class Headed(nn.Module):
    """A head of 1100 x 1024, over a million elements, which may be the embedding."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(1100, 1024), nn.Linear(1024, 1100, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def as_pieces(path: Path, state: dict[str, torch.Tensor]) -> None:
    model = Headed(tied=False)
    model.load_state_dict(state)
    parallelize_model(model, FSDP2Config())
    save_checkpoint(path, {"model": model})


def as_transposed(path: Path, state: dict[str, torch.Tensor]) -> None:
    if dist.get_rank() == 0:
        torch.save({name: value.t().contiguous().t() for name, value in state.items()}, path)


def as_safetensors(path: Path, state: dict[str, torch.Tensor]) -> None:
    if dist.get_rank() == 0:
        save_file(state, path)


@pytest.mark.promise(118)
@pytest.mark.parametrize(
    ("name", "write"), [("pieces", as_pieces), ("t.pt", as_transposed), ("m.safetensors", as_safetensors)]
)
@on_ranks(2)
def test_all_elements_of_a_tied_tensor_are_compared(tmp_path: Path, name: str, write: Any) -> None:
    """One element differs, which only rank 1 compares."""
    state = dict.fromkeys(("embed.weight", "head.weight"), torch.zeros(1100, 1024))
    for changed in (False, True):
        path = tmp_path / f"{changed}-{name}"
        if changed:
            state["head.weight"] = state["head.weight"].clone()
            state["head.weight"][700, 7] = 1
        write(path, {key: value.clone() for key, value in state.items()})
        dist.barrier()
        for load in (load_pretrained, lambda model, path: parallelize_model(model, config(), weights=path)):
            differ = fails_alike(CheckpointValueError, "embed.weight", "head.weight differ in the checkpoint")
            with differ if changed else nullcontext():
                load(Headed(tied=True), path)


def scaled(**options: Any) -> Any:
    return random(lora(llama(), **options))


@pytest.mark.promise(118)
@pytest.mark.parametrize(
    ("here", "text"),
    [
        ({"lora_alpha": 32}, "lora_alpha=8 (the model has 32)"),
        ({"use_rslora": True}, "use_rslora=False (the model has True)"),
        ({"alpha_pattern": {"q_proj": 64}}, "alpha_pattern={} (the model has {'q_proj': 64})"),
    ],
)
@on_ranks(2)
def test_an_adapter_that_is_scaled_otherwise_is_refused(
    tmp_path: Path, here: dict[str, Any], text: str
) -> None:
    warnings.simplefilter("ignore")
    export_pretrained(scaled(), tmp_path / "adapter")
    model = scaled(**here)
    parallelize_model(model, config())
    with fails_alike(CheckpointValueError, "was trained with", text):
        load_pretrained(model, tmp_path / "adapter")
    assert load_pretrained(model, tmp_path / "adapter", strict=False) == LoadResult([], [])


@pytest.mark.promise(118)
@pytest.mark.parametrize("kind", ["pissa", "olora"])
@on_ranks(2)
def test_an_adapter_that_has_changed_the_weights_refuses_others(tmp_path: Path, kind: str) -> None:
    warnings.simplefilter("ignore")
    export_pretrained(llama(), tmp_path / "base")
    for load in (load_pretrained, lambda model, path: parallelize_model(model, config(), weights=path)):
        model = lora(llama(), init_lora_weights=kind)
        with fails_alike(CheckpointValueError, f"changed the model's weights (init_lora_weights='{kind}')"):
            load(model, tmp_path / "base")


@pytest.mark.promise(118)
def test_of_several_adapters_the_one_that_is_meant_must_be_clear(tmp_path: Path) -> None:
    """In a file that nothing marks as an adapter's; the base model's weights are meant for no adapter."""
    warnings.simplefilter("ignore")
    model = get_peft_model(llama(), LoraConfig(target_modules=["q_proj"]), "first")
    model.add_adapter("second", LoraConfig(target_modules=["q_proj"]))
    (tmp_path / "third").mkdir()
    save_file(get_peft_model_state_dict(model, adapter_name="first"), tmp_path / "third" / "it.safetensors")
    with pytest.raises(CheckpointValueError, match="has no adapter 'third', only first, second"):
        load_pretrained(model, tmp_path / "third" / "it.safetensors")
    export_pretrained(llama(), tmp_path / "base")
    assert load_pretrained(model, tmp_path / "base") == LoadResult([], [])


@pytest.mark.promise(93)
@pytest.mark.parametrize("kind", ["oft", "boft", "shira", "eva"])
def test_base_weights_and_the_adapter_are_loaded_one_after_the_other(tmp_path: Path, kind: str) -> None:
    """Adapters with tables that are not saved, or in another form; EVA leaves the weights as they are."""
    warnings.simplefilter("ignore")
    makes = {
        "oft": lambda: OFTConfig(target_modules=["q_proj"], oft_block_size=4),
        "boft": lambda: BOFTConfig(target_modules=["q_proj"], boft_block_size=4),
        "shira": lambda: ShiraConfig(target_modules=["q_proj"], r=2),
        "eva": lambda: LoraConfig(target_modules=["q_proj"], init_lora_weights="eva", eva_config=EvaConfig()),
    }
    base = random(llama())
    base.save_pretrained(tmp_path / "base")
    model = get_peft_model(llama(), makes[kind]())
    assert load_pretrained(model, tmp_path / "base") == LoadResult([], [])
    found = {name.replace(".base_layer", ""): value for name, value in model.state_dict().items()}
    expected = base.state_dict()
    same({name: found[f"base_model.model.{name}"] for name in expected}, expected)
    if kind != "shira":  # peft computes its values when it saves
        trained = random(model, 3)
        trained.save_pretrained(tmp_path / "adapter")
        other = get_peft_model(llama(), makes[kind]())
        assert load_pretrained(other, tmp_path / "adapter") == LoadResult([], [])
        same(get_peft_model_state_dict(other), get_peft_model_state_dict(trained))


@pytest.mark.promise(118)
@pytest.mark.parametrize("options", [{"use_dora": True}, {"trainable_token_indices": [3]}])
@on_ranks(2)
def test_adapters_that_were_computed_from_other_weights_are_named(tmp_path: Path, options: Any) -> None:
    warnings.simplefilter("ignore")
    export_pretrained(llama(), tmp_path / "base")
    trained = random(lora(llama(), **options))
    export_pretrained(trained, tmp_path / "adapter")
    model = lora(llama(), **options)
    computed = pytest.warns(UserWarning, match="were computed from other weights than those of")
    with computed:
        parallelize_model(model, config(), weights=tmp_path / "base")
    with computed:
        load_pretrained(model, tmp_path / "base")
    warnings.simplefilter("error", UserWarning)
    assert load_pretrained(model, tmp_path / "adapter") == LoadResult([], [])
    found, expected = full_model_state(model, ranks="all"), trained.state_dict()
    own = [name for name in expected if "lora_" in name or "tokens_delta" in name]
    same({name: found[name] for name in own}, {name: expected[name] for name in own})


@on_ranks(2)
def test_a_file_that_is_cut_short_is_named(tmp_path: Path) -> None:
    warnings.simplefilter("ignore")
    for name, make in {"model": llama, "adapter_model": lambda: lora(llama())}.items():
        model, file = random(make()), tmp_path / name / f"{name}.safetensors"
        export_pretrained(model, file.parent)
        if dist.get_rank() == 0:
            file.write_bytes(file.read_bytes()[:-1])
        dist.barrier()
        for path in (file.parent, file):
            with fails(CheckpointValueError, f"{name}.safetensors is corrupt or truncated: "):
                parallelize_model(model, config(), weights=path)
            with fails(CheckpointValueError, f"{name}.safetensors is corrupt or truncated: "):
                load_pretrained(model, path)


@on_ranks(2)
def test_files_that_fail_leave_the_model_as_it_was_or_marked(path: Path, tmp_path: Path) -> None:
    model = built(seed=1)
    parallelize_model(model, config())
    before = values(model)
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointValueError, match="broken.safetensors is corrupt or truncated"):
        load_pretrained(model, broken)
    dist.barrier()
    if dist.get_rank() == 0:
        save_file({"row": torch.zeros(2, 8)}, broken)
    dist.barrier()
    with fails(CheckpointValueError, "row is (2, 8) in the checkpoint, (1, 8) in the model"):
        load_pretrained(model, broken, strict=False)
    same(values(model), before)
    model(tokens())
    read = Files.read

    def fail(self: Files, *arguments: Any, **options: Any) -> None:
        if dist.get_rank() == 1:
            raise CheckpointRuntimeError("the disk is gone")
        read(self, *arguments, **options)

    gone = pytest.raises(CheckpointRuntimeError, match="Rank 1: the disk is gone")
    with mock.patch.object(Files, "read", fail), gone:
        load_pretrained(model, path)
    with pytest.raises(ParallelismRuntimeError, match="unusable.*the disk is gone"):
        model(tokens())


class Unsafe:
    """What `torch.load` does not make without leave."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unsafe)

    __hash__ = None  # type: ignore[assignment]


class Counting(nn.Module):
    """Extra state of numbers, a tensor and an object, in a part that a wrapper may hide."""

    def __init__(self, extra: Any = None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def counting(extra: Any = None, seed: int = 1) -> Any:
    return built(lambda: nn.Sequential(Counting(extra), nn.Linear(4, 4)), seed)


def counted(tmp_path: Path, kind: str, extra: Any) -> tuple[Path, nn.Module]:
    """A checkpoint, and the model that it was saved from."""
    model, path = counting(extra, 3), tmp_path / kind
    parallelize_model(model, config())
    if kind != "bare":
        save_checkpoint(path, {"model": model}, sharded=kind == "sharded")
    elif dist.get_rank() == 0:
        torch.save(counting(extra, 3).state_dict(), path)
    dist.barrier()
    return path, model


def take(model: nn.Module, path: Path, way: str, strict: bool = True) -> None:
    if way == "weights":
        parallelize_model(model, ParallelismConfig(fsdp2=FSDP2Config(), strict=strict), weights=path)
    else:
        parallelize_model(model, config())
        assert load_pretrained(model, path, strict=strict) == LoadResult([], [])


@pytest.mark.promise(86)
@pytest.mark.parametrize("kind", ["sharded", "file", "bare"])
@on_ranks(2)
def test_extra_state_in_a_checkpoint_is_set(tmp_path: Path, kind: str) -> None:
    path, saved_model = counted(tmp_path, kind, {"n": 7, "t": torch.arange(3.0), "pair": (1, torch.ones(2))})
    for way in ("weights", "load_pretrained"):
        model = counting()
        take(model, path, way)
        same(values(model), values(saved_model))
        extra = model[0].extra
        assert (extra["n"], extra["pair"][0]) == (7, 1)
        assert torch.equal(extra["t"], torch.arange(3.0))
        assert torch.equal(extra["pair"][1], torch.ones(2))


@on_ranks(2)
def test_extra_state_follows_the_names_of_wrapped_models(tmp_path: Path) -> None:
    path, saved_model = counted(tmp_path, "sharded", 7)
    model = counting()
    model[0] = checkpoint_wrapper(model[0])
    parallelize_model(model, config(), weights=path)
    same(values(model), values(saved_model))
    assert model[0]._checkpoint_wrapped_module.extra == 7
    for load in (
        lambda: load_checkpoint(path, {"model": model}),
        lambda: load_full_model_state(model, full_model_state(saved_model)),
    ):
        model[0]._checkpoint_wrapped_module.extra = 0
        load()
        assert model[0]._checkpoint_wrapped_module.extra == 7
    if dist.get_rank() == 0:
        state = {f"module.{name}": value for name, value in counting(8).state_dict().items()}
        torch.save(state, tmp_path / "ddp")
    dist.barrier()
    assert load_pretrained(model, tmp_path / "ddp") == LoadResult([], [])
    assert model[0]._checkpoint_wrapped_module.extra == 8
    inside = nn.ModuleDict({"net": counting("kept")})
    parallelize_model(inside, config())
    found = load_pretrained(inside, path, strict=False)
    assert "net.0._extra_state" in found.missing
    assert "0._extra_state" in found.unexpected
    assert inside["net"][0].extra == "kept"


@pytest.mark.promise(118)
@pytest.mark.parametrize("kind", ["sharded", "file", "bare"])
@on_ranks(2)
def test_extra_state_on_one_side_only_is_named(tmp_path: Path, kind: str) -> None:
    path, _ = counted(tmp_path, kind, {"t": torch.ones(2)})
    other = nn.Sequential(nn.ModuleDict({"linear": nn.Linear(4, 4)}), nn.Linear(4, 4))
    parallelize_model(other, config())
    with fails_alike(CheckpointKeyError, "unexpected: 0._extra_state."):
        load_pretrained(other, path)
    assert load_pretrained(other, path, strict=False) == LoadResult([], ["0._extra_state"])
    save_checkpoint(tmp_path / "without", {"model": other}, sharded=kind == "sharded")
    model = counting("kept")
    parallelize_model(model, config())
    with fails_alike(CheckpointKeyError, "missing: 0._extra_state."):
        load_pretrained(model, tmp_path / "without")
    assert load_pretrained(model, tmp_path / "without", strict=False) == LoadResult(["0._extra_state"], [])
    assert model[0].extra == "kept"


@pytest.mark.promise(107)
@on_ranks(2)
def test_extra_state_that_could_run_code_is_refused_or_missing(tmp_path: Path) -> None:
    path, saved_model = counted(tmp_path, "sharded", Unsafe())
    model = counting("kept")
    parallelize_model(model, config())
    before = values(model)
    with fails_alike(
        CheckpointValueError, "0._extra_state", "could run code", "strict=False leaves extra state out"
    ):
        load_pretrained(model, path)
    same(values(model), before)
    assert load_pretrained(model, path, strict=False) == LoadResult(["0._extra_state"], [])
    same(values(model), values(saved_model))
    assert model[0].extra == "kept"


@pytest.mark.promise(107)
@on_ranks(2)
def test_damaged_extra_state_is_noticed(tmp_path: Path) -> None:
    path, _ = counted(tmp_path, "sharded", (1, torch.arange(4.0) + 0.123))
    if dist.get_rank() == 0:
        for file in path.glob("*.distcp"):
            data, mark = file.read_bytes(), (torch.arange(4.0) + 0.123).numpy().tobytes()
            file.write_bytes(data.replace(mark, mark[::-1]))
    dist.barrier()
    with fails_alike(CheckpointValueError, "is corrupt"):
        load_pretrained(counting(), path)
