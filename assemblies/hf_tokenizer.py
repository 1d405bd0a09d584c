"""ESM-2's tokens of proteins as a tokenizer of transformers'."""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Sequence, Split, WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from brickwork.assemblies.proteins import ALPHABET, CLS, EOS

_SPECIAL = tuple(token for token in ALPHABET if token.startswith("<"))


def protein_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer for LC-PLM: one token a residue, `<cls>` first and `<eos>` last.

    Spaces between residues are dropped; a character outside the alphabet, lower case included,
    becomes `<unk>` (`brickwork.assemblies.proteins.tokenize` raises). What `save_pretrained` writes
    loads with `AutoTokenizer`, without brickwork.

    >>> tokenizer = protein_tokenizer()
    >>> tokenizer(["MK", "M<mask>KV"], padding=True, return_tensors="pt")["input_ids"]
    tensor([[ 0, 20, 15,  2,  1,  1],
            [ 0, 20, 32, 15,  7,  2]])
    >>> tokenizer.decode([0, 20, 15, 2], skip_special_tokens=True)
    'MK'
    """
    vocab = {token: i for i, token in enumerate(ALPHABET)}
    tokens = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    tokens.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    tokens.pre_tokenizer = Sequence([WhitespaceSplit(), Split(Regex("."), "isolated")])
    tokens.post_processor = TemplateProcessing(
        single="<cls> $A <eos>",
        pair="<cls> $A <eos> $B:1 <eos>:1",
        special_tokens=[("<cls>", CLS), ("<eos>", EOS)],
    )
    tokens.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokens,
        cls_token="<cls>",
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        mask_token="<mask>",
        padding_side="right",
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )
