"""Models that do not fit into memory are compared unit by unit."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.mesh import MeshConfig
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.config.tensor_parallel import TPConfig
from composer_dist.distributed import Verification, parallelize_model, verify_model
from composer_dist.distributed.verification import plain, units, verify
from composer_dist.structure.structure import read_structure
from tests.kit import huggingface
from tests.kit.compare import same, values
from tests.kit.decoder import Decoder, token_batch
from tests.kit.grids import in_the_default_run
from tests.kit.meshes import config, ddp, mesh
from tests.kit.models import B
from tests.kit.toy import built
from tests.kit.world import on_ranks

pytestmark = pytest.mark.promise(113)


def verified(model: nn.Module, inputs: Any, **options: Any) -> Verification:
    with mock.patch.object(verify, "fits", return_value=False):
        return verify_model(model, None, inputs, **options)


MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "decoder": (Decoder, token_batch()),
    "llama": (huggingface.tied_llama, (4, 8)),
    "lora": (huggingface.lora_llama, (4, 8)),
    "t5": (huggingface.pretrained_t5, {"input_ids": token_batch(), "labels": token_batch()}),
}


def ends(module: nn.Module) -> bool:
    """The embedding and the head, which are tied, and the blocks."""
    return isinstance(module, nn.Embedding) or type(module).__name__ == "LlamaDecoderLayer"


SEQUENCE = ParallelismConfig(mesh=MeshConfig(dp_shard=1, tp=2), tp=TPConfig(sequence_parallel=True))
CASES: dict[str, tuple[int, Any, str, dict[str, Any]]] = {
    "fsdp": (2, FSDP2Config(), "decoder", {}),
    "ddp": (2, ddp(), "decoder", {}),
    "tp": (2, mesh(dp_shard=1, tp=2), "decoder", {}),
    "sequence": (2, SEQUENCE, "decoder", {}),
    "cp": (2, mesh(dp_shard=1, cp=2), "llama", {}),
    "fsdp tied": (2, FSDP2Config(), "llama", {}),
    "fsdp tied units": (2, FSDP2Config(), "llama", {"fsdp_wrap_policy": ends}),
    "ddp tied": (2, ddp(), "llama", {}),
    "fsdp lora": (2, FSDP2Config(), "lora", {}),
    "fsdp t5": (2, FSDP2Config(), "t5", {}),
    "fsdp amp": (2, FSDP2Config(), "decoder", {"precision": "amp_bf16"}),
    "ddp amp": (2, ddp(), "decoder", {"precision": "amp_bf16"}),
    "fsdp checkpointed": (2, config(activation_checkpointing="wrapped"), "decoder", {}),
    "compiled": (2, config(compile={"backend": "aot_eager"}), "decoder", {}),
    "hsdp": (4, config(replicas=2), "decoder", {}),
    "fsdp x tp": (4, mesh(dp_shard=2, tp=2), "llama", {}),
}


SLOW = ("compiled", "tp", "ddp tied", "fsdp tied", "ddp amp", "fsdp checkpointed", "fsdp x tp", "ddp")


@pytest.mark.parametrize("case", in_the_default_run(*(one for one in CASES if one not in SLOW), among=CASES))
@on_ranks(lambda case: CASES[case][0])
def test_units_and_the_rest_are_compared_in_every_mode(case: str) -> None:
    """Outputs, the loss and all gradients, with what each unit gets, returns and gives back."""
    warnings.simplefilter("ignore")  # peft's and transformers' own
    _, wishes, name, options = CASES[case]
    build, inputs = MODELS[name]
    model = built(build).train()
    trained = sum(p.requires_grad for p in model.parameters())
    parallelize_model(model, wishes, **options)
    before = values(model)
    found = verified(model, inputs)
    assert found.ok, str(found)
    counts = {one.what: one.count for one in found.checked}
    assert counts["gradient"] == trained, found
    assert counts["loss"] == counts["gradient norm"] == 1
    assert min(counts["unit input"], counts["unit output"], counts["unit gradient"]) >= 2
    assert counts["output"] >= 1
    assert len(found.notes) == 2, found.notes
    same(values(model), before)
    assert all(p.grad is None for p in model.parameters())
    assert all(module.training for module in model.modules())


@on_ranks(2)
def test_a_rank_has_the_rest_and_one_unit_of_the_plain_model() -> None:
    model, held = built(Decoder), [0]
    parallelize_model(model, FSDP2Config())
    copied = plain.plain_copy

    def counted(model: nn.Module, name: str = "", without: Sequence[str] = ()) -> nn.Module:
        made = copied(model, name, without)
        held.append(sum(p.numel() for p in made.parameters() if not p.is_meta))
        return made

    with mock.patch.object(units, "plain_copy", counted):
        assert verified(model, token_batch()).ok
    blocks = [sum(p.numel() for p in layer.parameters()) for layer in model.layers]
    assert held == [0, sum(p.numel() for p in model.parameters()) - sum(blocks), *blocks]


def weighted(scale: float) -> Callable[..., nn.Module]:
    """Copies in which a weight of the block differs."""

    def other(model: nn.Module, name: str = "", without: Sequence[str] = ()) -> nn.Module:
        made = plain_copy(model, name, without)
        if name == "layers.1":
            made.mlp[0].weight.data.mul_(scale)
        return made

    return other


plain_copy = plain.plain_copy


class Scaled(torch.autograd.Function):
    """The value, with twice the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


@pytest.mark.parametrize("wishes", [FSDP2Config(), mesh(dp_shard=1, tp=2)], ids=["fsdp", "tp"])
@on_ranks(2)
def test_the_unit_that_differs_is_named(wishes: Any) -> None:
    model = built(Decoder)
    parallelize_model(model, wishes)
    with mock.patch.object(units, "plain_copy", weighted(2.0)):
        found = verified(model, token_batch())
    assert found.first_module == "layers.1"
    differing = [(one.what, one.name) for one in found.differences]
    assert differing[0] == ("unit output", "layers.1 0")
    assert ("unit gradient", "layers.1 input 0") in differing
    assert not any(one.startswith("layers.0") for _, one in differing)
    # A gradient that is wrong in one unit only: values agree, and the units below get it right.
    handle = model.layers[1].mlp.register_forward_hook(lambda module, args, out: Scaled.apply(out))
    with mock.patch.object(units, "plain_copy", without_hooks):
        found = verified(model, token_batch())
    handle.remove()
    differing = [(one.what, one.name) for one in found.differences]
    assert found.first_module is None
    assert ("unit gradient", "layers.1 input 0") in differing
    assert ("gradient", "layers.1.mlp.0.weight") in differing
    assert ("gradient", "layers.1.attention.o_proj.weight") not in differing[:1]
    assert not any(one.startswith("layers.0") for _, one in differing)


def without_hooks(model: nn.Module, name: str = "", without: Sequence[str] = ()) -> nn.Module:
    made = plain_copy(model, name, without)
    for module in made.modules():
        module._forward_hooks.clear()
    return made


def test_it_fits_where_there_is_memory() -> None:
    structure = read_structure(B())
    assert units.fits(structure, 1)
    assert not units.fits(structure, 1 << 40)
