"""Presets on real adapters: LoRA left whole beside sharded layers. (Numbered layers: test_rules.)"""

import peft
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer_dist.config import presets
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.config.rule import Rule
from composer_dist.distributed import named_parameters_canonical, parallelize_model
from tests.kit.compare import close, full, values
from tests.kit.huggingface import VOCABULARY, adapter, pretrained_llama
from tests.kit.world import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


def gradients(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: full(p.grad) for name, p in parameters.items() if p.grad is not None}


@pytest.mark.promise(94)
@pytest.mark.parametrize("kind", ["lora", "dora", "embedding"])
@on_ranks(2)
def test_adapters_left_whole_beside_sharded_layers(kind: str) -> None:
    models = []
    for _ in range(2):
        base = pretrained_llama()
        torch.manual_seed(1)
        models.append(peft.get_peft_model(base, adapter(kind)))
    reference, model = models
    rules = [Rule([presets.layers(), ""], shard=True), Rule(presets.lora(), shard=False)]
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], 0.01) for m in models]
    done = parallelize_model(model, ParallelismConfig(rules=rules), optimizers[1])
    theirs = dict(named_parameters_canonical(model))
    for step in range(3):
        tokens = torch.randint(3, VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(step))
        mine = tokens.chunk(2)[dist.get_rank()]
        for one, batch in ((reference, tokens), (model, mine)):
            one(input_ids=batch, labels=batch).loss.backward()
        close(gradients(theirs), gradients(dict(reference.named_parameters())), rtol=1e-4)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        close(values(model), values(reference), rtol=1e-4, atol=1e-5)
    whole = [name for name, p in theirs.items() if not isinstance(p, DTensor)]
    assert whole == list(done.plain_parameters)
    assert whole == [name for name, p in reference.named_parameters() if p.requires_grad]
    assert whole
