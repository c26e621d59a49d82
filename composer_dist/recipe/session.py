"""A run from its start to its end, and the verification of its model."""

from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path

from composer_dist.checkpoint import export_pretrained, full_model_state
from composer_dist.distributed import (
    HangGuard,
    Verification,
    parallelize_composer_model,
    process_group,
    sampler_kwargs,
    verify_model,
)
from composer_dist.errors import ParallelismValueError
from composer_dist.files.checked import CheckedFile, LocalSink
from composer_dist.models import ComposerClassifier, HuggingFaceModel
from composer_dist.progress import tell
from composer_dist.recipe.build import Session, build, data_and_model, optimizer_of
from composer_dist.recipe.data import batches, epoch_of
from composer_dist.recipe.output.folder import run_folder
from composer_dist.recipe.problems import blamed_on
from composer_dist.recipe.read import Configuration
from composer_dist.recipe.schema import ChatData, ModuleModel
from composer_dist.recipe.trial import PackingError, check_packing
from composer_dist.trainer import EMA, Time
from composer_dist.trainer.arguments import hang_limits
from composer_dist.trainer.clock import NoTokensError
from composer_dist.trainer.data.loader import OtherDataError
from composer_dist.trainer.improvement import NoMetricError


def run(configuration: Configuration) -> None:
    """Trains, evaluates and exports.

    Raises:
        ParallelismError: on every rank, whatever went wrong on any of them.
    """
    with ExitStack() as stack:
        with blamed_on(configuration.document):
            process_group.init(device=configuration.run.trainer.get("device"), reuse=True)
            stack.enter_context(run_folder(configuration))
            session = build(configuration)
        with blamed_on(configuration.document, (NoMetricError, NoTokensError, OtherDataError, PackingError)):
            _run(session)
    process_group.destroy()


def verified(configuration: Configuration) -> Verification:
    """What `verify_model` finds with the first batch of the training data; every rank calls it.

    Nothing is written: neither the run's folder nor checkpoints nor logs.

    Raises:
        ParallelismError: on every rank; something cannot be made as the configuration asks.
    """
    run = configuration.run
    with blamed_on(configuration.document):
        _, data, _, built = data_and_model(configuration)
        model = built.model
        with process_group.together("building the optimizer"):
            optimizer = optimizer_of(run, model, configuration)
        place = {"num_replicas": 1, "rank": 0}
        if built.parallelism is not None:
            precision = run.trainer.get("precision")
            done = parallelize_composer_model(
                model, optimizer, built.parallelism, precision, weights=built.weights
            )
            place = sampler_kwargs(done.mesh)
        with process_group.together("the first batch"):
            batch = next(iter(data.placed(**place)))
    model.train()
    return verify_model(model, batch=batch, optimizer=optimizer)


def _run(session: Session) -> None:
    try:
        trainer = session.trainer
        done = trainer.preparation
        if done is not None and trainer.resumed_from is not None:
            done = replace(done, initialized=())  # the checkpoint has since been loaded
        _say(f"{done or ''}")
        duration = session.run.trainer["max_duration"]
        if trainer.state.timestamp.reached(Time.of(duration)):
            _say(
                f"The run in {session.run.out} has already reached trainer.max_duration={duration}. Raise "
                "trainer.max_duration to continue, or set another `out` to start over."
            )
        else:
            data = session.run.data
            if isinstance(session.model, HuggingFaceModel) and isinstance(data, ChatData) and data.packing:
                check_packing(session.model, trainer.state, data)
            _say(_steps(session))
            trainer.fit()
        limits = hang_limits(session.run.trainer.get("hang_timeout"))
        with HangGuard(limits, doing=lambda: "the export").at("save"):
            exported = finish(session)
        _say(session.summary.text(trainer.state, session.run.out, exported))
    finally:
        session.trainer.close()


def _steps(session: Session) -> str:
    """The steps of the run, where its length gives their number."""
    epoch = epoch_of(session.run, session.trainer.state.train_dataloader)
    try:
        steps = f"{batches(session.run.trainer['max_duration'], epoch):,} in all"
        return f"Steps: {steps}, {epoch:,} in an epoch." if epoch is not None else f"Steps: {steps}."
    except ParallelismValueError:
        return ""


def finish(session: Session) -> Path | None:
    """Writes the trained model, or its adapter, for others to load, and returns where; a collective."""
    if not session.run.export:
        return None
    averages = next((one for one in session.trainer.callbacks if isinstance(one, EMA)), None)
    with averages.swapped_in(session.trainer.state) if averages else nullcontext():
        if isinstance(session.run.model, ModuleModel):
            path = _write_module(session)
        else:
            adapter = session.run.model.adapter is not None and session.run.export != "merged"
            path = session.run.out / ("adapter" if adapter else "model")
            export_pretrained(session.model, path, merge_adapters=session.run.export == "merged")
            what, library = ("Adapter", "peft's") if adapter else ("Model", "transformers'")
            _say(f"{what} saved to {path}; load it with {library} from_pretrained.")
    if averages and averages.averages:
        _say("The saved weights are the EMA's averages.")
    return path


def _write_module(session: Session) -> Path:
    """Writes the state of the user's own module as one file for `load_state_dict`."""
    model = session.model
    state = full_model_state(model.module if isinstance(model, ComposerClassifier) else model)
    path = session.run.out / "model.pt"
    with process_group.together("writing the model"):
        if process_group.world_and_rank()[1] == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            aside = path.with_name(f".{path.name}.tmp")
            aside.unlink(missing_ok=True)
            with CheckedFile(LocalSink(aside), aside.name, where=str(path)) as file:
                file.save_object(state)
            aside.replace(path)  # an earlier one is valid until now
    _say(f"Model saved to {path}; load it with torch.load and load_state_dict.")
    return path


def _say(text: str) -> None:
    """Prints on rank 0."""
    if process_group.world_and_rank()[1] == 0 and text:
        tell(text)
