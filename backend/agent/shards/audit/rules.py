"""What only all files together can tell: one schema, one hidden size, every id once, no states of another sample.

What data_config.json says is the measure. Without it the majority is, where it is more than half: seq_len may equal
the hidden size, or 1, so that only a file's token axis is made a symbol, and which axis that is the files vote on.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Dict, List, NamedTuple, Optional, Tuple
from typing import Counter as Counts

from backend.agent.shards.audit.faults import ERROR, WARNING, Faults
from backend.agent.shards.audit.folder import File
from backend.agent.shards.audit.look import IDS, Look, is_state, starred, worst
from backend.agent.shards.audit.said import TOKENS, Said
from backend.shardfmt import layout

SYMBOL = "S"
MAX_NAMED = 6
Tensor = Tuple[str, str, Tuple[Any, ...]]
Signature = Counts[Tensor]
Axes = Dict[Tuple[str, int], int]


class Seen(NamedTuple):
    """A file and the look at it."""

    file: File
    look: Look

    @property
    def tokens(self) -> Optional[int]:
        """Return its number of tokens, None where it has no ids."""
        ids = self.look["ids"]
        return None if ids is None else int(ids["tokens"])


class Agreement(NamedTuple):
    """What the files of a folder have in common."""

    axes: Axes
    schema: Signature
    hidden_size: Optional[int]
    layers: Optional[int]
    problem: str


def agree(seen: List[Seen], said: Said) -> Agreement:
    """Find what all files should be: what the folder says, else what more than half of them are."""
    good = [one for one in seen if one.tokens and not worst(one.look)]
    axes = _axes(good)
    schema: Signature = Counter()
    problem = ""
    if said.tensors:
        for key, (dtype, shape) in said.tensors.items():
            schema[(key, dtype, tuple(SYMBOL if size == TOKENS else size for size in shape))] += 1
    else:
        votes = Counter(frozenset(_signature(one.look, axes).items()) for one in good)
        most = votes.most_common(1)
        if most and most[0][1] * 2 > len(good):
            schema = Counter(dict(most[0][0]))
        elif most:
            text = "of %d files at most %d agree on keys, types and shapes: no majority says what is right"
            problem = text % (len(good), most[0][1])
    hidden = said.hidden_size or min((shape[-1] for key, _, shape in schema if _is_wide(key, shape)), default=None)
    return Agreement(axes, schema, hidden, said.layers or _layers(schema, hidden), problem)


def against_config(agreed: Agreement, said: Said, faults: Faults) -> None:
    """Compare what most files are with what data_config.json says, where that states no whole schema."""
    if said.tensors or not agreed.schema:
        return
    hidden, layers = said.hidden_size, _layers(agreed.schema, agreed.hidden_size)
    odd = [shape[-1] for key, _, shape in agreed.schema if hidden and _is_wide(key, shape) and shape[-1] % hidden]
    if odd:
        text = "the files' states are %d wide; %s says a hidden size of %d"
        faults.add("hidden-size", text % (odd[0], layout.CONFIG_NAME, hidden))
    elif said.layers and layers and said.layers != layers:
        text = "the files hold %d layers; %s says %d"
        faults.add("layer-count", text % (layers, layout.CONFIG_NAME, said.layers))


def own(one: Seen, rows: List[List[str]], faults: Faults) -> None:
    """Add what the look at a file found. A mask of zeros that the corpus has too is the corpus's, and a remark."""
    mask, sample = one.look["mask"], one.file.sample
    meant = bool(mask) and sample is not None and sample < len(rows) and rows[sample][1] == mask["hash"]
    for code, level, text in one.look["notes"]:
        level = WARNING if code == "mask-empty" and meant else level
        faults.add(code, text, one.file.path, sample, level)


def check(one: Seen, agreed: Agreement, said: Said, max_tokens: int, faults: Faults) -> None:
    """Add what is wrong with one file beside the others."""
    file, look = one.file, one.look
    for code, text in _lengths(one, agreed, said, max_tokens) + _shapes(look, agreed):
        faults.add(code, text, file.path, file.sample)
    ids = look["ids"]
    if ids and ids["least"] is not None:
        above = said.vocab_size is not None and ids["most"] >= said.vocab_size
        if ids["least"] < 0 or above:
            bound = "" if said.vocab_size is None else "; the vocabulary is 0 to %d" % (said.vocab_size - 1)
            text = "%s holds %d to %d%s" % (ids["key"], ids["least"], ids["most"], bound)
            faults.add("token-range", text, file.path, file.sample)


def _lengths(one: Seen, agreed: Agreement, said: Said, max_tokens: int) -> List[Tuple[str, str]]:
    tokens, found = one.tokens, []
    if tokens is None:
        return []
    for key, _, shape in one.look["tensors"]:
        axis = agreed.axes.get((starred(key), len(shape)))
        if axis is not None and shape[axis] != tokens:
            text = "%s has %d rows (%s) for %d token ids"
            found.append(("seq-mismatch", text % (key, shape[axis], " x ".join(map(str, shape)), tokens)))
    if max_tokens and tokens > max_tokens:
        found.append(("too-long", "%d tokens, more than %d" % (tokens, max_tokens)))
    stated = said.lengths.get(one.file.sample) if one.file.sample is not None else None
    if stated is not None and stated != tokens:
        found.append(("length-index", "%d token ids; sample_lengths.json says %d" % (tokens, stated)))
    return found


def _shapes(look: Look, agreed: Agreement) -> List[Tuple[str, str]]:
    """Name how a file differs from the schema, by the most telling word, once each."""
    if not agreed.schema or not look["tensors"]:
        return []
    mine = _signature(look, agreed.axes)
    if mine == agreed.schema:
        return []
    extra, lacking = mine - agreed.schema, agreed.schema - mine
    found: Dict[str, str] = {}
    for key in sorted({key for key, _, _ in (extra | lacking)}):
        have = [tensor for tensor in extra if tensor[0] == key]
        want = [tensor for tensor in lacking if tensor[0] == key]
        code, text = _difference(key, have, want, agreed.hidden_size)
        if code == "ids-dtype" and code in worst(look):
            continue
        found.setdefault(code, text)
    return list(found.items())


def _difference(key: str, have: List[Tensor], want: List[Tensor], hidden: Optional[int]) -> Tuple[str, str]:
    if not have or not want:
        listed = "[*]" in key and is_state(key)
        text = "there are fewer of %s" if listed and want else "%s is not there" if want else "%s is one too many"
        return ("layer-count" if listed else "schema"), text % key
    (_, dtype, shape), (_, right_dtype, right) = have[0], want[0]
    if dtype != right_dtype:
        return ("ids-dtype" if key in IDS else "schema"), "%s is %s, not %s" % (key, dtype, right_dtype)
    text = "%s is %s, not %s" % (key, " x ".join(map(str, shape)), " x ".join(map(str, right)))
    if is_state(key) and len(shape) == len(right) >= 2:
        if shape[-1] != right[-1]:
            return ("hidden-size" if not hidden or shape[-1] % hidden else "layer-count"), text
        if shape[:-1] != right[:-1] and len(shape) == 3:
            return "layer-count", text
    return "schema", text


def twins(seen: List[Seen], rows: List[List[str]], faults: Faults) -> None:
    """Find samples that are there twice, and states that belong to other ids: a batch whose rows were mixed up.

    `rows` is the corpus where it is known: what it holds twice may be there twice.
    """
    by_ids: Dict[str, List[Seen]] = {}
    by_rows: Dict[str, List[Seen]] = {}
    for one in seen:
        ids = one.look["ids"]
        if ids and ids["hash"]:
            by_ids.setdefault(ids["hash"], []).append(one)
            if one.look["rows"]:
                by_rows.setdefault(one.look["rows"], []).append(one)
    for group in by_ids.values():
        wrong = [one for one in group if not _is_right(one, rows)]
        if len({one.file.sample for one in group}) < 2:
            continue
        for one in wrong if len(wrong) < len(group) else group[1:]:
            faults.add(
                "duplicate-ids", "the same token ids as %s" % _others(group, one), one.file.path, one.file.sample
            )
    for group in by_rows.values():
        if len({one.look["ids"]["hash"] for one in group}) > 1:
            for one in group:
                text = "the same states as %s, whose token ids are others: their rows were mixed up"
                faults.add("same-states-other-ids", text % _others(group, one), one.file.path, one.file.sample)


def _is_right(one: Seen, rows: List[List[str]]) -> bool:
    index = one.file.sample
    return index is not None and index < len(rows) and rows[index][0] == one.look["ids"]["hash"]


def _others(group: List[Seen], mine: Seen) -> str:
    names = [one.file.path for one in group if one is not mine]
    return ", ".join(names[:MAX_NAMED]) + (" and %d more" % (len(names) - MAX_NAMED) if len(names) > MAX_NAMED else "")


def against_corpus(seen: List[Seen], rows: List[List[str]], said: Said, faults: Faults) -> None:
    """Compare ids, masks and names with the records that they were extracted from."""
    for one in seen:
        file, ids, mask = one.file, one.look["ids"], one.look["mask"]
        if file.sample is None:
            continue
        if file.sample >= len(rows):
            faults.add("no-such-sample", "the corpus has %d samples" % len(rows), file.path, file.sample)
            continue
        wanted_ids, wanted_mask, name = rows[file.sample]
        if ids and ids["hash"] and ids["hash"] != wanted_ids:
            faults.add("other-ids", "its token ids are not those of the corpus", file.path, file.sample)
        elif mask and mask["hash"] != wanted_mask:
            faults.add("other-mask", "its loss mask is not that of the corpus", file.path, file.sample)
        line = (said.journal or {}).get(file.sample)
        if line is not None and line.id != name:
            text = "the journal calls it %s, the corpus %s"
            faults.add("other-id", text % (line.id[:80], name[:80]), file.path, file.sample)


def against_journal(seen: List[Seen], said: Said, complete: bool, faults: Faults) -> None:
    """Compare every file with the line that was written when it was committed."""
    if said.journal is None:
        return
    for one in seen:
        file, line = one.file, said.journal.get(one.file.sample) if one.file.sample is not None else None
        if line is None:
            level = ERROR if complete else WARNING
            faults.add("not-committed", "it is not in the journal", file.path, file.sample, level)
            continue
        if line.file != file.path:
            faults.add("misplaced", "the journal says %s" % line.file, file.path, file.sample)
        if line.bytes != file.size:
            text = "%d bytes; %d were committed"
            faults.add("journal-bytes", text % (file.size, line.bytes), file.path, file.sample)
        elif one.look["crc32"] is not None and one.look["crc32"] != line.crc32:
            text = "its bytes are not those that were committed (CRC-32)"
            faults.add("journal-crc", text, file.path, file.sample)
        if one.tokens is not None and one.tokens != line.tokens:
            text = "%d token ids; %d were committed"
            faults.add("journal-tokens", text % (one.tokens, line.tokens), file.path, file.sample)


def _axes(good: List[Seen]) -> Axes:
    """Let the files say which axis of each tensor counts tokens: the one that is as long as the ids."""
    votes: Dict[Tuple[str, int], Counts[Optional[int]]] = {}
    ranks: Dict[Tuple[str, int], None] = {}
    for one in good:
        for key, _, shape in one.look["tensors"]:
            name = (starred(key), len(shape))
            ranks[name] = None
            if shape and one.tokens is not None and one.tokens > 1:
                axis = 0 if shape[0] == one.tokens else 1 if _is_batch(shape) and shape[1] == one.tokens else None
                votes.setdefault(name, Counter())[axis] += 1
    axes: Axes = {}
    for name in ranks:
        axis = _axis(name, votes.get(name, Counter()))
        if axis is not None:
            axes[name] = axis
    return axes


def _axis(name: Tuple[str, int], votes: "Counts[Optional[int]]") -> Optional[int]:
    key, rank = name
    counted = key in IDS or key == layout.LOSS_MASK or is_state(key)
    found = Counter({axis: number for axis, number in votes.items() if axis is not None})
    if found and (counted or sum(found.values()) * 2 > sum(votes.values())):
        return found.most_common(1)[0][0]
    if not counted or rank == 0:
        return None
    # Nothing but samples of one token, or none whose rows are as many as its ids: by the names' own meaning.
    return 0 if rank == 1 or (key == "hidden_states" and rank == 3) else 1 if rank == 3 else 0


def _is_batch(shape: List[int]) -> bool:
    return len(shape) > 1 and shape[0] == 1


def _signature(look: Look, axes: Axes) -> Signature:
    found: Signature = Counter()
    for key, dtype, shape in look["tensors"]:
        name = starred(key)
        sizes: List[Any] = list(shape)
        axis = axes.get((name, len(shape)))
        if axis is not None:
            sizes[axis] = SYMBOL
        found[(name, dtype, tuple(sizes))] += 1
    return found


def _is_wide(key: str, shape: Tuple[Any, ...]) -> bool:
    return is_state(key) and len(shape) >= 2 and isinstance(shape[-1], int) and shape[-1] > 0


def _layers(schema: Signature, hidden: Optional[int]) -> Optional[int]:
    """Count the layers that a sample's states hold."""
    total = 0
    for (key, _, shape), number in schema.items():
        if hidden and _is_wide(key, shape):
            deep = shape[1] if len(shape) == 3 and isinstance(shape[1], int) else 1
            total += number * deep * (shape[-1] // hidden)
    return total or None
