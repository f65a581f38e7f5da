"""The model against transformers' Qwen3-MoE: same logits, same loss, same gradients in fp32."""

import pytest
import torch
import torch.nn.functional as F

from offbench.workload.initial import initialise
from offbench.workload.model import Options, Qwen3Moe
from offbench.workload.presets import ModelShape, find

SHAPE = ModelShape(
    "parity",
    layers=3,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=32,
    experts=8,
    top_k=3,
    expert_width=48,
    vocab=160,
    seq_len=24,
    chunk_bytes=1 << 20,
)


def reference():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=SHAPE.vocab,
        hidden_size=SHAPE.hidden,
        num_hidden_layers=SHAPE.layers,
        num_attention_heads=SHAPE.heads,
        num_key_value_heads=SHAPE.kv_heads,
        head_dim=SHAPE.head_dim,
        num_experts=SHAPE.experts,
        num_experts_per_tok=SHAPE.top_k,
        moe_intermediate_size=SHAPE.expert_width,
        norm_topk_prob=True,
        rope_theta=SHAPE.rope_theta,
        rms_norm_eps=SHAPE.norm_eps,
        tie_word_embeddings=False,
        router_aux_loss_coef=0.0,
    )
    return Qwen3MoeForCausalLM(config)


def pairs(model, theirs):
    """(name, our tensor getter, their tensor getter, transposed) of every parameter."""
    rename = {
        "attention_norm": "input_layernorm.weight",
        **{name: f"self_attn.{name}_proj.weight" for name in "qkvo"},
        "q_norm": "self_attn.q_norm.weight",
        "k_norm": "self_attn.k_norm.weight",
        "moe_norm": "post_attention_layernorm.weight",
        "router.weight": "mlp.gate.weight",
        "experts.w13": "mlp.experts.gate_up_proj",
        "experts.w2": "mlp.experts.down_proj",
    }
    names = {"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    names["head.weight"] = "lm_head.weight"
    for layer in range(SHAPE.layers):
        names |= {f"blocks.{layer}.{ours}": f"model.layers.{layer}.{other}" for ours, other in rename.items()}
    other = dict(theirs.named_parameters())
    assert sorted(names.values()) == sorted(other)
    for name, parameter in model.named_parameters():
        yield name, parameter, other[names[name]], "experts" in name


def test_logits_loss_and_every_gradient_equal_transformers():
    torch.manual_seed(0)
    theirs = reference()
    ours = Qwen3Moe(SHAPE, SHAPE.layers)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # so that norms are not all ones
        for _, mine, other, transposed in pairs(ours, theirs):
            mine.copy_(other.transpose(1, 2) if transposed else other)
    tokens = torch.randint(SHAPE.vocab, (2, SHAPE.seq_len + 1))
    tokens, labels = tokens[:, :-1], tokens[:, 1:].contiguous()

    logits = F.linear(ours.norm(ours.decode(tokens)), ours.head.weight)
    their_logits = theirs(input_ids=tokens).logits
    torch.testing.assert_close(logits, their_logits, rtol=1e-5, atol=1e-5)

    loss = ours(tokens, labels)
    their_loss = F.cross_entropy(their_logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(loss, their_loss, rtol=1e-6, atol=1e-6)
    loss.backward()
    their_loss.backward()
    for name, mine, other, transposed in pairs(ours, theirs):
        expected = other.grad.transpose(1, 2) if transposed else other.grad
        error = (mine.grad - expected).norm() / expected.norm()
        assert error < 1e-5, (name, float(error))


@pytest.mark.parametrize("name", ["tiny", "qwen3-30b-a3b"])
def test_parameters_have_the_names_order_and_shapes_of_the_preset(name):
    shape = find(name)
    with torch.device("meta"):
        model = Qwen3Moe(shape, shape.layers)
    others = dict(shape.other_tensors())
    expected = [("embedding.weight", others["embedding"])]
    for layer in range(shape.layers):
        expected += [(f"blocks.{layer}.{n}{'.weight' * (n == 'router')}", s) for n, s in shape.layer_tensors()]
    expected += [("norm.weight", others["norm"]), ("head.weight", others["head"])]
    assert [(n, tuple(p.shape)) for n, p in model.named_parameters()] == expected
    assert sum(p.numel() for p in model.parameters()) == shape.params()


def loss_and_gradients(options, dtype=torch.float32):
    shape = find("tiny")
    model = Qwen3Moe(shape, 2, options)
    initialise(model, seed=1)
    model.to(dtype)
    tokens = torch.randint(shape.vocab, (2, 33), generator=torch.Generator().manual_seed(3))
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("routing", ["natural", "balanced"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpointing_changes_nothing(routing, dtype):
    kept = loss_and_gradients(Options(routing), dtype)
    again = loss_and_gradients(Options(routing, checkpoint=True), dtype)
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))
    assert all(torch.isfinite(a).all() and a.abs().max() > 0 for a in kept)
