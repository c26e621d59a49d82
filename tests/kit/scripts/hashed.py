"""One rank of a model's life in several modes; sets of strings have another order in each of these processes.

Its arguments: a folder, and whether the models are transformers'.
"""

import sys
import warnings
from pathlib import Path
from typing import Any

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
from tests.kit.meshes import MESHES
from tests.kit.toy import Toy, built, tokens, trainable

warnings.simplefilter("ignore")
folder, pretrained = Path(sys.argv[1]), sys.argv[2] == "True"
dist.init_process_group("gloo")
cases: list[tuple[Any, str]] = [(Toy, "fsdp2"), (Toy, "ddp")]
if pretrained:
    from tests.kit.huggingface import lora_llama, tied_llama

    cases = [(tied_llama, "fsdp2"), (lora_llama, "fsdp2"), (tied_llama, "tp")]
for number, (make, mesh) in enumerate(cases):
    model: Any = built(make, device="meta" if dist.get_rank() else "cpu")
    reference = built(make)
    optimizer = torch.optim.AdamW(trainable(model), lr=0.1)
    parallelize_model(model, MESHES[mesh][1], optimizer)
    ids = torch.arange(16).view(2, 8)
    batch: Any = {"input_ids": ids, "labels": ids} if pretrained else tokens()
    loss = None if pretrained else (lambda outputs, batch: outputs.square().mean())
    found = verify_model(model, reference, batch=batch, optimizer=optimizer, loss=loss)
    assert found.ok, str(found)
    (model(**batch).loss if pretrained else model(batch).square().mean()).backward()
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
    if pretrained:
        export_pretrained(model, folder / f"{number}-export")
    equal((full_model_state(model), full_optimizer_state(model, optimizer)), before)
    unparallelize_model(model, optimizer)
from_meta = built(device="meta")
parallelize_model(from_meta, "fsdp")  # initialized, in the same order on all ranks
print(sum(float(one.double().sum()) for one in full_model_state(from_meta, ranks="all").values()))
dist.barrier()
dist.destroy_process_group()
