"""`chunked_cross_entropy` against torch's cross-entropy of all logits."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional

from composer_dist.distributed.plan.record import storages_made
from composer_dist.errors import ParallelismRuntimeError, ParallelismValueError
from composer_dist.losses import chunked_cross_entropy
from tests.kit.world import on_ranks

pytestmark = pytest.mark.promise(123)
CLASSES, WIDTH = 50, 16
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "num_items": {"num_items": 31},
    "softcap": {"softcap": 2.0},
    "z_loss": {"z_loss": 0.1, "reduction": "sum"},
    "label_smoothing": {"label_smoothing": 0.2, "ignore_index": 3},
    "all": {"softcap": 2.0, "z_loss": 0.1, "label_smoothing": 0.2, "reduction": "none"},
}


def plain(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor, **options: Any) -> Tensor:
    """The definition."""
    ignored, reduction = options.get("ignore_index", -100), options.get("reduction", "mean")
    logits = (hidden @ weight.T + bias).flatten(0, 1)
    if softcap := options.get("softcap"):
        logits = softcap * torch.tanh(logits / softcap)
    smoothing = {"label_smoothing": options.get("label_smoothing", 0.0), "reduction": "none"}
    each = functional.cross_entropy(logits, labels.flatten(), ignore_index=ignored, **smoothing)
    counted = labels.flatten() != ignored
    each = each + options.get("z_loss", 0.0) * logits.logsumexp(-1) ** 2 * counted
    if reduction == "none":
        return each.view(labels.shape)
    return each.sum() / (options.get("num_items") or counted.sum()) if reduction == "mean" else each.sum()


def inputs(dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor]:
    """Hidden states, weight and bias; labels, of which each is ignored in one of the variants."""
    torch.manual_seed(0)
    shapes = (2, 37, WIDTH), (CLASSES, WIDTH), (CLASSES,)
    labels = torch.randint(0, CLASSES, (2, 37))
    labels[0, :9], labels[1, 5:9] = -100, 3
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes], labels


@pytest.mark.parametrize("name", OPTIONS)
def test_it_is_the_plain_loss(name: str) -> None:
    """Values and gradients; each row's gradient has another weight with reduction="none"."""
    options = OPTIONS[name]
    tensors, labels = inputs()
    if options.get("ignore_index"):
        labels = labels.clamp(min=0)
    hidden, weight, bias = tensors
    expected = plain(hidden, weight, labels, bias, **options)
    found = chunked_cross_entropy(hidden, weight, labels, bias=bias, chunk_size=8, **options)
    torch.testing.assert_close(found, expected)
    scale = torch.arange(1.0, 1 + expected.numel(), dtype=torch.float64).view(expected.shape)
    of_found, of_expected = (
        [*torch.autograd.grad((one * scale).sum(), tensors)] for one in (found, expected)
    )
    torch.testing.assert_close(of_found, of_expected)


def test_a_frozen_weight_gets_no_gradient_and_no_grad_computes_none() -> None:
    (hidden, weight, _), labels = inputs()
    weight.requires_grad_(False)
    loss = chunked_cross_entropy(hidden, weight, labels, chunk_size=8)
    loss.backward()
    assert weight.grad is None
    assert hidden.grad is not None
    with torch.no_grad():
        assert torch.equal(chunked_cross_entropy(hidden, weight, labels, chunk_size=8), loss.detach())


def test_gradients_are_added_up_in_float32() -> None:
    """Of 64 chunks in bfloat16: no further from the truth than the plain loss in bfloat16."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(512, WIDTH).bfloat16(), torch.randn(CLASSES, WIDTH).bfloat16()
    labels = torch.randint(0, CLASSES, (512,))
    truth = weight.double().requires_grad_()
    functional.cross_entropy(hidden.double() @ truth.T, labels).backward()
    errors = []
    for chunked in (False, True):
        own = weight.clone().requires_grad_()
        if chunked:
            loss = chunked_cross_entropy(hidden, own, labels, chunk_size=8)
        else:
            loss = functional.cross_entropy((hidden @ own.T).float(), labels)
        assert loss.dtype is torch.float32
        loss.backward()
        assert own.grad is not None
        assert own.grad.dtype is torch.bfloat16
        assert truth.grad is not None
        errors.append((own.grad - truth.grad).norm())
    assert errors[1] < 1.5 * errors[0]


def test_it_never_has_all_logits() -> None:
    """512 rows of 4,000 classes: 8 MB for each tensor of logits."""
    peaks = {}
    for size in (512, 16):
        hidden, weight = torch.randn(512, 8, requires_grad=True), torch.randn(4000, 8, requires_grad=True)
        labels = torch.randint(0, 4000, (512,))
        with storages_made([hidden, weight, labels]) as most:
            chunked_cross_entropy(hidden, weight, labels, chunk_size=size).backward()
        peaks[size] = most()
    assert peaks[512] > 2 * 512 * 4000 * 4
    assert peaks[16] < 512 * 4000 * 4 / 4


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_of_gradients_are_refused(reduction: Any) -> None:
    (hidden, weight, _), labels = inputs()
    loss = chunked_cross_entropy(hidden, weight, labels, reduction=reduction, chunk_size=10).sum()
    with pytest.raises(ParallelismRuntimeError, match=r"create_graph=True.*chunked_loss=False"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_a_loss_scale_does_not_overflow_float16_in_one_piece_either() -> None:
    (hidden, weight, _), labels = inputs(torch.float32)
    found = []
    for scale, enabled in ((2.0**17, True), (1.0, False)):
        with torch.autocast("cpu", torch.float16, enabled=enabled):
            loss = chunked_cross_entropy(hidden, weight, labels, reduction="sum")
        gradients = torch.autograd.grad(loss * scale, (hidden, weight))
        found.append([one / scale for one in gradients])
    torch.testing.assert_close(found[0], found[1], rtol=0.01, atol=0.01)


def test_no_rows_and_no_classes_have_a_sum_of_zero() -> None:
    empty, none = torch.zeros(0, 8), torch.zeros(0, dtype=torch.long)
    assert chunked_cross_entropy(empty, empty, none, reduction="sum") == 0


@pytest.mark.parametrize("chunk_size", [8, 100])
def test_a_mean_over_no_labels_is_nan_and_has_gradients_of_zero(chunk_size: int) -> None:
    """As torch's."""
    tensors, labels = inputs()
    hidden, weight, bias = tensors
    options: dict[str, Any] = {"bias": bias, "chunk_size": chunk_size}
    found = chunked_cross_entropy(hidden, weight, torch.full_like(labels, -100), **options)
    assert found.isnan()
    for scale in (0.0, 1.0):
        gradients = torch.autograd.grad(found * scale, tensors, retain_graph=True)
        assert all((one == 0).all() for one in gradients)


def test_a_loss_in_one_piece_has_gradients_of_gradients() -> None:
    (hidden, weight, _), labels = inputs()
    logits = functional.linear(hidden, weight).flatten(0, 1)
    found = []
    for loss in (
        chunked_cross_entropy(hidden, weight, labels),
        functional.cross_entropy(logits, labels.flatten()),
    ):
        (first,) = torch.autograd.grad(loss, hidden, create_graph=True)
        found += torch.autograd.grad(first.square().sum(), (hidden, weight))
    torch.testing.assert_close(found[:2], found[2:])


@on_ranks(1)
def test_mistakes_are_named() -> None:
    (hidden, weight, _), labels = inputs()
    with pytest.raises(ParallelismValueError, match=r"\(2, 37, 16\), \(50, 15\) and \(2, 37\)"):
        chunked_cross_entropy(hidden, weight[:, 1:], labels)
    with pytest.raises(ParallelismValueError, match="'median'"):
        chunked_cross_entropy(hidden, weight, labels, reduction="median")  # type: ignore[arg-type]
    with pytest.raises(ParallelismValueError, match=r"(?s)num_items divides a mean.*chunk_size must be"):
        chunked_cross_entropy(hidden, weight, labels, num_items=3, reduction="sum", chunk_size=0)
    sharded = DTensor.from_local(weight.detach(), init_device_mesh("cpu", (1,)), [Replicate()])
    with pytest.raises(ParallelismValueError, match="weight is sharded"):
        chunked_cross_entropy(hidden, sharded, labels)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_autocast_of_the_forward_holds_in_backward(reduction: Any) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    labels = torch.tensor([0, 1, -100, 3, 4, 2])
    gradients = []
    for rows in (hidden, hidden.bfloat16()):
        for chunked in (True, False):
            with torch.autocast("cpu", torch.bfloat16):
                if chunked:
                    loss = chunked_cross_entropy(rows, weight, labels, reduction=reduction, chunk_size=4)
                else:
                    logits = functional.linear(rows, weight).float()
                    loss = functional.cross_entropy(logits, labels, reduction=reduction)
            gradients.append(torch.autograd.grad(loss.sum(), (hidden, weight), retain_graph=True))
    for ours, theirs in (gradients[:2], gradients[2:]):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("options", "message"), [
    ({"bias": torch.ones(4)}, r"bias must be \(v\)"),
    ({"softcap": 0.0}, "softcap must be positive, not 0.0"),
    ({"num_items": 0}, "num_items must be positive, not 0"),
    ({"z_loss": -1.0}, "z_loss must not be negative, not -1.0"),
    ({"chunk_size": 2.5}, "chunk_size must be an integer, not 2.5"),
])  # fmt: skip
def test_options_that_cannot_work_are_named(options: Any, message: str) -> None:
    with pytest.raises(ParallelismValueError, match=message):
        chunked_cross_entropy(torch.ones(2, 3), torch.ones(5, 3), torch.tensor([0, 1]), **options)
