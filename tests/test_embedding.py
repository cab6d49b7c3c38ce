import pytest
import torch
from models import causal_lm, dense, hybrid, wrapped_hybrid
from transformers import BertConfig, BertModel, Qwen3Config, Qwen3ForCausalLM, Qwen3Model

from ddtree_lab.stages.embedding import resolve_embeddings


def tiny_config(**arguments):
    return Qwen3Config(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, **arguments,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("make", "input_path", "output_path"),
    [
        (hybrid, "model.embed_tokens", "lm_head"),
        (dense, "model.embed_tokens", "lm_head"),
        (wrapped_hybrid, "model.language_model.embed_tokens", "lm_head"),
        (lambda: causal_lm("gpt2"), "transformer.wte", "lm_head"),
        (lambda: causal_lm("opt"), "model.decoder.embed_tokens", "lm_head"),
    ],
    ids=["hybrid", "dense", "wrapped", "gpt2", "opt"],
)
def test_embeddings_are_found_where_the_architecture_keeps_them(make, input_path, output_path):
    target = make()
    found = resolve_embeddings(target)
    assert (found.input_path, found.output_path) == (input_path, output_path)
    assert found.input is target.get_submodule(input_path)
    assert found.output is target.get_submodule(output_path)
    assert (found.vocab_size, found.hidden_size) == (97, 32)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("tied", [True, False])
def test_tied_means_one_weight(tied, device):
    with torch.device(device):
        target = Qwen3ForCausalLM(tiny_config(tie_word_embeddings=tied))
    found = resolve_embeddings(target)
    assert found.tied is tied
    assert (found.input.weight is found.output.weight) is tied
    assert ("one weight" in str(found)) is tied


def test_two_views_of_one_storage_are_tied():
    target = Qwen3ForCausalLM(tiny_config(tie_word_embeddings=False))
    target.lm_head.weight = torch.nn.Parameter(target.model.embed_tokens.weight.data)
    assert resolve_embeddings(target).tied


def test_the_embeddings_compute_the_targets_own_logits():
    target, ids = wrapped_hybrid(), torch.arange(9)[None]
    found = resolve_embeddings(target)
    with torch.no_grad():
        out = target(input_ids=ids, output_hidden_states=True, use_cache=False)
    assert torch.equal(out.hidden_states[0], found.input(ids))
    torch.testing.assert_close(out.logits, found.output(out.hidden_states[-1]))


@pytest.mark.parametrize(
    "make",
    [
        lambda: BertModel(
            BertConfig(vocab_size=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
        ),
        lambda: Qwen3Model(tiny_config()),
    ],
    ids=["encoder", "bare backbone"],
)
def test_a_model_without_an_output_head_is_refused(make):
    with pytest.raises(ValueError, match=r"target: .* has no output embedding"):
        resolve_embeddings(make())
