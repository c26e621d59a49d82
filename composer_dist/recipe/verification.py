"""Prepares the model of a run as the run would, and verifies it with a batch of the run's data."""

from composer_dist.distributed import (
    Verification,
    meta_init,
    parallelize_composer_model,
    process_group,
    sampler_kwargs,
    verify_model,
)
from composer_dist.recipe.build import optimizer_of, tokenizer_of
from composer_dist.recipe.data import datasets, loader
from composer_dist.recipe.models import build_model
from composer_dist.recipe.problems import blamed_on
from composer_dist.recipe.read import Configuration
from composer_dist.trainer.data.randomness import seed_all  # not public: only recipes and the Trainer seed


def verified(configuration: Configuration) -> Verification:
    """What `verify_model` finds with the first batch of the training data; every rank calls it.

    Nothing is written: neither the run's folder nor checkpoints nor logs.

    Raises:
        ParallelismError: on every rank; something cannot be made as the configuration asks.
    """
    run, folder = configuration.run, configuration.folder
    with blamed_on(configuration.document):
        process_group.init(device=run.trainer.get("device"), reuse=True)
        seed_all(run.seed)
        with process_group.together("reading the data"):
            tokenizer = tokenizer_of(run)
            train, _ = datasets(run, tokenizer, folder)
            data = loader(train, run, folder, training=True)
        with process_group.together("building the model"):
            seed_all(run.seed)
            model = build_model(run, tokenizer, folder)
            if configuration.parallelism is None:
                meta_init(model)
            optimizer = optimizer_of(run, model, configuration)
        place = {"num_replicas": 1, "rank": 0}
        if configuration.parallelism is not None:
            done = parallelize_composer_model(
                model, optimizer, configuration.parallelism, run.trainer.get("precision")
            )
            place = sampler_kwargs(done.mesh)
        with process_group.together("the first batch"):
            batch = next(iter(data.placed(**place)))
    model.train()
    return verify_model(model, batch=batch, optimizer=optimizer)
