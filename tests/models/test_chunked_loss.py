"""Models that train without all of their logits, in every way of training, against the plain loss."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torchmetrics.text import Perplexity

from composer_dist import _torch
from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.mesh import MeshConfig
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.config.replicate import DDPConfig
from composer_dist.config.rule import Rule
from composer_dist.config.tensor_parallel import TPConfig
from composer_dist.distributed import context_parallel, parallelize_model, plan_parallelism, sampler_kwargs
from composer_dist.errors import ParallelismRuntimeError, ParallelismValueError
from composer_dist.losses.logits import Logits
from composer_dist.models import HuggingFaceModel
from composer_dist.trainer import Trainer
from tests.kit import huggingface as hf
from tests.kit.compare import close, grads
from tests.kit.grids import in_the_default_run
from tests.kit.measure import losses_counted
from tests.kit.world import on_ranks

pytestmark = [
    pytest.mark.promise(123),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # peft's own
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # Dynamo's own
]


def lora_head() -> Any:
    targets = ["lm_head", "q_proj"]
    return hf.lora(hf.llama(), target_modules=targets, init_lora_weights=False, lora_dropout=0.0)


def gemma() -> Any:
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    return hf.built("Gemma2ForCausalLM", final_logit_softcapping=3.0, **sizes, **heads)


def config(tp: TPConfig | None = None, head: bool | None = None, **options: Any) -> ParallelismConfig:
    sizes = {key: options.pop(key) for key in ("tp", "cp", "dp_shard") if key in options}
    mesh = MeshConfig(tp=2 if tp else 1, **sizes)
    units = [
        Rule("model.lm_head", reshard_after_forward=head, shard=True),
        Rule("re:.*layers.\\d", shard=True),
    ]
    sharded = None if tp and "dp_shard" not in sizes else FSDP2Config()
    return ParallelismConfig(
        mesh=mesh, fsdp2=sharded, tp=tp, rules=units if head is not None else [], **options
    )


MODES: dict[str, tuple[int, Any, Any]] = {
    "fsdp": (2, hf.llama, config()),
    "a tied head": (2, hf.tied_llama, config()),
    "the head is a unit": (2, hf.llama, config(head=False)),
    "the head is a unit, resharded": (2, hf.llama, config(head=True)),
    "softcap": (2, gemma, config()),
    "lora on the head": (2, lora_head, config()),
    "ddp": (2, hf.llama, DDPConfig()),
    "ddp, unused parameters are searched": (2, hf.llama, DDPConfig(find_unused_parameters=True)),
    "ddp, static graph": (2, hf.llama, DDPConfig(static_graph=True)),
    "tp": (2, hf.llama, config(TPConfig())),
    "tp, lora on the head": (2, lora_head, config(TPConfig())),
    "tp, a tied head": (2, hf.tied_llama, config(TPConfig())),
    "loss parallel": (2, hf.llama, config(TPConfig(loss_parallel=True, sequence_parallel=True))),
    "fsdp x loss parallel": (4, gemma, config(TPConfig(loss_parallel=True), dp_shard=2)),
    "cp": (2, hf.llama, config(cp=2)),
    "compiled": (2, hf.llama, config(compile={"backend": "aot_eager"})),
    "recomputed": (2, hf.llama, config(activation_checkpointing=True)),
}
FIRST: tuple[tuple[str, int], ...] = (
    ("fsdp", 5),
    ("the head is a unit, resharded", True),
    ("tp, lora on the head", 5),
    ("loss parallel", 5),
    ("loss parallel", True),
    ("cp", 5),
    ("ddp", True),
    ("ddp, unused parameters are searched", 5),
    ("compiled", True),
)


def rows() -> dict[str, Any]:
    ids = torch.arange(4 * 8).view(4, 8) * 7 % 50
    labels = ids.masked_fill(ids % 5 == 0, -100)
    items = torch.tensor(20)
    return {"input_ids": ids, "labels": labels, "use_cache": False, "num_items_in_batch": items}


@pytest.mark.parametrize(
    ("mode", "positions"), in_the_default_run(*FIRST, among=itertools.product(MODES, (5, True)))
)
@on_ranks(lambda mode, positions: MODES[mode][0], timeout=120)
def test_gradients_are_those_of_the_plain_loss(mode: str, positions: int) -> None:
    """Two steps; a rank's sum over its rows is divided by the number of all ranks' labels."""
    _, build, how = MODES[mode]
    models = []
    for chunked in (False, positions):
        torch.manual_seed(0)
        models.append(HuggingFaceModel(build(), chunked_loss=chunked).train())
    trained = [[one for one in model.parameters() if one.requires_grad] for model in models]
    optimizers = [torch.optim.SGD(parameters, 0.1) for parameters in trained]
    reference, model = models
    done = parallelize_model(model, how, optimizers[1])
    place, batch = sampler_kwargs(done.mesh), rows()
    share = slice(place["rank"], None, place["num_replicas"])
    mine = batch | {key: batch[key][share] for key in ("input_ids", "labels")}
    with context_parallel(model, mine):
        pass  # the check of the first batch computes losses too
    with losses_counted() as counts:
        for _ in range(2):
            for optimizer in optimizers:
                optimizer.zero_grad()
            reference.loss(reference(batch), batch).backward()
            with context_parallel(model, mine) as part:
                (model.loss(model(part), part) * place["num_replicas"]).backward()
            close(grads(model), grads(reference), 1e-4, 1e-6)
            for optimizer in optimizers:
                optimizer.step()
    assert counts == {"chunks": 2, "values": 0}


@pytest.mark.parametrize("resharded", [False, True])
@on_ranks(2)
def test_a_head_that_is_a_unit_is_gathered_once(resharded: bool) -> None:
    """In forward; and once more for backward if it was resharded, as with logits."""
    model = HuggingFaceModel(hf.llama(), chunked_loss=2).train()
    parallelize_model(model, config(head=resharded))
    head: Any = model.model.lm_head
    assert isinstance(head, FSDPModule)
    (group,) = _torch.fsdp_param_groups(head)
    gathered: list[bool] = []
    before = group.unshard

    def unshard(*args: Any, **kwargs: Any) -> None:
        before(*args, **kwargs)
        gathered.append(group._all_gather_result is not None)

    group.unshard = unshard
    batch = rows()
    outputs = model(batch)
    assert sum(gathered) == 1
    assert group.is_sharded == resharded
    model.loss(outputs, batch).backward()
    assert sum(gathered) == 1 + resharded
    assert group.is_sharded


class Reads(HuggingFaceModel):
    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return outputs.loss + outputs.logits.pow(2).mean()


def test_who_reads_logits_gets_them() -> None:
    """Metrics of the mode, a subclass's loss, evaluation, generation, who turns it off."""
    batch, metric = rows(), Perplexity(ignore_index=-100)
    for made in (
        HuggingFaceModel(hf.llama(), chunked_loss=False),
        HuggingFaceModel(hf.llama(), metrics=[metric]),
        Reads(hf.llama()),
    ):
        assert type(made.train()(batch).logits) is Tensor
        made.loss(made(batch), batch).backward()
    with pytest.raises(ParallelismValueError, match=f"several metrics of class {type(metric).__name__}"):
        HuggingFaceModel(hf.llama(), use_logits=True, eval_metrics=[metric, metric])
    model = HuggingFaceModel(hf.llama(), use_logits=True, eval_metrics=[metric]).train()
    assert type(model(batch).logits) is Logits
    with pytest.raises(ParallelismRuntimeError, match="chunked_loss=False"):
        model(batch).logits.argmax(-1)
    assert type(model.eval()(batch).logits) is Tensor
    assert model.generate(torch.ones(1, 2, dtype=torch.long), max_new_tokens=2).shape == (1, 4)


@pytest.mark.parametrize("metrics", [False, True])
@on_ranks(1)
def test_the_trainer_evaluates_without_logits_that_no_metric_reads(metrics: bool) -> None:
    batch, found = rows(), []
    del batch["num_items_in_batch"]
    for chunked in (False, 5):
        torch.manual_seed(0)
        given = [Perplexity(ignore_index=-100)] if metrics else []
        model = HuggingFaceModel(hf.llama(), use_logits=metrics, eval_metrics=given, chunked_loss=chunked)
        with losses_counted() as counts:
            trainer = Trainer(
                model=model,
                train_dataloader=[batch],
                eval_dataloader=[batch],
                max_duration="2ep",
                optimizers=torch.optim.SGD(model.parameters(), 0.1),
            )
            trainer.fit()
            found.append(trainer.eval()["loss/eval/total"])
            (predicted,) = trainer.predict([batch])
            assert type(predicted if metrics else predicted["logits"]) is Tensor
        assert counts["values"] == 0
        assert counts["chunks"] == (0 if not chunked else 2 if metrics else 2 + 3)
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_plans_know_it() -> None:
    """The largest logits of a traced step: all of them, or those of 1024 positions."""
    estimates = []
    for chunked in (False, 1024):
        with torch.device("meta"):
            built = hf.llama(vocab_size=3000, max_position_embeddings=4096)
            model = HuggingFaceModel(built, chunked_loss=chunked).train()
        estimates.append(plan_parallelism(model, "fsdp", world_size=2).memory((2, 4096)).logits)
    assert estimates[0] > 2 * 2 * 4096 * 3000 * 4
    assert estimates[1] < 5 * 1024 * 3000 * 4
