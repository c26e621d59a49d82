"""Writes a checkpoint to one file that `torch.load` can read, with its checksums at the end."""

from __future__ import annotations

import os
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from composer_dist.checkpoint.background import Buffers
from composer_dist.checkpoint.format.state_tree import Leaves, encode
from composer_dist.checkpoint.gather import agree_on, gather_full
from composer_dist.checkpoint.storage.place import Place, complete, writing
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.files.checked import CheckedFile, Sink
from composer_dist.files.checkpoint_format import decode
from composer_dist.files.torch_save import LENGTH, block_for, seal_of
from composer_dist.tensors.nested import tensors_in


@dataclass
class SavingFile:
    """A checkpoint that the first rank writes to one file."""

    place: Place
    token: str
    keep: int | None
    whole: dict[str, Any]
    """The full contents by key; empty on other ranks."""

    @classmethod
    def gather(
        cls, place: Place, token: str, keep: int | None, contents: Mapping[str, Any], agreement: Agreement
    ) -> SavingFile:
        """Gather every sharded tensor on the first rank, one after the other."""
        here = agreement.rank == agreement.ranks[0]
        with agreement.together("the contents of the checkpoint"):
            leaves = Leaves()
            structure = {key: encode((key,), value, leaves) for key, value in contents.items()}
            leaves.check()
        agree_on("gathering the checkpoint", leaves.tensors.values(), list(leaves.tensors), None)
        full = gather_full(leaves.tensors, everywhere=False)
        full = {name: tensor.resolve_conj().resolve_neg() for name, tensor in full.items()}

        def read(kind: str, name: str) -> Any:
            return full[name] if kind == "tensor" else deepcopy(leaves.objects[name])

        whole = {key: decode(deepcopy(code), read) for key, code in structure.items()} if here else {}
        return cls(place, token, keep, whole)

    def stage(self, buffers: Buffers) -> None:
        """Do nothing: everything was copied when it was gathered."""

    def run(self, agreement: Agreement) -> None:
        """Have the first rank write; all succeed, or all raise."""
        here = agreement.rank == agreement.ranks[0]
        try:
            with agreement.together("the file of the checkpoint"):
                if here:
                    with writing(self.place):
                        sink = self.place.sink(self.token, None)
                    write_single_file(self.whole, sink, os.fspath(self.place.path))
                    complete(self.place, self.token, {}, self.keep)
        except BaseException:
            if here:
                self.place.discard(self.token)
            raise


def write_single_file(contents: Any, sink: Sink, name: str) -> None:
    """Write a file that `torch.load(weights_only=True)` reads, if it has only tensors and plain values.

    Raises:
        CheckpointValueError: a value cannot be pickled.
        CheckpointRuntimeError: the file cannot be written.
    """
    file = CheckedFile(sink, name, block_for(2 * sum(tensor.nbytes for tensor in tensors_in(contents))))
    with file:
        file.save_object(contents, through=_WithoutLength(file))
        file.append(seal_of(file.stored()))


class _WithoutLength:
    """Passes on everything except the archive's last field, the length of its comment."""

    def __init__(self, file: CheckedFile) -> None:
        self._file, self._rest = file, b""

    def write(self, data: Any) -> int:
        """Append bytes, and hold back the last ones."""
        view = memoryview(data).cast("B")
        last = self._rest + bytes(view[-LENGTH.size :])
        self._file.write(last[: -LENGTH.size])
        self._file.write(view[: -LENGTH.size])
        self._rest = last[-LENGTH.size :]
        return len(view)

    def flush(self) -> None:
        """Do nothing: the last field must not be written."""
