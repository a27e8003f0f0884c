"""A tiny tokenizer with a chat template, made at run time: every byte is a token, plus a few whole words.

It has what goes wrong in real ones: characters that take several tokens (all of them outside ASCII),
special tokens that users can type, a beginning-of-sequence token set by the template.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<s>", "<|im_start|>", "<|im_end|>")
# Pairs of letters that become one token, in the order of their merging.
_MERGES = (("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("t", "o"), ("Ġ", "t"), ("Ġt", "he"))


def tiny_tokenizer() -> Tokenizer:
    """Byte-level BPE: ids 0 to 255 are bytes, then seven merges, then the special tokens."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(pair) for pair in _MERGES]
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=list(_MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def sentencepiece_tokenizer() -> Tokenizer:
    """A tokenizer of Llama 2's kind: spaces as ▁, one in front of each text, bytes for unknown characters."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ["▁", "a", "b", "▁a", "[", "]", "I"]:
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a")], byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("</s>", normalized=False)])
    return tokenizer


def write_tiny_text(directory: Path, *, max_context_tokens: int = 4096, chat_template: str = CHAT_TEMPLATE) -> Path:
    """Put the files of the text side of a model into `directory`, which is made; returns it."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer()
    eos = tokenizer.token_to_id("<|im_end|>")
    tokenizer.save(str(directory / "tokenizer.json"))
    objects = {
        "config.json": {"model_type": "tiny", "max_position_embeddings": max_context_tokens, "eos_token_id": eos},
        "generation_config.json": {"eos_token_id": [eos]},
        "tokenizer_config.json": {"bos_token": "<s>", "eos_token": "<|im_end|>", "chat_template": chat_template},
    }
    for name, value in objects.items():
        (directory / name).write_text(json.dumps(value), encoding="utf-8")
    return directory
