"""A tokenizer that puts a blank before whatever it is given, as SentencePiece of Llama 2 does, with that model's template."""

from __future__ import annotations

from typing import Any

LLAMA_2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)


def llama2_tokenizer() -> Any:
    """As Llama 2's: a blank before each text, blanks as a sign, bytes for what it does not know."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += [*"abcdefghijklmnopqrstuvwxyz0123456789+?[]/INST=:AQ", "tw", "two", "▁two"]
    joins = [("t", "w"), ("tw", "o"), ("▁", "two")]
    model = models.BPE(
        {piece: number for number, piece in enumerate(pieces)},
        joins,
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    made = Tokenizer(model)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=LLAMA_2
    )
