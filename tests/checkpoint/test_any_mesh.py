"""Saved on one mesh, loaded on another: bit-equal, optimizer included."""

from functools import partial
from pathlib import Path

import pytest

from tests.kit.huggingface import gpt2, llama, phi3
from tests.kit.meshes import MESHES
from tests.kit.runs import assert_same, load_run, save_run
from tests.kit.toy import built
from tests.kit.world import run

pytestmark = [
    pytest.mark.promise(58),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]
make_gpt2 = partial(built, gpt2)  # fused matrices, cut in groups of columns
make_phi3 = partial(built, phi3)  # fused matrices, cut in groups of rows
make_llama = partial(built, llama)  # column- and row-wise parallel matrices


@pytest.mark.parametrize("sharded", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "saved", ["hsdp", *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ("fsdp2", "plain", "ddp"))]
)
def test_any_mesh_to_any_mesh(tmp_path: Path, saved: str, sharded: bool) -> None:
    path = str(tmp_path / "checkpoint")
    before = run(save_run, MESHES[saved][0], path, saved, sharded=sharded)[0]
    for loaded in ("plain", "fsdp4" if saved != "hsdp" else "fsdp2", "ddp", "hsdp"):
        for after in run(load_run, MESHES[loaded][0], path, loaded):
            assert_same(before, after)


@pytest.mark.parametrize(
    ("make", "meshes"),
    [
        pytest.param(make_gpt2, ("tp", "fsdp_tp", "plain"), marks=pytest.mark.slow),
        (make_phi3, ("fsdp_tp", "plain")),
        pytest.param(make_llama, ("fsdp_tp", "plain"), marks=pytest.mark.slow),
        (make_llama, ("fsdp1", "fsdp4", "hsdp", "tp")),
    ],
)
def test_from_mesh_to_mesh(tmp_path: Path, make: object, meshes: tuple[str, ...]) -> None:
    path, other = str(tmp_path / "one"), str(tmp_path / "other")
    before = run(save_run, 2, path, "fsdp2", make)[0]
    for loaded in meshes:
        for after in run(load_run, MESHES[loaded][0], path, loaded, make, other):
            assert_same(before, after)
        path, other = other, path
