"""Time and peak memory of every stage over a few DDTree rounds, checked against paths.

    python examples/measure_rounds.py TARGET DRAFTER [--rounds 3] [--tree-budget 64] [--context 256]

TARGET and DRAFTER are hub ids or folders, such as `ddtree-lab synth` writes. The prompt is random ids, so a pair
without a sensible tokenizer will do. Memory is the process's on a CPU (sampled) and the allocator's on CUDA.
"""

import argparse
import threading
import time
from contextlib import contextmanager

import psutil
import torch

import ddtree_lab as dl
from ddtree_lab.pipeline import State, advance, settings_for, start
from ddtree_lab.records import format_bytes
from ddtree_lab.stages.verify import logits_scale, verify_tree


@contextmanager
def measured(rows, name):
    """Append (name, seconds, peak bytes above the level before) to `rows`."""
    stop, peak = threading.Event(), [resident()]
    level = peak[0]
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()

    def sample():
        while not stop.wait(0.005):
            peak[0] = max(peak[0], resident())

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    began = time.perf_counter()
    yield
    seconds = time.perf_counter() - began
    stop.set()
    sampler.join()
    if torch.cuda.is_available():
        peak[0] = torch.cuda.max_memory_allocated()
    rows.append((name, seconds, max(peak[0], resident()) - level))


def resident():
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated()
    return psutil.Process().memory_info().rss


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target")
    parser.add_argument("drafter")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tree-budget", type=int, default=64)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--device-map")
    args = parser.parse_args()
    rows = []
    with measured(rows, "load"):
        pair = dl.load_pair(args.target, args.drafter, device_map=args.device_map)
    vocab = pair.embeddings.vocab_size
    prompt = torch.randint(0, vocab, (1, args.context), generator=torch.Generator().manual_seed(0))
    settings = settings_for(
        pair, method="ddtree", tree_budget=args.tree_budget, max_new_tokens=10_000, temperature=0.0,
        top_k=None, top_p=None, seed=0, verify_method="auto",
    )  # fmt: skip
    dl.generate(
        pair, prompt[:, :8], tree_budget=4, max_new_tokens=3
    )  # pays for lazy set-up and the method's trial
    with measured(rows, "prefill"):
        state: State = start(pair, prompt, settings)
    for number in range(1, args.rounds + 1):
        while True:
            stage = state.next_stage
            with measured(rows, f"round {number} {stage}"):
                state = advance(pair, settings, state)
            if stage == "mask":
                before = state
            if stage == "verify":
                verification = state.records["verify"]
            if stage == "commit":
                break
        with measured(rows, f"round {number} (paths)"):
            paths = verify_tree(pair.target, before.cache, verification.tree, "paths")
        error = (verification.logits.float() - paths.logits.float()).abs().max()
        scale = logits_scale(paths.logits.float())
        same = int((verification.logits.argmax(-1) == paths.logits.argmax(-1)).sum())
        accepted = len(state.records["commit"].path) - 1
        print(
            f"round {number}: {verification.tree.num_nodes} nodes by {verification.method}, "
            f"{accepted} accepted drafts, largest difference from paths {float(error):.3g} "
            f"on logits of scale {scale:.3g}, {same} of {len(paths.logits)} argmaxes alike"
        )
    print(f"\n{'stage':<18}{'seconds':>10}  peak memory on top")
    for name, seconds, extra in rows:
        print(f"{name:<18}{seconds:>10.3f}  {format_bytes(extra)}")


if __name__ == "__main__":
    main()
