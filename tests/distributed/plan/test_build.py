"""Modules that train under some plans only are refused by name in the others."""

import pytest
import torch
from torch import nn

from composer_dist import FSDP2Config, ParallelismConfig, Rule
from composer_dist.distributed import parallelize_model, plan_parallelism
from composer_dist.errors import ParallelismValueError
from tests.kit.compare import close, fails_alike, weights
from tests.kit.huggingface import llama
from tests.kit.runs import loss_of
from tests.kit.toy import built
from tests.kit.world import on_ranks

pytestmark = [
    pytest.mark.promise(104),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # peft's own
]


def test_sparse_embeddings_are_refused_where_they_would_be_sharded() -> None:
    model = nn.ModuleDict(
        {"embed": nn.Embedding(4, 2, sparse=True), "bag": nn.EmbeddingBag(4, 2, sparse=True)}
    )
    with pytest.raises(ParallelismValueError, match=r"^embed, bag: FSDP2 cannot reduce the sparse gradients"):
        plan_parallelism(model, "fsdp", world_size=2)
    plain = Rule(["embed", "bag"], shard=False)
    model["head"] = nn.Linear(2, 4)
    assert set(plan_parallelism(model, ParallelismConfig(rules=[plain]), world_size=2).plain) == {
        "embed.weight",
        "bag.weight",
    }
    assert plan_parallelism(model, "ddp", world_size=2).plain
    model.requires_grad_(False)
    assert not plan_parallelism(model, "fsdp", world_size=2).plain


def adalora() -> nn.Module:
    import peft

    sizes = {"init_r": 4, "target_r": 2, "tinit": 1, "tfinal": 1, "deltaT": 1, "total_step": 6}
    return peft.get_peft_model(
        llama(), peft.AdaLoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], **sizes)
    )


@pytest.mark.parametrize("config", ["fsdp", "ddp"])
def test_sparse_buffers_are_refused_on_several_ranks(config: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].register_buffer("adjacency", torch.eye(4).to_sparse())
    text = r"^1\.adjacency: sparse parameters and buffers cannot be .*Register the indices and the values"
    with pytest.raises(ParallelismValueError, match=text):
        plan_parallelism(model, config, world_size=2)
    plan_parallelism(model, config, world_size=1)
    model[1].adjacency = model[1].adjacency.to_dense()
    plan_parallelism(model, config, world_size=2)


@on_ranks(2)
def test_adalora_trains_if_its_matrices_stay_whole_and_is_refused_otherwise() -> None:
    reference, model = built(adalora), built(adalora)
    with fails_alike(ParallelismValueError, "AdaLora reads its matrices outside", "lora_A"):
        parallelize_model(model, "fsdp")
    rules = [Rule("re:.*[.]lora_[ABE]", shard=False)]
    parallelize_model(model, ParallelismConfig(fsdp2=FSDP2Config(), rules=rules))
    for step in range(4):
        for one in (reference, model):
            optimizer = torch.optim.SGD([p for p in one.parameters() if p.requires_grad], 0.5)
            loss_of(one.eval()).backward()
            optimizer.step()
            one.base_model.update_and_allocate(step)
            optimizer.zero_grad()
    close(weights(model), weights(reference), rtol=1e-4)
