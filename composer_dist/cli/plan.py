"""`composer-dist plan`: what a model needs on many devices, before anything runs."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from composer_dist.cli.announce import say
from composer_dist.cli.train import Overrides

EXAMPLES = """
Examples:

  composer-dist plan path/to/model --world-size 8 --device-memory 80GiB --batch 1x8192
  composer-dist plan path/to/model --world-size 8 --device-memory 80GiB --batch 8x8192 --suggest
  composer-dist plan pretrain.yaml data.batch_size=4096 --world-size 1024 --html report.html
  composer-dist plan models.py:function --world-size 64 --config parallelism.yaml --json

Exit status: 0 if it fits or no memory is given, 1 if it does not, 2 if the call is wrong.
"""


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="A model directory, a config.json, a run's YAML, or a function: file.py:name or "
            "package.module:name."
        ),
    ],
    overrides: Overrides = None,
    world_size: Annotated[int, typer.Option("--world-size", min=1, help="Number of ranks.")] = 1,
    device_memory: Annotated[
        str | None,
        typer.Option("--device-memory", help="Memory of one device, such as 80GiB.", show_default=False),
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(
            "--batch", help="Batch of one rank, sequences x tokens, such as 1x8192.", show_default=False
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="A YAML file with the parallelism; fsdp by default.", exists=True),
    ] = None,
    precision: Annotated[
        str | None, typer.Option("--precision", help="Precision, such as amp_bf16.", show_default=False)
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option("--optimizer", help="Optimizer, such as sgd; adamw by default.", show_default=False),
    ] = None,
    topology: Annotated[
        str, typer.Option("--topology", help="Links between devices: h100 or a100.")
    ] = "h100",
    device: Annotated[str, typer.Option("--device", help="Rates of a device: h100 or a100.")] = "h100",
    rank: Annotated[int, typer.Option("--rank", min=0, help="Rank whose memory is estimated.")] = 0,
    suggested: Annotated[
        bool,
        typer.Option(
            "--suggest", help="Search for the fastest parallelism that fits; what --config sets is kept."
        ),
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", help="Write a report for a browser to this file.", dir_okay=False, show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Estimate units, memory, traffic and time of a model on many ranks, without a device."""
    limit = None if device_memory is None else _bytes(device_memory)
    shape = None if batch is None else _shape(batch)
    say("Searching ..." if suggested else "Planning ...")

    import yaml

    from composer_dist.recipe.dry_run import planned
    from composer_dist.wording import human_bytes

    found = _on_gpus(planned(model, world_size, config, precision, optimizer, overrides or ()))
    made, step, suggestion = found.plan, shape or found.batch, None
    if suggested:
        suggestion = _suggestion(found, limit, shape or found.share, topology, device)
        if suggestion.best is None:
            typer.echo(json.dumps(_no_plan(suggestion), indent=1) if as_json else suggestion)
            raise typer.Exit(1)
        made, step = suggestion.best.plan, suggestion.best.batch
    estimate = made.memory(step, rank=rank)
    traffic = made.communication(step, rank=rank, topology=topology)
    work = made.compute(step, rank=rank, topology=topology, device=device) if step else None
    if html is not None:
        made.to_html(html, step, rank=rank, device_memory=limit, topology=topology)
    fits = None if limit is None else estimate.peak <= limit
    if as_json:
        memory = {key: value for key, value in dataclasses.asdict(estimate).items() if key != "timeline"}
        rows = [dataclasses.asdict(one) for one in traffic]
        compute = (
            None if work is None else {**dataclasses.asdict(work), "seconds": work.seconds, "mfu": work.mfu}
        )
        how = {"memory": estimate.how, "communication": traffic.how, "compute": work.how if work else None}
        told = {"memory": memory, "communication": rows, "compute": compute, "fits": fits, "how": how}
        if suggestion is not None:
            told["suggestion"] = suggestion.to_dict()
        typer.echo(json.dumps(told, indent=1))
    elif suggestion is not None:
        text = yaml.safe_dump({"parallelism": suggestion.config.to_dict()}, sort_keys=False)
        typer.echo(f"{suggestion}\nFor --config, or in a run's file:\n\n{text.rstrip()}")
    else:
        typer.echo("\n".join(str(one) for one in (made, estimate, traffic, work) if one))
        chosen = "" if "composer" in found.wishes else f"--optimizer {optimizer or 'adamw'} "
        typer.echo(f"Calculated with {chosen}--device {device} --topology {topology}.")
        if limit is not None:
            verb, more = ("fits", "") if fits else ("does not fit", " --suggest searches a plan that does.")
            if fits and estimate.reserved > limit:
                more = f" But torch's allocator may reserve {human_bytes(estimate.reserved)}, which is more."
            needed = f"{human_bytes(estimate.peak)} of {human_bytes(limit)}"
            typer.echo(f"A rank {verb}: it needs {needed}.{more}")
    if fits is False:
        raise typer.Exit(1)


def _on_gpus(found: Any) -> Any:
    """The same plan for GPUs, by whose rates and links it is judged, on a machine without any."""
    import torch

    from composer_dist.config.mesh import MeshConfig
    from composer_dist.config.parallelism import resolve_config
    from composer_dist.distributed import plan_parallelism

    config = resolve_config(found.wishes["config"])
    mesh = config.mesh
    if torch.accelerator.is_available() or not isinstance(mesh, MeshConfig) or mesh.device_type:
        return found
    wishes = {
        **found.wishes,
        "config": dataclasses.replace(config, mesh=dataclasses.replace(mesh, device_type="cuda")),
    }
    made = plan_parallelism(found.model, world_size=found.plan.world_size, **wishes)
    return dataclasses.replace(found, plan=made, wishes=wishes)


def _suggestion(found: Any, limit: int | None, share: Any, topology: str, device: str) -> Any:
    from composer_dist.distributed import suggest

    if limit is None or share is None:
        missing = "--device-memory" if limit is None else "--batch"
        raise typer.BadParameter(f"--suggest needs {missing}.", param_hint="--suggest")
    return suggest(
        found.model,
        world_size=found.plan.world_size,
        device_memory=limit,
        batch=share,
        topology=topology,
        device=device,
        **found.wishes,
    )


def _no_plan(suggestion: Any) -> dict[str, Any]:
    nothing = dict.fromkeys(("memory", "compute", "how"))
    return {**nothing, "communication": [], "fits": False, "suggestion": suggestion.to_dict()}


def _bytes(text: str) -> int:
    import pydantic

    try:
        return int(pydantic.TypeAdapter(pydantic.ByteSize).validate_python(text))
    except pydantic.ValidationError:
        raise typer.BadParameter(
            f"{text!r} is not a size; expected a number with a unit, such as 80GiB.",
            param_hint="--device-memory",
        ) from None


def _shape(text: str) -> Any:
    numbers = text.lower().split("x")
    if len(numbers) != 2 or not all(one.isdecimal() and int(one) for one in numbers):
        raise typer.BadParameter(
            f"{text!r} is not a batch; expected sequences x tokens, such as 1x8192.", param_hint="--batch"
        )
    return tuple(map(int, numbers))
