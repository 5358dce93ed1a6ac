"""Tiny models and tokenizers of transformers, made on disk: no hub is asked."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<s>", "</s>", *DIGITS, *["plus", "is", "good", "bad", "film", "the", "a"]]


def make_llama(folder: Path, *, tied: bool = False, shards: bool = False) -> Path:
    """A Llama of two layers whose tokenizer puts <s> before a text, and nothing behind it."""
    _tokenizer("<s> $A", "<s>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="4KB" if shards else "50GB")
    return folder


def make_bert(folder: Path) -> Path:
    """A BERT of two layers with a head for masked words, without dropout."""
    _tokenizer("[CLS] $A [SEP]", "[CLS]", "[SEP]").save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.2,  # wide enough for the classes to be told apart in a few steps
    )
    BertForMaskedLM(config).save_pretrained(folder)
    return folder


def make_tokenizer(folder: Path, *, more: int = 0) -> Path:
    """The Llama's tokenizer alone, with ``more`` words: "w0", "w1" and so on."""
    _tokenizer("<s> $A", "<s>", more=more).save_pretrained(folder)
    return folder


def write_sums(path: Path) -> Path:
    """55 prompts and completions of different lengths: "one plus two is" -> "three"."""
    sums = [(a, b) for a in range(10) for b in range(10 - a)]
    lines = [
        {"prompt": f"{DIGITS[a]} plus {DIGITS[b]} is", "completion": " ".join(["is"] * (a % 3) + [DIGITS[a + b]])}
        for a, b in sums
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_films(path: Path) -> Path:
    """64 texts of different lengths, each good or bad."""
    opinions = ["good" if number % 2 else "bad" for number in range(64)]
    lines = [{"text": f"the film is {o}" + " film" * (n % 5), "label": o} for n, o in enumerate(opinions)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def _tokenizer(template: str, *special: str, more: int = 0) -> PreTrainedTokenizerFast:
    words = [*WORDS, *(f"w{number}" for number in range(more))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(word, WORDS.index(word)) for word in special]
    )
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    if "[CLS]" in special:
        names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "mask_token": "[MASK]"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", **names)
