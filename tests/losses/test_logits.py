"""Models whose heads put their logits off: where the loss is computed in chunks, and equals the plain one."""

import copy
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from composer_dist.errors import ParallelismRuntimeError
from composer_dist.losses.logits import put_off
from tests.kit import huggingface as hf
from tests.kit.grids import in_the_default_run
from tests.kit.measure import losses_counted
from tests.zoo import toy

pytestmark = pytest.mark.promise(123)
PLAIN = {
    "chameleon": "masks tokens of the vocabulary",
    "csm": "several heads",
    "diffusion_gemma": "no loss of its own",
    "encoder-decoder": "its decoder computes its own logits",
    "esm": "a trained bias beside the head",
    "inkling2": "cuts the vocabulary",
    "inkling2_text": "cuts the vocabulary",
    "mobilebert": "uses the head's weight without its forward",
    "prophetnet": "a loss over several futures",
}
"""Models with a linear head that compute all logits, and why."""
ON = (
    *("llama", "qwen3", "gemma2", "cohere", "granite", "gpt2", "t5", "bart", "bert", "mixtral", "mamba"),
    *("whisper", "llava"),
)
REST = [name for name in toy.names() if name not in (*ON, *PLAIN)]


def compared(name: str) -> dict[str, int]:
    """Compare the loss and all gradients of a toy model with the plain ones."""
    warnings.simplefilter("ignore")
    found: list[tuple[Tensor, dict[str, Tensor]]] = []
    with losses_counted() as counts:
        for chunked in (False, True):
            model: Any = toy.build(name)
            torch.manual_seed(1)  # a few draw random numbers even in eval
            with put_off(model, 5) if chunked else nullcontext():
                loss = toy.loss(model, copy.deepcopy(toy.inputs(name, model)))
            loss.backward()
            gradients = {key: one.grad for key, one in model.named_parameters() if one.grad is not None}
            found.append((loss.detach(), gradients))
    (expected, of_expected), (chunked, of_chunked) = found
    torch.testing.assert_close(chunked, expected, rtol=1e-5, atol=0)
    assert of_chunked.keys() == of_expected.keys()
    for key, gradient in of_expected.items():
        if gradient.numel():
            error = (of_chunked[key] - gradient).abs().max()
            assert error <= 1e-6 + 1e-4 * gradient.abs().max(), f"gradient of {key} is off by {error}"
    return counts


@pytest.mark.parametrize("name", ON)
def test_these_architectures_train_without_logits(name: str) -> None:
    counts = compared(name)
    assert counts["chunks"] > 0
    assert counts["values"] == 0


@pytest.mark.parametrize("name", in_the_default_run("chameleon", among=PLAIN))
def test_what_needs_logits_gets_them(name: str) -> None:
    assert compared(name)["chunks"] == 0


@pytest.mark.slow
def test_in_the_whole_zoo_it_is_the_plain_loss() -> None:
    """On wherever there is a linear head, apart from `PLAIN`."""
    on = []
    for name in REST:
        counts = compared(name)
        assert counts["values"] == 0, name
        on += [name] if counts["chunks"] else []
    assert len(on) + len(ON) >= 311


def test_operations_in_between_are_those_of_the_plain_logits() -> None:
    """Scales, caps, casts, views, slices of positions; a trained scale and a masked token need the values."""
    model, ids = hf.llama(), torch.arange(12).view(2, 6)
    hidden = torch.randn(2, 6, 32)
    labels = torch.randint(0, 50, (10,))
    head, scale = model.lm_head, torch.nn.Parameter(torch.tensor(2.0))

    def steps(found: Tensor) -> Tensor:
        found = torch.tanh(2.0 * found / 3 + torch.ones(1, 1, 50)) - 0.5
        return found.to(torch.float64)[:, 1:, :].contiguous().view(-1, 50)

    for more, whole in ((lambda one: one, 0), (lambda one: one * scale, 1), (lambda one: one[:, :40], 1)):
        expected = functional.cross_entropy(more(steps(head(hidden))), labels % 40)
        with put_off(model, 3), losses_counted() as counts:
            late = steps(head(hidden))
            assert (late.shape, late.dtype, late.device) == ((10, 50), torch.float64, ids.device)
            found = functional.cross_entropy(more(late), labels % 40)
        torch.testing.assert_close(found, expected, check_dtype=False)
        assert (counts["values"] > 0, counts["chunks"]) == (whole, 1 - whole)


def test_a_loss_without_labels_is_nan_and_has_gradients_of_zero() -> None:
    model, ids = hf.llama(), torch.arange(12).view(2, 6)
    with put_off(model, 3), losses_counted() as counts:
        loss = model(ids, labels=torch.full_like(ids, -100)).loss
    assert counts["chunks"]
    assert loss.isnan()
    (loss * 0.0).backward()
    assert all(one.grad is not None and (one.grad == 0).all() for one in model.parameters())


def test_values_are_there_inside_and_refused_afterwards() -> None:
    model, ids = hf.llama(), torch.arange(12).view(2, 6)
    expected = model(ids).logits
    with put_off(model):
        inside, later = model(ids).logits, model(ids).logits
        assert torch.equal(inside.softmax(-1), expected.softmax(-1))
        inside[..., 0] = 0.0
        assert (inside.sum(-1) != expected.sum(-1)).all()
    assert repr(later) == "Logits((2, 6, 50), torch.float32, not computed)"
    with pytest.raises(ParallelismRuntimeError, match=r"Linear, .* HuggingFaceModel\(chunked_loss=False\)"):
        later.argmax(-1)
    assert type(model(ids).logits) is Tensor


def test_a_hook_that_reads_the_logits_leaves_them_their_gradients() -> None:
    model, ids = hf.llama(), torch.arange(12).view(2, 6)
    seen: list[Tensor] = []

    @torch.no_grad()
    def look(head: Any, given: Any, output: Tensor) -> None:
        seen.append(output.mean())

    model.lm_head.register_forward_hook(look)
    with put_off(model), losses_counted() as counts:
        loss = model(ids, labels=ids).loss
    assert counts["chunks"] == 0
    torch.testing.assert_close(seen[0], model(ids).logits.mean())
    loss.backward()
    assert model.lm_head.weight.grad is not None
