"""Against PyTorch: models made by Hugging Face's transformers give the same logits and the same gradients.

Needs PyTorch; `make test-peers` runs it in an environment of its own.
"""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

import weft as wf
from weft import nn
from weft.models import Batch, huggingface

TOKENS = 37  # splits unevenly over 4 devices
PLACES = [("", ""), ("data=2 model=4", "batch:data d_ff:model heads:model vocab:model")]
LENGTH = {"gpt2": 21, "llama": 21, "t5": 140}  # T5's buckets end at a distance of 128


def t5(**changes):
    sizes = dict(vocab_size=TOKENS, d_model=24, d_kv=6, d_ff=34, num_layers=2, num_heads=4)
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**(sizes | changes)))


def t5_untied():
    # transformers 5 ties T5 when it makes one; a checkpoint of v1.1 has two tables.
    model = t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False, num_decoder_layers=3)
    model.lm_head.weight = torch.nn.Parameter(torch.randn(TOKENS, 24))
    return model


def gpt2(**changes):
    sizes = dict(vocab_size=TOKENS, n_embd=24, n_layer=2, n_head=4, n_positions=32, n_inner=38)
    tokens = dict(bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **tokens, **changes))


def llama(**changes):
    sizes = dict(vocab_size=TOKENS, hidden_size=24, intermediate_size=34, num_hidden_layers=2)
    sizes |= dict(num_attention_heads=8, num_key_value_heads=8, head_dim=6, max_position_embeddings=64)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(sizes | changes)))


LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=32)
MODELS = {
    "t5 v1.0": lambda: t5(),
    "t5 v1.1": t5_untied,
    "gpt2": lambda: gpt2(),
    "gpt2 untied, exact gelu": lambda: gpt2(tie_word_embeddings=False, activation_function="gelu"),
    "llama": lambda: llama(),
    "llama grouped, tied": lambda: llama(num_key_value_heads=2, tie_word_embeddings=True, rope_theta=5e5),
    "llama multi-query, biases": lambda: llama(num_key_value_heads=1, attention_bias=True, mlp_bias=True),
    "llama 3, stretched": lambda: llama(num_key_value_heads=4, rope_theta=1e3, rope_scaling=LLAMA3),
}


class Peer:
    """A PyTorch model, its checkpoint, one batch, and what PyTorch makes of it."""

    def __init__(self, name, folder):
        torch.manual_seed(0)
        self.model, self.folder = MODELS[name]().eval(), folder / "peer"
        with torch.no_grad():  # away from zero and one, so that no bias and no scale is without effect
            for parameter in self.model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        self.model.save_pretrained(self.folder)
        kind = self.model.config.model_type
        rng, length = np.random.default_rng(1), LENGTH[kind]
        rows = [rng.integers(0, TOKENS, (3, n)) for n in (length, length, length + 1)]
        self.tokens, self.targets, self.inputs = rows if kind == "t5" else (*rows[:2], None)

    def logits(self, model=None):
        model = model or self.model
        tokens = torch.tensor(self.tokens)
        if self.inputs is None:
            return model(input_ids=tokens).logits
        return model(input_ids=torch.tensor(self.inputs), decoder_input_ids=tokens).logits

    def loss(self):
        logits = self.logits()
        return torch.nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), torch.tensor(self.targets).reshape(-1)
        )

    def batch(self):
        def rows(array):
            dims = [wf.Dim("batch", array.shape[0]), wf.Dim("length", array.shape[1])]
            return wf.tensor(jnp.asarray(array, jnp.int32), dims)

        inputs = None if self.inputs is None else rows(self.inputs)
        return Batch(rows(self.tokens), rows(self.targets), inputs=inputs)


@pytest.fixture(params=MODELS)
def peer(request, tmp_path):
    return Peer(request.param, tmp_path)


def close(got, want, name):
    """Equal to 1e-4 of each value; those near zero to 1e-5 of the largest."""
    scale = np.abs(want).max()
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * scale, err_msg=name)


def test_logits_and_gradients(peer, tmp_path):
    want_logits = peer.logits().detach().numpy()
    want_loss = peer.loss()
    want_loss.backward()
    want = {name: p.grad.numpy() for name, p in peer.model.named_parameters()}

    def both(model, batch):
        loss, grads = wf.value_and_grad(lambda m: m.loss(batch))(model)
        return model.logits(batch), loss, grads

    for n, (mesh, layout) in enumerate(PLACES):
        model = huggingface.load(peer.folder, mesh, layout)
        logits, loss, grads = wf.spmd(both, mesh, layout)(model, peer.batch())
        close(logits.numpy("batch", "length", "vocab"), want_logits, "logits")
        close(loss.numpy(), want_loss.item(), "loss")
        huggingface.save(grads, tmp_path / f"gradients{n}")  # under PyTorch's names
        got = load_file(tmp_path / f"gradients{n}" / "model.safetensors")
        assert set(got) == set(want)
        for name in want:
            close(got[name], want[name], f"the gradient of {name}")


@pytest.mark.parametrize("mesh, layout", PLACES)
def test_back_again(peer, mesh, layout, tmp_path):
    """What we save is the file we read, tensor for tensor and bit for bit, and transformers reads it."""
    huggingface.save(huggingface.load(peer.folder, mesh, layout), tmp_path / "again")
    here, there = (load_file(folder / "model.safetensors") for folder in (tmp_path / "again", peer.folder))
    assert set(here) == set(there)
    for name in there:
        assert here[name].dtype == there[name].dtype
        np.testing.assert_array_equal(here[name], there[name], err_msg=name)
    read, report = type(peer.model).from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not any(report.values()), report
    torch.testing.assert_close(peer.logits(read.eval()), peer.logits(), rtol=0, atol=0)


@pytest.mark.parametrize("mesh, layout", PLACES)
def test_in_several_files_of_half_the_size(peer, mesh, layout, tmp_path):
    peer.model.to(torch.bfloat16).save_pretrained(tmp_path / "shards", max_shard_size="5KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    model = huggingface.load(tmp_path / "shards", mesh, layout)
    assert all(p.dtype == jnp.float32 for p in nn.parameters(model).values())
    huggingface.save(model, tmp_path / "again", "bfloat16")
    read = type(peer.model).from_pretrained(tmp_path / "again", dtype=torch.bfloat16)
    want = dict(peer.model.named_parameters())
    for name, got in read.named_parameters():
        torch.testing.assert_close(got, want[name], rtol=0, atol=0)
