"""The report of a run that hangs: which rank is the first cause, and where each rank stands."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from composer_dist.distributed.ranks.hangs.stand import Entered, Frame, Stand
from composer_dist.users_code import is_users_file
from composer_dist.wording import ranks_named

_MOST = 40
"""The innermost frames of a stack that are shown."""
_STATES = {
    "left": "has left the guarded part",
    "failed": "has failed",
    "ended": "has ended; see its output",
    "stopped": "is stopped (by SIGSTOP or a debugger)",
    "blocked": "is blocked: a call in C holds Python's lock (the GIL)",
    "silent": "does not answer: its process or host is gone, stopped or swapped out",
}


def report(stands: Sequence[Stand], limit: float, section: str) -> str:
    """What every rank prints.

    Args:
        stands: of all ranks.
        limit: seconds, that the rank which noticed first had for this section.
        section: see `HangGuard`.
    """
    lines = [f"{cause(stands)} (no progress for {limit:.0f} s, the limit in section {section!r})."]
    lines += [f"  rank {one.rank}: {_told(one, stands)}" for one in stands]
    for ranks, stack in _stacks(stands):
        lines.append(f"Stack of {ranks_named(ranks)} (most recent call last):")
        lines += [f'  File "{one.file}", line {one.line}, in {one.function}' for one in stack[-_MOST:]]
    return "\n".join(lines)


def cause(stands: Sequence[Stand]) -> str:
    """The ranks that the others wait for, and what these do instead."""
    for state in ("failed", "ended", "stopped", "blocked", "silent", "left"):
        if found := [one for one in stands if one.state == state]:
            between = ": " if state == "failed" else " at "
            doing = f"{between}{found[0].doing}" if found[0].doing else ""
            return f"The run hangs: {_named(found)} {_plural(_STATES[state], found)}{doing}"
    absent = [one for one in stands if one.collective() is None]
    if absent and len(absent) < len(stands):
        data = [one for one in absent if one.in_data()]
        found = data or absent
        return f"The run hangs: {_named(found)} {_activity(found[0])} while the others wait in a collective"
    if absent:
        return f"The run hangs: {_named(absent)} {_activity(absent[0])}"
    late = {one.rank for one in stands for name in one.entered if one.rank in _late(name, stands)}
    if late:
        found = [one for one in stands if one.rank in late]
        return (
            f"The run hangs: {_named(found)} waits in {found[0].collective()} at {found[0].doing}, "
            "while others wait in a collective that it has not entered"
        )
    kinds = sorted({f"{one.collective()}" for one in stands})
    return f"The run hangs: all ranks wait in a collective ({', '.join(kinds)})"


def _named(stands: Sequence[Stand]) -> str:
    return ranks_named([one.rank for one in stands])


def _plural(words: str, stands: Sequence[Stand]) -> str:
    if len(stands) == 1:
        return words
    for one, many in (("has ", "have "), ("is ", "are "), ("does ", "do ")):
        words = many + words.removeprefix(one) if words.startswith(one) else words
    return words


def _activity(stand: Stand) -> str:
    """What a rank does that waits in no collective."""
    if stand.in_data():
        return f"waits for data at {stand.doing}"
    frame = _users(stand.stack) or (stand.stack[-1] if stand.stack else None)
    where = f" in {_place(frame)}" if frame else ""
    return f"is still{where} at {stand.doing}" if stand.doing else f"is still{where or ' running'}"


def _told(stand: Stand, stands: Sequence[Stand]) -> str:
    """One line about a rank."""
    if stand.state in _STATES:
        last = f"{': ' if stand.state == 'failed' else '; last seen at '}{stand.doing}" if stand.doing else ""
        return f"{_STATES[stand.state]}{last}"
    frame = _users(stand.stack)
    where = f" in {_place(frame)}" if frame else ""
    words = f"{stand.doing}{where}, for {stand.seconds:.0f} s"
    if (collective := stand.collective()) is None:
        return f"{words}, {'waits for data' if stand.in_data() else 'in no collective'}"
    for name, entered in stand.entered.items():
        if (late := _late(name, stands)) and stand.rank not in late:
            of = f"collective {entered.number} of the group of {ranks_named(entered.ranks)}"
            return f"{words}, waits in {collective} ({of}) for {ranks_named(late)}"
    return f"{words}, waits in {collective}"


def _place(frame: Frame) -> str:
    return f"{frame.function} ({Path(frame.file).name}:{frame.line})"


def _late(name: str, stands: Iterable[Stand]) -> list[int]:
    """The ranks that have entered fewer collectives of a group than another one."""
    counts: Mapping[int, Entered] = {one.rank: one.entered[name] for one in stands if name in one.entered}
    most = max((one.number for one in counts.values()), default=0)
    silent = [one.rank for one in stands if one.state != "runs"]
    members = next((one.ranks for one in counts.values()), ())
    missing = [rank for rank in members if rank in silent]
    return sorted({rank for rank, one in counts.items() if one.number < most}.union(missing))


def _users(stack: Sequence[Frame]) -> Frame | None:
    """The innermost frame of the user's own code."""
    return next((one for one in reversed(stack) if is_users_file(one.file)), None)


def _stacks(stands: Sequence[Stand]) -> list[tuple[list[int], Sequence[Frame]]]:
    """Each different stack once, with its ranks."""
    found: dict[tuple[Frame, ...], list[int]] = {}
    for one in stands:
        if one.stack:
            found.setdefault(tuple(one.stack), []).append(one.rank)
    return [(ranks, stack) for stack, ranks in found.items()]
