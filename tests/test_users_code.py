"""Warnings name the line of the call that caused them, and not one of this package's."""

import linecache
from collections.abc import Callable
from contextlib import contextmanager
from functools import singledispatch
from typing import Any

import pytest
import torch
from torch import nn

from composer_dist.users_code import warn

OURS: dict[str, Any] = {"__name__": "composer_dist.some.module", "warn": warn, "torch": torch}
OURS |= {"contextmanager": contextmanager, "singledispatch": singledispatch, "nn": nn}
CODE = """
def direct():
    warn("text")

@contextmanager
def entered():
    warn("text")
    yield

def inside():
    with entered():
        pass

@singledispatch
def dispatched(one):
    inside()

@torch.no_grad()
def decorated():
    dispatched(1)

def of_a_forward():
    model = nn.Linear(1, 1)
    model.register_forward_pre_hook(lambda *_: warn("text"))
    return model
"""
exec(CODE, OURS)


@pytest.mark.parametrize("name", ["direct", "inside", "decorated"])
def test_a_warning_is_attributed_to_the_line_that_calls_the_package(name: str) -> None:
    call: Callable[[], None] = OURS[name]
    with pytest.warns(UserWarning, match="text") as caught:
        call()  # this line
    assert [(one.filename, linecache.getline(one.filename, one.lineno).strip()) for one in caught] == [
        (__file__, "call()  # this line")
    ]


def test_a_warning_of_a_hook_is_attributed_to_the_call_of_the_model() -> None:
    model = OURS["of_a_forward"]()
    with pytest.warns(UserWarning, match="text") as caught:
        model(torch.ones(1))
    assert [one.filename for one in caught] == [__file__]
