"""DDTree behind the ordinary `generate`: `target.generate(**inputs, custom_generate=DDTree(drafter))`."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerateDecoderOnlyOutput

from ddtree_lab.pair import Pair
from ddtree_lab.pipeline import Settings, State, node_prefix, run_round, start, with_costs
from ddtree_lab.sampling import Sampler
from ddtree_lab.stages.cache import cache_length
from ddtree_lab.stages.draft import Drafter
from ddtree_lab.stages.verify import Verification

_CACHE_NAMES = ("cache", "past_key_values")


class DDTree:
    """A decoding method for `custom_generate`.

    Honours the call's logits processors (every node sees its own prefix), stopping criteria, streamer
    and `return_dict_in_generate` with scores and logits. Sampling takes its seed from torch's global
    generator, so `torch.manual_seed` makes it repeatable.

    Args:
        drafter: the target's DFlash drafter, or an `NgramDrafter`, which any target can do with.
        tree_budget: drafted nodes a round at most, the root not counted, or `"auto"`, as in `dl.generate`.
        method: `"ddtree"`, or `"dflash"` for the chain.

    Example:
        >>> pair.target.generate(**inputs, custom_generate=dl.DDTree(pair.drafter))  # doctest: +SKIP
    """

    def __init__(self, drafter: Drafter, tree_budget: int | str = 32, *, method: str = "ddtree") -> None:
        Settings(method=method, tree_budget=tree_budget)  # complains about what it cannot use
        self.drafter = drafter
        self.tree_budget = tree_budget
        self.method = method

    def __repr__(self) -> str:
        return f"DDTree(tree_budget={self.tree_budget}, method={self.method!r})"

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> GenerateDecoderOnlyOutput | Tensor:
        """Called by `generate` with what it has prepared.

        Raises:
            ValueError: a batch, padding, a filled cache or an output that this method cannot give.
        """
        _refuse_unsupported(input_ids, generation_config, model_kwargs)
        cache = next(
            (model_kwargs[name] for name in _CACHE_NAMES if model_kwargs.get(name) is not None), None
        )
        do_sample = bool(generation_config.do_sample)
        seed = int(torch.randint(2**62, ())) if do_sample else 0
        settings = Settings(
            method=self.method,
            tree_budget=self.tree_budget,
            max_new_tokens=int(generation_config.max_length) - input_ids.shape[1],
            sampler=Sampler(do_sample, seed, processors=logits_processor),
            stop=lambda ids: bool(
                stopping_criteria(torch.tensor([ids], device=input_ids.device), None).all()
            ),
        )
        pair = Pair(model, self.drafter)
        settings = with_costs(pair, settings)
        outputs = _Outputs(generation_config, settings.sampler)
        streamer = streamer or self._streamer_of_generate()
        state = start(pair, input_ids, settings)
        _stream(streamer, state.new_token_ids)
        outputs.add_first(state)
        while not state.finish_reason:
            before = state
            state = run_round(pair, settings, state)
            outputs.add_round(before, state)
            _stream(streamer, state.token_ids[len(before.token_ids) :])
        if streamer is not None:
            streamer.end()
        if cache is not None:
            cache.layers = state.cache.layers  # the caller's own, or the one `generate` prepared
        sequences = torch.tensor([state.token_ids], device=input_ids.device)
        if not generation_config.return_dict_in_generate:
            return sequences
        return outputs.as_dict(sequences, state.cache)

    def _streamer_of_generate(self) -> Any:
        """The streamer of the `generate` call that is running this method.

        The library hands a callable all it has prepared except the streamer (5.8 to 5.24), which has been
        given the prompt by then. It is a local variable of `generate`, so that is where it is looked up.
        """
        frame = inspect.currentframe()
        while frame is not None:
            if frame.f_code.co_name == "generate" and frame.f_locals.get("custom_generate") is self:
                return frame.f_locals.get("streamer")
            frame = frame.f_back
        return None


def _stream(streamer: Any, token_ids: tuple[int, ...]) -> None:
    if streamer is not None:
        for token in token_ids:  # one by one: the library's streamers expect a token a call
            streamer.put(torch.tensor([token]))


def _refuse_unsupported(input_ids: Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    if input_ids.shape[0] != 1:
        raise ValueError(f"input_ids has {input_ids.shape[0]} rows; DDTree decodes one prompt at a time.")
    mask = model_kwargs.get("attention_mask")
    if mask is not None and not bool(mask.all()):
        raise ValueError("attention_mask hides tokens; DDTree decodes one prompt without padding.")
    if model_kwargs.get("inputs_embeds") is not None:
        raise ValueError("inputs_embeds is given; DDTree needs token ids.")
    for name in _CACHE_NAMES:
        cache = model_kwargs.get(name)
        if cache is not None and not isinstance(cache, DynamicCache):
            raise ValueError(f"{name} is a {type(cache).__name__}; DDTree needs a dynamic cache.")
        if cache is not None and cache_length(cache):
            raise ValueError(
                f"{name} already holds {cache_length(cache)} tokens; the drafter has seen none of them. Pass the "
                "whole prompt without a cache."
            )
    for name in ("output_attentions", "output_hidden_states"):
        if config.return_dict_in_generate and getattr(config, name, False):
            raise ValueError(f"{name}=True is not available with DDTree; scores and logits are.")
    if (config.num_beams or 1) > 1 or (config.num_return_sequences or 1) > 1:
        raise ValueError("num_beams and num_return_sequences must be 1 with DDTree.")


class _Outputs:
    """Scores and logits of every emitted token, for `return_dict_in_generate`."""

    def __init__(self, config: GenerationConfig, sampler: Sampler) -> None:
        wanted = bool(config.return_dict_in_generate)
        self.sampler = sampler
        self.scores: list[Tensor] | None = [] if wanted and config.output_scores else None
        self.logits: list[Tensor] | None = [] if wanted and config.output_logits else None

    def add_first(self, state: State) -> None:
        if state.first_logits is not None:
            prompt = state.token_ids[: state.num_prompt_tokens]
            self._add(state.first_logits, lambda _: prompt)

    def add_round(self, before: State, after: State) -> None:
        verification, path = after.records["verify"], after.records["commit"].path  # type: ignore[attr-defined]
        assert isinstance(verification, Verification)
        prefix = node_prefix(before, verification.tree)
        self._add(verification.logits[list(path)], lambda row: prefix(path[row]))

    def _add(self, logits: Tensor, prefix: Any) -> None:
        if self.logits is not None:
            self.logits += list(logits.float()[:, None])
        if self.scores is not None:
            self.scores += list(self.sampler.scores(logits, prefix)[:, None])

    def as_dict(self, sequences: Tensor, cache: Cache) -> GenerateDecoderOnlyOutput:
        output = GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=tuple(self.scores) if self.scores is not None else None,
            logits=tuple(self.logits) if self.logits is not None else None,
        )
        name = next(name for name in _CACHE_NAMES if name in type(output).__dataclass_fields__)
        output[name] = cache
        return output
