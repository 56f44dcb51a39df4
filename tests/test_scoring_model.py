"""Loading a model from a directory: what is refused, and that nothing is filled in."""

import hashlib
import json
import shutil
import subprocess
import sys
import typing

import pytest
import scoring_cases as cases
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import rlbatch.scoring
from rlbatch.errors import ScoringError, StorageError
from rlbatch.scoring import load_model, model_vocab_size, prepended_bos, tokenizer_fingerprint


@pytest.fixture
def directory(tinylm_dir, tmp_path):
    """A copy of the tiny model to damage."""
    return shutil.copytree(tinylm_dir, tmp_path / "model")


def _load(path, device="cpu", dtype=torch.float32):
    return load_model(path, device=device, dtype=dtype)


def _rewrite(directory, change):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_weights_are_those_of_the_file_in_eval_mode(tinylm_dir, device):
    model = _load(tinylm_dir, device)
    stored = load_file(tinylm_dir / "model.safetensors")
    loaded = model.state_dict()
    assert set(stored) <= set(loaded)
    assert all(torch.equal(loaded[name].cpu(), tensor) for name, tensor in stored.items())
    assert not any(module.training for module in model.modules())
    assert model.device.type == device.type


def test_dtype_is_the_one_asked_for(tinylm_dir):
    model = _load(str(tinylm_dir), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_tied_weights_count_as_present(tmp_path):
    config = cases.CONFIGS["llama"]()
    config.tie_word_embeddings = True
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    model = _load(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(StorageError, match=r"\[file-unusable\] .*nothing-here") as caught:
        _load(tmp_path / "nothing-here")
    assert caught.value.code == "file-unusable"


def test_a_missing_config_is_named(directory):
    (directory / "config.json").unlink()
    with pytest.raises(StorageError, match=r"expected: a directory with config.json"):
        _load(directory)


def test_a_config_that_is_not_json_is_refused(directory):
    (directory / "config.json").write_text("{")
    with pytest.raises(StorageError, match="not a valid JSON file"):
        _load(directory)


def test_missing_weights_are_refused(directory):
    (directory / "model.safetensors").unlink()
    with pytest.raises(StorageError, match=r"no file named model\.safetensors"):
        _load(directory)


def test_truncated_weights_are_refused(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100_000])
    with pytest.raises(StorageError, match=r"SafetensorError"):
        _load(directory)


def test_a_weight_that_is_not_in_the_file_is_not_drawn_at_random(directory):
    _rewrite(directory, lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.weight"))
    with pytest.raises(StorageError, match=r"no model\.layers\.0\.mlp\.up_proj\.weight \(1 missing\)"):
        _load(directory)


def test_a_weight_of_another_shape_is_refused(directory):
    _rewrite(
        directory, lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"][:9].clone()})
    )
    with pytest.raises(StorageError, match="file-unusable"):
        _load(directory)


def test_a_model_that_is_not_a_language_model_is_refused(directory):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "model_type": "t5"}))
    with pytest.raises(StorageError, match="Unrecognized configuration class"):
        _load(directory)


def test_code_beside_the_weights_is_never_run(directory, tmp_path):
    config = json.loads((directory / "config.json").read_text())
    mark = tmp_path / "ran"
    (directory / "evil.py").write_text(f"open({str(mark)!r}, 'w')\nclass Evil: pass\n")
    auto = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    (directory / "config.json").write_text(json.dumps({**config, "model_type": "evil", "auto_map": auto}))
    with pytest.raises(StorageError, match="file-unusable"):
        _load(directory)
    assert not mark.exists()


def test_a_device_that_is_not_there_is_named(tinylm_dir):
    with pytest.raises(
        ScoringError, match=r"expected: the device cuda:99\n  found:    \d+ CUDA devices"
    ) as caught:
        _load(tinylm_dir, device="cuda:99")
    assert caught.value.code == "device-missing"


@pytest.mark.parametrize("device", ["banana", "", "cuda:-1", "mtia", None])
def test_what_torch_does_not_know_is_no_device(tinylm_dir, device):
    with pytest.raises(
        ScoringError, match=rf"\[device-missing\]\n  expected: the device {device}\n"
    ) as caught:
        _load(tinylm_dir, device=device)
    assert len(caught.value.findings[0].found.splitlines()) == 1


@pytest.mark.parametrize("dtype", ["banana", "float32", torch.int64, torch.bool, None])
def test_a_dtype_is_a_floating_one_of_torch(tinylm_dir, dtype):
    with pytest.raises(ScoringError, match=r"\[dtype-unusable\]") as caught:
        _load(tinylm_dir, dtype=dtype)
    assert caught.value.findings[0].found == repr(dtype)


def test_nothing_is_printed(tinylm_dir, capfd):
    _load(tinylm_dir)
    assert capfd.readouterr() == ("", "")


def test_vocabulary_is_the_smaller_of_the_two_embeddings(tinylm_dir):
    model = cases.tiny_model("llama")
    assert model_vocab_size(model) == 96
    model.lm_head = nn.Linear(32, 90, bias=False)
    assert model_vocab_size(model) == 90
    model.set_input_embeddings(nn.Embedding(80, 32))
    assert model_vocab_size(model) == 80
    assert model_vocab_size(model.model) == 80


def test_a_model_without_an_embedding_table_is_refused():
    model = cases.tiny_model("llama")
    model.set_input_embeddings(nn.Identity())
    with pytest.raises(
        ScoringError,
        match=r"an input embedding with a weight \[V, D\], in LlamaForCausalLM\n  found:    Identity",
    ):
        model_vocab_size(model)


BOS_IN_FRONT = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
}
EOS_BEHIND = {**BOS_IN_FRONT, "single": BOS_IN_FRONT["single"][::-1]}
BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}


@pytest.mark.parametrize(
    ("processor", "config", "expected"),
    [
        (BOS_IN_FRONT, {}, 1),
        ({"type": "Sequence", "processors": [BYTES, BOS_IN_FRONT]}, {}, 1),
        (BOS_IN_FRONT, {"add_bos_token": True, "chat_template": "{{ bos_token }}{{ messages }}"}, 1),
        (BOS_IN_FRONT, {"chat_template": "<s>{{ messages }}"}, 1),
        (BOS_IN_FRONT, {"chat_template": "{{ messages }}"}, None),
        (BOS_IN_FRONT, {"add_bos_token": False}, None),
        (EOS_BEHIND, {}, None),
        (BYTES, {"chat_template": "{{ bos_token }}{{ messages }}"}, None),
        (None, {}, None),
    ],
)
def test_a_bos_is_known_where_tokenizer_and_chat_template_both_begin_with_it(
    tmp_path, processor, config, expected
):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"post_processor": processor}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert prepended_bos(tmp_path, 1) == expected
    assert prepended_bos(tmp_path, 3) is None
    assert prepended_bos(tmp_path, None) is None


def test_the_bos_of_real_files_and_of_none(tinylm_dir, tmp_path):
    assert prepended_bos(tinylm_dir, 1) == 1
    assert prepended_bos(tmp_path, 1) is None
    (tmp_path / "tokenizer.json").write_text("{")
    assert prepended_bos(tmp_path, 1) is None


def test_tokenizer_fingerprint_is_the_sha256_of_its_file(tinylm_dir, tmp_path):
    expected = hashlib.sha256((tinylm_dir / "tokenizer.json").read_bytes()).hexdigest()
    assert tokenizer_fingerprint(tinylm_dir) == expected
    assert tokenizer_fingerprint(tmp_path) is None


def test_importing_scoring_does_not_import_transformers():
    code = "import sys, rlbatch.scoring; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_of_scoring_has_types_that_can_be_looked_up():
    for name in rlbatch.scoring.__all__:
        typing.get_type_hints(getattr(rlbatch.scoring, name))
