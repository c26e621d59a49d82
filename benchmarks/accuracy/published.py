"""Figures that others have published, beside those of a plan with the same configuration."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from composer_dist import DDPConfig, FSDP2Config, MeshConfig, ParallelismConfig, Rule
from composer_dist.distributed import init_context, plan_parallelism
from composer_dist.distributed.plan.memory import MemoryEstimate
from composer_dist.recipe.other_libraries import nf4

GIB, GB = 1 << 30, 10**9
DEVICE = 79.1
"""GiB that a process can allocate on an A100 or H100 of 80 GB."""
CUDA = MeshConfig(device_type="cuda")


def llama(dtype: torch.dtype = torch.float32, **sizes: Any) -> Any:
    """On meta, by default with Llama 3's vocabulary."""
    defaults = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 8192}
    with init_context(dtype=dtype):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(defaults | sizes)))


_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
_3B = {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24}
_3B |= {"head_dim": 128, "tie_word_embeddings": True}


def estimate(
    model: Any,
    ranks: int,
    batch: Any,
    recomputed: Any = None,
    mixed: bool = True,
    fused: bool = False,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    **options: Any,
) -> MemoryEstimate:
    """Of rank 0 under FSDP2.

    Args:
        model: on meta.
        ranks: of one dimension.
        batch: as for `plan.memory`.
        recomputed: as for `activation_checkpointing`.
        mixed: whether to compute in bf16.
        fused: whether the optimizer's step is one kernel.
        optimizer: its class.
        options: of `ParallelismConfig`.
    """
    config = ParallelismConfig(activation_checkpointing=recomputed, mesh=CUDA, **options)
    made = optimizer([one for one in model.parameters() if one.requires_grad])
    made.param_groups[0]["fused"] = fused  # the constructor wants a device
    precision = "amp_bf16" if mixed else None
    plan = plan_parallelism(model, config, world_size=ranks, optimizer=made, precision=precision)
    return plan.memory(batch)


def _every_second_product() -> Any:
    """Torchtitan's selective checkpointing (torchtitan/models/parallelize_llama.py in December 2024)."""
    aten, products = torch.ops.aten, Counter[bool]()
    attention = {
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
    }

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator == aten.mm.default:
            products[context.is_recompute] += 1
            kept = products[context.is_recompute] % 2 == 1
        else:
            kept = operator in attention
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


_OFFLOADED = "composable", {"offload": True}
SELECTIVE = ("composable", {"context_fn": _every_second_product})


class Chunked(nn.Module):
    """torchtune's cross entropy, compiled: the logits are in `parts`, by default chunked."""

    def __init__(self, model: Any, parts: int = 8) -> None:
        super().__init__()
        self.model, self.parts = model, parts

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Token ids and labels (sequences, tokens) to the sum of their losses."""
        hidden = self.model.model(input_ids).last_hidden_state
        logits = [self.model.lm_head(one) for one in hidden.chunk(self.parts, dim=1)]
        return {"loss": torch.stack([_Entropy.apply(one) for one in logits]).sum()}


class _Entropy(torch.autograd.Function):
    """A compiled loss: keeps the logits, and has no temporary tensors."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.new_empty(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (logits,) = ctx.saved_tensors
        return torch.empty_like(logits)


def _adapted(quantized: bool) -> Any:
    """Torchtune's LoRA of Llama 3.2 3B: recipes/configs/llama3_2/3B_lora_single_device.yaml."""
    import peft

    model = llama(torch.bfloat16, **_3B)
    if quantized:
        nf4.quantize(model)
    targets = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    adapter = peft.LoraConfig(r=64, lora_alpha=128, target_modules=targets)
    with init_context(dtype=torch.bfloat16):
        peft.inject_adapter_in_model(adapter, model)
    for name, one in model.named_parameters():
        one.requires_grad_("lora_" in name)
    return Chunked(model)


def _lora(quantized: bool) -> MemoryEstimate:
    model, alone = _adapted(quantized), DDPConfig()
    return estimate(model, 1, (2, 4096), _OFFLOADED, mixed=False, fused=True, ddp=alone)


def _tune(recomputed: Any = None, parts: int = 0, **options: Any) -> MemoryEstimate:
    """Of a full fine-tune; with `parts`, the loss is compiled."""
    model = llama(torch.bfloat16, **_3B)
    model = Chunked(model, parts) if parts else model
    return estimate(model, 1, (2, 4096), recomputed, mixed=False, fused=True, **options)


def _eight_bits() -> float:
    from torchao.optim import AdamW8bit

    return _without_gradients(_tune(_OFFLOADED, 8, optimizer=AdamW8bit))


def _without_gradients(made: MemoryEstimate) -> float:
    """GiB at the peak if each gradient were gone as soon as it is there."""
    return max(sum(now.values()) - now.get("gradients", 0) for _, _, now in made.timeline) / GIB


def _mpt(
    width: int, layers: int, heads: int, ranks: int, batch: tuple[int, int], kept: bool = False
) -> MemoryEstimate:
    """A decoder of MPT's sizes with torch's attention, as MPT's own class keeps every score."""
    sizes = {"hidden_size": width, "ffn_dim": 4 * width, "word_embed_proj_dim": width, "dropout": 0.0}
    sizes |= {"num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": 50368}
    with init_context():
        config = transformers.OPTConfig(
            **sizes, max_position_embeddings=batch[1], enable_bias=False, use_cache=False
        )
        model = transformers.OPTForCausalLM(config)
    return estimate(model, ranks, batch, None if kept else "composable")


def _t5(**fsdp2: Any) -> MemoryEstimate:
    sizes = {"d_model": 1024, "d_ff": 16384, "d_kv": 128, "num_heads": 32, "num_layers": 24}
    with init_context():
        config = transformers.T5Config(**sizes, vocab_size=32128, decoder_start_token_id=0, use_cache=False)
        model = transformers.T5ForConditionalGeneration(config)
    return estimate(model, 8, (1, 1), "composable", fused=True, fsdp2=FSDP2Config(**fsdp2))


def _zero_2() -> float:
    """GiB of a plan, and of whole gradients in bf16 beside it."""
    made = _t5(reshard_after_forward=False)
    return (made.peak + 8 * (made.gradients + made.padding) / 2) / GIB


def _bert() -> MemoryEstimate:
    sizes = {"vocab_size": 28996}
    with init_context():
        return estimate(transformers.BertModel(transformers.BertConfig(**sizes)), 1, None, mixed=False)


def _largest_layer() -> float:
    rule = Rule("embeddings.word_embeddings", shard=True)
    with init_context():
        model = transformers.BertModel(transformers.BertConfig(vocab_size=28996))
    plan = plan_parallelism(model, ParallelismConfig(mesh=CUDA, rules=[rule]), world_size=2)
    return max(unit.nbytes for unit in plan.units if unit.name) / 2**20


class _Softmax(torch.autograd.Function):
    """Megatron's cross entropy: bf16 logits become fp32 probabilities, in place from there on."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        values = logits.float()
        ctx.save_for_backward(values.exp_())
        return values.new_empty(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (values,) = ctx.saved_tensors
        return values.mul_(gradient).bfloat16()


class _Head(nn.Module):
    """A head of 62,080 tokens over a width of 1, so that the loss is all there is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(62080, 1, dtype=torch.bfloat16, device="meta"))

    def forward(self, hidden: Tensor) -> dict[str, Tensor]:
        return {"loss": _Softmax.apply(linear(hidden, self.weight))}


def _loss_of(tokens: int) -> MemoryEstimate:
    hidden = torch.empty(tokens, 1, dtype=torch.bfloat16, device="meta")
    return estimate(_Head(), 1, hidden, mixed=False)


class Row(NamedTuple):
    """A published figure."""

    what: str
    published: float
    of: Callable[[], float]
    """The plan's, in the same unit."""
    why: str = ""
    """They differ, or what was planned instead."""


class Fit(NamedTuple):
    """A run that was made on devices, or failed on them."""

    what: str
    fits: bool
    of: Callable[[], MemoryEstimate]


def _peak(make: Callable[[], MemoryEstimate], unit: int = GIB) -> Callable[[], float]:
    return lambda: make().peak / unit


def _titan(ranks: int) -> Callable[[], float]:
    return lambda: estimate(llama(**_8B), ranks, (2, 8192), SELECTIVE).reserved / GIB


_FUSED = "planned without torch.compile, as plans trace the model as it is"
_LOSS = "planned with a loss that has no temporary tensors, and without torch.compile elsewhere"
_LAYERS = f"{_LOSS}; compiled layers keep less"
_BACKWARD = "planned without the gradients of the timeline, as composer_dist does not step within backward"
_GRADIENTS = "what is reserved has room for gradients, not there at the peak: 3.5 GiB more on 8 ranks"
_WHOLE = "planned with reshard_after_forward=False and whole bf16 gradients, which FSDP2 does not keep"
_HOST = "planned with cpu_offload=True, which puts the parameters on the CPU, too"
_TYPO = "the same page says 413.18 in its second table and in its text"
_TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
_TUNE = "torchtune, README.md"
_SPEED = "DeepSpeed, docs/code-docs/source/memory.rst"
ROWS: dict[str, list[Row]] = {
    f"{_TITAN}: Llama 3.1 8B, FSDP, 2 x 8192, selective; GiB reserved": [
        Row("table 1: 8 H100", 82.4, _titan(8)),
        Row("table 1: + torch.compile", 77.0, _titan(8), _FUSED),
        Row("table 3: 128 H100", 67.0, _titan(128)),
        Row("table 3: + torch.compile", 62.0, _titan(128), _FUSED),
        Row("8 H100 less 128", 15.4, lambda: _titan(8)() - _titan(128)(), _GRADIENTS),
    ],
    f"{_TUNE}: Llama 3.2 3B in bf16 on one A100, packed to 2 x 4096; GiB active": [
        Row("baseline", 60.0, _peak(_tune)),
        Row("+ compile", 51.0, _peak(lambda: _tune(parts=1)), _LOSS),
        Row("+ chunked cross entropy", 42.9, _peak(lambda: _tune(parts=8)), _LAYERS),
        Row("+ activation checkpointing", 24.9, _peak(lambda: _tune("composable", 8))),
        Row("+ optimizer in backward", 23.1, lambda: _without_gradients(_tune("composable", 8)), _BACKWARD),
        Row("+ activation offloading", 21.8, lambda: _without_gradients(_tune(_OFFLOADED, 8)), _BACKWARD),
        Row("+ 8-bit AdamW", 17.6, _eight_bits, _BACKWARD),
        Row("LoRA", 8.5, _peak(lambda: _lora(quantized=False))),
        Row("QLoRA", 4.6, _peak(lambda: _lora(quantized=True))),
    ],
    f"{_SPEED}: t5-3b on 8 GPUs, without activations; GiB": [
        Row("ZeRO-3", 6.10, _peak(_t5)),
        Row("ZeRO-3, optimizer on the CPU", 0.79, _peak(lambda: _t5(cpu_offload=True)), _HOST),
        Row("ZeRO-2", 15.93, _zero_2, _WHOLE),
    ],
    "accelerate, docs/source/usage_guides/model_size_estimator.md: bert-base-cased; MiB": [
        Row("total", 418.18, lambda: (_bert().parameters + _bert().buffers) / 2**20, _TYPO),
        Row("largest layer", 84.95, _largest_layer),
        Row("training with Adam", 1.61 * 1024, _peak(_bert, 1 << 20)),
    ],
    "SkyRL, pull request 1841: cross entropy of 62,080 tokens, eager; GB": [
        Row(f"{tokens:,} tokens", published, _peak(partial(_loss_of, tokens), GB))
        for tokens, published in ((8192, 3.1), (32768, 11.7), (65536, 23.2), (131072, 46.2), (262144, 92.2))
    ],
}
"""Source to its rows."""
_MPT = {"7B": (4096, 32, 32), "13B": (5120, 40, 40), "30B": (7168, 48, 64), "70B": (8192, 80, 64)}
_RUNS = [
    *(("7B", 8, (6, 2048), True), ("7B", 8, (16, 4096), False), ("13B", 8, (2, 2048), True)),
    *(("13B", 8, (10, 4096), False), ("13B", 64, (2, 2048), True), ("30B", 8, (3, 2048), False)),
    *(("30B", 16, (10, 2048), False), ("30B", 32, (14, 2048), False)),
    *(("70B", 32, (2, 2048), False), ("70B", 64, (8, 2048), False)),
]
"""Model, GPUs, microbatch, and whether all activations are kept."""


def _llama_2(sequences: int, recomputed: Any) -> MemoryEstimate:
    return estimate(llama(**_70B, vocab_size=32000), 64, (sequences, 4096), recomputed)


FITS: dict[str, list[Fit]] = {
    "llm-foundry, scripts/train/benchmarking/README.md: MPT on H100s of 80 GB, FULL_SHARD, amp_bf16": [
        Fit(
            f"{size}, {ranks} GPUs, {batch[0]} x {batch[1]}{'' if kept else ', recomputed'}",
            True,
            partial(_mpt, *_MPT[size], ranks, batch, kept),
        )
        for size, ranks, batch, kept in _RUNS
    ],
    "torchtitan, docs/performance.md: Llama 2 70B on 64 A100 of 80 GB": [
        Fit("1 x 4096, selective", True, partial(_llama_2, 1, SELECTIVE)),
        Fit("2 x 4096, selective", False, partial(_llama_2, 2, SELECTIVE)),
        Fit("2 x 4096, full", True, partial(_llama_2, 2, "composable")),
    ],
}
"""Source to its runs."""
_HEAD = """## Published runs

Plans without a device, of models of transformers instead of the sources' own, next to what others have
measured or computed. The goal is a ratio of 0.90 to 1.10.
"""


def published() -> list[str]:
    """The section."""
    logging.disable(logging.WARNING)
    try:
        return [_HEAD, *_figures(), *_fits()]
    finally:
        logging.disable(logging.NOTSET)


def _figures() -> Iterator[str]:
    for source, rows in ROWS.items():
        yield from (f"{source}.", "", "| run | published | plan | ratio | why |", "|---|---|---|---|---|")
        for row in rows:
            found = row.of()
            ratio = found / row.published
            yield f"| {row.what} | {row.published} | {found:,.2f} | {ratio:.2f} | {row.why} |"
        yield ""


def _fits() -> Iterator[str]:
    for source, fits in FITS.items():
        yield f"{source}. A process can allocate {DEVICE:.1f} GiB."
        yield from ("", "| run | fitted | plan GiB | fits |", "|---|---|---|---|")
        for one in fits:
            found = one.of().peak / GIB
            yield f"| {one.what} | {_word(one.fits)} | {found:.1f} | {_word(found < DEVICE)} |"
        yield ""


def _word(fits: bool) -> str:
    return "yes" if fits else "no"
