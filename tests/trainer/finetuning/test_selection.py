"""Which parameters names and patterns choose, on plain models."""

from typing import Any

import pytest
from torch import nn

from composer_dist import _torch
from composer_dist.errors import ParallelismValueError
from composer_dist.trainer import Phase
from composer_dist.trainer.finetuning.selection import select


def model() -> nn.Module:
    tree = nn.Module()
    tree.embed = nn.Embedding(4, 2)
    tree.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    tree.head = nn.Linear(2, 4, bias=False)
    return tree


def plan(*params: str | list[str], tree: nn.Module | None = None) -> list[list[str]]:
    selection = select([Phase(entry, until="1ep") for entry in params], tree or model())
    selection.check()
    return selection.parts


FIRST, SECOND = ["layers.0.weight", "layers.0.bias"], ["layers.1.weight", "layers.1.bias"]


@pytest.mark.promise(71)
@pytest.mark.parametrize(
    ("params", "parts"),
    [
        (["head", "layers"], [["head.weight"], [*FIRST, *SECOND]]),
        (["layers.0"], [FIRST]),
        (["layers.0.bias"], [["layers.0.bias"]]),
        ([r"re:.*\.bias"], [["layers.0.bias", "layers.1.bias"]]),
        ([r"re:layers\.[1-9]"], [SECOND]),
        (["head", ["layers.1", "rest"], "layers.0"], [["head.weight"], ["embed.weight", *SECOND], FIRST]),
    ],
)
def test_names_patterns_and_the_rest_select_parameters(params: Any, parts: list[list[str]]) -> None:
    assert plan(*params) == parts


@pytest.mark.promise(71)
@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            ["layers.0", "head", "re:layers.*"],
            r"phases 0 and 2 both name layers\.0\.bias, layers\.0\.weight.*'rest'",
        ),
        (["hed"], "phase 0: 'hed' matches no parameter.* Did you mean 'head'"),
        (["re:bias"], "'re:bias' matches no parameter"),  # a pattern matches whole names
        (["re:("], "phase 0: 're:\\(' is an invalid regular expression"),
        (["rest", "rest"], "'rest' is in phases 0, 1"),
        (["head", ["embed", "layers"], "rest"], "phase 2: nothing is left for 'rest'"),
        ([["a", "head"], ["b", "head"]], r"'a' matches(.|\n)*'b' matches(.|\n)*both name"),  # all at once
    ],
)
def test_what_cannot_be_selected_is_refused(params: list[str | list[str]], message: str) -> None:
    with pytest.raises(ParallelismValueError, match=message):
        plan(*params)


def test_what_the_user_has_frozen_stays_frozen() -> None:
    tree = model()
    tree.layers[0].requires_grad_(False)
    assert plan("head", "layers", "rest", tree=tree) == [["head.weight"], SECOND, ["embed.weight"]]
    with pytest.raises(ParallelismValueError, match=r"'layers\.0' matches only frozen parameters"):
        plan("layers.0", tree=tree)
    tree.embed.requires_grad_(False)
    with pytest.raises(ParallelismValueError, match="nothing is left for 'rest'.* 3 are frozen"):
        plan("head", "layers", "rest", tree=tree)


def test_tied_parameters_go_by_any_of_their_names() -> None:
    tree = model()
    tree.head.weight = tree.embed.weight
    assert plan("head", "rest", tree=tree)[0] == ["embed.weight"]
    with pytest.raises(ParallelismValueError, match=r"both name embed\.weight"):
        plan("head", "embed", tree=tree)


@pytest.mark.promise(78)
def test_clean_names_match_wrapped_modules() -> None:
    tree = model()
    expected = plan("head", "layers.1", "re:layers\\.0\\..*", "rest", tree=tree)
    tree.layers = nn.ModuleList(map(_torch.checkpoint_wrapper, tree.layers))
    assert any("_checkpoint_wrapped_module" in name for name, _ in tree.named_parameters())
    assert plan("head", "layers.1", "re:layers\\.0\\..*", "rest", tree=tree) == expected
