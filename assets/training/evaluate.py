"""Stage 6: measure what ships, with the package's own exact decoder.

    torchrun --nproc-per-node 2 -m assets.training.evaluate

Acceptance is counted in *emitted tokens a round* (accepted drafts and the bonus token; 8 at most).
The prompts of a table are the same for every method, and so is the text (the decoder is exact),
which makes the comparison of methods a paired one.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch

import ddtree_lab

from .export import greedy_answers
from .held_out import hard_prompts, held_out_tasks
from .optimisation import Processes
from .repetition import distinct_4, lookup_rounds
from .settings import BUILD, EVALUATION, MEASUREMENTS_FILE, PAIR, SEEDS
from .tasks import KINDS
from .tokenizer import load_tokenizer

METHODS = {
    "chain": {"method": "dflash"},
    "tree 16": {"method": "ddtree", "tree_budget": 16},
    "tree 32": {"method": "ddtree", "tree_budget": 32},
    "tree 64": {"method": "ddtree", "tree_budget": 64},
}


@dataclass(frozen=True)
class Decoded:
    """One prompt at one temperature: how many rounds each method took for the same tokens."""

    domain: str
    temperature: float
    num_tokens: int  # emitted in rounds: the first new token comes from prefill
    rounds: dict[str, int]
    is_identical: bool  # every method wrote what plain decoding writes
    lookup_rounds: int
    distinct_4: float


def decode(
    pair: ddtree_lab.Pair, prompt_ids: Sequence[int], domain: str, temperature: float, seed: int
) -> Decoded:
    """Decode with every method and note whether each wrote the same tokens as plain decoding."""
    shared = {"max_new_tokens": EVALUATION.max_new_tokens, "temperature": temperature, "seed": seed}
    plain = ddtree_lab.generate(pair, prompt_ids, method="autoregressive", **shared)
    rounds, is_identical = {}, True
    for name, method in METHODS.items():
        generation = ddtree_lab.generate(pair, prompt_ids, **method, **shared)
        is_identical &= generation.token_ids == plain.token_ids
        rounds[name] = generation.num_rounds
    return Decoded(
        domain,
        temperature,
        num_tokens=len(plain.token_ids) - 1,
        rounds=rounds,
        is_identical=is_identical,
        lookup_rounds=lookup_rounds(prompt_ids, plain.token_ids),
        distinct_4=distinct_4(plain.token_ids),
    )


def jobs(pair: ddtree_lab.Pair) -> list[tuple[list[int], str, float]]:
    """(prompt ids, domain, temperature) of everything to be decoded."""
    tasks = held_out_tasks(-(-EVALUATION.num_chat // len(KINDS)))[: EVALUATION.num_chat]
    chat = [pair.encode(task.prompt)[0].tolist() for task in tasks]
    found = [(ids, "chat", temperature) for temperature in EVALUATION.chat_temperatures for ids in chat]
    for prompt in hard_prompts(EVALUATION.num_hard):
        ids = pair.encode(prompt.text, raw=True)[0].tolist()
        found.append((ids, prompt.domain, EVALUATION.hard_temperature))
    return found


def summarise(rows: list[Decoded]) -> dict:
    """Emitted tokens a round over all rounds, with a 95 % interval from resampled prompts."""
    rows = [row for row in rows if row.num_tokens > 0]
    tokens = np.array([row.num_tokens for row in rows])
    resampled = np.random.default_rng(SEEDS.evaluation).integers(len(rows), size=(10_000, len(rows)))

    def interval(rounds: list[int]) -> dict:
        counts = np.array(rounds)
        ratios = tokens[resampled].sum(axis=1) / counts[resampled].sum(axis=1)
        low, high = np.percentile(ratios, [2.5, 97.5])
        mean = tokens.sum() / counts.sum()
        return {"mean": round(float(mean), 3), "low": round(float(low), 3), "high": round(float(high), 3)}

    return {
        "prompts": len(rows),
        "prompts_decoded_identically": sum(row.is_identical for row in rows),
        "tokens": int(tokens.sum()),
        "emitted_tokens_a_round": {name: interval([row.rounds[name] for row in rows]) for name in METHODS}
        | {"n-gram look-up": interval([row.lookup_rounds for row in rows])},
        "distinct_4": round(float(np.mean([row.distinct_4 for row in rows])), 3),
    }


def task_accuracy() -> dict[str, dict[str, int]]:
    """Greedy answers judged by each kind's own checker: right ones of all."""
    tasks = held_out_tasks(EVALUATION.tasks_per_kind)
    tokenizer = load_tokenizer()
    counts = {kind: {"right": 0, "of": 0} for kind in KINDS}
    for task, ids in zip(tasks, greedy_answers(tasks), strict=True):
        text = tokenizer.decode(ids, skip_special_tokens=True)
        counts[task.kind]["right"] += KINDS[task.kind].check(task, text)
        counts[task.kind]["of"] += 1
    return counts


def main() -> None:
    processes = Processes()
    pair = ddtree_lab.load_pair(PAIR / "target", PAIR / "drafter", dtype=torch.float32)
    todo = list(enumerate(jobs(pair)))[processes.rank :: processes.count]
    part = BUILD / f"evaluation_{processes.rank}.json"
    rows = []
    for done, (index, (ids, domain, temperature)) in enumerate(todo):
        rows.append(asdict(decode(pair, ids, domain, temperature, seed=SEEDS.evaluation + index)))
        if processes.is_first and done % 20 == 0:
            print(f"evaluation: {done} of {len(todo)}", flush=True)
    part.write_text(json.dumps(rows), encoding="utf-8")
    accuracy = task_accuracy() if processes.is_first else {}
    processes.wait()
    if processes.is_first:
        parts = [BUILD / f"evaluation_{rank}.json" for rank in range(processes.count)]
        _write(
            [Decoded(**row) for path in parts for row in json.loads(path.read_text(encoding="utf-8"))],
            accuracy,
        )
    processes.close()


def _write(rows: list[Decoded], accuracy: dict) -> None:
    groups = sorted({(row.domain, row.temperature) for row in rows})
    measurements = {
        "max_new_tokens": EVALUATION.max_new_tokens,
        "acceptance": [
            {"domain": domain, "temperature": temperature}
            | summarise([row for row in rows if (row.domain, row.temperature) == (domain, temperature)])
            for domain, temperature in groups
        ],
        "task_accuracy": accuracy,
    }
    MEASUREMENTS_FILE.write_text(json.dumps(measurements, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(measurements, indent=2), flush=True)


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    main()
