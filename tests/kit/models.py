"""Small models, each with one thing that preparation must get right.

Every model takes one batch tensor, `(8, ...)`, and returns a tensor whose first dimension is the batch.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, ROWS, LENGTH = 16, 8, 8, 5


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # Without biases: softmax takes the key's out again, and Adam would blow up its gradient's rounding.
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(-1, -2) / math.sqrt(WIDTH)
        return self.o(scores.softmax(-1) @ self.v(x))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp, self.norm = Attention(), Mlp(), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class B(nn.Module):
    """docs/promises.md's `B`; with `tied`, its head is its embedding."""

    def __init__(self, tied: bool = False, blocks: int = 3, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def M() -> nn.Sequential:  # noqa: N802
    """docs/promises.md's `M`."""
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def tied() -> nn.Module:
    return B(tied=True)


class MambaBlock(nn.Module):
    """Uses its convolution's weight, and never calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1d = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH, padding=2)
        self.out_proj = nn.Linear(WIDTH, WIDTH)
        self.A_log = nn.Parameter(torch.randn(WIDTH, 2))

    def forward(self, x: Tensor) -> Tensor:
        mixed = F.conv1d(x.transpose(1, 2), self.conv1d.weight, self.conv1d.bias, padding=2, groups=WIDTH)
        mixed = mixed[..., : x.shape[1]].transpose(1, 2) * self.A_log.exp().sum(-1)
        return x + self.out_proj(mixed)


def mamba() -> nn.Module:
    return B(block=MambaBlock)


class BertHead(nn.Module):
    def __init__(self, embed: nn.Embedding) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(VOCABULARY))
        self.decoder = nn.Linear(WIDTH, VOCABULARY)
        self.decoder.weight, self.decoder.bias = embed.weight, self.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(x)


def bert() -> nn.Module:
    """The decoder's weight is the embedding's, its bias is its parent's."""
    model = B()
    model.head = BertHead(model.embed)
    return model


class Half(nn.Module):
    def __init__(self, shared: nn.Embedding) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.embed_tokens.weight = shared.weight
        self.block = nn.ModuleList([Block(), Block()])

    def forward(self, tokens: Tensor, memory: Tensor | None = None) -> Tensor:
        x: Tensor = self.embed_tokens(tokens)
        x = x if memory is None else x + memory
        for block in self.block:
            x = block(x)
        return x


class EncoderDecoder(nn.Module):
    """One embedding under four names."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder, self.decoder = Half(self.shared), Half(self.shared)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.shared.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.decoder(tokens, self.encoder(tokens)))


class MoeBlock(nn.Module):
    """Two experts, and a router whose bias is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2, bias=False)
        self.router.register_buffer("bias_correction", torch.randn(2))
        self.experts = nn.ModuleList([Mlp(), Mlp()])

    def forward(self, x: Tensor) -> Tensor:
        weights = (self.router(x) + self.router.bias_correction).softmax(-1)
        return x + sum(w.unsqueeze(-1) * e(x) for w, e in zip(weights.unbind(-1), self.experts, strict=True))


def moe() -> nn.Module:
    return B(block=MoeBlock)


def tied_blocks() -> nn.Module:
    """Block 0's norm is block 2's, parameter by parameter."""
    model = B()
    first, last = model.layers[0].norm, model.layers[2].norm
    last.weight, last.bias = first.weight, first.bias
    return model


class Parent(nn.Module):
    """Holds its child's weight, too."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(WIDTH, WIDTH)
        self.weight = self.child.weight

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.child(x)) @ self.weight


def parent_child() -> nn.Module:
    return B(block=Parent)


class Scaled(nn.Module):
    """A scalar parameter, and one of a single element."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.shift = nn.Parameter(torch.tensor([0.1]))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.linear(x) + self.shift).tanh() * self.gain


def scalar() -> nn.Module:
    return B(block=Scaled)


def non_contiguous() -> nn.Module:
    model = B()
    for layer in model.layers:
        layer.attention.q.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
    return model


class Precise(nn.Module):
    """A norm in float64 among float32 layers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x).double()).float()


def dtypes() -> nn.Module:
    return B(block=Precise)


class OwnDtype(nn.Module):
    """A float64 parameter of its own above a float32 layer with more bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.linear(x) * self.scale).float()


def own_dtype() -> nn.Module:
    return B(block=OwnDtype)


class Borrowing(nn.Module):
    """Calls a norm that is registered with the root only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.borrowed: list[nn.Module] = []

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.borrowed[0](x))


def borrowed() -> nn.Module:
    model = B(block=Borrowing)
    for layer in model.layers:
        layer.borrowed.append(model.norm)
    return model


class Shell(nn.Module):
    """A root without parameters of its own, and one ReLU in two places."""

    def __init__(self) -> None:
        super().__init__()
        relu = nn.ReLU()
        self.net = nn.Sequential(nn.Linear(8, 8), relu, nn.Linear(8, 8), relu, nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(10, 10), nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh()) + (x @ self.weight if hasattr(self, "weight") else 0)


class Composers(nn.Module):
    """The nested model of Composer's wrap-attribute tests: m2 {m3, m4}, m5 {m6, m7}."""

    def __init__(self) -> None:
        super().__init__()
        self.m2, self.m5 = Pair(), Pair()

    def forward(self, x: Tensor) -> Tensor:
        return self.m5(self.m2(x))


def composers(ties: dict[str, str]) -> Composers:
    """Composer's nested model, in which each `target` is the parameter `source`."""
    model = Composers()
    for target, source in ties.items():
        owner, _, key = target.rpartition(".")
        setattr(model.get_submodule(owner), key, model.get_parameter(source))
    return model


def batch(model: nn.Module, step: int = 0) -> Tensor:
    """`(ROWS, LENGTH)` tokens or `(ROWS, width)` numbers, whatever the model takes."""
    generator = torch.Generator().manual_seed(step)
    if any(isinstance(module, nn.Embedding) for module in model.modules()):
        return torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    width = 10 if isinstance(model, Composers) else 8
    return torch.randn(ROWS, width, generator=generator)


class Layer(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, images: Tensor) -> Tensor:
        for layer in self.layers:
            images = layer(images)
        return images * self.gain


class Multimodal(nn.Module):
    """Text `(rows, WIDTH)`, and images or none; returns a tuple, as models do."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.vision = Vision().requires_grad_(not frozen)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, text: Tensor, images: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if images is not None:
            text = text + self.vision(images)
        for layer in self.layers:
            text = layer(text)
        return self.head(text), text
