"""How close `plan.memory()` comes: to real steps on CPU, and to figures that others have published.

    torchrun --standalone --nproc-per-node 2 benchmarks/accuracy.py > docs/accuracy.md      # make accuracy

A real step's memory is the sum of every allocation and deallocation of torch on the CPU, gloo's buffers
included, as torch's profiler records them; the least of three steps, because gloo's thread frees its buffers
late at times. What a rank holds (parameters, gradients, the optimizer's state) is compared to the byte.
"""

import contextlib
import gc
import io
import logging
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from torch.profiler import ProfilerActivity, profile

from composer_dist import DDPConfig, FSDP2Config, MeshConfig, ParallelismConfig
from composer_dist.distributed import init_context, parallelize_model, plan_parallelism

GIB = 1 << 30
BATCH = (2, 64)
_SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4}
_GROUPED = {"num_key_value_heads": 2}
_EXPERTS = {"num_experts_per_tok": 2, **_GROUPED}
MODELS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": _GROUPED,
    "Qwen3ForCausalLM": {**_GROUPED, "head_dim": 64},
    "Gemma2ForCausalLM": {**_GROUPED, "head_dim": 64},
    "Phi3ForCausalLM": {"pad_token_id": 0},
    "GPT2LMHeadModel": {"n_embd": 256, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "GPTNeoXForCausalLM": {},
    "BloomForCausalLM": {"n_layer": 3, "n_head": 4},
    "OPTForCausalLM": {"ffn_dim": 512, "word_embed_proj_dim": 256},
    "MixtralForCausalLM": {**_EXPERTS, "num_local_experts": 4},
    "T5ForConditionalGeneration": {"d_model": 256, "d_ff": 512, "num_layers": 2, "d_kv": 64, "num_heads": 4},
    "BertForMaskedLM": {},
    "ModernBertForMaskedLM": {"pad_token_id": 0},
}
"""Classes of transformers, each with its sizes beside `_SIZES`."""
RECOMPUTED = ("none", "composable", "selective")


def build(name: str) -> Any:
    cls = getattr(transformers, name)
    own_names = name in ("GPT2LMHeadModel", "T5ForConditionalGeneration")
    sizes = MODELS[name] if own_names else _SIZES | MODELS[name]
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}
    return cls(cls.config_class(**{"vocab_size": 1000, "use_cache": False, **special, **sizes}))


class Seen(NamedTuple):
    """The bytes of a real rank and those that the plan says."""

    peak: int
    planned: int
    held: bool
    """Whether parameters, gradients and the optimizer's state are equal."""


def compare(name: str, precision: str | None, recomputed: str, ddp: bool) -> Seen:
    torch.manual_seed(0)
    ac = None if recomputed == "none" else recomputed
    way = {"ddp": DDPConfig()} if ddp else {"fsdp2": FSDP2Config(), "check_order": False}
    config = ParallelismConfig(activation_checkpointing=ac, **way)
    model = build(name).train()
    optimizer = torch.optim.AdamW(model.parameters())
    with init_context():
        alone = build(name).train()
    adam = torch.optim.AdamW(alone.parameters())
    plan = plan_parallelism(alone, config, world_size=2, optimizer=adam, precision=precision)
    estimate = plan.memory(BATCH, rank=dist.get_rank())
    parallelize_model(model, config, optimizer, precision)
    ids, peaks, gradients = torch.ones(BATCH, dtype=torch.long), [], 0
    for _ in range(4):
        gc.collect()
        gc.disable()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            outputs = model(input_ids=ids, labels=ids)
            outputs.loss.backward()
            del outputs
            gradients = _bytes(one.grad for one in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        gc.enable()
        peaks.append(_peak(seen))
    state = _bytes(one for values in optimizer.state.values() for one in values.values())
    always = estimate.parameters + estimate.padding + estimate.optimizer + estimate.buffers
    always += estimate.gradients if ddp else 0  # DDP's buckets
    held = (_bytes(model.parameters()), gradients, state)
    exact = held == (estimate.parameters, estimate.gradients, estimate.optimizer)
    return Seen(min(peaks[1:]) + always, estimate.peak, exact)


def _bytes(tensors: Any) -> int:
    found = [one for one in tensors if one is not None]
    return sum((one.to_local() if hasattr(one, "to_local") else one).nbytes for one in found)


def _peak(seen: Any) -> int:
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def llama(dtype: torch.dtype = torch.float32, **sizes: Any) -> Any:
    defaults = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 8192}
    with init_context(dtype=dtype):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(defaults | sizes)))


_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
_3B = {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24}
_3B |= {"head_dim": 128, "tie_word_embeddings": True}
_TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
PUBLISHED: list[tuple[str, dict[str, Any], torch.dtype, int, tuple[int, int], str, float, str, str]] = [
    (
        *("Llama 3.1 8B, FSDP on 8 H100, 2 x 8192, selective", _8B, torch.float32, 8, (2, 8192), "selective"),
        *(82.4, f"{_TITAN} table 1 (reserved)", "they keep every second matrix product; ours keeps all"),
    ),
    (
        *("the same on 128 H100", _8B, torch.float32, 128, (2, 8192), "selective"),
        *(67.0, f"{_TITAN} table 3 (reserved)", "as above; what is reserved has room for gradients too"),
    ),
    (
        *("Llama 3.2 3B in bf16 on one A100, 2 x 4096", _3B, torch.bfloat16, 1, (2, 4096), "none"),
        *(60.0, "torchtune, README (active)", ""),
    ),
]
"""What, sizes, dtype, ranks, batch, recomputation, GiB, source, and why it differs."""


def published() -> list[str]:
    rows = ["| run | published GiB | plan GiB | ratio | source | why they differ |", "|" + "---|" * 6]
    for what, sizes, dtype, ranks, batch, recomputed, gib, source, why in PUBLISHED:
        model = llama(dtype, **sizes)
        ac = None if recomputed == "none" else recomputed
        config = ParallelismConfig(activation_checkpointing=ac, mesh=MeshConfig(device_type="cuda"))
        adam = torch.optim.AdamW(model.parameters())
        precision = "amp_bf16" if dtype is torch.float32 else None
        plan = plan_parallelism(model, config, world_size=ranks, optimizer=adam, precision=precision)
        found = plan.memory(batch).peak / GIB
        rows.append(f"| {what} | {gib} | {found:.1f} | {found / gib:.2f} | {source} | {why} |")
    return rows


_HEAD = """# Accuracy of estimates

Made by `make accuracy` (torch {}, CPU, gloo, two ranks). Each cell is the plan's peak of a step
divided by that of a real one, in which every allocation of torch on the CPU counts. The goal is
0.95 to 1.05. gloo's thread frees its buffers late where the machine is busy, which makes the real
peak higher. "Held" compares parameters, gradients and the optimizer's state to the byte.
"""


def main() -> None:
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    dist.init_process_group("gloo")
    columns = [f"{one or 'fp32'}, {ac}" for one in (None, "amp_bf16") for ac in RECOMPUTED]
    version = torch.__version__.split("+")[0]
    lines = [_HEAD.format(version), f"| model | way | {' | '.join(columns)} | held |", "|" + "---|" * 9]
    for name in MODELS:
        for ddp in (False, True):
            cells, exact = [], True
            for precision in (None, "amp_bf16"):
                for recomputed in RECOMPUTED:
                    with contextlib.redirect_stderr(io.StringIO()):
                        seen = compare(name, precision, recomputed, ddp)
                    cells.append(f"{seen.planned / seen.peak:.3f}")
                    exact &= seen.held
            way, held = "DDP" if ddp else "FSDP2", "equal" if exact else "DIFFERS"
            lines.append(f"| {name} | {way} | {' | '.join(cells)} | {held} |")
    if dist.get_rank() == 0:
        lines += ["", "## Published runs", "", *published()]
        print("\n".join(lines))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
