"""Models that do not fit into memory are compared unit by unit."""

from unittest import mock

import pytest
import torch
from torch import nn

from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.distributed import parallelize_model, verify_model
from composer_dist.distributed.verification import plain, units, verify
from composer_dist.structure.structure import read_structure
from tests.kit.huggingface import llama
from tests.kit.models import B, batch
from tests.kit.world import on_ranks

pytestmark = pytest.mark.promise(113)


@on_ranks(2)
def test_each_unit_is_compared_with_its_copy() -> None:
    torch.manual_seed(0)
    model = B()
    parallelize_model(model, FSDP2Config())
    with mock.patch.object(verify, "fits", return_value=False):
        found = verify_model(model, batch=batch(model))
    assert found.ok, str(found)
    assert {one.what: one.count for one in found.checked}["unit output"] == 3
    assert found.notes[-1].startswith("gradients and the loss, because the unsharded")
    copied = plain.plain_copy

    def other(module: nn.Module) -> nn.Module:
        unit = copied(module)
        if module is model.layers[1]:
            next(unit.parameters()).data.mul_(2)
        return unit

    with mock.patch.object(verify, "fits", return_value=False), mock.patch.object(units, "plain_copy", other):
        found = verify_model(model, batch=batch(model))
    assert [(one.what, one.name) for one in found.differences] == [("unit output", "layers.1 0")]
    assert found.first_module == "layers.1"


@on_ranks(2)
def test_caches_of_transformers_are_left_out() -> None:
    model = llama()
    parallelize_model(model, FSDP2Config())
    with mock.patch.object(verify, "fits", return_value=False):
        found = verify_model(model, batch=(2, 6))
    assert found.ok, str(found)
    assert {one.what: one.count for one in found.checked}["unit output"] == len(model.model.layers)


def test_it_fits_where_there_is_memory() -> None:
    structure = read_structure(B())
    assert units.fits(structure, [0])
    assert not units.fits(structure, range(1 << 40))
