"""Every rank sees its own part of the data."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from composer_dist.distributed.mesh.mesh import Mesh
from composer_dist.distributed.ranks import process_group
from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.trainer.data.loader import DistributedDataLoader, is_split
from composer_dist.trainer.data.streaming import StreamingDataLoader


def data_part(mesh: Mesh | None) -> dict[str, int]:
    """`num_replicas` and `rank` of this rank's data; several ranks need a mesh."""
    if mesh is not None:
        return mesh.sampler_kwargs()
    world, _ = process_group.world_and_rank()
    if world > 1:
        raise ParallelismValueError(
            f"There are {world} ranks, but neither a parallelism_config nor a prepared model: each "
            "would train its own model. Pass parallelism_config='fsdp', for example."
        )
    return {"num_replicas": 1, "rank": 0}


def check_sampler(dataloader: Iterable[Any], expected: Mapping[str, int], purpose: str = "train") -> None:
    """Refuses a dataloader whose sampler would give ranks the same samples, or skip some."""
    for part in _parts(dataloader):
        found = {key: getattr(part, key, None) for key in expected}
        if None in found.values():
            continue
        if found != dict(expected):
            raise ParallelismValueError(
                f"{type(part).__name__} is for {_spell(found)}, but on this rank the mesh asks for "
                f"{_spell(expected)}; pass **sampler_kwargs(mesh) to it."
            )
        return
    dataset, name = getattr(dataloader, "dataset", None), type(dataloader).__name__
    fault = ""
    if hasattr(dataset, "__len__"):
        fault = (
            f"on the same samples: the sampler of the {name} is not distributed. Give it "
            "sampler=DistributedSampler(dataset, **sampler_kwargs(mesh)), or pass a DistributedDataLoader"
        )
    elif is_split(dataset) is False:
        fault = (
            f"on the same samples: the stream of the {name} is not split by split_dataset_by_node. Pass a "
            "StreamingDataLoader, which splits it"
        )
    if fault and expected["num_replicas"] > 1:
        raise ParallelismValueError(
            f"All {expected['num_replicas']} data-parallel ranks would {purpose} {fault}; "
            "if every rank's dataset is its own part already, pass check_sampler=False to the Trainer."
        )


def placed(dataloader: Iterable[Any], part: Mapping[str, int]) -> Iterable[Any]:
    """The dataloader, placed on this rank if it is one of ours.

    Raises:
        ParallelismTypeError: it is a data set, whose samples would be taken for batches.
    """
    if isinstance(dataloader, Dataset) and not isinstance(dataloader, IterableDataset):
        raise ParallelismTypeError(
            f"A dataloader gives batches, but {type(dataloader).__name__} is a data set, which gives "
            "samples. Pass DistributedDataLoader(dataset, global_batch_size=...), or a DataLoader of torch."
        )
    if isinstance(dataloader, DistributedDataLoader | StreamingDataLoader):
        return dataloader.placed(**part)
    return dataloader


def batch_size(dataloader: Iterable[Any] | None) -> int | None:
    """Samples of a batch, of all ranks or of one, if the dataloader says it."""
    return getattr(dataloader, "global_batch_size", None) or getattr(dataloader, "batch_size", None)


def set_epoch(dataloader: Iterable[Any], epoch: int) -> None:
    """Calls `set_epoch` of whatever shuffles by it: the sampler, the dataset, the dataloader."""
    for part in _parts(dataloader):
        if callable(setter := getattr(part, "set_epoch", None)):
            setter(epoch)


def _parts(dataloader: Iterable[Any]) -> Iterator[Any]:
    """The objects of a dataloader that may choose samples, each once."""
    batch_sampler = getattr(dataloader, "batch_sampler", None)
    parts = [
        dataloader,
        getattr(dataloader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
        getattr(dataloader, "dataset", None),
    ]
    yield from {id(part): part for part in parts if part is not None}.values()


def _spell(numbers: Mapping[str, int | None]) -> str:
    return ", ".join(f"{name}={value}" for name, value in numbers.items())
