"""One of the processes of `test_tensor_parallel`: loads each pair split over both, and writes down what it saw.

Run by torchrun: `two_processes.py FOLDER OUT`; FOLDER holds a folder for each family with `target` and `drafter`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch.distributed
from models import random_ids, random_tree

import ddtree_lab as dl
from ddtree_lab import costs

costs.ROWS = (1, 2, 5, 9)  # what "auto" measures: larger trees tell no more here


def look(folder: Path) -> dict:
    ids, tree = random_ids(9), random_tree("bushy", 12)
    pair = dl.load_pair(folder / "target", folder / "drafter", tp_plan="auto")
    logits = {}
    for method in ("paths", "tree", "scan"):
        cache = dl.make_cache(pair.target)
        dl.prefill(pair.target, ids, cache)
        logits[method] = dl.verify_tree(pair.target, cache, tree, method).logits
    methods = ("autoregressive", "dflash", "ddtree")
    return {
        # Newer versions of the library hold parts as DTensors, which give the whole one's size.
        "numbers": sum(getattr(t, "_local_tensor", t).numel() for t in pair.target.parameters()),
        "rows": pair.embeddings.vocab_size,
        "tied": pair.embeddings.tied,
        "auto": dl.verify_tree(pair.target, cache, tree).method,
        "difference": max(float((logits[m] - logits["paths"]).abs().max()) for m in ("tree", "scan")),
        "tokens": {
            **{m: dl.generate(pair, ids, m, tree_budget=9, max_new_tokens=12).token_ids for m in methods},
            "auto": dl.generate(pair, ids, tree_budget="auto", max_new_tokens=12).token_ids,
        },
        "trees": [
            r.num_drafted for r in dl.generate(pair, ids, tree_budget="auto", max_new_tokens=12).rounds
        ],
    }


if __name__ == "__main__":
    root, out = map(Path, sys.argv[1:])
    seen = {folder.name: look(folder) for folder in sorted(root.iterdir())}
    (out / f"{os.environ['RANK']}.json").write_text(json.dumps(seen))
    torch.distributed.destroy_process_group()
