"""Against Hugging Face's transformers: a folder's tokenizer, and texts that a model says with it.

The folders are written by transformers: a model, and a tokenizer of its own. `make test-peers` runs this.
"""

import pytest
import tokenizers
import torch
import transformers

from weft.generate import GenerationConfig, TextGenerator
from weft.models import huggingface

TEXTS = ["the cat sat on the mat", "a dog and a cat", "été où çà", "cats", "a mat, a log and a dog"]
HEADS = {"gpt2": "heads", "llama": "kv_heads", "t5": "heads"}
# What the tokenizer adds to a text: nothing (GPT-2), a token before it (Llama), one behind it (T5).
RULES = {"gpt2": None, "llama": "<s> $A", "t5": "$A </s>"}
SPECIALS = ["<pad>", "<s>", "</s>"]


def words(rule):
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=280, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXTS, trainer)
    if rule:
        specials = [(one, made.token_to_id(one)) for one in SPECIALS if one in rule]
        made.post_processor = tokenizers.processors.TemplateProcessing(single=rule, special_tokens=specials)
    named = dict(bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **named)


def model(name, vocab):
    sizes = dict(vocab_size=vocab, tie_word_embeddings=False, eos_token_id=2, pad_token_id=0)
    if name == "gpt2":
        shape = dict(n_embd=32, n_layer=2, n_head=4, n_positions=64, n_inner=40)
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **shape, bos_token_id=1))
    if name == "llama":
        shape = dict(hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4)
        shape |= dict(num_key_value_heads=2, head_dim=8, max_position_embeddings=64)
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **shape, bos_token_id=1))
    shape = dict(d_model=32, d_kv=8, d_ff=40, num_layers=2, num_heads=4, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **shape))


@pytest.fixture(scope="module", params=RULES)
def peer(request, tmp_path_factory):
    """Its name, the folder, and transformers' own tokenizer and model."""
    folder, tokenizer = tmp_path_factory.mktemp(request.param), words(RULES[request.param])
    torch.manual_seed(3)
    made = model(request.param, len(tokenizer)).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        if request.param == "t5":  # transformers 5 ties it when it makes one
            made.lm_head.weight = torch.nn.Parameter(0.4 * torch.randn(len(tokenizer), 32))
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return request.param, folder, tokenizer, made


def test_the_same_ids(peer):
    name, folder, theirs, _ = peer
    ours = huggingface.tokenizer(folder)
    assert (ours.vocab, ours.end, ours.pad) == (len(theirs), theirs.eos_token_id, theirs.pad_token_id)
    for text in TEXTS:
        ids = theirs(text, add_special_tokens=False).input_ids
        assert ours.encode(text) == ids and ours.decode(ids) == theirs.decode(ids) == text
        whole = {"gpt2": ids, "llama": [ours.start, *ids], "t5": [*ids, ours.end]}[name]
        assert theirs(text).input_ids == whole
    assert ours.start == {"gpt2": ours.end, "llama": theirs.bos_token_id, "t5": ours.end}[name]


@pytest.mark.parametrize("mesh", ["", "data=2 model=2"])
def test_the_same_texts(peer, mesh):
    name, folder, theirs, model = peer
    layout = f"batch:data {HEADS[name]}:model d_ff:model" if mesh else ""
    speaker = TextGenerator(
        huggingface.load(folder, mesh, layout), huggingface.tokenizer(folder), mesh, layout, rows=2
    )
    for text, said in zip(TEXTS, speaker.generate(TEXTS, GenerationConfig(limit=8)), strict=True):
        # Nothing stands before GPT-2's texts unless it is written there: we put the end of another one.
        read = theirs((theirs.eos_token if name == "gpt2" else "") + text, return_tensors="pt")
        out = model.generate(
            input_ids=read.input_ids,
            attention_mask=torch.ones_like(read.input_ids),
            max_new_tokens=8,
            do_sample=False,
        )[0]
        new = out[1:] if name == "t5" else out[read.input_ids.shape[1] :]
        assert list(said.tokens) == new.tolist()
        assert said.text == theirs.decode(new, skip_special_tokens=True)
