"""Prepared models are verified in every mode, and are as before afterwards."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.distributed import parallelize_model, verify_model
from composer_dist.distributed.prepared import named_parameters_canonical
from tests.kit import huggingface
from tests.kit.compare import same, values
from tests.kit.decoder import Decoder, token_batch
from tests.kit.grids import crossed
from tests.kit.meshes import MESHES
from tests.kit.models import B, batch
from tests.kit.toy import Toy, built
from tests.kit.world import on_ranks

pytestmark = pytest.mark.promise(113)


class Losing(Decoder):
    """Returns its loss and nothing else."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        assert labels is not None
        return nn.functional.cross_entropy(super().forward(input_ids).flatten(0, 1), labels.flatten())


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any]]] = {
    "tied": (lambda: B(tied=True), batch),
    "norms and buffers": (lambda: built(Toy), lambda model: torch.arange(16)),
    "dropout": (lambda: Decoder(dropout=0.5), lambda model: token_batch()),
    "loss": (Losing, lambda model: {"input_ids": token_batch(), "labels": token_batch(2)}),
    "llama": (huggingface.tied_llama, lambda model: (4, 8)),
    "lora": (huggingface.lora_llama, lambda model: (4, 8)),
}


def cases() -> list[Any]:
    quick = [("fsdp2", "tied"), ("ddp", "norms and buffers"), ("plain", "dropout"), ("ddp", "dropout")]
    quick += [("hsdp", "tied"), ("cp", "llama"), ("tp", "lora"), ("cp", "loss")]
    found = []
    compiled = ParallelismConfig(compile={"backend": "aot_eager"})
    for mesh, (ranks, config) in (MESHES | {"compiled": (2, compiled)}).items():
        for name in MODELS:
            cut = any(word in mesh for word in ("tp", "cp"))
            if (cut and name in ("tied", "norms and buffers")) or ("cp" in mesh and name == "dropout"):
                continue  # they are neither decoders nor call torch's attention
            marks = () if (mesh, name) in quick else pytest.mark.slow
            found.append(pytest.param(ranks, config, name, id=f"{mesh}-{name}", marks=marks))
    return found


@pytest.mark.parametrize(("ranks", "config", "name"), cases())
@on_ranks("ranks")
def test_clean_models_are_ok_and_stay_as_they_are(ranks: int, config: Any, name: str) -> None:
    warnings.simplefilter("ignore")  # peft's and transformers' own
    build, inputs = MODELS[name]
    torch.manual_seed(0)
    model = build().train()
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.0)
    if config is not None:
        parallelize_model(model, config, optimizer)
    before, state = values(model), torch.get_rng_state()
    hooks = [len(module._forward_hooks) for module in model.modules()]
    for other in (reference, None):
        found = verify_model(model, other, inputs(model), optimizer=optimizer)
        assert found.ok, str(found)
        counts = {one.what: one.count for one in found.checked}
        trained = sum(p.requires_grad for p in reference.parameters())
        assert counts["gradient"] == counts["optimizer step"] == counts["optimizer group"] == trained
        assert counts["loss"] == counts["gradient norm"] == 1
        assert ("module output" in counts) == (getattr(config, "mesh", None) is None or config.mesh.cp == 1)
    same(values(model), before)
    assert torch.equal(torch.get_rng_state(), state)
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    assert all(module.training for module in model.modules())
    assert all(p.grad is None for _, p in named_parameters_canonical(model))
    assert not optimizer.state


@crossed({"name": ["tied", "llama"], "mesh": ["fsdp2", "ddp"]})
@on_ranks(2)
def test_low_precision_is_within_its_tolerance(mesh: str, name: str) -> None:
    build, inputs = MODELS[name]
    torch.manual_seed(0)
    model = build().train()
    parallelize_model(model, MESHES[mesh][1], precision="amp_bf16")
    found = verify_model(model, None, inputs(model))
    assert found.ok, str(found)
    assert {one.tolerance for one in found.checked if one.what == "gradient"} == {0.1}
    assert 0.001 < next(one.relative for one in found.checked if one.what == "gradient") < 0.1
