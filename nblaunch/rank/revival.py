"""A rank's part in giving variables back to ranks that were started again. Imported when it is asked for.

A variable comes from another rank where it was alike on all ranks, as far as is known (`sketches`), and has
the same pickle on all that still have it. The pickles are those of a save, and travel in memory between ranks
of one node. A rank without such a peer is far: the client passes on to it what it gets as the value of the
first rank. A rank that is new, on a node that has come, gets what all others have alike. Of a DTensor a rank
gets the shard from one that has the same (a replica of HSDP), through the default group. Objects that the
notebook has sent keep their keys, so what refers to them later leads to what has come. What had no copy is
named.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from nblaunch.capture import arrays, pickling, shared_memory, tensors
from nblaunch.protocol.messages import LastKnown, Payload, Revived
from nblaunch.rank import environment, in_place, isolate, namespace, saving, sharded

_OWN = "it was not the same on all ranks, as far as is known"
# Only ranks that do not agree on what they do would wait so long.
_MOST_SECONDS = 600.0
_NOBODY = "no other rank has it"
_UNKNOWN = "one other rank has it, and whether theirs were the same is not known"
_ALONE = "one rank alone has it, and whether it is to be the same on all is not known"
_NEW = "nothing is known of it before the job that was cut off"
_PIECE = 64 << 20
_GROUP_GONE = "made for a process group that is gone"
_NO_REPLICA = "no other rank has the same shards"

_received: dict[str, torch.Tensor] = {}
"""The shards of this rank, as bytes, until what they are of comes."""


def pickler(file: Any, *, buffers: list[Any], check: Callable[[], None]) -> Any:
    """Return what pickles one variable as a save does; buffers are appended to `buffers`, but for DDP's.

    `check` is called for each object, and may raise.
    """
    stream = saving.SaveStream(sharded.GroupObjects(*saving.numbers(), saving.own_device()), check=check)
    storages = arrays.WholeMemories()
    # With these of another rank a model goes on as DDP has it.
    broadcast = saving.ranges_of(in_place.broadcast_buffers())

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        deferred = storages.deferred(buffer)
        data = buffer.raw() if deferred is None else deferred()
        if pickling.memory_range(data) not in broadcast:
            buffers.append(data)
        return False

    return saving.Pickler(file, protocol=5, buffer_callback=keep_inside, storages=storages, stream=stream)


def revive(
    token: str, reborn: Mapping[int, LastKnown]
) -> tuple[Revived, Sequence[int], list[pickle.PickleBuffer]] | None:
    """Bring the variables of ranks that were started again. All ranks call it; one that has sent answers.

    `reborn` maps them to what they had. The answer has the ranks that are far, and what is to be passed on to
    them (`take`).
    """
    meeting = saving.Meeting(token, _MOST_SECONDS)
    sources = [rank for rank in meeting.ranks if rank not in reborn]
    if not sources:
        had = (_candidates(each, 0) for each in reborn.values())
        return Revived(lost={name: _NOBODY for each in had for name in each}), (), []
    with meeting.together():
        nodes = meeting.tell(os.environ.get("GROUP_RANK"))
        # The first of each node.
        near = {nodes[rank]: rank for rank in reversed(sources)}
        if meeting.rank in reborn:
            _exchange_shards(meeting, {})
            payloads, told = meeting.tell(""), None
            if encoded := payloads[near.get(nodes[meeting.rank], meeting.rank)]:
                payload = msgspec.json.decode(encoded, type=Payload)
                parts = shared_memory.get(payload, private=True)
                told = _take(meeting, parts, _candidates(reborn[meeting.rank], len(sources)))
            meeting.tell(told)
            return None
        sent = _Sent(saving.Meeting(f"{token} sources", _MOST_SECONDS, ranks=sources), reborn)
        _exchange_shards(meeting, sent.shards)
        puts = any(near.get(nodes[rank]) == meeting.rank for rank in reborn) and sent.as_first
        with contextlib.ExitStack() as held:
            put = held.enter_context(sent.put()) if puts else None
            meeting.tell("" if put is None else msgspec.json.encode(put.payload).decode())
            told_by = {rank: each for rank, each in enumerate(meeting.tell(None)) if rank in reborn}
    if meeting.rank != sources[0]:
        return None
    far = [rank for rank, told in told_by.items() if told is None]
    found = sent.report()
    for rank in told_by.keys() - far:
        found = found.less(*told_by[rank])
    return found, far, sent.parts() if far else []


def take(
    token: str, parts: Sequence[memoryview], reborn: Mapping[int, LastKnown], sources: int
) -> tuple[dict[str, str], list[int]]:
    """Take variables of so many ranks that the client has passed on.

    Return those that are lost, with the reason, and the keys of objects.
    """
    meeting = saving.Meeting(token)
    return _take(meeting, parts, _candidates(reborn[meeting.rank], sources))


def _candidates(known: LastKnown, sources: int) -> dict[str, str]:
    """Return what a rank had, with why it cannot have it from others; "" if it can."""
    if known.joins and sources == 1:
        return dict.fromkeys((*known.alike, *known.others), _ALONE)
    alike = "" if sources > 1 else _UNKNOWN
    return (
        dict.fromkeys(known.equal, "") | dict.fromkeys(known.alike, alike) | dict.fromkeys(known.others, _OWN)
    )


class _Sent:
    """What a rank sends to those that were started again."""

    def __init__(self, meeting: saving.Meeting, reborn: Mapping[int, LastKnown]) -> None:
        assert namespace.here is not None  # noqa: S101 - a session's rank
        here = namespace.here
        had = [_candidates(each, len(meeting.ranks)) for each in reborn.values()]
        # An import means the same everywhere. One that only some of these ranks have is not brought: all must
        # compare the same variables, as often.
        imports = sorted(name for name, value in here.to_save().items() if saving.is_imported(value))
        there = meeting.tell([imports, here.names()])
        imported = set.intersection(*(set(each) for each, _ in there))
        wanted = {name for each in had for name, why in each.items() if not why} | imported
        self._rank, self._reborn = meeting.rank, reborn
        made = saving.Save(meeting, here, wanted, ddp_buffers=False)
        self._bare = False
        if unlike := wanted - made.equal.keys():
            # Of a step that was cut off, each rank has gradients of its own.
            graded = set[int]().union(*(made.examined[each].graded for each in unlike & made.examined.keys()))
            bare = saving.Save(meeting, here, wanted, bare=graded, ddp_buffers=False)
            self._bare = len(bare.equal) > len(made.equal)
            made = bare if self._bare else made
        self._lost = {name: why for each in had for name, why in each.items() if why and name not in imported}
        of_groups = {name for name, each in made.examined.items() if each.meshes}
        differ = wanted - made.equal.keys()
        self._lost |= {name: _GROUP_GONE if name in of_groups else _OWN for name in differ}
        self._lost |= {name: why for name, why in made.left_out.items() if name in wanted}
        old = set().union(*had, *(each.lacked for each in reborn.values()))
        self._lost |= dict.fromkeys(set().union(*(names for _, names in there)) - old - imported, _NEW)
        # Of one other rank it is not known whether the dead one had the same beside its variables.
        left = {each for each in made.equal if len(meeting.ranks) == 1 and each in saving.OF_A_RANK}
        sent = {name: each for name, each in made.equal.items() if name not in left}
        self.shards: dict[int, dict[str, torch.Tensor]] = {}
        """By rank and number, the bytes of those that this rank is to send."""
        lacking = self._take_shards(meeting, made, sent)
        self._lost |= lacking
        sent = {name: each for name, each in sent.items() if name not in lacking}
        self._names = tuple(each for each in sent if not saving.is_beside(each))
        self._shown = {each for each in self._names if not saving.is_imported(made.values[each])}
        self._anew = tuple(each for each in _told_of(made) if each in made.values.keys() - sent)
        # Equal ones come first.
        end = min((each.first_key for each in made.own.values()), default=float("inf"))
        places = {key: (place, obj) for key, (place, obj) in made.stream.keys.items() if place < end}
        keys, came = here.keys_of(places), here.came(self._names)
        known = meeting.tell([sorted(keys.items()), came])
        self.as_first = known[meeting.ranks.index(meeting.rank)] == known[0]
        """Whether the notebook knows of it what it knows of the first."""
        self._keys = tuple(keys.values())
        content = {
            "variables": [each.packed(name) for name, each in sent.items()],
            "keys": keys,
            "came": came,
            "classes": frozenset(pickling.received_classes.values()),
            "directory": made.values[saving.DIRECTORY] if saving.DIRECTORY in sent else "",
            "path": made.values[saving.SEARCH_PATH] if saving.SEARCH_PATH in sent else ([], []),
            "models": in_place.numbers_of_models(places.values()),
        }
        buffers = tuple(buffer for each in sent.values() for buffer in each.buffers)
        self._packed = pickling.Packed(memoryview(pickle.dumps(content)), buffers)
        self._directory = here.directory

    def _take_shards(
        self, meeting: saving.Meeting, made: saving.Save, variables: Mapping[str, Any]
    ) -> dict[str, str]:
        """Find the shards that this rank is to send; return the variables that cannot come, with why."""
        tensors = made.shards
        numbers = {number: name for name, each in variables.items() for number in each.shards}
        holders = {
            (number, rank): sharded.holder(tensors[number], rank, self._reborn)
            for number in numbers
            for rank in self._reborn
        }
        without = {numbers[number]: _NO_REPLICA for (number, _), each in holders.items() if each is None}
        locals_of = {number: tensors[number].to_local().detach() for number in numbers}
        for name, why in _sharing(numbers, tensors, locals_of, variables, made.stream.keys.values()):
            without.setdefault(name, why)
        lacking: dict[str, str] = {}
        # A rank whose shards are empty sees no memory that is shared.
        for each in meeting.tell(without):
            lacking |= each
        for (number, rank), each in holders.items():
            if numbers[number] not in lacking and each == self._rank:
                local = locals_of[number].resolve_conj().resolve_neg().contiguous()
                # Before any other rank waits for it: what raises here, raises there.
                self.shards.setdefault(rank, {})[number] = local.view(-1).view(torch.uint8)
        return lacking

    def put(self) -> shared_memory.Outgoing:
        """Hold it where the others can map it."""
        return shared_memory.put(self._packed, lambda: self._directory)

    def parts(self) -> list[pickle.PickleBuffer]:
        """Return it as parts of a value."""
        return [pickle.PickleBuffer(_in_memory(each)) for each in self._packed.parts]

    def report(self) -> Revived:
        """Return what ranks have that have lost nothing of it."""
        shown = [each for each in self._names if each in self._shown]
        known = self._reborn.values()
        return Revived(
            source=self._rank,
            names=self._names,
            shown=tuple(shown),
            lost=self._lost,
            keys=self._keys,
            anew=self._anew,
            changed=tuple(each for each in shown if any(each in of.changed for of in known)),
            assumed=tuple(each for each in shown if any(each in of.alike for of in known if not of.joins)),
            gradients=not self._bare,
        )


def _sharing(
    numbers: Mapping[str, str],
    tensors: Mapping[str, Any],
    locals_of: Mapping[str, torch.Tensor],
    variables: Mapping[str, Any],
    objects: Iterable[tuple[int, Any]],
) -> Iterator[tuple[str, str]]:
    """Yield variables with shards in memory that another DTensor, or a tensor, shows, too, with the reason.

    Each would have memory of its own on the other rank. Parameters keep theirs.
    """
    of_parameters = {number for number in numbers if isinstance(tensors[number], torch.nn.Parameter)}
    shown: list[tuple[int, int, str]] = []
    for number in sorted(numbers, key=lambda each: _range_of(locals_of[each])):
        start, stop = _range_of(locals_of[number])
        if not (stop and shown and start < shown[-1][1]):
            shown.append((start, stop, number))
            continue
        begin, end, owner = shown[-1]
        other = number
        if number in of_parameters and owner not in of_parameters:
            other, owner = owner, number
        shown[-1] = begin, max(end, stop), owner
        yield numbers[other], f"it shows the memory of {numbers[owner]}"
    for name, begin, close in _memories(variables, objects) if shown else ():
        at = bisect.bisect(shown, (close, 0, "")) - 1
        if at >= 0 and begin < shown[at][1]:
            yield name, f"it shows the memory of {numbers[shown[at][2]]}"


def _memories(
    variables: Mapping[str, Any], objects: Iterable[tuple[int, Any]]
) -> Iterator[tuple[str, int, int]]:
    """Yield variables with where the memory of a tensor or an array that they lead to begins and ends."""
    first = sorted((each.first_key, name) for name, each in variables.items())
    for key, obj in objects:
        at = bisect.bisect(first, (key, "\U0010ffff")) - 1
        storage = None
        if isinstance(obj, torch.UntypedStorage):
            storage = obj
        elif isinstance(obj, torch.Tensor) and not sharded.is_dtensor(obj):
            with contextlib.suppress(RuntimeError):  # a subclass has no memory of its own
                storage = obj.untyped_storage()
        if at >= 0 and storage is not None and storage.nbytes():
            yield first[at][1], storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        elif at >= 0 and arrays.is_array(obj) and obj.nbytes:
            yield first[at][1], obj.ctypes.data, obj.ctypes.data + obj.nbytes


def _range_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where the elements of a tensor begin and end in memory."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _told_of(made: saving.Save) -> list[str]:
    """Return what the user is told of that is no variable, where it begins anew."""
    # Without a seed of the program's, each rank begins with a random one.
    seeded = isolate.own_seed not in {None, torch.initial_seed()}
    told = dict.fromkeys(saving.OF_A_RANK, seeded)
    told[saving.ENVIRONMENT] = bool(made.values[saving.ENVIRONMENT])
    told[saving.DIRECTORY] = bool(made.values[saving.DIRECTORY])
    told[saving.SEARCH_PATH] = any(made.values[saving.SEARCH_PATH])
    return [each for each in told if told[each]]


def _exchange_shards(meeting: saving.Meeting, own: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
    """Send shards to ranks that were started again, which receive theirs; all ranks call it, in one order."""
    sizes_of = {rank: {number: each.nbytes for number, each in of.items()} for rank, of in own.items()}
    told = meeting.tell(sizes_of)
    _received.clear()
    device = saving.own_device()
    for source, of_source in enumerate(told):
        for rank, sizes in of_source.items():
            for number, size in sizes.items():
                if source == meeting.rank and size:
                    dist.send(own[int(rank)][number].to(device), int(rank))
                elif int(rank) == meeting.rank:
                    _received[number] = torch.empty(size, dtype=torch.uint8, device=device)
                    dist.recv(_received[number], source) if size else None


def _in_memory(part: memoryview | tensors.Far) -> memoryview | bytearray:
    if isinstance(part, memoryview):
        return part
    whole = bytearray()
    for piece in part.pieces(_PIECE):
        whole += piece
    return whole


def _take(
    meeting: saving.Meeting, parts: Sequence[memoryview], own: Mapping[str, str]
) -> tuple[dict[str, str], list[int]]:
    """Take variables that have come; return those that are lost, with the reason, and the keys of objects.

    `own` are those that this rank had, with why it cannot have them.
    """
    assert namespace.here is not None  # noqa: S101 - a session's rank
    here = namespace.here
    content = pickle.loads(parts[0])  # noqa: S301 - from a rank of this session
    environment.follow(content["directory"], *content["path"])  # variables may need modules from there
    loaded = saving.Unpickled(meeting, not_there=_GROUP_GONE)
    with loaded.loading():
        loaded.take(content["variables"], iter(parts[1:]))
        loaded.finish(_received)
    _received.clear()
    beside = {name: value for name, value in loaded.values.items() if saving.is_beside(name)}
    kept = {
        name: value
        for name, value in loaded.values.items()
        if name not in beside and (not own.get(name) or saving.is_imported(value))
    }
    there = {key: loaded.objects[place] for place, key in content["keys"].items() if place in loaded.objects}
    pickling.keep_as_own(content["classes"])
    # Ranks compare their models by number when they form their groups again.
    in_place.number_models(content["models"], loaded.objects)
    here.revived(kept, content["came"], there)
    saving.restore_surroundings(beside, frozenset())
    lost = {name: why for name, why in loaded.lost.items() if not name.startswith(sharded.FSDP2)}
    return lost, list(there)
