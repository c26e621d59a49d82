"""The same fine-tuning with composer_dist. Run it with torchrun --nproc-per-node 2 after.py."""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from composer_dist import FSDP2Config, ParallelismConfig
from composer_dist.checkpoint import full_model_state, full_optimizer_state
from composer_dist.distributed import clip_grad_norm, init_context, parallelize_model, process_group

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)


def main() -> list[float]:
    """Load, train, save; return the loss of each step on this rank."""
    process_group.init()
    _, rank = process_group.world_and_rank()
    torch.manual_seed(7)
    with init_context(empty=rank != 0):  # rank 0 has the weights; for files there is weights=
        model = LlamaForCausalLM(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = ParallelismConfig(fsdp2=FSDP2Config(), activation_checkpointing="composable")
    parallelize_model(model, config, optimizer)

    losses = []
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        tokens = torch.randint(0, 64, (2, 16), generator=generator).to(model.device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    weights = full_model_state(model)
    state = full_optimizer_state(model, optimizer)
    if rank == 0:
        torch.save({"model": weights, "optimizer": state}, f"{tempfile.mkdtemp()}/last.pt")
    return losses


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}")
