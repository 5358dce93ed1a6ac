"""Counts of parameters against published models and against transformers' own modules."""

import os

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from trainrun.config import ConfigError
from trainrun.counts import FAMILIES, shape_of_config, shape_of_settings
from trainrun.models.gpt import GPT
from trainrun.settings import ModelSettings

os.environ["HF_HUB_OFFLINE"] = "1"

LLAMA_3_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
LLAMA_2_70B = LLAMA_3_8B | {
    "vocab_size": 32000,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
MIXTRAL_8X7B = LLAMA_3_8B | {"model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8}
NEOX_20B = {
    "model_type": "gpt_neox",
    "vocab_size": 50432,
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "num_hidden_layers": 44,
    "num_attention_heads": 64,
}
BERT_LARGE = {
    "model_type": "bert",
    "vocab_size": 30522,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
}


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (LLAMA_3_8B, 8_030_261_248),
        (LLAMA_2_70B, 68_976_648_192),
        (MIXTRAL_8X7B, 46_702_792_704),
        (NEOX_20B, 20_554_567_680),
        (BERT_LARGE, 335_141_888),
    ],
    ids=["llama-3-8b", "llama-2-70b", "mixtral-8x7b", "neox-20b", "bert-large"],
)
def test_ux_08_published_models_are_counted_exactly(config, parameters):
    assert shape_of_config(config).parameters == parameters


def test_ux_08_key_and_value_heads_that_a_mixtral_file_leaves_out_are_8_and_not_those_of_the_queries():
    config = {key: value for key, value in MIXTRAL_8X7B.items() if key != "num_key_value_heads"}
    assert shape_of_config(config).parameters == 46_702_792_704


def config_of(kind):
    """Small configurations of one family, with what tells its members apart."""
    heads = st.sampled_from([2, 4])
    common = {
        "model_type": st.just(kind),
        "vocab_size": st.integers(3, 60),
        "tie_word_embeddings": st.booleans(),
    }
    if kind == "gpt2":
        own = {"n_embd": st.sampled_from([8, 16]), "n_layer": st.integers(1, 3), "n_head": st.just(2)}
        own |= {"n_inner": st.sampled_from([None, 24]), "n_positions": st.integers(4, 20)}
        return st.fixed_dictionaries(common | own)
    own = {
        "hidden_size": st.sampled_from([16, 32]),
        "intermediate_size": st.integers(5, 40),
        "num_hidden_layers": st.integers(1, 3),
    }
    own |= {"num_attention_heads": heads}
    if kind == "bert":
        own |= {"max_position_embeddings": st.integers(4, 20), "type_vocab_size": st.integers(1, 3)}
    if kind == "gpt_neox":
        own |= {"attention_bias": st.booleans()}
    if kind in ("llama", "qwen3"):
        own |= {"attention_bias": st.booleans()}
    if kind == "llama":
        own |= {"mlp_bias": st.booleans()}
    if kind in ("llama", "mistral", "mixtral", "qwen2", "qwen3"):
        own |= {"num_key_value_heads": st.sampled_from([1, 2])}
    optional = {"head_dim": st.sampled_from([4, 12])} if kind in ("llama", "mistral", "mixtral", "qwen3") else {}
    if kind == "mixtral":
        own |= {"num_local_experts": st.integers(2, 4)}
    return st.fixed_dictionaries(common | own, optional=optional)


@pytest.mark.parametrize("kind", sorted(FAMILIES))
@hypothesis_settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_ux_08_every_family_counts_what_transformers_makes(kind, data):
    transformers = pytest.importorskip("transformers")
    config = data.draw(config_of(kind))
    made = transformers.AutoConfig.for_model(**config)
    factory = transformers.AutoModel if kind == "bert" else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = factory.from_config(made)
    shape = shape_of_config(config)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape == shape_of_config(made.to_dict()), "a file with every default written out means the same"


@hypothesis_settings(max_examples=40, deadline=None)
@given(
    layers=st.integers(1, 3),
    heads=st.sampled_from([2, 4]),
    kv_heads=st.sampled_from([0, 1, 2]),
    feed_forward=st.sampled_from([0, 20]),
    activation=st.sampled_from(["relu2", "swiglu"]),
    norm_weights=st.booleans(),
    embedding_norm=st.booleans(),
    tied=st.booleans(),
    own_vocabulary=st.sampled_from([0, 70]),
)
def test_the_bundled_gpt_is_counted_as_it_is_made(own_vocabulary, **options):
    settings = ModelSettings(width=16, vocabulary=own_vocabulary, **options)
    with torch.device("meta"):
        model = GPT(settings, vocabulary=50, context=8)
    shape = shape_of_settings(settings, vocabulary=50)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.vocabulary == (own_vocabulary or 50)


def test_a_kind_of_model_that_is_not_known_is_named_with_the_nearest():
    with pytest.raises(ConfigError, match=r"model_type is 'lama'.* Did you mean 'llama'"):
        shape_of_config({"model_type": "lama"})


def test_a_size_that_is_missing_is_named():
    config = {key: value for key, value in LLAMA_3_8B.items() if key != "intermediate_size"}
    with pytest.raises(ConfigError, match="llama model has no 'intermediate_size'"):
        shape_of_config(config)
