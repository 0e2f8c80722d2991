"""torchao at the edges: MXTensor in and out without a rounding, and the int8 trunk and the experts' int8
activations, lossy and said so."""

import json

import pytest
import torch
from checkpoint_editing import GOLDEN
from safetensors.torch import load_file

from kimi_k3 import KimiK3ForCausalLM
from kimi_k3.quantization import experts_from_mxtensor, experts_to_mxtensor
from kimi_k3_kernels import mxfp4_dequantize

mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_torchao_decodes_our_experts_to_the_same_values(dtype):
    model = KimiK3ForCausalLM.from_pretrained(GOLDEN / "golden", progress=False)
    experts = model.get_submodule("model.layers.1.block_sparse_moe.experts")
    for name in ("w1", "w2", "w3"):
        packed, scale = getattr(experts, f"{name}_packed"), getattr(experts, f"{name}_scale")
        tensor = experts_to_mxtensor(packed, scale, dtype)
        assert torch.equal(tensor.dequantize(), mxfp4_dequantize(packed, scale, dtype))
        codes, scales = experts_from_mxtensor(tensor)
        assert torch.equal(codes, packed) and torch.equal(scales, scale)
        assert codes.data_ptr() == packed.data_ptr()


def test_every_code_and_scale_passes_through():
    codes = torch.arange(256, dtype=torch.uint8).repeat(16).view(2, 128, 16)
    scales = torch.randint(1, 255, (2, 128, 1), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    tensor = experts_to_mxtensor(codes, scales)
    assert torch.equal(tensor.dequantize(), mxfp4_dequantize(codes, scales))
    back = experts_from_mxtensor(tensor)
    assert torch.equal(back[0], codes) and torch.equal(back[1], scales)


def test_what_torchao_quantised_comes_in_with_its_values():
    weight = torch.randn(3, 8, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    tensor = mx_tensor.MXTensor.to_mx(weight, torch.float4_e2m1fn_x2, 32)
    packed, scale = experts_from_mxtensor(tensor)
    assert packed.dtype == scale.dtype == torch.uint8
    assert torch.equal(mxfp4_dequantize(packed, scale), tensor.dequantize())


def test_other_formats_are_refused():
    weight = torch.randn(8, 64).bfloat16()
    with pytest.raises(ValueError, match="experts_from_mxtensor"):
        experts_from_mxtensor(mx_tensor.MXTensor.to_mx(weight, torch.float8_e4m3fn, 32))
    with pytest.raises(ValueError, match="experts_to_mxtensor"):
        experts_to_mxtensor(torch.zeros(4, 32, dtype=torch.uint8), torch.zeros(4, 4, dtype=torch.uint8))


def test_the_int8_trunk_is_close_lossy_and_said_so(tmp_path, caplog):
    tokens = torch.tensor([json.loads((GOLDEN / "smooth.reference" / "reference.json").read_text())["tokens"]])
    reference = load_file(GOLDEN / "smooth.reference" / "logits.safetensors")["hf_f64_prefill"]
    model = KimiK3ForCausalLM.from_pretrained(GOLDEN / "smooth", dtype=torch.float32, trunk="int8", progress=False)
    assert "lossy" in caplog.text
    with torch.no_grad():
        logits = model(tokens).logits[0]
    difference = (logits - reference).abs()
    assert (
        1e-3 < difference.mean() <= 0.15
    )  # 0.7 % a layer; bfloat16 alone makes 0.075 on these logits of deviation 2.5
    kinds = {name: type(p.data).__name__ for name, p in model.named_parameters()}
    for name, kind in kinds.items():
        is_plain = name.endswith(("kv_b_proj.weight", "res_proj.weight", "lm_head.weight", "embed_tokens.weight",
                                  "f_a_proj.weight", "f_b_proj.weight", "b_proj.weight", "gate.weight"))  # fmt: skip
        is_plain = is_plain and not name.endswith("q_b_proj.weight")
        if is_plain:
            assert kind in ("Tensor", "Parameter"), name
        elif name.endswith("_proj.weight"):
            assert "Int8" in kind or "Affine" in kind, (name, kind)
    with pytest.raises(ValueError, match="lossy"):
        model.save_pretrained(tmp_path)


def test_int8_expert_activations_are_close_lossy_and_leave_the_weights(tmp_path, caplog):
    tokens = torch.tensor([json.loads((GOLDEN / "smooth.reference" / "reference.json").read_text())["tokens"]])
    plain = KimiK3ForCausalLM.from_pretrained(GOLDEN / "smooth", dtype=torch.float32, progress=False)
    assert "lossy" not in caplog.text
    model = KimiK3ForCausalLM.from_pretrained(
        GOLDEN / "smooth", dtype=torch.float32, expert_activations="int8", progress=False
    )
    assert caplog.text.count("lossy") == 1
    with torch.no_grad():
        difference = (model(tokens).logits - plain(tokens).logits).abs()
    assert 1e-4 < difference.mean() <= 0.075  # what bfloat16 alone makes on these logits of deviation 2.5
    plain.save_pretrained(tmp_path / "plain")
    model.save_pretrained(tmp_path / "int8")
    for file in (tmp_path / "plain").glob("*.safetensors"):
        assert (tmp_path / "int8" / file.name).read_bytes() == file.read_bytes()


def test_int8_expert_activations_want_packed_experts(tmp_path):
    model = KimiK3ForCausalLM.from_pretrained(GOLDEN / "golden", progress=False)
    model.save_pretrained(tmp_path, experts="dequantized")
    with pytest.raises(ValueError, match="want packed experts"):
        KimiK3ForCausalLM.from_pretrained(tmp_path, expert_activations="int8", progress=False)
