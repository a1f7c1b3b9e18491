"""A model folder without a model: a byte-level BPE tokenizer with ChatML's template, made here, no network."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

MAX_CONTEXT = 512
MODEL = "tiny"
END = "<|im_end|>"
SPECIAL = ["<|endoftext|>", "<|im_start|>", END]
TEXTS = ["The quick brown fox jumps over the lazy dog. " * 4, "Hello, how are you? I am fine, thank you. " * 4]
TEMPLATE = (
    "{% for message in messages %}"
    "{% if 'REFUSE' in message['content'] %}{{ raise_exception('no such thing') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_level_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("[a b]", special=False, normalized=False)])
    return tokenizer


def sentencepiece_tokenizer() -> Tokenizer:
    """Llama 2's kind: spaces as U+2581, rare bytes as <0xNN>, one leading space dropped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = ["\u2581", *"abcdefghijklmnopqrstuvwxyz.,!é", "\u2581the", "\u2581a"]
    vocabulary = {piece: i for i, piece in enumerate([*pieces, *letters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def write_model_folder(folder: Path, tokenizer: Tokenizer | None = None, template: str | None = TEMPLATE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer or byte_level_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id(END)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": MAX_CONTEXT, "eos_token_id": end}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": END}, "model_max_length": 8}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder
