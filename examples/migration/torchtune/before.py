"""Fine-tuning with torchtune's distributed functions. Run it with torchrun --nproc-per-node 2 before.py."""

import tempfile
from functools import partial

import torch
import torch.distributed as dist
from torchtune import training
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)


def main() -> list[float]:
    """Load, train, save; return the loss of each step on this rank."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not dist.is_initialized():
        dist.init_process_group("cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo")
    _, rank = training.get_world_size_and_rank()
    torch.manual_seed(7)
    pretrained = LlamaForCausalLM(CONFIG).state_dict()  # as a checkpointer would read it, on every rank

    with training.set_default_dtype(torch.float32), torch.device("meta"):
        model = LlamaForCausalLM(CONFIG)
    training.set_activation_checkpointing(model, auto_wrap_policy={LlamaDecoderLayer})
    conditions = [partial(training.get_shard_conditions, names_to_match=None)]
    training.shard_model(model, conditions, cpu_offload=False, reshard_after_forward=True)
    with device:  # buffers that are in no checkpoint
        model.model.rotary_emb = LlamaRotaryEmbedding(CONFIG)
    training.load_from_full_model_state_dict(model, pretrained, device, strict=True)
    training.validate_no_params_on_meta_device(model)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        tokens = torch.randint(0, 64, (2, 16), generator=generator).to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    weights = training.gather_cpu_state_dict(model, rank == 0, device=device)
    state = training.get_full_optimizer_state_dict(model, optimizer, rank == 0, device=device)
    if rank == 0:
        torch.save({"model": weights, "optimizer": state}, f"{tempfile.mkdtemp()}/last.pt")
    return losses


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}")
