"""Every architecture as transformers saves it: read back in parts, and exported alike."""

import json
import warnings
from pathlib import Path

import pytest
import torch

from composer_dist.checkpoint import export_pretrained
from composer_dist.distributed.mesh.layout import Coordinate, Layout
from composer_dist.files.match import match_names
from composer_dist.files.read import Files, read_slabs
from composer_dist.files.safetensors import read_index
from composer_dist.files.slabs import plan_reads
from composer_dist.structure.structure import read_structure
from tests.kit.compare import same
from tests.kit.files import tensors
from tests.zoo import toy

RANKS = 3
UNREADABLE = {"shieldgemma2"}  # transformers saves names that it does not find again itself


@pytest.mark.zoo
@pytest.mark.parametrize("name", sorted(set(toy.names()) - UNREADABLE))
def test_what_transformers_saves_is_read_back_in_parts(tmp_path: Path, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference, model = toy.build(name), toy.build(name, device="meta")
        reference.save_pretrained(tmp_path, max_shard_size="50KB")
    structure, index = read_structure(model), read_index(tmp_path)
    match = match_names(structure, index.tensors, tmp_path)
    match.check(structure, index.entries, strict=True, path=tmp_path)
    expected = read_structure(reference).tensors
    slabs, parts = [], []
    for tensor, blueprint in match.tensors.items():
        whole = expected[tensor].get().detach()
        layout = Layout(tuple(whole.shape), rows=whole.ndim > 0)
        for rank in range(RANKS):
            at = Coordinate(rank, RANKS)
            local = torch.empty(layout.local_shape(at), dtype=whole.dtype)
            slabs += plan_reads(blueprint, index.entries, layout.part(at), local.view(-1))
            parts.append((tensor, local, layout.part(at).of(whole).view(local.shape)))
    with Files(tmp_path, index.files) as files:
        read_slabs(slabs, files)
    for tensor, found, value in parts:
        torch.testing.assert_close(found, value, rtol=0, atol=0, equal_nan=True, msg=tensor)


DEFAULT = ("bert", "clip", "d_fine", "resnet", "t5")
"""Ties of several kinds, and tensors without dimensions."""
EVERY = [pytest.param(one, marks=() if one in DEFAULT else pytest.mark.zoo) for one in sorted(toy.names())]


@pytest.mark.promise(96)
@pytest.mark.parametrize("name", EVERY)
def test_what_we_export_is_what_transformers_saves(tmp_path: Path, name: str) -> None:
    model, ours, theirs = toy.build(name), tmp_path / "ours", tmp_path / "theirs"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(theirs)
        export_pretrained(model, ours)
    same(tensors(ours), tensors(theirs))
    assert json.loads((ours / "config.json").read_text()) == json.loads((theirs / "config.json").read_text())
