"""A loop as people really write it: DDTree's verify on a Hugging Face model, patched until it runs.

It has the three patches everybody finds for Qwen3.5 and Qwen3.6: the cache is made from the config, the
embeddings are looked up, attention is sdpa. It runs, and it is wrong. Ask the doctor where:

    ddtree-lab doctor --port examples.my_port:MyPort
"""

import torch
from transformers import DynamicCache

from ddtree_lab.compat import cache_keyword


class MyPort:
    """Prefill, verify and commit over a cache that is cropped after each round."""

    def __init__(self, pair):
        self.model = pair.target
        self.cache_name = cache_keyword(self.model)  # past_key_values, or cache in newer versions

    def prefill(self, input_ids):
        cache = DynamicCache(config=self.model.config)  # patch 1: from the config
        self._forward(input_ids, cache)
        return {"cache": cache, "length": input_ids.shape[1]}

    def verify(self, state, tree):
        past, n = state["length"], tree.num_nodes
        mask = torch.full((n, past + n), torch.finfo(self.model.dtype).min, dtype=self.model.dtype)
        mask[:, :past] = 0
        mask[:, past:][torch.from_numpy(tree.visibility)] = 0
        positions = torch.from_numpy(past + tree.depths)[None]
        self._crop(state)  # what an earlier verify left behind
        out = self._forward(
            torch.from_numpy(tree.token_ids)[None],
            state["cache"],
            attention_mask=mask[None, None],
            position_ids=positions,
        )
        state["tree"] = tree
        return out.logits[0]

    def commit(self, state, path):
        past = state["length"]
        kept = torch.tensor([*range(past), *(past + node for node in path)])
        for layer in state["cache"].layers:
            if hasattr(layer, "keys"):  # patch 2: recurrent layers have no keys, so they are skipped
                layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
        return {"cache": state["cache"], "length": past + len(path)}

    def cache(self, state):
        return state["cache"]

    def _crop(self, state):
        for layer in state["cache"].layers:
            if hasattr(layer, "keys"):
                layer.keys = layer.keys[:, :, : state["length"]]
                layer.values = layer.values[:, :, : state["length"]]

    def _forward(self, input_ids, cache, **kwargs):
        with torch.no_grad():
            return self.model(input_ids=input_ids, use_cache=True, **{self.cache_name: cache}, **kwargs)
