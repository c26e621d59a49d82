"""The loss of a language model's head: its memory and its time, without all logits and with them.

    python benchmarks/loss.py --tokens 8192 --vocabulary 32768 --rounds 3

One process; hidden states and a head's weight are there, and forward and backward of the loss give both their
gradients. Memory is counted: the most bytes of tensors that operators have made and that are alive, not of
inputs; the step that is counted is not among those that are timed, of which the fastest counts. The error is
the largest of the weight's gradient from 256 tokens, relative to the largest element in float64.

- logits: torch's cross-entropy of all logits in float32, as transformers computes it.
- TRL: `ChunkedLogProbFunction`, the only loss of its `SFTTrainer`, with its own sizes.
- Liger: `LigerFusedLinearCrossEntropyLoss`, whose kernels need Triton and a GPU.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from rounds import Contender, Figures, device, now, play
from torch import Tensor
from torch.nn import functional

from composer_dist.distributed.plan.record import storages_made
from composer_dist.losses import chunked_cross_entropy

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(hidden: Tensor, weight: Tensor, labels: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return functional.cross_entropy(functional.linear(hidden, weight).to(dtype), labels)


def trl() -> Loss:
    from trl.kernels import ChunkedLogProbFunction

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        probabilities, *_ = ChunkedLogProbFunction.apply(
            hidden, weight, None, labels, 1.0, 8192, None, 1.0, ()
        )
        return -probabilities.mean()

    return loss


def liger() -> Loss:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    fused = LigerFusedLinearCrossEntropyLoss()
    return lambda hidden, weight, labels: fused(weight, hidden, labels)


def measured(make: Callable[[], Loss], arguments: argparse.Namespace) -> Figures:
    """One contender's figures."""
    loss, here, dtype = make(), device(), getattr(torch, arguments.dtype)
    torch.manual_seed(0)
    hidden = torch.randn(arguments.tokens, arguments.width, device=here)
    weight = torch.randn(arguments.vocabulary, arguments.width, device=here) / arguments.width**0.5
    labels = torch.randint(arguments.vocabulary, (arguments.tokens,), device=here)
    inputs = [one.to(dtype).requires_grad_() for one in (hidden, weight)]
    with storages_made([*inputs, labels]) as most:
        loss(*inputs, labels).backward()
    error = _error(loss, inputs, labels[:256])
    seconds = []
    for _ in range(arguments.steps):
        for one in inputs:
            one.grad = None
        start = now()
        loss(*inputs, labels).backward()
        seconds.append(now() - start)
    return {"seconds": min(seconds), "MiB": most() / 2**20, "error": error}


def _error(loss: Loss, inputs: list[Tensor], labels: Tensor) -> float:
    hidden, weight = (one.detach() for one in inputs)
    first, exact = hidden[: len(labels)], weight.double().requires_grad_()
    (found,) = torch.autograd.grad(loss(first.requires_grad_(), inputs[1], labels), inputs[1])
    plain(first.double(), exact, labels, torch.float64).backward()
    assert exact.grad is not None
    return float((found - exact.grad).abs().max() / exact.grad.abs().max())


def options(parser: argparse.ArgumentParser) -> None:
    sizes = {"tokens": 8192, "width": 512, "vocabulary": 32768, "steps": 2}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])


CONTENDERS: dict[str, Contender] = {
    "composer_dist": partial(measured, lambda: chunked_cross_entropy),
    "composer_dist, 256 rows": partial(measured, lambda: partial(chunked_cross_entropy, chunk_size=256)),
    "logits": partial(measured, lambda: plain),
    "TRL": partial(measured, trl),
    "Liger": partial(measured, liger),
}

if __name__ == "__main__":
    play(CONTENDERS, ratios=["logits", "TRL"], options=options, ranks=[1])
