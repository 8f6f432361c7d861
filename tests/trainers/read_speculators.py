"""read_speculators.py DATA OUT.json [DRAFT]: load every row as speculators 0.9.0 trains on it, and write what came out.

Runs in the environment of install.sh. A row that is missing, or whose ids differ from the dataset's, is an error
here. With DRAFT, the vocabulary maps are loaded and also made again from token_freq.pt by its own function.
"""

import hashlib
import json
import sys
import warnings

import torch
from speculators.data_generation.offline import check_hidden_states
from speculators.train.data import ArrowDataset, CollateFn
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution


def digest(tensor):
    raw = tensor.contiguous().view(torch.uint8) if tensor.dtype == torch.bfloat16 else tensor.contiguous()
    return [str(tensor.dtype), list(tensor.shape), hashlib.sha256(raw.numpy().tobytes()).hexdigest()]


def rows(data):
    """Return every row, the training split and then the validation split, as the trainer divides them."""
    found = []
    for split in ("train", "val"):
        dataset = ArrowDataset(1 << 20, data, on_missing="raise", train_ratio=0.9, split=split)
        for index in range(len(dataset)):
            row = dataset[index]
            cached = dataset.transfer.get_cached(dataset._map_to_file_idx(index))
            check_hidden_states(cached, dataset.data[index]["input_ids"].tolist())
            assert dataset.approx_lengths[index] == len(row["input_ids"])
            found.append(row)
    return found


def main(data, out, draft=None):
    warnings.simplefilter("error")
    found = rows(data)
    hidden = found[0]["verifier_last_hidden_states"].shape[1]
    total = sum(len(row["input_ids"]) for row in found)
    batch = CollateFn(total, hidden)([dict(row) for row in found])
    assert torch.equal(batch["hidden_states"][0], torch.cat([row["hidden_states"] for row in found]))
    result = {"rows": [{key: digest(value) for key, value in row.items()} for row in found]}
    if draft:
        from speculators.train.cli import _load_mappings

        d2t, t2d, size = _load_mappings(f"{data}/d2t-{draft}.npy", f"{data}/t2d-{draft}.npy", int(draft))
        counts = torch.load(f"{data}/token_freq.pt", weights_only=True)
        again = build_vocab_mappings_from_distribution(counts, size, len(t2d))
        result["map"] = {"d2t": d2t.tolist(), "t2d": t2d.tolist()}
        result["map_again"] = {"d2t": again[0].tolist(), "t2d": again[1].tolist()}
    with open(out, "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
