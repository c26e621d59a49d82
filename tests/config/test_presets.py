"""Presets on real adapters: LoRA left whole beside sharded layers. (Numbered layers: test_rules.)"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from composer_dist.config import presets
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.config.rule import Rule
from composer_dist.distributed import named_parameters_canonical, parallelize_model
from tests.kit.compare import full
from tests.kit.huggingface import VOCABULARY, adapter, pretrained_llama
from tests.kit.world import World

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


def _unsharded_adapters(kind: str) -> tuple[list[str], list[str]]:
    import peft

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
        for name, parameter in reference.named_parameters():
            gradient = theirs[name].grad
            assert (gradient is None) == (parameter.grad is None), name
            if gradient is not None:
                torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(full(theirs[name].detach()), parameter.detach(), rtol=1e-4, atol=1e-5)
    whole = [name for name, p in theirs.items() if not isinstance(p, DTensor)]
    assert whole == list(done.plain_parameters)
    return whole, [name for name, p in reference.named_parameters() if p.requires_grad]


@pytest.mark.promise(94)
@pytest.mark.parametrize("kind", ["lora", "dora", "embedding"])
def test_adapters_left_whole_beside_sharded_layers(world2: World, kind: str) -> None:
    for whole, trainable in world2(_unsharded_adapters, kind):
        assert whole == trainable
        assert whole
