"""What models do beyond computing an output from an input, in each way of training, against one process.

Each cell trains two steps and is "same" (loss and parameters are those of one process on the whole batch) or
"refused" (an error of this library that names the offender). Anything else fails.
`python -m tests.behavior.test_same_function` prints the table of `docs/same_function.md`.

Longer than other files: every case is a model, and all share one loop and one table.
"""

import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import register_pytree_node

from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.mesh import MeshConfig
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.config.replicate import DDPConfig
from composer_dist.config.tensor_parallel import TPConfig
from composer_dist.distributed import parallelize_model, sampler_kwargs
from composer_dist.errors import ParallelismError
from tests.kit import world
from tests.kit.compare import weights

pytestmark = [pytest.mark.filterwarnings("ignore:Full backward hook is firing"), pytest.mark.promise(104)]

WIDTH, BATCH = 8, 8
CUT = {r"re:layers\.\d+\.linear": "colwise_gather"}


class Block(nn.Module):
    """`x + tanh(linear(x))`; subclasses do something else besides."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.rand(WIDTH))

    def work(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * self.gain

    def forward(self, x: Tensor, kept: Any = None) -> Any:
        return self.work(x)


class Net(nn.Module):
    """Three blocks, which are handed the same `kept` one after the other; the output is a loss."""

    block: type[Block] = Block
    steps = 2
    step: int
    """The one that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.block() for _ in range(3)])

    def run(self, x: Tensor, kept: Any = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, kept)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x).pow(2).mean()


# Arguments


class AppendBlock(Block):
    def forward(self, x: Tensor, kept: Any = None) -> Any:
        kept.append(x.pow(2).mean() * self.gain.sum())
        return self.work(x)


class Appends(Net):
    """a list that blocks append losses to"""

    block = AppendBlock

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        return self.run(x, kept).pow(2).mean() + sum(kept) / len(kept)


class FillBlock(Block):
    def forward(self, x: Tensor, kept: Any = None) -> Any:
        kept["hidden"] = kept.get("hidden", 0) + self.work(x)
        return kept["hidden"]


class Fills(Net):
    """a dict that carries a running sum"""

    block = FillBlock

    def forward(self, x: Tensor) -> Tensor:
        kept: dict[str, Tensor] = {}
        self.run(x, kept)
        return kept["hidden"].pow(2).mean()


@dataclass
class Notes:
    losses: list[Tensor]
    total: Any = 0.0


class NoteBlock(Block):
    def forward(self, x: Tensor, kept: Any = None) -> Any:
        kept.losses.append(x.mean())
        kept.total = kept.total + (x * self.gain).pow(2).mean()
        return self.work(x)


class Dataclasses(Net):
    """a dataclass whose fields blocks set"""

    block = NoteBlock

    def forward(self, x: Tensor) -> Tensor:
        kept = Notes([])
        out = self.run(x, kept).pow(2).mean()
        return out + kept.total + sum(kept.losses) / len(kept.losses)


class Pair(NamedTuple):
    first: Tensor
    second: list[Tensor]


class PairBlock(Block):
    def forward(self, x: Any, kept: Any = None) -> Any:
        x.second.append(self.work(x.first))
        return Pair(x.second[-1], x.second)


class Namedtuples(Net):
    """a namedtuple with a list inside"""

    block = PairBlock

    def forward(self, x: Tensor) -> Tensor:
        out: Any = self.run(Pair(x, [x]))  # type: ignore[arg-type]
        return torch.stack(out.second).pow(2).mean()


class SetBlock(Block):
    def forward(self, x: Tensor, kept: Any = None) -> Any:
        kept.add((x * self.gain).pow(2).mean())
        return self.work(x)


class Sets(Net):
    """a set that blocks add losses to"""

    block = SetBlock

    def forward(self, x: Tensor) -> Tensor:
        kept: set[Tensor] = set()
        out = self.run(x, kept).pow(2).mean()
        return out + torch.stack(list(kept)).sum()


class Box:
    """An object that torch knows nothing of."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.total: Any = 0.0


class BoxBlock(Block):
    def forward(self, x: Tensor, kept: Any = None) -> Any:
        kept.losses.append((x * self.gain).pow(2).mean())
        return self.work(x)


class Objects(Net):
    """an object of the user's own class"""

    block = BoxBlock

    def forward(self, x: Tensor) -> Tensor:
        kept = Box()
        return self.run(x, kept).pow(2).mean() + sum(kept.losses)


class NoteLossBlock(Block):
    def forward(self, x: Tensor, kept: Any = None) -> Any:
        kept((x * self.gain).pow(2).mean())
        return self.work(x)


class Closures(Net):
    """a function that keeps losses in its closure"""

    block = NoteLossBlock

    def forward(self, x: Tensor) -> Tensor:
        losses: list[Tensor] = []

        def note(loss: Tensor) -> None:
            losses.append(loss)

        return self.run(x, note).pow(2).mean() + sum(losses)


class CacheBlock(Block):
    def forward(self, x: Tensor, kept: Any = None) -> Any:
        keys = (x * self.gain)[:, None, None]
        keys, values = kept.update(keys, keys * 2, 0)
        return self.work(x) + (keys + values).mean((1, 2))


class Caches(Net):
    """a `DynamicCache` of transformers, read by later blocks"""

    block = CacheBlock

    def forward(self, x: Tensor) -> Tensor:
        from transformers import DynamicCache

        kept = DynamicCache()
        out = self.run(x, kept).pow(2).mean()
        return out + kept.layers[0].values.pow(2).mean()


class StaticCaches(Caches):
    """a `StaticCache` of transformers"""

    def forward(self, x: Tensor) -> Tensor:
        from transformers import PreTrainedConfig, StaticCache

        config = PreTrainedConfig(num_hidden_layers=1, num_attention_heads=1, hidden_size=WIDTH)
        kept = StaticCache(config, max_cache_len=3)
        out = self.run(x, kept).pow(2).mean()
        return out + kept.layers[0].values.pow(2).mean()


class CrossBlock(Block):
    def forward(self, x: Tensor, kept: Any = None) -> Any:
        keys = (x * self.gain)[:, None, None]
        if not kept.is_updated.get(0):  # by the first block, for all
            kept.cross_attention_cache.update(keys, keys * 2, 0)
            kept.is_updated[0] = True
        mine, _ = kept.self_attention_cache.update(keys, keys * 2, 0)
        encoded = kept.cross_attention_cache.layers[0].values
        return self.work(x) + mine.mean((1, 2)) + encoded.mean((1, 2))


class EncoderDecoderCaches(Net):
    """an `EncoderDecoderCache` of transformers, filled by the first block and read by later ones"""

    block = CrossBlock

    def forward(self, x: Tensor) -> Tensor:
        from transformers import DynamicCache, EncoderDecoderCache

        kept = EncoderDecoderCache(DynamicCache(), DynamicCache())
        out = self.run(x, kept).pow(2).mean()
        return out + kept.self_attention_cache.layers[0].values.pow(2).mean()


class SumBlock(Block):
    def forward(self, x: Tensor, kept: Any = None) -> Any:
        kept.total = kept.total * torch.tanh(self.work(x))
        return kept.total


class Sums(Net):
    """a running sum in an object of the user's own class"""

    block = SumBlock

    def forward(self, x: Tensor) -> Tensor:
        kept = Box()
        kept.total = x
        return self.run(x, kept).pow(2).mean() + kept.total.mean()


class WriteBlock(Block):
    def forward(self, x: Tensor, kept: Any = None) -> Any:
        x.mul_(self.gain)
        x[:, 0] += self.gain[0]
        return self.work(x)


class Writes(Net):
    """an argument with a gradient, changed in place"""

    block = WriteBlock

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_() * 2
        return self.run(x).pow(2).mean() + x.pow(2).mean()


class CountBlock(Block):
    def forward(self, x: Tensor, kept: Any = None) -> Any:
        kept += 1
        return self.work(x) * kept.clone()


class Counts(Net):
    """an argument without a gradient, counted up in place"""

    block = CountBlock

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.zeros(())
        return self.run(x, kept).pow(2).mean() * kept


class Node:
    """A container that torch's pytrees know."""

    def __init__(self, value: Any) -> None:
        self.value = value


register_pytree_node(Node, lambda node: ([node.value], None), lambda values, _: Node(next(iter(values))))


class NodeBlock(Block):
    def forward(self, x: Tensor, kept: Any = None) -> Any:
        kept.value = kept.value + self.work(x)
        return kept.value


class Nodes(Net):
    """a container registered as a pytree"""

    block = NodeBlock

    def forward(self, x: Tensor) -> Tensor:
        kept = Node(x)
        self.run(x, kept)
        return kept.value.pow(2).mean()


# Outputs and losses that are kept elsewhere


class HolderBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.box = Box()

    def forward(self, x: Tensor, kept: Any = None) -> Any:
        out = self.work(x)
        self.box.losses = [self.gain.pow(2).sum() + (self.linear(out) ** 2).mean()]
        return out


class Holders(Net):
    """a loss in an object that the module holds"""

    block = HolderBlock

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x).pow(2).mean() + sum(layer.box.losses[0] for layer in self.layers)


class AttributeBlock(Block):
    def forward(self, x: Tensor, kept: Any = None) -> Any:
        out = self.work(x)
        self.loss = self.gain.pow(2).sum() + (self.linear(out) ** 2).mean()
        return out


class Attributes(Net):
    """a loss as an attribute, computed last"""

    block = AttributeBlock

    def forward(self, x: Tensor) -> Tensor:
        out = self.run(x)
        return out.pow(2).mean() + sum(layer.loss for layer in self.layers)


class ObjectBlock(Block):
    def forward(self, x: Any, kept: Any = None) -> Any:
        box = Box()
        box.losses.append(self.work(x.losses[0] if isinstance(x, Box) else x))
        return box


class ReturnsObjects(Net):
    """an object as the only output"""

    block = ObjectBlock

    def forward(self, x: Tensor) -> Tensor:
        out: Any = self.run(x)
        return out.losses[0].pow(2).mean()


class NothingBlock(Block):
    def forward(self, x: Any, kept: Any = None) -> Any:
        kept.append(self.work(kept[-1]))


class ReturnsNothing(Net):
    """None as the output"""

    block = NothingBlock

    def forward(self, x: Tensor) -> Tensor:
        kept = [x]
        for layer in self.layers:
            layer(None, kept)
        return kept[-1].pow(2).mean()


class Penalty(Net):
    """a gradient penalty (`create_graph=True`)"""

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        loss = model(x)
        [gradient] = torch.autograd.grad(loss, x, create_graph=True)
        return loss + (gradient * len(x)).pow(2).sum(1).mean()


class OnlyPenalty(Net):
    """a gradient penalty alone"""

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        [gradient] = torch.autograd.grad(model(x), x, create_graph=True)
        return (gradient * len(x)).pow(2).sum(1).mean()


# Modules that change their tensors


class MaxNorm(Net):
    """`nn.Embedding(max_norm=)`"""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.embed(x.abs().mul(10).long().clamp(max=15))).pow(2).mean()


class RenormBlock(Block):
    def forward(self, x: Tensor, kept: Any = None) -> Any:
        with torch.no_grad():
            self.linear.weight.copy_(nn.functional.normalize(self.linear.weight, dim=1))
        return self.work(x)


class Renormalizes(Net):
    """a weight normalized in forward"""

    block = RenormBlock


class CodeBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.rand(WIDTH), requires_grad=False)

    def forward(self, x: Tensor, kept: Any = None) -> Any:
        if Net.step == 2:
            self.code.data.lerp_(x.detach().mean(0).to(self.code.dtype), 0.1)
        return self.work(x) + self.code


class Codebook(Net):
    """a codebook in a frozen parameter, changed through `.data` from the third forward on"""

    block, steps = CodeBlock, 3


class RunningBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor, kept: Any = None) -> Any:
        self.steps += 1
        self.mean.mul_(0.5).add_(1.0)
        return self.work(x) + self.mean * self.steps


class Running(Net):
    """a running mean and a counter in buffers"""

    block = RunningBlock


class NormBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)

    def forward(self, x: Tensor, kept: Any = None) -> Any:
        self.norm(torch.ones(BATCH, WIDTH))  # the same statistics on every rank
        return self.work(x) + self.norm.running_var.to(x.dtype)


class BatchNorms(Net):
    """a batch norm's running statistics"""

    block = NormBlock


class TeachBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.others: list[nn.Module] = []

    def forward(self, x: Tensor, kept: Any = None) -> Any:
        with torch.no_grad():
            for other in self.others:
                other.gain.lerp_(self.gain, 0.1)
        return self.work(x)


class Teacher(Net):
    """a teacher that a block averages with its own weights"""

    block = TeachBlock

    def __init__(self) -> None:
        super().__init__()
        self.teacher = Block().requires_grad_(False)
        self.layers[1].others.append(self.teacher)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x)
        return (self.run(x) - target).pow(2).mean()


class TeachDataBlock(TeachBlock):
    def forward(self, x: Tensor, kept: Any = None) -> Any:
        for other in self.others:
            other.gain.data.lerp_(self.gain.data, 0.1)
        return self.work(x)


class TeacherData(Teacher):
    """a teacher that a block averages, through `.data`"""

    block = TeachDataBlock


class TeacherUnit(Net):
    """a teacher among the blocks, averaged by the model"""

    def __init__(self) -> None:
        super().__init__()
        self.layers.append(self.block().requires_grad_(False))

    def average(self) -> None:
        with torch.no_grad():
            for mine, other in zip(self.layers[3].parameters(), self.layers[0].parameters(), strict=True):
                mine.lerp_(other, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.layers[3](x)
        self.average()
        for layer in self.layers[:3]:
            x = layer(x)
        return (x - target).pow(2).mean()


class Neighbors(TeacherUnit):
    """a teacher among the blocks, averaged by another block"""

    block = TeachBlock

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].others.append(self.layers[3])

    def average(self) -> None:
        pass


class NeighborsData(Neighbors):
    """a teacher among the blocks, averaged by another block through `.data`"""

    block = TeachDataBlock


class OtherBufferBlock(TeachBlock):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor, kept: Any = None) -> Any:
        for other in self.others:
            other.mean.mul_(0.5).add_(1.0)
        return self.work(x) + self.mean


class OtherBuffers(Net):
    """a buffer of another block, changed in place"""

    block = OtherBufferBlock

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].others.append(self.layers[2])
        self.layers[2].others.append(self.layers[0])


class ReplaceBufferBlock(OtherBufferBlock):
    def forward(self, x: Tensor, kept: Any = None) -> Any:
        for other in self.others:
            other.mean = other.mean * 0.5 + 1
        return self.work(x) + self.mean


class OtherBufferReplaced(OtherBuffers):
    """a buffer of another block, replaced"""

    block = ReplaceBufferBlock


# torch.func


class CallBlock(Block):
    def forward(self, x: Tensor, kept: Any = None) -> Any:
        return x + self.gain * functional_call(self.linear, {"weight": self.linear.weight * 2}, (x,))


class InnerFunctionalCall(Net):
    """`functional_call` of a module inside a block"""

    block = CallBlock


class OuterFunctionalCall(Net):
    """`functional_call` of a block with changed weights"""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = functional_call(layer, {name: p * 2 for name, p in layer.named_parameters()}, (x,))
        return x.pow(2).mean()


class VmapBlock(Block):
    def forward(self, x: Tensor, kept: Any = None) -> Any:
        return x + self.gain * torch.vmap(lambda row: torch.tanh(self.linear(row)))(x)


class Vmap(Net):
    """`vmap` inside a block"""

    block = VmapBlock


class GradBlock(Block):
    def forward(self, x: Tensor, kept: Any = None) -> Any:
        return x + self.gain * torch.func.grad(lambda y: torch.tanh(self.linear(y)).sum())(x)


class FuncGrad(Net):
    """`torch.func.grad` inside a block"""

    block = GradBlock


# Methods other than forward


class Encodes(Net):
    """a method of the model, called outside of any forward"""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)

    def encode(self, x: Tensor) -> Tensor:
        return self.run(self.head(x))

    def loss(self, model: Any, x: Tensor) -> Tensor:
        loss: Tensor = model.encode(x).pow(2).mean()
        return loss


_LOSSES: list[Tensor] = []


class GlobalBlock(Block):
    def forward(self, x: Tensor, kept: Any = None) -> Any:
        out = self.work(x)
        _LOSSES.append(self.gain.pow(2).sum() + (self.linear(out) ** 2).mean())
        return out


class Globals(Net):
    """a loss in a global list"""

    block = GlobalBlock

    def forward(self, x: Tensor) -> Tensor:
        _LOSSES.clear()
        return self.run(x).pow(2).mean() + sum(_LOSSES)


class HoldingBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.box = Box()
        self.box.total = self.gain

    def forward(self, x: Tensor, kept: Any = None) -> Any:
        return self.work(x) * self.box.total


class HoldsWeight(Net):
    """a weight that an object of the module also holds"""

    block = HoldingBlock


# Scalars of parameters and gradients


class Norms(Net):
    """hand-written clipping by `p.grad.norm().item()`"""

    def after_backward(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            norm = parameter.grad.norm().item()
            if norm > 0.01:
                parameter.grad.mul_(0.01 / norm)


class Lamb(Net):
    """an optimizer that scales by `float(p.norm())`"""

    def after_backward(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad.mul_(float(parameter.detach().norm()) / (float(parameter.grad.norm()) + 1e-6))


class Compares(Net):
    """`if p.abs().max() > x`"""

    def after_backward(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.detach().abs().sum() > 3.0:
                parameter.grad.mul_(0.5)


# Hooks


class TensorHookBefore(Net):
    """`p.register_hook` before preparation"""

    def before(self) -> None:
        self.layers[1].linear.weight.register_hook(lambda gradient: gradient * 3)


class TensorHookAfter(Net):
    """`p.register_hook` after preparation"""

    def after(self, optimizer: Any) -> None:
        self.layers[1].linear.weight.register_hook(lambda gradient: gradient * 3)


def _normalized(gradient: Tensor) -> Tensor:
    return gradient / (gradient.norm() + 1e-3)


class ClipsInHook(Net):
    """a hook of `p.register_hook` that normalizes the gradient"""

    def after(self, optimizer: Any) -> None:
        self.layers[1].linear.weight.register_hook(_normalized)


def _triple(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(3)


class AccumulateHookAfter(Net):
    """`register_post_accumulate_grad_hook` after preparation"""

    def after(self, optimizer: Any) -> None:
        self.layers[1].linear.weight.register_post_accumulate_grad_hook(_triple)


def _normalize(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.copy_(_normalized(parameter.grad))


class ClipsInAccumulateHook(Net):
    """a hook of `register_post_accumulate_grad_hook` that normalizes the gradient"""

    def after(self, optimizer: Any) -> None:
        self.layers[1].linear.weight.register_post_accumulate_grad_hook(_normalize)


class ForwardHooks(Net):
    """forward hooks, before and after preparation"""

    def before(self) -> None:
        self.layers[0].register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]))
        self.layers[1].register_forward_hook(lambda module, args, output: output * 2)

    def after(self, optimizer: Any) -> None:
        self.layers[2].register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]))
        self.layers[0].register_forward_hook(lambda module, args, output: output * 2)


class BackwardHooks(Net):
    """full backward hooks, before and after preparation"""

    def before(self) -> None:
        self.layers[1].register_full_backward_hook(lambda module, given, got: (given[0] * 2, *given[1:]))

    def after(self, optimizer: Any) -> None:
        self.layers[2].register_full_backward_hook(lambda module, given, got: (given[0] * 2, *given[1:]))


class ZeroesBetween(Net):
    """`model.zero_grad()` between forward and backward"""

    def loss(self, model: Any, x: Tensor) -> Tensor:
        model(x).backward()
        loss = model(x)
        model.zero_grad()
        return loss


# Modules that change after preparation


class Replaces(Net):
    """a module replaced after preparation"""

    def after(self, optimizer: Any) -> None:
        torch.manual_seed(9)
        self.layers[1] = Block()
        optimizer.add_param_group({"params": self.layers[1].parameters()})


class Adds(Net):
    """a module added after preparation"""

    def after(self, optimizer: Any) -> None:
        torch.manual_seed(9)
        self.layers.append(Block())
        optimizer.add_param_group({"params": self.layers[3].parameters()})


class Assigns(Net):
    """a parameter replaced after preparation"""

    def after(self, optimizer: Any) -> None:
        torch.manual_seed(9)
        self.layers[1].gain = nn.Parameter(torch.rand(WIDTH))


class Removes(Net):
    """a module removed after preparation"""

    def after(self, optimizer: Any) -> None:
        del self.layers[1]


class AutogradGrad(Net):
    """gradients by `torch.autograd.grad`"""

    def gradients(self, model: nn.Module, loss: Tensor) -> None:
        parameters = list(model.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient


def _below(kind: type[Net]) -> Iterator[type[Net]]:
    for one in kind.__subclasses__():
        yield one
        yield from _below(one)


CASES = {one.__name__: one for one in _below(Net)}

RARE = (
    "Caches",
    "StaticCaches",
    "EncoderDecoderCaches",
    "Counts",
    "TeacherData",
    "TeacherUnit",
    "NeighborsData",
    "OtherBuffers",
    "OtherBufferReplaced",
    "Globals",
    "HoldsWeight",
)
"""Cases that only slow tests run."""

MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "FSDP2": (2, {}),
    "HSDP": (4, {"mesh": MeshConfig(dp_replicate=2, dp_shard=2)}),
    "DDP": (2, {"ddp": DDPConfig()}),
    "TP": (2, {"mesh": MeshConfig(dp_shard=1, tp=2), "tp": TPConfig(plan=CUT)}),
}
"""On how many ranks, and how."""
EXTRAS: dict[str, dict[str, Any]] = {
    "": {},
    "recomputed": {"activation_checkpointing": "composable"},
    "wrapped": {"activation_checkpointing": "wrapped"},
    "selective": {"activation_checkpointing": "selective"},
    "offloaded": {"activation_checkpointing": "offload"},
    "always gathered": {"fsdp2": FSDP2Config(reshard_after_forward=False)},
    "compiled": {"compile": True},
}
"""What else is done to the model."""
QUICK = [(mode, precision, "") for mode in MODES for precision in (None, "amp_bf16")]
SPARSE = {("HSDP", None): 8, ("HSDP", "amp_bf16"): 16, ("FSDP2", "amp_bf16"): 8, ("DDP", "amp_bf16"): 8}
SPARSE |= {("DDP", None): 4, ("TP", None): 8, ("TP", "amp_bf16"): 8}
"""Where the default run has every fourth, eighth or sixteenth case only: FSDP2 in fp32 has them all."""
SLOW = [("FSDP2", precision, extra) for precision in (None, "amp_bf16") for extra in EXTRAS if extra]
SLOW += [
    (mode, precision, extra)
    for mode, extra in (
        ("HSDP", "recomputed"),
        *(("DDP", extra) for extra in ("recomputed", "wrapped", "selective", "compiled")),
        ("TP", "recomputed"),
        ("TP", "compiled"),
    )
    for precision in (None, "amp_bf16")
]

TORCHS = (IN_PLACE := "modified by an inplace operation", EXISTS := "attribute 'gain' already exists")
"""Errors of torch's own, raised before anything is lost."""
DONATED = "supports no gradients of gradients"
NO_HOOKS = "calls torch.func.grad"
WRITES = "changed .* in place"
HOOKS = r"Gradient hooks \(Tensor.register_hook\) on layers.1.linear.weight"
PARTS = "of a sharded tensor would give this rank's part"
NEW = "was put into the model after the preparation"
SHARDED = "layers.2 used sharded parameters of another unit"
OUTSIDE = "changes .*, outside of it"
OTHER = "is no longer the parameter that was sharded"
REFUSED: dict[str, dict[str, str]] = {
    "FSDP2": {
        "MaxNorm": "embed: an embedding with max_norm",
        "Renormalizes": f"layers.0 .*{WRITES}",
        "Codebook": f"layers.0 .*{WRITES}",
        "OuterFunctionalCall": f"layers.0.gain {OTHER}",
        "Norms": PARTS,
        "Lamb": PARTS,
        "Teacher": f"the root .*{WRITES}",
        "TeacherData": f"the root .*{WRITES}",
        "Neighbors": SHARDED,
        "NeighborsData": SHARDED,
        "Encodes": r"head was used .*forward_methods=\['encode'\]",
        "Globals": "needs (a parameter|layers.1.linear.weight), which FSDP2 has freed|Backward mixed sharded",
        "HoldsWeight": "layers.0.gain is also held inside of layers.0.box",
        "TensorHookBefore": HOOKS,
        "TensorHookAfter": HOOKS,
        "ClipsInHook": HOOKS,
        "Replaces": NEW,
        "Adds": NEW,
        "Assigns": f"layers.1.gain {OTHER}",
        "AutogradGrad": "this rank's gradient of layers.2",
    },
    "DDP": {
        "MaxNorm": "embed: an embedding with max_norm",
        "Codebook": f"{WRITES}, and not in the same way",
        "Replaces": f"layers.1.gain {NEW}",
        "Adds": f"layers.3.gain {NEW}",
        "Assigns": f"layers.1.gain {NEW}",
        "AutogradGrad": "this rank's gradient of layers.0.gain",
        "Removes": "layers.1.gain, layers.1.linear.weight, layers.1.linear.bias no gradient",
    },
    "TP": {
        "Vmap": "torch.func's transforms",
        "FuncGrad": "torch.func's transforms",
        "Norms": PARTS,
        "Lamb": PARTS,
        "TensorHookBefore": HOOKS,
    },
}
"""Which cells are refused, and in which words."""
ALSO = {extra: {"FuncGrad": NO_HOOKS} for extra in ("recomputed", "wrapped", "selective", "offloaded")}
for extra in ("recomputed", "wrapped", "selective"):
    ALSO[extra] |= dict.fromkeys(("Renormalizes", "Codebook"), f"a recomputed .*{WRITES}")
    ALSO[extra] |= dict.fromkeys(("StaticCaches", "Writes", "Counts"), "among its arguments in place")
    ALSO[extra] |= dict.fromkeys(("Teacher", "TeacherData"), f"the root .*{WRITES}|{OUTSIDE}")
    ALSO[extra] |= dict.fromkeys(("Neighbors", "NeighborsData"), f"{SHARDED}|{OUTSIDE}")
    ALSO[extra] |= dict.fromkeys(("OtherBuffers", "OtherBufferReplaced"), OUTSIDE)
ALSO["always gathered"] = {"Globals": ""}
ALSO["wrapped"] |= dict.fromkeys(("OuterFunctionalCall", "Assigns"), EXISTS)
ALSO["compiled"] = {"Penalty": DONATED, "OnlyPenalty": DONATED, "Writes": IN_PLACE, "Globals": ""}
REFUSED["HSDP"] = REFUSED["FSDP2"]
REFUSED["TP amp_bf16"] = {**REFUSED["FSDP2"], **REFUSED["TP"]}  # FSDP2 casts


def _train(case: type[Net], options: dict[str, Any] | None, precision: str | None) -> Any:
    """The losses of some steps, and the parameters; what the ranks hold of a batch follows from the mesh."""
    torch.manual_seed(3)
    model = case()
    _call(model, "before")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    parts, part = 1, 0
    if options is not None:
        done = parallelize_model(model, ParallelismConfig(**options), optimizer, precision=precision)
        data = sampler_kwargs(done.mesh)
        parts, part = data["num_replicas"], data["rank"]
    _call(model, "after", optimizer)
    losses = []
    for step in range(case.steps):
        Net.step = step
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step)).chunk(parts)[part]
        loss = model.loss(model, x) if hasattr(model, "loss") else model(x)
        model.gradients(model, loss) if hasattr(model, "gradients") else loss.backward()
        _call(model, "after_backward", model)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().float().clone()
        if options is not None:
            dist.all_reduce(total)
            total /= dist.get_world_size()
        losses.append(total)
    return losses, {name: value.float() for name, value in weights(model).items()}


def _call(model: nn.Module, name: str, *args: Any) -> None:
    if hasattr(model, name):
        getattr(model, name)(*args)


def cell(case: type[Net], options: dict[str, Any], precision: str | None) -> str:
    """ "same", "refused: ..." or what went wrong."""
    losses, expected = _train(case, None, None)
    if "compile" in options:
        torch.compiler.reset()  # after a few compilations of one function, torch runs it uncompiled
    try:
        found, parameters = _train(case, options, precision)
    except ParallelismError as error:
        return f"refused: {error}"
    except Exception as error:
        if notes := getattr(error, "__notes__", None):
            return f"refused: {notes[-1]}"
        if any(words in str(error) for words in TORCHS):
            return f"refused: {error}"
        return f"{type(error).__name__}: {str(error)[:200]}"
    tolerance = 1e-4 if precision is None else 0.1
    try:
        torch.testing.assert_close(found, losses, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(parameters, expected, rtol=tolerance, atol=tolerance)
    except AssertionError as error:
        return f"different: {' '.join(str(error).split())[:160]}"
    return "same"


def column(mode: str, precision: str | None, extra: str, names: Sequence[str]) -> dict[str, str]:
    """The cells of some cases in one way of training."""
    warnings.simplefilter("ignore")  # torch.compile's own
    _, options = MODES[mode]
    return {name: cell(CASES[name], {**options, **EXTRAS[extra]}, precision) for name in names}


def _column(
    mode: str, precision: str | None, extra: str, names: Sequence[str] = tuple(CASES)
) -> dict[str, str]:
    """As all ranks have it."""
    found = world.run(column, MODES[mode][0], mode, precision, extra, names, timeout=600)
    return {name: " / ".join(dict.fromkeys(one[name] for one in found)) for name in names}


def _check(mode: str, precision: str | None, extra: str, names: Sequence[str] = tuple(CASES)) -> None:
    refused = REFUSED.get(f"{mode} {precision}", REFUSED[mode]) | ALSO.get(extra, {})
    wrong = {
        name: result
        for name, result in _column(mode, precision, extra, names).items()
        if not re.fullmatch(f"refused: .*({refused[name]}).*" if refused.get(name) else "same", result, re.S)
    }
    assert not wrong, wrong


def _usual(mode: str, precision: str | None) -> list[str]:
    """The cases of the default run."""
    every = SPARSE.get((mode, precision), 1)
    return [name for name in CASES if name not in RARE][::every]


@pytest.mark.parametrize(("mode", "precision", "extra"), QUICK)
def test_it_is_the_same_function_or_is_refused_by_name(mode: str, precision: str | None, extra: str) -> None:
    _check(mode, precision, extra, _usual(mode, precision))


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "precision", "extra"), QUICK)
def test_rarer_cases_are_the_same_or_refused_by_name(mode: str, precision: str | None, extra: str) -> None:
    usual = _usual(mode, precision)
    _check(mode, precision, extra, [name for name in CASES if name not in usual])


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "precision", "extra"), SLOW)
def test_it_is_so_with_what_else_is_done_to_a_model(mode: str, precision: str | None, extra: str) -> None:
    _check(mode, precision, extra)


def _print_table() -> None:
    columns: dict[tuple[str, str], dict[str | None, dict[str, str]]] = {}
    for mode, precision, extra in (*QUICK, *SLOW):
        columns.setdefault((mode, extra), {})[precision] = _column(mode, precision, extra)
    print(f"| What the model does | {' | '.join(' '.join(filter(None, key)) for key in columns)} |")
    print(f"|---|{'---|' * len(columns)}")
    for name, case in CASES.items():
        cells = [
            {precision: found[name].partition(":")[0] for precision, found in column.items()}
            for column in columns.values()
        ]
        shown = [one[None] if len(set(one.values())) == 1 else f"{one[None]}¹" for one in cells]
        print(f"| {case.__doc__} | {' | '.join(shown)} |")


def test_the_page_has_every_case() -> None:
    page = Path("docs/same_function.md").read_text()
    assert [name for name, case in CASES.items() if f"| {case.__doc__} |" not in page] == []


if __name__ == "__main__":
    _print_table()
    world.stop()
