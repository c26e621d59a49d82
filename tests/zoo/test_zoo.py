"""Every Hugging Face architecture that builds at toy size trains prepared as it does unsharded."""

import pytest

from composer_dist import Rule
from tests.kit.world import run
from tests.zoo import toy
from tests.zoo.check import prepared_equals_unsharded

ROOT_ONLY = {
    "squeezebert": "its encoder calls layer.forward(...), so that no hook of a layer runs, FSDP2's included"
}
"""Architectures whose blocks cannot be units, each with the upstream cause; sharded as one unit."""

REST = [name for name in toy.names() if name not in toy.FAST and name not in ROOT_ONLY]


@pytest.mark.parametrize("name", toy.FAST)
def test_architecture(name):
    assert run(prepared_equals_unsharded, 2, name)[0] >= 1


@pytest.mark.zoo
@pytest.mark.parametrize("name", REST)
def test_every_architecture(name):
    assert run(prepared_equals_unsharded, 2, name, timeout=120)[0] >= 1


@pytest.mark.parametrize("name", ROOT_ONLY)
def test_architecture_as_one_unit(name):
    assert run(prepared_equals_unsharded, 2, name, (Rule("", shard=True),)) == [1, 1]


def test_the_zoo_is_large():
    assert len(toy.names()) >= 174
