"""read_specforge.py SHARDS OUT.json: load every shard as SpecForge 0.2.0 trains on it, and write what came out.

Runs in the environment of install.sh. Eager validation is on; batches of one go through its own loader,
normaliser and store. With a vocabulary map beside the shards, it is loaded the way the trainer does.
"""

import hashlib
import json
import os
import sys

import torch
from specforge.algorithms.eagle3.data import build_offline_normalizer, build_offline_reader
from specforge.runtime.data_plane.feature_dataloader import FeatureDataLoader
from specforge.runtime.data_plane.feature_store import LocalFeatureStore
from specforge.training.vocab_mapping import count_effective_feature_tokens


def digest(tensor):
    raw = tensor.contiguous().view(torch.uint8) if tensor.dtype == torch.bfloat16 else tensor.contiguous()
    return [str(tensor.dtype), list(tensor.shape), hashlib.sha256(raw.numpy().tobytes()).hexdigest()]


def main(shards, out):
    os.environ["SPECFORGE_VALIDATE_OFFLINE_FEATURES"] = "1"
    refs = build_offline_reader(shards, run_id="check", ttt_length=7, max_len=1 << 20).read()
    loader = FeatureDataLoader(
        LocalFeatureStore(store_id="check"),
        refs=refs,
        batch_size=1,
        collate_fn=lambda samples: samples[0],
        per_sample_transform=build_offline_normalizer(1 << 20, ttt_length=7),
    )
    found = {}
    for ref, batch in zip(refs, loader, strict=True):
        path = os.path.relpath(ref.feature_store_uri[len("file://") :], shards)
        tensors = batch.tensors if hasattr(batch, "tensors") else batch
        found[path] = {key: digest(value) for key, value in tensors.items()}
    counts = count_effective_feature_tokens(shards, target_vocab_size=None)
    result = {"refs": len(refs), "samples": found, "counts": {int(k): int(v) for k, v in counts.items()}}
    path = os.path.join(shards, "vocab_mapping", "vocab_mapping.pt")
    if os.path.exists(path):
        mapping = torch.load(path, weights_only=True)
        result["map"] = {key: value.tolist() for key, value in mapping.items()}
    with open(out, "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
