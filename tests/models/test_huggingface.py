"""Hugging Face checkpoints without PyTorch: there and back on several layouts, and every way they can be wrong."""

import dataclasses
import json
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from compare import assert_same, assert_zero_padding
from safetensors.numpy import load_file, save_file

import weft as wf
from weft import nn
from weft.core.errors import WeftError
from weft.models import Transformer, huggingface, preset
from weft.models.huggingface import convert, files, stored_slices

TESTS = Path(__file__).parents[1]

V, D, F, H, K = 13, 10, 14, 6, 4  # vocab, d_model, d_ff, heads, d_kv: hardly any divides by 4


def linear(name, out, into):
    return {f"{name}.weight": (out, into)}


def t5(gated, tied):
    tensors = {"shared.weight": (V, D)} | ({} if tied else {"lm_head.weight": (V, D)})
    for stack, layers, feed in (("encoder", 2, 1), ("decoder", 3, 2)):
        tensors |= {f"{stack}.final_layer_norm.weight": (D,)}
        tensors |= {f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight": (32, H)}
        for n in range(layers):
            block = f"{stack}.block.{n}.layer"
            tensors |= {f"{block}.{k}.layer_norm.weight": (D,) for k in range(feed + 1)}
            for attention in ["0.SelfAttention"] + ["1.EncDecAttention"] * (feed == 2):
                for name in "qkv":
                    tensors |= linear(f"{block}.{attention}.{name}", H * K, D)
                tensors |= linear(f"{block}.{attention}.o", D, H * K)
            for name in ["wi_0", "wi_1"] if gated else ["wi"]:
                tensors |= linear(f"{block}.{feed}.DenseReluDense.{name}", F, D)
            tensors |= linear(f"{block}.{feed}.DenseReluDense.wo", D, F)
    settings = dict(model_type="t5", vocab_size=V, d_model=D, d_ff=F, num_heads=H, d_kv=K, num_layers=2)
    settings |= dict(num_decoder_layers=3, tie_word_embeddings=tied, is_encoder_decoder=True)
    return settings | dict(feed_forward_proj="gated-gelu" if gated else "relu"), tensors


def gpt2(prefix="transformer."):
    d = 12
    tensors = {f"{prefix}wte.weight": (V, d), f"{prefix}wpe.weight": (9, d)}
    norms = ["ln_f"]
    for n in range(2):
        norms += [f"h.{n}.ln_1", f"h.{n}.ln_2"]
        maps = {"attn.c_attn": (d, 3 * d), "attn.c_proj": (d, d), "mlp.c_fc": (d, F), "mlp.c_proj": (F, d)}
        for name, shape in maps.items():
            tensors |= {f"{prefix}h.{n}.{name}.weight": shape, f"{prefix}h.{n}.{name}.bias": shape[1:]}
    tensors |= {f"{prefix}{norm}.{kind}": (d,) for norm in norms for kind in ("weight", "bias")}
    return dict(
        model_type="gpt2", vocab_size=V, n_embd=d, n_head=H, n_layer=2, n_positions=9, n_inner=F
    ), tensors


def llama(kv_heads=2, tied=False, **more):
    tensors = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    tensors |= {} if tied else {"lm_head.weight": (V, D)}
    for n in range(3):
        layer = f"model.layers.{n}"
        tensors |= {f"{layer}.{norm}_layernorm.weight": (D,) for norm in ("input", "post_attention")}
        tensors |= linear(f"{layer}.self_attn.q_proj", H * K, D) | linear(
            f"{layer}.self_attn.o_proj", D, H * K
        )
        for name in "kv":
            tensors |= linear(f"{layer}.self_attn.{name}_proj", kv_heads * K, D)
        tensors |= linear(f"{layer}.mlp.gate_proj", F, D) | linear(f"{layer}.mlp.up_proj", F, D)
        tensors |= linear(f"{layer}.mlp.down_proj", D, F)
    settings = dict(model_type="llama", vocab_size=V, hidden_size=D, intermediate_size=F, head_dim=K)
    settings |= dict(num_attention_heads=H, num_key_value_heads=kv_heads, num_hidden_layers=3)
    return settings | dict(tie_word_embeddings=tied, rms_norm_eps=1e-5) | more, tensors


KINDS = {
    "t5 v1.0": lambda: t5(gated=False, tied=True),
    "t5 v1.1": lambda: t5(gated=True, tied=False),
    "gpt2": gpt2,
    "llama": lambda: llama(kv_heads=H),
    "llama grouped": lambda: llama(),
    "llama multi-query, tied": lambda: llama(kv_heads=1, tied=True),
}


def values(shapes, dtype=np.float32):
    """Numbers that identify their tensor and position: those of a checkpoint all differ."""
    start, made = 1, {}
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        made[name] = np.arange(start, start + size).astype(dtype).reshape(shape)
        start += size
    return made


def write(folder, settings, tensors):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "model.safetensors")
    return folder


def made(folder, kind="llama grouped", dtype=np.float32):
    settings, shapes = KINDS[kind]()
    return write(folder, settings, values(shapes, dtype))


def saved(folder):
    return load_file(folder / "model.safetensors")


# -- there and back ---------------------------------------------------------------------------------

PLACES = {
    "nowhere": (None, None),
    "uneven": ("data=2 model=4", wf.Layout("batch:data vocab:model d_ff:model heads:model")),
    "inside heads": ("data=2 model=4", wf.Layout("kv_heads:data d_kv:model buckets:model")),
    "stored": ("data=4 model=2", wf.Layout("heads:model", params="d_model:data")),
    "layers": ("stage=2", wf.Layout("layers:stage")),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(kind, place, tmp_path):
    mesh, layout = PLACES[place]
    folder = made(tmp_path / "there", kind)
    model = huggingface.load(folder, mesh, layout)
    for parameter in nn.parameters(model).values():
        assert parameter.role == "param" and parameter.dtype == jnp.float32
        if mesh:
            assert parameter.mesh == wf.Mesh(mesh) and parameter.layout == layout
            assert_zero_padding(parameter)
    huggingface.save(model, tmp_path / "back")
    assert_same(saved(tmp_path / "back"), saved(folder), rtol=0, atol=0)
    assert huggingface.config_of(tmp_path / "back") == huggingface.config_of(folder) == model.config


def test_how_it_was_trained_does_not_hinder_saving(tmp_path):
    folder = made(tmp_path / "there", "gpt2")
    model = huggingface.load(folder, pipeline="1f1b", pipeline_micro=4)
    huggingface.save(model, tmp_path / "back")
    assert_same(saved(tmp_path / "back"), saved(folder), rtol=0, atol=0)
    idle = dict(balance=0.5, router_z=0.1, lsh_chunk=8, lsh_rounds=1, pipeline="1f1b", pipeline_micro=4)
    other = nn.init(Transformer(dataclasses.replace(model.config, **idle)), jax.random.key(0))
    huggingface.save(other, tmp_path / "other")
    assert huggingface.config_of(tmp_path / "other") == huggingface.config_of(folder)


def test_where_each_number_goes(tmp_path):
    """By formulas of our own, since there and back would not notice a mistake made twice."""
    theirs = values(llama()[1])
    model = huggingface.load(made(tmp_path / "llama"))
    query = nn.parameters(model)["decoder.blocks.attention.query.weight"]
    assert [d.name for d in query.dims] == ["layers", "d_model", "kv_heads", "heads", "d_kv"]
    for layer, m, kv, h, k in np.ndindex(*(d.size for d in query.dims)):
        want = theirs[f"model.layers.{layer}.self_attn.q_proj.weight"][(kv * 3 + h) * K + k, m]
        assert query.array[layer, m, kv, h, k] == want
    down = nn.parameters(model)["decoder.blocks.feed.narrow.weight"].numpy("layers", "d_ff", "d_model")
    np.testing.assert_array_equal(down[1], theirs["model.layers.1.mlp.down_proj.weight"].T)

    theirs = values(gpt2()[1])
    model = huggingface.load(made(tmp_path / "gpt2", "gpt2"))
    for part, name in enumerate(("query", "key", "value")):
        weight = nn.parameters(model)[f"decoder.blocks.attention.{name}.weight"]
        fused = theirs["transformer.h.1.attn.c_attn.weight"]
        np.testing.assert_array_equal(weight.numpy()[1].reshape(12, 12), fused[:, 12 * part : 12 * part + 12])
        bias = nn.parameters(model)[f"decoder.blocks.attention.{name}.bias"]
        fused = theirs["transformer.h.1.attn.c_attn.bias"]
        np.testing.assert_array_equal(bias.numpy()[1].reshape(12), fused[12 * part : 12 * part + 12])


def test_a_device_reads_its_own_slice_and_no_more(tmp_path, monkeypatch):
    folder, read = made(tmp_path), []
    plain = files.SafetensorsCheckpoint.read

    def counted(self, name, where):
        found = plain(self, name, where)
        read.append(found.size)
        return found

    monkeypatch.setattr(files.SafetensorsCheckpoint, "read", counted)
    model = huggingface.load(folder, *PLACES["uneven"])
    local_count = 0
    for parameter in nn.parameters(model).values():
        shards = parameter.storage.addressable_shards
        for shard in shards[:1] if parameter.storage.is_fully_replicated else shards:
            ends = zip(shard.index, parameter.dims, strict=True)
            local_count += math.prod(
                min(s.stop or d.size, d.size) - min(s.start or 0, d.size) for s, d in ends
            )
    assert sum(read) == local_count


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_half_sized_numbers_become_float32_and_back(dtype, tmp_path):
    folder = made(tmp_path / "there", dtype=dtype)
    model = huggingface.load(folder, *PLACES["uneven"])
    assert {p.dtype for p in nn.parameters(model).values()} == {jnp.dtype(jnp.float32)}
    huggingface.save(model, tmp_path / "back", np.dtype(dtype).name)
    assert_same(saved(tmp_path / "back"), saved(folder), rtol=0, atol=0)


def test_several_files(tmp_path):
    folder = sharded(tmp_path / "shards")
    huggingface.save(huggingface.load(folder, *PLACES["uneven"]), tmp_path / "back")
    assert_same(saved(tmp_path / "back"), values(llama()[1]), rtol=0, atol=0)


def sharded(folder):
    settings, shapes = llama()
    tensors = values(shapes)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    where = {name: f"model-0000{n % 3 + 1}-of-00003.safetensors" for n, name in enumerate(tensors)}
    for file in set(where.values()):
        save_file({n: t for n, t in tensors.items() if where[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def test_names_that_checkpoints_differ_in(tmp_path):
    """The prefix left out, masks stored, the embedding under its other names."""
    settings, shapes = gpt2(prefix="")
    masks = {
        "h.0.attn.bias": np.ones((1, 1, 9, 9), np.float32),
        "h.1.attn.masked_bias": np.ones((), np.float32),
    }
    bare = write(tmp_path / "bare", settings, values(shapes) | masks)
    huggingface.save(huggingface.load(bare), tmp_path / "full")
    assert_same(saved(tmp_path / "full"), values(gpt2()[1]), rtol=0, atol=0)

    settings, shapes = t5(gated=False, tied=True)
    want = values(shapes)
    tensors = dict(want)
    tensors["encoder.embed_tokens.weight"] = tensors["lm_head.weight"] = tensors.pop("shared.weight")
    unused = {
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": np.ones((32, H), np.float32)
    }
    other = write(tmp_path / "other", settings, tensors | unused)
    huggingface.save(huggingface.load(other), tmp_path / "usual")
    assert_same(saved(tmp_path / "usual"), want, rtol=0, atol=0)


@pytest.mark.parametrize(
    "declared, stored, tied",
    [
        (True, None, True),
        (True, "the same", True),
        (True, "another", False),
        (False, "the same", False),
        (False, "another", False),
    ],
)
def test_when_the_last_layer_is_tied(declared, stored, tied, tmp_path):
    settings, shapes = llama(tied=True)
    tensors = values(shapes)
    if stored:
        table = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = table.copy() if stored == "the same" else table + 1
    folder = write(tmp_path, settings | {"tie_word_embeddings": declared}, tensors)
    assert huggingface.config_of(folder).tied == tied
    model = huggingface.load(folder)
    assert (model.last is None) == tied
    if not tied:
        np.testing.assert_array_equal(model.last.weight.numpy("vocab", "d_model"), tensors["lm_head.weight"])


def test_a_config_needs_no_tensors(tmp_path):
    """So a model can be planned before it is downloaded, or while that is going on."""
    folder = made(tmp_path)
    config = huggingface.config_of(folder)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert huggingface.config_of(folder) == config
    for path in folder.glob("model*"):
        path.unlink()
    assert huggingface.config_of(folder) == config


def test_how_a_model_is_computed_can_be_chosen(tmp_path):
    model = huggingface.load(made(tmp_path), compute="bfloat16", dropout=0.1)
    assert (model.config.compute, model.config.dropout, model.decoder.config.compute) == (
        "bfloat16",
        0.1,
        "bfloat16",
    )


STRETCH = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    "rope, want",
    [
        ({}, (1e4, None)),
        ({"rope_theta": 5e5}, (5e5, None)),
        ({"rope_theta": 5e5, "rope_scaling": None}, (5e5, None)),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **STRETCH}}, (5e5, (8.0, 1.0, 4.0, 64))),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, (5e5, None)),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **STRETCH}},
            (5e5, (8.0, 1.0, 4.0, 64)),
        ),
    ],
)
def test_rotary_settings(rope, want, tmp_path):
    settings, shapes = llama(**rope)
    folder = write(tmp_path / "there", settings, values(shapes))
    config = huggingface.config_of(folder)
    assert (config.rotary_base, config.rotary_stretch) == want
    huggingface.save(huggingface.load(folder), tmp_path / "back")
    assert huggingface.config_of(tmp_path / "back") == config


def test_t5_settings(tmp_path):
    """The logits of v1.0 are scaled; newer files have a separate key for that."""
    settings, shapes = t5(gated=False, tied=True)
    for n, (more, scaled) in enumerate([({}, True), ({"scale_decoder_outputs": False}, False)]):
        config = huggingface.config_of(write(tmp_path / str(n), settings | more, values(shapes)))
        assert (config.scale_logits, config.tied, config.layers, config.decoder_layers) == (
            scaled,
            True,
            2,
            3,
        )
        assert (config.scaled, config.positions, config.activation) == (False, "relative", "relu")
    settings, shapes = t5(gated=True, tied=False)
    config = huggingface.config_of(write(tmp_path / "v1.1", settings, values(shapes)))
    assert (config.scale_logits, config.tied, config.activation) == (False, False, "gated_gelu")


@pytest.mark.parametrize("name", ["t5-small", "t5-v1.1-11b", "gpt2-xl", "llama-2-7b", "llama-3-70b"])
def test_presets_have_a_family(name):
    config = preset(name).config
    family = convert._family_of(config)
    assert name.startswith(family.name)
    model = Transformer(config)
    stored = sum(
        int(np.prod(shape))
        for ours, row in convert._rows(family, model).items()
        for shape in stored_slices.stored_shapes(row, nn.parameters(model)[ours].dims).values()
    )
    parts = 3 if family.name == "gpt2" else 1  # a fused tensor is named by three rows
    fused = sum(
        p.size for n, p in nn.parameters(model).items() if re.search("attention.(query|key|value)", n)
    )
    assert stored == nn.count(model) + (parts - 1) * fused


# -- nothing half-written ---------------------------------------------------------------------------


def test_a_save_that_fails_leaves_nothing(tmp_path):
    folder = made(tmp_path / "there")
    model = huggingface.load(folder)
    nn.parameters(model)["last.weight"].array.delete()  # the last one to be written
    with pytest.raises(RuntimeError, match="deleted"):
        huggingface.save(model, tmp_path / "back")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["there"]

    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    with pytest.raises(RuntimeError, match="deleted"):
        huggingface.save(model, folder)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_a_checkpoint_is_replaced(tmp_path):
    folder = made(tmp_path / "one")
    (folder / "tokenizer.json").write_text("{}")
    other = huggingface.load(made(tmp_path / "two", "gpt2"))
    huggingface.save(other, folder)
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert_same(saved(folder), saved(tmp_path / "two"), rtol=0, atol=0)
    assert huggingface.config_of(folder) == other.config


# -- what can be wrong ------------------------------------------------------------------------------

WRONG = {}


def wrong(fn):
    WRONG[fn.__name__] = fn
    return fn


@wrong
def no_folder(folder):
    huggingface.load(folder / "gpt2-medium")


@wrong
def no_config(folder):
    (made(folder) / "config.json").unlink()
    huggingface.load(folder)


@wrong
def no_tensors(folder):
    (made(folder) / "model.safetensors").rename(folder / "flax_model.msgpack")
    huggingface.load(folder)


@wrong
def pickles_only(folder):
    (made(folder) / "model.safetensors").rename(folder / "pytorch_model.bin")
    huggingface.load(folder)


@wrong
def config_cut_short(folder):
    path = made(folder) / "config.json"
    path.write_text(path.read_text()[:40])
    huggingface.config_of(folder)


@wrong
def config_that_is_a_list(folder):
    (made(folder) / "config.json").write_text("[]")
    huggingface.config_of(folder)


@wrong
def file_cut_short(folder):
    path = made(folder) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    huggingface.load(folder)


@wrong
def file_of_noise(folder):
    (made(folder) / "model.safetensors").write_bytes(bytes(range(100, 200)))
    huggingface.load(folder)


@wrong
def shard_missing(folder):
    (sharded(folder / "shards") / "model-00002-of-00003.safetensors").unlink()
    huggingface.load(folder / "shards")


@wrong
def unknown_type(folder):
    settings, shapes = llama()
    huggingface.load(write(folder, settings | {"model_type": "lama"}, values(shapes)))


@wrong
def sizes_missing(folder):
    settings, shapes = llama()
    settings = {k: v for k, v in settings.items() if k not in ("hidden_size", "vocab_size")}
    huggingface.load(write(folder, settings, values(shapes)))


@wrong
def unknown_rotary_scaling(folder):
    settings, shapes = llama(rope_scaling={"type": "linear", "factor": 2.0})
    huggingface.load(write(folder, settings, values(shapes)))


@wrong
def unknown_activation(folder):
    settings, shapes = t5(gated=True, tied=False)
    huggingface.load(write(folder, settings | {"feed_forward_proj": "gated-relu"}, values(shapes)))


@wrong
def other_buckets(folder):
    settings, shapes = t5(gated=True, tied=False)
    huggingface.load(write(folder, settings | {"relative_attention_num_buckets": 64}, values(shapes)))


@wrong
def tensors_of_another_model(folder):
    settings, shapes = llama()
    shapes["model.layers.1.self_attn.q_proj.weight"] = (D, H * K)
    shapes["model.norm.weight"] = (D + 1,)
    del shapes["model.layers.2.mlp.up_proj.weight"], shapes["lm_head.weight"]
    more = values(shapes) | {"model.layers.3.mlp.up_proj.weight": np.ones((F, D), np.float32)}
    more["model.layers.0.mlp.up_proj.weight"] = np.ones((F, D), np.int8)
    huggingface.load(write(folder, settings, more))


@wrong
def heads_that_cannot_be_shared(folder):
    settings, shapes = llama(kv_heads=4)
    huggingface.load(write(folder, settings, values(shapes)))


@wrong
def misspelt_change(folder):
    huggingface.load(made(folder), computer="bfloat16")


@wrong
def save_of_no_family(folder):
    huggingface.save(Transformer(preset("tiny-lm").config), folder / "new")


@wrong
def save_of_a_description(folder):
    huggingface.save(Transformer(preset("gpt2").config), folder / "new")


@wrong
def save_of_specs(folder):
    huggingface.save(nn.specs(Transformer(preset("gpt2").config)), folder / "new")


@wrong
def save_in_another_type(folder):
    huggingface.save(huggingface.load(made(folder)), folder / "new", "bfloat")


@wrong
def save_onto_a_file(folder):
    (folder / "file").write_text("")
    huggingface.save(huggingface.load(made(folder)), folder / "file")


@wrong
def name_on_the_hub(folder):
    huggingface.load("owner/some-model")


@pytest.mark.parametrize("name", WRONG)
def test_message(name, golden, tmp_path):
    with pytest.raises(WeftError) as caught:
        WRONG[name](tmp_path)
    assert "test_huggingface.py" in caught.value.where
    text = str(caught.value).replace(str(tmp_path), "folder")
    text = re.sub(r"\n  at .*", "", text)
    golden(name, f"{type(caught.value).__name__}: {text}", folder="messages/huggingface")
    assert not (tmp_path / "new").exists()


def test_every_message_has_its_test():
    here = {path.stem for path in (TESTS / "messages" / "huggingface").glob("*.txt")}
    assert here == set(WRONG)
