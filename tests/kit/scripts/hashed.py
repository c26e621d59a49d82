"""One rank of a model's life in every mode; sets of strings have another order in each of these processes."""

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from composer_dist.checkpoint import (
    export_pretrained,
    full_model_state,
    full_optimizer_state,
    load_checkpoint,
    save_checkpoint,
)
from composer_dist.distributed import (
    clip_grad_norm,
    parallelize_model,
    summon_full_params,
    unparallelize_model,
    verify_model,
)
from tests.kit.compare import equal
from tests.kit.huggingface import lora_llama, tied_llama
from tests.kit.meshes import MESHES, config
from tests.kit.toy import built

warnings.simplefilter("ignore")
folder = Path(sys.argv[1])
dist.init_process_group("gloo")
on_meta = "meta" if dist.get_rank() else "cpu"
for number, (make, mesh) in enumerate(
    [(tied_llama, "fsdp2"), (tied_llama, "ddp"), (lora_llama, "fsdp2"), (tied_llama, "tp")]
):
    model, reference = built(make, device=on_meta), built(make)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    parallelize_model(model, MESHES[mesh][1], optimizer)
    ids = torch.arange(16).view(2, 8)
    found = verify_model(model, reference, batch={"input_ids": ids, "labels": ids}, optimizer=optimizer)
    assert found.ok, str(found)
    model(input_ids=ids, labels=ids).loss.backward()
    clip_grad_norm(model, 1.0)
    optimizer.step()
    with summon_full_params(model, with_grads=True):
        pass
    before = full_model_state(model), full_optimizer_state(model, optimizer)
    state = {"model": model, "optimizer": optimizer}
    for sharded in (True, False):
        path = folder / f"{number}-{sharded}"
        save_checkpoint(path, state, sharded=sharded)
        load_checkpoint(path, state)
    export_pretrained(model, folder / f"{number}-export")
    equal((full_model_state(model), full_optimizer_state(model, optimizer)), before)
    unparallelize_model(model, optimizer)
built_again = built(device="meta")
parallelize_model(built_again, config())  # initialized, in the same order on all ranks
print(
    torch.cat([one.flatten() for one in full_model_state(built_again, ranks="all").values()]).double().sum()
)
dist.barrier()
dist.destroy_process_group()
