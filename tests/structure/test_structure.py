"""What a model holds, under which names, and what is shared."""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from composer_dist.structure import structure as read
from composer_dist.structure.names import ancestors
from composer_dist.structure.structure import read_structure
from tests.kit import models


def test_names_owners_and_ties() -> None:
    structure = read_structure(models.EncoderDecoder())
    shared = structure.tensors["shared.weight"].info
    assert shared.owners == ("shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head")
    assert shared.names == tuple(f"{owner}.weight" for owner in shared.owners)
    assert (shared.kind, shared.shape, shared.nbytes) == ("parameter", (16, 8), 512)
    assert list(structure.modules)[:4] == ["", "shared", "encoder", "encoder.embed_tokens"]


def test_buffers_and_plain_attributes_are_listed() -> None:
    model = models.B(blocks=1)
    model.register_buffer("table", torch.zeros(2), persistent=False)
    model.scratch = torch.zeros(3)
    kinds = {name: held.info.kind for name, held in read_structure(model).tensors.items()}
    assert kinds["table"] == "buffer"
    assert kinds["scratch"] == "attribute"
    assert "table" not in read_structure(model).parameters


def test_what_is_inside_of_modules_is_found_in_one_pass() -> None:
    structure = read_structure(models.tied())
    names = {
        name: [info.name for info in inside] for name, inside in structure.inside(["head", "norm"]).items()
    }
    assert names == {"head": ["embed.weight"], "norm": ["norm.weight", "norm.bias"]}
    assert list(structure.inside([""])[""]) == [held.info for held in structure.tensors.values()]
    owners = sum(len(held.info.owners) for held in structure.tensors.values())
    with mock.patch.object(read, "ancestors", wraps=ancestors) as counted:
        structure.inside(list(structure.modules))
    assert counted.call_count == owners


def test_the_parameters_are_looked_up_once() -> None:
    structure = read_structure(models.tied())
    assert structure.parameters is structure.parameters
    assert list(structure.parameters) == list(dict(models.tied().named_parameters()))


def test_putting_keeps_ties() -> None:
    model = models.tied()
    held = read_structure(model).tensors["embed.weight"]
    held.put(nn.Parameter(torch.ones(16, 8)))
    assert model.head.weight is model.embed.weight is held.get()


def test_wrappers_do_not_show_in_names() -> None:
    model = models.B(blocks=2)
    before = read_structure(model)
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    after = read_structure(model)
    assert list(after.tensors) == list(before.tensors)
    assert list(after.modules) == list(before.modules)
    assert after.modules["layers.0"] is model.layers[0]
    assert after.digest == before.digest


def test_the_digest_sees_names_shapes_dtypes_freezing_and_ties() -> None:
    def digest(**changes: object) -> str:
        with torch.device("meta"):
            model = models.B(tied=bool(changes.get("tied")), blocks=1)
            if not changes.get("tied"):
                model.head = nn.Linear(8, 16, bias=False)
        model.to(changes.get("dtype", torch.float32))  # type: ignore[arg-type]
        model.norm.requires_grad_(not changes.get("frozen"))
        return read_structure(model).digest

    digests = [digest(), digest(tied=True), digest(dtype=torch.bfloat16), digest(frozen=True)]
    assert len(set(digests)) == 4
    assert digest() == digests[0]


def test_a_module_below_itself_is_read_once() -> None:
    model = models.M()
    model[0].parent = model
    assert list(read_structure(model).tensors) == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_ancestors() -> None:
    assert list(ancestors("a.b.c")) == ["a.b.c", "a.b", "a", ""]
    assert list(ancestors("")) == [""]


class Twice(nn.Module):
    """A block under two names, with layers of its own."""

    def __init__(self, base: type[nn.Module] = nn.Module) -> None:
        super().__init__()
        self.first = models.Block()
        self.rest = nn.ModuleList([models.Block(), self.first])


@pytest.mark.promise(82)
def test_a_module_under_two_names_is_one_module() -> None:
    structure = read_structure(Twice())
    assert structure.first["rest.1.mlp.up"] == "first.mlp.up"
    held = structure.tensors["first.mlp.up.weight"]
    assert held.info.names == ("first.mlp.up.weight", "rest.1.mlp.up.weight")
    assert len(held.places) == 1


@pytest.mark.promise(104)
def test_lazy_modules_are_refused_until_they_have_shapes() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.LazyLinear(4))
    with pytest.raises(
        ValueError, match=r"^1: a lazy module has no shapes before its first call. Run one batch"
    ):
        read_structure(model)
    model(torch.ones(1, 2))
    assert list(read_structure(model).parameters) == ["0.weight", "0.bias", "1.weight", "1.bias"]
